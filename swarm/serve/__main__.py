"""Serve models by name, as OpenAI does: python -m swarm.serve."""

import sys
from collections.abc import Sequence

from swarm._util.terminal import escape_control_chars
from swarm.errors import UserError
from swarm.serve.cli import parse_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; print a user's error in one line and return its exit code."""
    try:
        options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        from swarm.serve.server import run

        run(options)
        return 0
    except UserError as error:
        print(f"error: {escape_control_chars(str(error))}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
