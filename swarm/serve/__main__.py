"""Serve models by name, as OpenAI does: python -m swarm.serve."""

import sys
from collections.abc import Sequence

from swarm._util.cli import run_command, run_program
from swarm.errors import require_packages
from swarm.serve.cli import parse_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; print a user's error in one line and return its exit code."""

    def command() -> None:
        options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        require_packages("serve", "fastapi", "uvicorn")
        from swarm.serve.server import run

        run(options)

    return run_command(command, "stopped")


if __name__ == "__main__":
    run_program(main)
