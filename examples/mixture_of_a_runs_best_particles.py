"""A mixture of agents of a run's three best particles: do they know more together than the best?

python examples/mixture_of_a_runs_best_particles.py  # searches first
python examples/mixture_of_a_runs_best_particles.py search/first
"""

import sys
from pathlib import Path
from typing import Any

from swarm.api import Result, evaluate, open_run, search
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.types import AgentSpec


def main(
    run: str | Path | Result, task: Any = "nlgraph_mini", overrides: Any = ("task.test_limit=30",)
) -> MixtureOfAgents:
    found = run if isinstance(run, Result) else open_run(run)
    proposers = [AgentSpec(best, best.words) for best in found.bests(3)]
    # The best reads what the others say; a small model that says nothing is passed over.
    mixture = MixtureOfAgents(proposers, AgentSpec(found.best, "aggregator"), quorum=0)
    together = evaluate(mixture, task, overrides=overrides)
    alone = evaluate(found.best, task, overrides=overrides)
    for name, one in (("together", together), ("the best alone", alone)):
        low, high = one.interval
        print(f"{name}: {one.utility:.3f} [{low:.3f}, {high:.3f}], {one.result['tokens']:,} tokens")
    print("together after alone:", together.against(alone))
    return mixture


if __name__ == "__main__":
    main(
        sys.argv[1]
        if sys.argv[1:]
        else search(
            "nlgraph_mini",
            optimizer={"particles": 9, "max_iterations": 3},
            overrides={"task.dev_limit": 30, "task.test_limit": 40},
        )
    )
