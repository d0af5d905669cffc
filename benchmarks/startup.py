"""Start-up: --help, the import, and the first answer of a fresh process.

python benchmarks/startup.py [--repeats 5]
"""

import argparse
import subprocess
import sys

from batching import default_base
from timing import interleaved, machine

FIRST = """
import numpy as np
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.models import Request
from swarm.api import Pool
pool, engine = Pool({pool!r}).open(), HFEngine()
engine.open(BaseModel({base!r}), pool, "cpu")
print(engine.generate(np.eye(len(pool.names))[:1], [[Request("1 + 1 =", 2)]]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a folder; default: SmolLM2")
    parser.add_argument("--pool", default="initial_experts")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    base = options.model or default_base().resolve()
    commands = {
        "--help": ["-m", "swarm.search", "--help"],
        "import swarm.loop.run": ["-c", "import swarm.loop.run"],
        "import torch": ["-c", "import torch"],
        "first answer": ["-c", FIRST.format(pool=options.pool, base=base)],
    }

    def call(arguments: list[str]) -> None:
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    ways = {name: (lambda c=c: call(c)) for name, c in commands.items()}
    for way in ways.values() if options.repeats > 1 else ():
        way()
    print(machine())
    for name, taken in interleaved(ways, options.repeats).items():
        print(f"{name}: {taken}")


if __name__ == "__main__":
    main()
