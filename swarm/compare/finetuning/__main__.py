"""Follow, create and list fine-tunings: python -m swarm.compare.finetuning update."""

from collections.abc import Sequence

from swarm._util.cli import RaisingParser, run_command, run_program
from swarm.compare.finetuning.cli import add_parsers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; a `UserError` is printed in one line, and its exit code returned."""
    parser = RaisingParser(prog="python -m swarm.compare.finetuning", description=__doc__)
    add_parsers(parser.add_subparsers(dest="command", required=True, parser_class=RaisingParser))

    def command() -> int | None:
        options = parser.parse_args(arguments)
        code: int | None = options.handler(options)
        return code

    return run_command(command, "stopped; the same command resumes")


if __name__ == "__main__":
    run_program(main)
