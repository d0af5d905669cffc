"""Fault bench: bad configurations, adapters and data files, and damaged run folders.

python benchmarks/faults.py [--groups configuration,adapter] [--sample 40] [--jobs 2] [--list]

Every case is wrong by construction and runs the real entry point on a tiny model, in a fork of
this process (which imports torch once) with a time and a memory limit. Counted per group:

    tracebacks  anything but exit code 0, 1 or 2, or an error that is not one line "error: ..."
    hangs       no end within --limit seconds
    silent      exit code 0 without a warning; after a damage also a wrong or unrepaired result

The goal is 0 of each; the exit code is 1 otherwise. `--cold N` repeats N cases in fresh processes.
"""

import argparse
import itertools
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fault_cases import Case, Lab
from fault_cases.damages import damages
from fault_cases.inputs import adapters, configurations, data_files
from fault_cases.running import cold, run_cases

DAMAGES = 133
"""Number of damaged files by default, a sample of about 650."""

GROUPS = ("configuration", "adapter", "data file", "damage")


def every_case(
    lab: Lab, seed: int, groups: Sequence[str] = GROUPS, damaged: int = DAMAGES
) -> list[Case]:
    """Return all cases, in a fixed order for a seed; `damaged` is the number of damaged files."""
    made: dict[str, Callable[[], Iterator[Case]]] = {
        "configuration": lambda: configurations(lab, random.Random(f"{seed} configuration")),
        "adapter": lambda: adapters(lab),
        "data file": lambda: data_files(lab),
        "damage": lambda: damages(lab, random.Random(f"{seed} damage"), damaged),
    }
    return [case for group in groups for case in made[group]()]


def prepare() -> None:
    """Import what every case needs, so that forks have it."""
    import hydra
    import scipy.stats  # noqa: F401
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    import swarm.engine.decode
    import swarm.engine.lora
    import swarm.evaluation.evaluation
    import swarm.executors.inline
    import swarm.finetune.run
    import swarm.loop.run
    import swarm.optimizers.pso
    import swarm.tasks.multiple_choice  # noqa: F401
    from swarm._util.files import conf_folder

    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        hydra.compose("search", overrides=["name=x"])


def main() -> int:
    """Run the bench and print its counts; 1 if one of them is not 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", default=",".join(GROUPS), help="of " + ", ".join(GROUPS))
    parser.add_argument(
        "--match", default="", help="only cases whose name matches this regular expression"
    )
    parser.add_argument("--sample", type=int, default=0, help="number of cases, sampled; 0: all")
    parser.add_argument(
        "--damages", type=int, default=DAMAGES, help="number of damaged files, up to about 650"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel cases")
    parser.add_argument("--limit", type=float, default=60.0, help="timeout of a case in seconds")
    parser.add_argument(
        "--cold", type=int, default=0, help="number of cases repeated in separate processes"
    )
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument("--verbose", action="store_true", help="print the outcome of every case")
    options = parser.parse_args()
    prepare()
    counts: dict[str, Counter[str]] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        home = Path(folder)
        groups = options.groups.split(",")
        cases = every_case(Lab(home), options.seed, groups, options.damages)
        cases = [case for case in cases if re.search(options.match, case.name)]
        draw = random.Random(f"{options.seed} sample")
        if options.sample:
            cases = draw.sample(cases, min(options.sample, len(cases)))
        if options.list:
            print("\n".join(f"{case.group}: {case.name}" for case in cases))
            return 0
        chosen = draw.sample(cases, min(options.cold, len(cases)))
        ends = run_cases(cases, home, options.jobs, options.limit)
        for one in itertools.chain(ends, (cold(case, home) for case in chosen)):
            counts.setdefault(one.case.group, Counter()).update([one.kind])
            if one.kind != "ok" or options.verbose:
                print(
                    f"{one.kind}: {one.case.group}: {one.case.name}\n    {one.why}"
                    f"  [{one.seconds:.1f} s]",
                    flush=True,
                )
    print("| group | cases | tracebacks | hangs | silent |\n| --- | --- | --- | --- | --- |")
    total: Counter[str] = Counter()
    for group, count in [*counts.items(), ("all", sum(counts.values(), total))]:
        kinds = (count[kind] for kind in ("traceback", "hang", "silent"))
        print(f"| {group} | {sum(count.values())} | {' | '.join(map(str, kinds))} |")
    print(f"{time.monotonic() - began:.0f} s; {options.cold} of them in separate processes")
    return int(any(count.total() != count["ok"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
