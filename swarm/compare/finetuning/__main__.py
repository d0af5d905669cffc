"""Follow, create and list fine-tunings: python -m swarm.compare.finetuning update."""

import sys
from collections.abc import Sequence

from swarm._util.cli import RaisingParser
from swarm._util.terminal import escape_control_chars
from swarm.compare.finetuning.cli import add_parsers
from swarm.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; a `UserError` is printed in one line, and its exit code returned."""
    parser = RaisingParser(prog="python -m swarm.compare.finetuning", description=__doc__)
    add_parsers(parser.add_subparsers(dest="command", required=True, parser_class=RaisingParser))
    try:
        options = parser.parse_args(arguments)
        return options.handler(options) or 0
    except UserError as error:
        print(f"error: {escape_control_chars(str(error))}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("stopped; the same command resumes", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
