"""Judge answers and compare models: python -m swarm.judge mt_bench show --out outputs."""

import sys

from swarm.judge.cli import main

if __name__ == "__main__":
    sys.exit(main())
