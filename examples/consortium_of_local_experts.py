"""A consortium of experts on this machine: each answers apart, what most of them answer counts.

python examples/consortium_of_local_experts.py
"""

from collections.abc import Sequence
from typing import Any

from swarm.api import Roster, evaluate
from swarm.models.base import Request
from swarm.multi_agent.consortium.consortium import Consortium
from swarm.multi_agent.types import AgentSpec

EXPERTS = ("rooms", "roads", "arithmetic")


def main(
    roster: Roster | None = None,
    experts: Sequence[str] = EXPERTS,
    task: Any = "nlgraph_mini",
    overrides: Any = ("task.test_limit=20",),
) -> Consortium:
    roster = roster or Roster()  # its models share one base in memory
    names = [f"local/{name}" for name in experts]
    consortium = Consortium(
        [AgentSpec(roster.model(name), name) for name in names],
        arbiter=AgentSpec(
            roster.model("local/base"), "arbiter"
        ),  # decides where no answer has most
        strategy="vote",
        system="",  # small models cannot tell how sure they are: just the question
        max_iterations=1,
    )
    question = Request("What is 9 + 4?\nAnswer:", max_new_tokens=4)
    for slot in consortium.proposers:
        print(f"{slot.name} says {slot.model.generate([question])[0].text.strip()!r}")
    print(f"together they answer {consortium.generate([question])[0].text.strip()!r}")

    together = evaluate(consortium, task, overrides=overrides)
    print(together)
    for name in names:
        alone = evaluate(name, task, roster=roster, overrides=overrides)
        print(f"{name} alone: {alone.utility:.3f}; together: {together.against(alone)}")
    return consortium


if __name__ == "__main__":
    main()
