"""The command `python -m swarm.experts fetch`, from a checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from swarm.experts.fetch import main

if __name__ == "__main__":
    raise SystemExit(main())
