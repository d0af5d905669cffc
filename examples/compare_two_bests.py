"""The bests of two searches beside each other: what they are made of, and which one is better.

python examples/compare_two_bests.py  # two seeds, searched first
python examples/compare_two_bests.py search/first search/second
"""

import sys
from typing import Any

from swarm.api import Result, evaluate, open_run, search


def main(
    first: Result, second: Result, task: Any = "nlgraph_mini", overrides: Any = ()
) -> dict[str, Any]:
    names = [*first.best.coefficients]
    width = max(map(len, names))
    for name in names:
        shares = [found.best.coefficients.get(name, 0.0) for found in (first, second)]
        print(f"{name:>{width}}  {shares[0]:+.2f}  {shares[1]:+.2f}")
    tested = [evaluate(found, task, overrides=overrides) for found in (first, second)]
    for found, one in zip((first, second), tested, strict=True):
        low, high = one.interval
        print(
            f"{found.folder}: dev {found.best.utility:.3f}, "
            f"test {one.utility:.3f} [{low:.3f}, {high:.3f}]"
        )
    gain = tested[1].against(tested[0])
    items = tested[0].items.merge(tested[1].items, on="id", suffixes=("_first", "_second"))
    differ = items[items.value_first != items.value_second]
    print(f"second after first: {gain} {len(differ)} items differ:")
    print(differ[["id", "answer_first", "answer_second"]].head().to_string(index=False))
    return {"gain": gain, "differ": differ}


if __name__ == "__main__":
    limits = {"task.dev_limit": 25, "task.test_limit": 60}
    if len(sys.argv) == 3:
        main(open_run(sys.argv[1]), open_run(sys.argv[2]))
    else:
        few = {"optimizer": {"particles": 9, "max_iterations": 3}, "overrides": limits}
        main(*(search("nlgraph_mini", seed=seed, **few) for seed in (1, 2)), overrides=limits)
