"""Ask several models and get one answer: python -m swarm.moa "Why is the sky blue?"."""

from collections.abc import Sequence

from swarm._util.cli import run_program
from swarm._util.options import run_click


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; print a user's error in one line and return its exit code."""
    from swarm.moa.cli import moa

    return run_click(moa, arguments, "python -m swarm.moa")


if __name__ == "__main__":
    run_program(main)
