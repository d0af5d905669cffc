"""Ask models questions and compare their answers: python -m swarm.compare run questions.yaml."""

import sys
from collections.abc import Sequence

from swarm._util.terminal import escape_control_chars, std_streams
from swarm.compare.cli import build_parser
from swarm.errors import UserError


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 on success, 1 after an error or a failed answer, 2 for an invalid command,
            130 after an interrupt.
    """
    std_streams()
    try:
        options = build_parser().parse_args(words)
        return options.handler(options) or 0
    except UserError as error:
        print(f"error: {escape_control_chars(str(error))}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
