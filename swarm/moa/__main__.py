"""Ask several models and get one answer: python -m swarm.moa "Why is the sky blue?"."""

import os
import sys
from collections.abc import Sequence

from swarm._util.terminal import escape_control_chars
from swarm.errors import UserError
from swarm.moa.arguments import parse_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; print a user's error in one line and return its exit code."""
    try:
        options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        from swarm.moa.cli import run

        return run(options)
    except UserError as error:
        print(f"error: {escape_control_chars(str(error))}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the pipe has closed it; keep the interpreter from flushing to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
