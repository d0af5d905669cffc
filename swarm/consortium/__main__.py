"""Ask several models and an arbiter: python -m swarm.consortium "Why is the sky blue?"."""

from swarm._util.cli import run_program
from swarm.consortium.cli import consortium

if __name__ == "__main__":
    name, variable = "python -m swarm.consortium", "_SWARM_CONSORTIUM_COMPLETE"
    run_program(lambda: consortium(prog_name=name, complete_var=variable))
