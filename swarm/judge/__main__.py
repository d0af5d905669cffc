"""Answers, judgements and win rates: python -m swarm.judge FORMAT ACTION."""

import sys

from swarm.judge.command import main

if __name__ == "__main__":
    sys.exit(main())
