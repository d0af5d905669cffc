"""Fetch LoRA experts from the hub, or train small ones: python -m swarm.experts fetch --to my_pool.

The actions: fetch, train; each has a --help.
"""

import sys

from swarm.errors import UserError

ACTIONS = ("fetch", "train")


def main() -> int:
    """Run an action; a user's mistake is reported in one line."""
    first = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if first in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        if first not in ACTIONS:
            raise UserError(f"{first}: no such action; allowed: {', '.join(ACTIONS)}", 2)
        if first == "fetch":
            from swarm.experts import fetch as action
        else:
            from swarm.experts import train as action  # type: ignore[no-redef]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return action.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
