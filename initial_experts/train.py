"""The command `python -m swarm.experts train`, from a checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from swarm.experts.train import main

if __name__ == "__main__":
    raise SystemExit(main())
