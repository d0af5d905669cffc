"""The strategies of a consortium: who is asked what, and which answer comes of it."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_agents import slot, speaker
from small_consortia import DEAD, confidences, deliberation, heard, judge, shown

from swarm.models.base import Request
from swarm.multi_agent.consortium.consortium import Consortium
from swarm.multi_agent.consortium.prompts import ROLES
from swarm.multi_agent.types import AgentSpec


def fixed(**says: Any) -> list[AgentSpec]:
    """Members by name, and what each says."""
    return [slot(name, text) for name, text in says.items()]


def number_of(text: str, answers: dict[int, str]) -> int:
    return next(number for number, one in answers.items() if one == text)


def by_choice(best: Callable[[dict[int, str]], Any]) -> AgentSpec:
    """An arbiter that replies with what the function makes of the answers it is shown."""
    return slot("arbiter", lambda request: str(best(shown(request))))


def ranking(texts: Sequence[str]) -> Callable[[dict[int, str]], str]:
    """Ranks those of these answers that it is shown, in this order."""
    return lambda answers: " > ".join(
        str(number_of(text, answers)) for text in texts if text in answers.values()
    )


# pick-one and rank


@pytest.mark.parametrize("seed", range(4))
def test_pick_one_gives_the_chosen_answer_word_by_word(seed: int) -> None:
    text = "B  is\n it"
    members = fixed(a="A\nConfidence: 0.9", b=f"<think>x</think>\n{text}\nConfidence: 0.1", c="C")
    arbiter = by_choice(lambda answers: f"Answer {number_of(text, answers)}.")
    found = deliberation(Consortium(members, arbiter, "pick-one", seed=seed))
    assert found.final.text == text and len(found.answers) == 4
    verdict = found.iterations[0].verdict
    assert verdict.confidence is None and verdict.ranking == (1,)
    assert "<synthesis>" not in heard(arbiter)[0]
    (request,) = speaker(arbiter).heard
    assert request.stop_check and request.stop_check("2\n") and not request.stop_check("well")


def test_a_choice_that_cannot_be_read_is_asked_for_again_and_then_the_surest_is_taken() -> None:
    members = fixed(a="A\nConfidence: 0.1", b="B\nConfidence: 0.5")
    replies = iter(["hm", "2"])
    again = deliberation(Consortium(members, slot("j", lambda _: next(replies)), "pick-one"))
    assert again.iterations[0].verdict.source == "repaired" and again.warnings == []
    found = deliberation(Consortium(members, slot("j", "17"), "pick-one"))
    assert found.final.text == "B" and found.iterations[0].verdict.source == "fallback"


@pytest.mark.parametrize(
    "form", ["{} > {} > {}", "[{}, {}, {}]", "1. Answer {}\n2. Answer {}\n3. {}"]
)
def test_rank_gives_the_top_and_keeps_the_order(form: str) -> None:
    members = fixed(a="A", dead=DEAD, b="B", c="C")

    def order(answers: dict[int, str]) -> str:
        return form.format(*(number_of(text, answers) for text in "CAB"))

    arbiter = by_choice(order)
    found = deliberation(Consortium(members, arbiter, "rank"))
    assert found.final.text == "C" and found.iterations[0].verdict.ranking == (3, 0, 2)
    assert len(found.answers) == 5 and "<synthesis>" not in heard(arbiter)[0]


# vote


def test_vote_counts_answers_and_asks_nobody_else() -> None:
    members = fixed(a="Lyon", b="It is (B)", c="Answer: b", d="so B")
    arbiter = judge(0.9)
    found = deliberation(Consortium(members[:3], arbiter, "vote", confidence_threshold=0.6))
    assert found.final.text == "It is (B)" and speaker(arbiter).heard == []
    assert confidences(found) == [pytest.approx(2 / 3)]
    verdict = found.iterations[0].verdict
    assert verdict.source == "counted" and verdict.ranking == (1, 2, 0)
    again = deliberation(Consortium(members[:3], None, "vote"))
    assert len(again.iterations) == 3 and again.stopped == "max_iterations=3"
    assert all("It is (B)" in text for text in heard(members[0])[2:])


def test_a_tie_goes_to_the_arbiter_which_sees_one_answer_of_each_group() -> None:
    members = fixed(a="so 7", b="so 8", c="it is 8", d="it is 7", e="Lyon")
    arbiter = by_choice(lambda answers: number_of("so 8", answers))
    found = deliberation(Consortium(members, arbiter, "vote", confidence_threshold=0.4))
    assert found.final.text == "so 8" and confidences(found) == [0.4]
    assert sorted(shown(speaker(arbiter).heard[0]).values()) == ["so 7", "so 8"]


def test_a_tie_that_nobody_decides_stays_among_the_tied() -> None:
    members = fixed(a="7", b="7", c="8", d="8", e="Lyon\nConfidence: 1")
    found = deliberation(Consortium(members, slot("j", DEAD), "vote", confidence_threshold=0.4))
    assert found.final.text == "7" and found.iterations[0].verdict.source == "fallback"


# elimination


def test_elimination_drops_instances_until_some_are_left() -> None:
    number = iter(range(100))
    twice = slot("m", lambda _: f"m{next(number) % 2}", count=2)
    arbiter = by_choice(ranking(["m1", "y", "m0", "x"]))
    consortium = Consortium([twice, *fixed(x="x", y="y")], arbiter, "elimination")
    found = deliberation(consortium)
    asked = [[one.text for one in iteration.answers] for iteration in found.iterations]
    assert asked[0] == ["m0", "m1", "x", "y"] and asked[1] == ["m0", "m1", "y"]
    # The first instance has left, and the second is asked alone.
    last = [(one.answer.name, one.instance) for one in found.iterations[2].answers]
    assert last == [("m", 2), ("y", 1)]
    assert [one.verdict.needs_iteration for one in found.iterations] == [True, True, False]
    plan = consortium.plan_calls()
    assert len(found.answers) == plan.minimum == plan.maximum - 3
    assert deliberation(consortium).iterations[0].answers[0].answer.name == "m"


def test_who_fails_leaves_first_and_several_may_leave_at_once() -> None:
    members, arbiter = fixed(a="A", b=DEAD, c="C", d="D"), by_choice(ranking("DCA"))
    one = deliberation(Consortium(members, arbiter, "elimination", keep=3))
    assert [len(iteration.answers) for iteration in one.iterations] == [4, 3]
    assert [o.text for o in one.iterations[1].answers] == ["A", "C", "D"]
    several = deliberation(Consortium(members, arbiter, "elimination", eliminate=3, keep=1))
    assert [len(iteration.answers) for iteration in several.iterations] == [4, 1]
    assert several.final.text == "D"


# roles


def test_each_instance_has_a_role() -> None:
    member, other = slot("a", count=3), slot("b", system="Be brief.")
    deliberation(Consortium([member, other], judge(0.9), "roles"))
    told = [*heard(member), *heard(other)]
    roles = [[role for role in ROLES if ROLES[role] in text] for text in told]
    assert roles == [[role] for role in list(ROLES)[:4]]
    assert "Be brief." in told[3]
    own, arbiter = slot("a", count=3), judge(0.9)
    deliberation(Consortium([own], arbiter, "roles", roles=["critic", "You are a pirate."]))
    assert [ROLES["critic"] in text for text in heard(own)] == [True, False, True]
    assert ["a pirate" in text for text in heard(own)] == [False, True, False]
    assert not any("pirate" in text for text in heard(arbiter))


# peer review


def reviewer(name: str, says: str, order: str) -> AgentSpec:
    """A member that answers, and that puts others' answers in this order."""

    def reply(request: Request) -> str:
        answers = shown(request)
        return f"{name} thinks so.\nRanking: {ranking(order)(answers)}" if answers else says

    return slot(name, reply)


