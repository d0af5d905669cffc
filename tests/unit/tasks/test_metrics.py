"""Metrics of scores: by domain, constant answers, and one answer throughout."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import searches
from task_items import domains_file, exact_match

from swarm.runs.verdict import (
    compare_constant_answers,
    format_one_answer_warnings,
)
from swarm.tasks.abstain import Abstain
from swarm.tasks.base import Item, Score
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.metrics import (
    NO_GOLD_DOMAIN,
    best_constant_answers,
    find_one_answer_domains,
    item_domain,
    measure,
    measure_domains,
)
from swarm.tasks.mixture import Mixture

MINI = searches.ROOT / "data" / "nlgraph_mini.json"


@pytest.fixture(scope="module")
def mini() -> ExactMatch:
    return ExactMatch("nlgraph_mini", str(MINI))


def given(task: Any, items: Sequence[Item], answers: Sequence[str | None]) -> list[Score]:
    """The scores of these answers."""
    return [
        Score(task.grade(item, answer), answer, part=item.get("part", ""))
        for item, answer in zip(items, answers, strict=True)
    ]


def test_constant_answers_equal_a_hand_count(mini: ExactMatch) -> None:
    dev, test = mini.items("dev"), mini.items("test")
    found = best_constant_answers(mini, dev)
    assert found is not None
    best, right = {}, 0
    for domain in ("connectivity", "shortest_path"):
        golds = Counter(item["answer"] for item in dev if item["domain"] == domain)
        best[domain] = golds.most_common(1)[0][0]
        right += sum(i["answer"] == best[domain] for i in test if i["domain"] == domain)
    assert found.domains == best == {"connectivity": "Yes", "shortest_path": "1"}
    one = compare_constant_answers(mini, dev, test)
    assert one is not None and one.test is not None and one.choices == best
    assert one.test.utility == right / len(test) == 0.3075
    every = Counter(item["answer"] for item in dev)
    assert every[found.overall] == max(every.values())


def test_domains_add_up(mini: ExactMatch) -> None:
    items = mini.items("test")
    answers = [("Yes", "No", "1", "2", None)[n * 7 % 5] for n in range(len(items))]
    scores = given(mini, items, answers)
    found = measure(mini, scores, items)
    domains = found.domains
    assert list(domains) == list(dict.fromkeys(item["domain"] for item in items))
    total = sum(one.utility * one.n for one in domains.values())
    assert total / len(items) == pytest.approx(found.utility)
    for name, one in domains.items():
        mine = [s for s, i in zip(scores, items, strict=True) if i["domain"] == name]
        read = Counter(s.answer for s in mine if s.answer)
        assert one.n == len(mine)
        assert one.unparsed == pytest.approx(1 - read.total() / len(mine))
        assert one.commonest_share == max(read.values()) / read.total()
        assert one.low < one.utility < one.high


def test_parts_are_domains_by_their_own_measures(tmp_path: Path) -> None:
    roads = exact_match(tmp_path, "roads", ["Yes", "Yes", "No"], ["No", "Yes", "Yes", "Yes"])
    sums = exact_match(tmp_path, "sums", [3, 3, 4], [4, 4, 3])
    both = Mixture("both", {"roads": roads, "inner": Mixture("inner", [sums])})
    items = both.items("test")
    assert [item_domain(item) for item in items] == ["roads"] * 4 + ["inner/sums"] * 3
    scores = given(both, items, ["No", "No", "Yes", "Yes", "4", "4", "4"])
    found = measure_domains(both, items, scores)
    assert {name: one.utility for name, one in found.items()} == {
        "roads": 0.75,
        "inner/sums": pytest.approx(2 / 3),
    }
    constants = best_constant_answers(both, both.items("dev"))
    assert constants is not None and constants.domains == {"roads": "Yes", "inner/sums": "3"}
    # By the mixture's own utility, the harmonic mean of 3/4 and 1/3; one answer fails in a part.
    each, one = (measure(both, constants.score_items(both, items, k)) for k in (True, False))
    assert each.utility == pytest.approx(2 / (4 / 3 + 3)) and one.utility == 0


def test_without_a_domain_the_gold_answer_gives_one(tmp_path: Path) -> None:
    golds = ["Yes", "no", "true", 12, "1,200", "red door"]
    task = exact_match(tmp_path, "kinds", golds, ["Yes"])
    kinds = ["yes or no", "yes or no", "true or false", "number", "number", "phrase"]
    named = [f"gold answer: {kind}" for kind in kinds]
    assert [item_domain(item) for item in task.items("dev")] == named
    choice = {"id": 0, "choices": {"A": "a", "B": "b"}, "answer": "A"}
    assert item_domain(choice) == "gold answer: letter"
    assert item_domain({"id": 0, "prompt": "write"}) == NO_GOLD_DOMAIN


def test_a_constant_answer_may_be_to_abstain(tmp_path: Path) -> None:
    task = Abstain("doors", str(domains_file(tmp_path / "doors.json")))
    found = best_constant_answers(task, task.items("dev"))
    # Of two letters each is right for half (0 on the mean); of three, abstention beats -1/3.
    assert found is not None and found.domains == {"doors": "A", "paths": "abstain"}
    assert found.overall == "abstain"
    scores = found.score_items(task, task.items("test"), by_domain=False)
    assert measure(task, scores).utility == 0


def test_one_answer_is_warned_of(tmp_path: Path) -> None:
    task = exact_match(tmp_path, "doors", ["No"], ["Yes", "No"] * 10)
    items = task.items("test")
    for answers in (["No"] * 18 + ["Yes"] * 2, ["No"] * 9 + [None] * 11):
        assert find_one_answer_domains(task, items, given(task, items, answers)) == []
    for answers, share in ((["No"] * 19 + ["Yes"], 0.95), (["No"] * 10 + [None] * 10, 1.0)):
        (one,) = find_one_answer_domains(task, items, given(task, items, answers))
        assert one.domain == "gold answer: yes or no"
        assert one.answer == "No" and one.share == share and one.right == 0.5
        (words,) = format_one_answer_warnings([one], "the best found", "test")
        beginning = "Warning: in the domain (gold answer: yes or no) of test, the best found"
        assert words.startswith(beginning)
    # A domain that has but one gold answer.
    mostly = exact_match(tmp_path, "mostly", ["No"], ["No"] * 19 + ["Yes"])
    items = mostly.items("test")
    assert find_one_answer_domains(mostly, items, given(mostly, items, ["No"] * 20)) == []
    (one,) = find_one_answer_domains(mostly, items, given(mostly, items, ["Yes"] * 20))
    assert one.right == 0.05


def test_one_answer_to_small_domains_is_seen_over_all(mini: ExactMatch) -> None:
    task = ExactMatch("small", str(MINI))
    items = [{**item, "domain": f"d{n // 5}"} for n, item in enumerate(mini.items("test")[:40])]
    (one,) = find_one_answer_domains(task, items, given(task, items, ["No"] * 39 + ["Yes"]))
    assert one.domain is None and one.answers == 40
    assert "in all domains" in format_one_answer_warnings([one], "it", "test")[0]


def test_answers_that_are_not_graded_have_no_constant(mini: ExactMatch) -> None:
    signalled = ExactMatch("nlgraph_mini", str(MINI), signal="logprob")
    items = signalled.items("test")
    scores = [Score(-1.0, "") for _ in items]
    assert best_constant_answers(signalled, signalled.items("dev")) is None
    assert find_one_answer_domains(signalled, items, scores) == []
    assert measure_domains(signalled, items, scores)["connectivity"].commonest is None
