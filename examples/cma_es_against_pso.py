"""Two optimizers on the same budget: is CMA-ES better than the particle swarm here?

Both may put as many prompts, and what one of them was answered the other does not ask again. One
seed tells little: `python -m swarm.study compare` takes several and more methods.

    python examples/cma_es_against_pso.py
"""

from typing import Any

from swarm.api import Result, evaluate, search


def main(budget: int = 800, folder: str = "search", **keys: Any) -> dict[str, Result]:
    settings = {
        "task": "nlgraph_mini",
        "overrides": {"task.dev_limit": 25, "task.test_limit": 60},
        "ensemble": 0,
        **keys,
    }
    found = {}
    for name in ("pso", "cmaes"):
        found[name] = search(
            optimizer=name, budget=budget, folder=folder, shared=f"{folder}/shared", **settings
        )
    tested = {}
    for name, result in found.items():
        tested[name] = evaluate(result, settings["task"], overrides=settings["overrides"])
        low, high = tested[name].interval
        print(
            f"{name}: dev {result.best.utility:.3f}, test {tested[name].utility:.3f} "
            f"[{low:.3f}, {high:.3f}], {result.best.words}"
        )
    print("cmaes after pso:", tested["cmaes"].against(tested["pso"]))
    return found


if __name__ == "__main__":
    main()
