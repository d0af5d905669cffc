"""The commands without the llm package: python -m swarm.consortium "Why is the sky blue?"."""

from swarm.consortium.commands import consortium

if __name__ == "__main__":
    consortium(prog_name="python -m swarm.consortium")
