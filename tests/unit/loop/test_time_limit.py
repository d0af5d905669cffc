"""When a time limit ends a search, by the seconds in its record."""

from types import SimpleNamespace
from typing import Any

from swarm.loop.limits import TimeLimit


def reason(minutes: float | None, seconds: list[float], final_items: int) -> str | None:
    """Of iterations with 10 prompts each, scored in half of their time."""
    rounds = [{"seconds": s, "scoring_seconds": s / 2, "prompts_scored": 10} for s in seconds]
    record: Any = SimpleNamespace(iterations=rounds)
    return TimeLimit(minutes).exhausted_reason(record, final_items)


def test_another_iteration_and_the_test_must_fit() -> None:
    assert reason(1, [], 10**6) is None, "the first iteration always completes"
    assert reason(1, [20], 20) is None, "20 s, 20 s for the next iteration, 1 s for each item"
    assert reason(1, [15], 10**6) is None, "half of the time is the search's"
    assert reason(1, [20], 21) == "time limit of 1 minutes; a larger minutes= continues"
    assert reason(1, [40, 6, 6], 0) is None, "the first iteration does not foretell the next"
    assert reason(1, [21, 11, 9, 9], 0) is not None, "11 s are possible again, 9 s would fit"
    assert reason(1.5, [40, 30, 30], 0) == "time limit of 1.5 minutes; a larger minutes= continues"
    assert reason(None, [1e9], 10**9) is None


def test_answers_of_another_search_take_no_time() -> None:
    one = {"seconds": 30, "scoring_seconds": 10, "prompts_scored": 100, "prompts_shared": 90}
    record: Any = SimpleNamespace(iterations=[one])
    assert TimeLimit(1.1).exhausted_reason(record, 6) is None
    assert TimeLimit(1.1).exhausted_reason(record, 7) is not None


def test_a_budget_replaces_the_default_limit() -> None:
    assert TimeLimit("auto").minutes == 10 and TimeLimit("auto", budget=100).minutes is None
    assert TimeLimit(5, budget=100).minutes == 5


def test_a_larger_limit_continues_a_search_that_ended_by_time() -> None:
    assert TimeLimit(20).was_raised({"minutes": 10}) and TimeLimit().was_raised({"minutes": 10})
    assert not TimeLimit(10).was_raised({"minutes": 10})
    assert not TimeLimit(20).was_raised({"finished": "50 iterations done"})
