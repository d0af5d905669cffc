"""Fault bench: bad configurations, adapters and data files, and damaged run folders.

python benchmarks/faults.py [--groups configuration,adapter] [--sample 40] [--jobs 2]

Every case is wrong by construction and runs the real entry point on a tiny model, in a fork of
this process (which imports torch once) with a time and a memory limit. Counted per group:

    tracebacks  anything but exit code 0, 1 or 2, or an error that is not one line "error: ..."
    hangs       no end within --limit seconds
    silent      exit code 0 without a warning; after a damage also a wrong or unrepaired result

The goal is 0 of each; the exit code is 1 otherwise. `--cold N` repeats N cases in fresh processes.
"""

import argparse
import importlib
import itertools
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import frame
from fault_cases import Case, Lab
from fault_cases.damages import damages
from fault_cases.inputs import adapters, configurations, data_files
from fault_cases.running import cold, run_cases

NEEDED = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "swarm.engine.decode",
    "swarm.evaluation.evaluation",
    "swarm.executors.inline",
    "swarm.finetune.run",
    "swarm.loop.run",
    "swarm.optimizers.pso",
    "swarm.tasks.multiple_choice",
)
"""What is imported before the forks, so that each case need not."""

GROUPS: dict[str, Callable[[Lab, int, int], Iterator[Case]]] = {
    "configuration": lambda lab, seed, _: configurations(
        lab, random.Random(f"{seed} configuration")
    ),
    "adapter": lambda lab, *_: adapters(lab),
    "data file": lambda lab, *_: data_files(lab),
    "damage": lambda lab, seed, count: damages(lab, random.Random(f"{seed} damage"), count),
}
"""What makes the cases of a group for a seed, with so many damaged files."""


def measure(options: argparse.Namespace) -> Iterator[frame.Row]:
    """Yield a row for each group; the outcome of each case that is not right is printed."""
    for name in NEEDED:
        importlib.import_module(name)
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        home = Path(folder)
        lab, damaged = Lab(home), options.damages
        made = (GROUPS[name](lab, options.seed, damaged) for name in options.groups.split(","))
        cases = [case for case in itertools.chain(*made) if re.search(options.match, case.name)]
        draw = random.Random(f"{options.seed} sample")
        if options.sample:
            cases = draw.sample(cases, min(options.sample, len(cases)))
        chosen = draw.sample(cases, min(options.cold, len(cases)))
        ends = run_cases(cases, home, options.jobs, options.limit)
        for one in itertools.chain(ends, (cold(case, home) for case in chosen)):
            counts.setdefault(one.case.group, Counter()).update([one.kind])
            if one.kind != "ok":
                print(f"{one.kind}: {one.case.group}: {one.case.name}", file=sys.stderr)
                print(f"    {one.why}  [{one.seconds:.1f} s]", file=sys.stderr)
    for group, count in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        kinds = {kind: count[kind] for kind in ("traceback", "hang", "silent")}
        yield {"group": group, "cases": count.total(), **kinds}


if __name__ == "__main__":
    parser = frame.parser(__doc__, repeats=1)
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--match", default="", help="regular expression that names must match")
    parser.add_argument("--sample", type=int, default=0, help="number of cases, sampled; 0: all")
    parser.add_argument("--damages", type=int, default=133, help="damaged files, of about 650")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel cases")
    parser.add_argument("--limit", type=float, default=60.0, help="timeout of a case in seconds")
    parser.add_argument("--cold", type=int, default=0, help="cases repeated in fresh processes")
    rows = frame.run(parser.parse_args(), measure)
    sys.exit(any(row[kind] for row in rows for kind in ("traceback", "hang", "silent")))
