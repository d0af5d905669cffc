"""Start-up: --help, the import, and the first answer of a fresh process.

python benchmarks/startup.py [--repeats 5]
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import frame

FIRST = """
import numpy as np
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.models import Request
from swarm.api import Pool
pool, engine = Pool({pool!r}).open(), HFEngine()
engine.open(BaseModel({base!r}, dtype={dtype!r}), pool, {device!r})
print(engine.generate(np.eye(len(pool.names))[:1], [[Request("1 + 1 =", 2)]]))
"""


def measure(options: argparse.Namespace) -> Iterator[frame.Row]:
    """Yield a row for each command."""
    base = frame.base_and_pool(options)[0].resolve()
    first = FIRST.format(pool=options.pool, base=base, dtype=options.dtype, device=options.device)
    commands = {
        "--help": ["-m", "swarm.search", "--help"],
        "import swarm.loop.run": ["-c", "import swarm.loop.run"],
        "import torch": ["-c", "import torch"],
        "first answer": ["-c", first],
    }
    ways = {
        name: partial(subprocess.run, [sys.executable, *words], check=True, capture_output=True)
        for name, words in commands.items()
    }
    for name, spent in frame.interleaved(ways, options.repeats, check=lambda _: None).items():
        yield {"command": name, **spent}


if __name__ == "__main__":
    frame.run(frame.parser(__doc__, repeats=5, model=True).parse_args(), measure)