def test_peers_judge_the_others_and_the_chair_hears_them() -> None:
    members = [reviewer(name, name.upper(), "BCAD") for name in "abcd"]
    arbiter = judge(0.9)
    found = deliberation(Consortium(members, arbiter, "peer-review"))
    seen = [list(shown(speaker(one).heard[1]).values()) for one in members]
    for name, texts in zip("ABCD", seen, strict=True):
        assert sorted(texts) == sorted(set("ABCD") - {name})
    assert any(texts != sorted(texts) for texts in seen)
    assert found.iterations[0].verdict.ranking == (1, 2, 0, 3)
    (told,) = heard(arbiter)
    numbers = {text: number for number, text in shown(speaker(arbiter).heard[0]).items()}
    assert f"The ranking: {' > '.join(str(numbers[text]) for text in 'BCAD')}" in told
    # The numbers in the reviews are the chair's.
    reviews = re.findall(r"<review-\w+>\n(.*?)\n</review", told, re.DOTALL)
    first = f"Ranking: {' > '.join(str(numbers[text]) for text in 'BCD')}"
    assert len(reviews) == 4 and any(first in text for text in reviews)
    assert [len(layer) for layer in found.layers] == [4, 4, 1] and found.warnings == []
    assert {answer.role for answer in found.layers[1]} == {"reviewer"}


def test_an_order_is_the_mean_over_those_who_judged() -> None:
    # The third's own review is missing, so that it alone was judged by both others.
    members = [reviewer("a", "A", "BC"), reviewer("b", "B", "CA")]
    times = iter(["C", "I had rather not."])
    members.append(slot("c", lambda _: next(times)))
    found = deliberation(Consortium(members, slot("j", DEAD), "peer-review"))
    # A: 0 of b. B: 1 of a. C: 0 of a, 1 of b.
    assert found.iterations[0].verdict.ranking == (1, 2, 0) and found.final.text == "B"
    assert "iteration 1: c: its review could not be read" in found.warnings


def test_with_one_answer_there_is_no_review() -> None:
    arbiter = judge(0.9)
    found = deliberation(Consortium(fixed(a="A", b=DEAD), arbiter, "peer-review"))
    assert len(found.answers) == 3 and "<review" not in heard(arbiter)[0]
    assert found.iterations[0].verdict.ranking == ()


@pytest.mark.parametrize("strategy", ["pick-one", "rank"])
def test_a_choice_is_short_however_long_an_answer_may_be(strategy: str) -> None:
    """A small model that writes an essay is ended after a few words; thoughts may go on."""
    arbiter = slot("arbiter", "1" if strategy == "pick-one" else "1 > 2")
    deliberation(Consortium([slot("a"), slot("b")], arbiter, strategy), max_new_tokens=4096)
    (asked,) = speaker(arbiter).heard
    assert asked.max_new_tokens <= 1056
    if strategy == "pick-one":
        assert asked.stop_check and asked.stop_check("The sky is blue because " * 20)
        assert not asked.stop_check("<think>\nThe sky is blue because " + "it is " * 100)
        assert not asked.stop_check("The best")
