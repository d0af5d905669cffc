"""Fetch LoRA experts from the hub, or train small ones: python -m swarm.experts fetch --to my_pool.

The actions: fetch, train; each has a --help.
"""

import sys
from importlib import import_module

from swarm._util.cli import run_command, run_program
from swarm.errors import UserError

ACTIONS = ("fetch", "train")


def main() -> int:
    """Run an action; a user's mistake is reported in one line."""
    action = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if action in ("-h", "--help"):
        print(__doc__)
        return 0

    def command() -> int:
        if action not in ACTIONS:
            raise UserError(f"{action}: no such action; allowed: {', '.join(ACTIONS)}", 2)
        code: int = import_module(f"swarm.experts.{action}").main(sys.argv[2:])
        return code

    return run_command(command)


if __name__ == "__main__":
    run_program(main)
