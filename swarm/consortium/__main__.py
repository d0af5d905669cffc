"""Ask several models and an arbiter: python -m swarm.consortium "Why is the sky blue?"."""

from swarm.consortium.cli import consortium

if __name__ == "__main__":
    consortium(prog_name="python -m swarm.consortium", complete_var="_SWARM_CONSORTIUM_COMPLETE")
