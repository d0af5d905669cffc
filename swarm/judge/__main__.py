"""Judge answers and compare models: python -m swarm.judge mt_bench show --out outputs."""

from swarm._util.cli import run_program
from swarm.judge.cli import main

if __name__ == "__main__":
    run_program(main)
