"""Ask models questions and compare their answers: python -m swarm.compare run questions.yaml."""

from collections.abc import Sequence

from swarm._util.cli import run_command, run_program
from swarm._util.terminal import std_streams
from swarm.compare.cli import build_parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 on success, 1 after an error or a failed answer, 2 for an invalid command,
            130 after an interrupt.
    """
    std_streams()

    def command() -> int | None:
        options = build_parser().parse_args(words)
        code: int | None = options.handler(options)
        return code

    return run_command(command)


if __name__ == "__main__":
    run_program(main)
