"""What scores come to and how sure that is: utility and interval, a tested difference, a vote.

Utilities by domain, the best constant answers and the warning of one answer throughout are here,
too. The domain of an item is its part of a mixture, else its own "domain", else the kind of its
gold answer: "letter" (multiple choice), "yes or no", "true or false", "number" or "phrase".
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from swarm.report.statistics import (
    Interval,
    Paired,
    mean_interval,
    paired_test,
    utility_interval,
    utility_test,
    vote,
)
from swarm.tasks import Item, Score, Task, unparsed
from swarm.tasks.answers import kind_of

NO_DOMAIN = "no gold answer"
"""The domain of items that have neither a domain of their own nor a gold answer."""

CANDIDATES = 50
"""Gold answers, the most frequent on dev, among which the best constant answer is looked for."""

ONE_ANSWER = 0.9
"""Above this share of a domain's answers, one value counts as a constant answer."""

LEAST_ANSWERS = 10
"""Of fewer answers, nothing is said about how many are the same."""


def interval_of(task: Task, scores: Sequence[Score]) -> Interval:
    """A task's utility of these scores with its 95 % interval."""
    values = [score.value for score in scores]
    if is_mean(task, scores):
        return mean_interval(values, signed=getattr(task, "lowest", 0.0) < 0)
    return utility_interval(
        lambda places: task.utility([scores[i] for i in places]), [s.part for s in scores]
    )


def described(task: Task, scores: Sequence[Score], items: Sequence[Item] = ()) -> dict[str, Any]:
    """A utility with its 95 % interval, the unparsed rate, and the utilities of a mixture's parts.

    Its keys: "utility", "interval" ([low, high]), "items", "unparsed_rate", perhaps "parts", and
    with `items` "domains" (see `by_domain`) and "one_answer" (see `one_answer`).

    Args:
        items: Those that were scored, in the same order; none leaves domains out.
    """
    interval = interval_of(task, scores)
    found: dict[str, Any] = {
        "utility": interval.mean,
        "interval": [interval.low, interval.high],
        "items": interval.n,
        "unparsed_rate": unparsed(scores),
    }
    if hasattr(task, "parts"):
        found["parts"] = task.parts(scores)
    if items:
        found["domains"] = by_domain(task, items, scores)
        found["one_answer"] = one_answer(task, items, scores)
    return found


def domain_of(item: Item) -> str:
    """The domain of an item; see the module's docstring."""
    for key in ("part", "domain"):
        if item.get(key) not in (None, ""):
            return str(item[key])
    golds = _golds(item)
    if not golds:
        return NO_DOMAIN
    return "letter" if "choices" in item else kind_of(golds[0])


def by_domain(
    task: Task, items: Sequence[Item], scores: Sequence[Score]
) -> dict[str, dict[str, Any]]:
    """The utility of each domain and, where answers are graded, its commonest answer.

    Returns:
        By domain, in the order of the items: "utility" (a part's by its own measure), "interval"
        ([low, high], 95 %), "items", "unparsed_rate" (0 to 1); where `votes` holds
        also "answers" (those that were read), "commonest" (`None` of no answers) and "share" (of
        the answers, 0 to 1).
    """
    found = {}
    for domain, places in places_by_domain(items).items():
        mine = [scores[place] for place in places]
        leaf, inner = _inside(task, mine)
        interval = interval_of(leaf, inner)
        found[domain] = {
            "utility": interval.mean,
            "interval": [interval.low, interval.high],
            "items": interval.n,
            "unparsed_rate": unparsed(mine),
            **(_commonest(mine) if getattr(leaf, "votes", True) else {}),
        }
    return found


def one_answer(task: Task, items: Sequence[Item], scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Where a model gives one answer throughout, whatever it is asked.

    A domain is named if more than 90 % of at least 10 answers that were read are one value, unless
    that value is right for more than 90 % of the domain's items. If this holds of the answers to
    several domains together, all items are named and no domain.

    Returns:
        For each: "domain" (`None` of all items), "answer", "share" (of the answers), "answers",
        "right" (the share of items for which that answer has a value above 0).
    """
    if not getattr(task, "votes", True):
        return []

    def warned(domain: str | None, places: Sequence[int]) -> list[dict[str, Any]]:
        told = _commonest([scores[place] for place in places])
        if told["answers"] < LEAST_ANSWERS or told["share"] <= ONE_ANSWER:
            return []
        answer = told["commonest"]
        right = fmean(task.grade(items[place], answer) > 0 for place in places)
        if right > ONE_ANSWER:
            return []
        counts = {"share": told["share"], "answers": told["answers"], "right": right}
        return [{"domain": domain, "answer": answer, **counts}]

    domains = places_by_domain(items)
    answered = {domain_of(i) for i, s in zip(items, scores, strict=True) if s.answer}
    if len(answered) > 1 and (found := warned(None, range(len(items)))):
        return found
    return [one for domain, places in domains.items() for one in warned(domain, places)]


@dataclass(frozen=True, slots=True)
class Constants:
    """The best constant answers: what is reached without reading a question.

    Attributes:
        overall: One answer to all items.
        domains: One answer to all items of a domain, by domain.
    """

    overall: str
    domains: Mapping[str, str]

    def scores(self, task: Task, items: Sequence[Item], by_domain: bool = True) -> list[Score]:
        """The scores of these answers; the overall one where a domain has none."""
        given = self.domains if by_domain else {}
        answers = [given.get(domain_of(item), self.overall) for item in items]
        return [_graded(task, item, one) for item, one in zip(items, answers, strict=True)]

    def described(self, task: Task, splits: Mapping[str, Sequence[Item]]) -> dict[str, Any]:
        """What they come to on some splits, by the splits' names.

        Returns:
            "overall": {"answer", and for each split "utility", "interval", "items"}, and
            "by_domain": {"answers", and for each split the same with "domains"}.
        """
        found: dict[str, Any] = {
            "overall": {"answer": self.overall},
            "by_domain": {"answers": dict(self.domains)},
        }
        for split, items in splits.items():
            for kind, each in (("overall", False), ("by_domain", True)):
                scores = self.scores(task, items, each)
                told = described(task, scores, items if each else ())
                kept = ("utility", "interval", "items", "domains")
                found[kind][split] = {key: told[key] for key in kept if key in told}
        return found


def constant_answers(task: Task, dev: Sequence[Item]) -> Constants | None:
    """The best constant answers on these items; `None` where answers cannot be graded or chosen.

    Candidates are the 50 most frequent gold answers of the items concerned and the task's
    `constants`. Of a domain that one counts whose mean value is highest, overall that one whose
    utility is; of equals the more frequent one.

    Args:
        dev: Items to choose on; never those of test.
    """
    if not getattr(task, "votes", True) or not dev:
        return None
    candidates = _candidates(task, dev)
    if not candidates:
        return None
    overall = max(candidates, key=lambda one: task.utility([_graded(task, i, one) for i in dev]))
    domains = {}
    for domain, places in places_by_domain(dev).items():
        mine = [dev[place] for place in places]
        domains[domain] = max(
            _candidates(task, mine) or [overall],
            key=lambda one: fmean(task.grade(item, one) for item in mine),
        )
    return Constants(overall, domains)


def described_constants(
    task: Task,
    dev: Sequence[Item],
    test: Sequence[Item] = (),
    after: Sequence[Score] = (),
) -> dict[str, Any] | None:
    """The best constant answers of dev, what they come to, and a model beside them on test.

    Args:
        dev: Items to choose on.
        test: Items to score on besides; none leaves them out.
        after: The model's scores of the test items; none leaves the comparison out.

    Returns:
        `Constants.described`, and with `after` "gain" (of the model over the answers by domain),
        "gain_interval" ([low, high], 95 %) and "p_value"; `None` as `constant_answers`.
    """
    constants = constant_answers(task, dev)
    if constants is None:
        return None
    found = constants.described(task, {"dev": dev} | ({"test": test} if test else {}))
    if after:
        gain = gain_of(task, after, constants.scores(task, test))
        found |= {"gain": gain.difference, "gain_interval": [gain.low, gain.high]}
        found["p_value"] = gain.p
    return found


def _candidates(task: Task, items: Sequence[Item]) -> list[str]:
    counted = Counter(gold for item in items for gold in _golds(item))
    golds = [gold for gold, _ in counted.most_common(CANDIDATES)]
    return list(dict.fromkeys([*golds, *getattr(task, "constants", ())]))


def _golds(item: Item) -> list[str]:
    """The gold answers of an item, or of the item within a mixture's."""
    while "part" in item and isinstance(item.get("item"), Mapping):
        item = item["item"]
    gold = item.get("answer")
    several = gold if isinstance(gold, list) else [gold]
    return [str(one) for one in several if isinstance(one, str | int | float)]


def _graded(task: Task, item: Item, answer: str) -> Score:
    part = str(item["part"]) if "part" in item and "item" in item else ""
    return Score(task.grade(item, answer), answer, part=part)


def places_by_domain(items: Sequence[Item]) -> dict[str, list[int]]:
    """The places of each domain's items."""
    found: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        found.setdefault(domain_of(item), []).append(place)
    return found


def _inside(task: Any, scores: Sequence[Score]) -> tuple[Task, list[Score]]:
    """The part that all these scores are of, as a task, with the scores as it gave them."""
    if not hasattr(task, "tasks"):
        return task, list(scores)
    for name in scores[0].part.split("/"):
        task = task.tasks[name]
    return task, [replace(score, part="") for score in scores]


def _commonest(scores: Sequence[Score]) -> dict[str, Any]:
    """How many answers were read, the commonest of them, and its share."""
    counted = Counter(score.answer for score in scores if score.answer)
    answers = counted.total()
    answer, times = counted.most_common(1)[0] if counted else (None, 0)
    return {"answers": answers, "commonest": answer, "share": times / max(1, answers)}


def gain_of(task: Task, after: Sequence[Score], before: Sequence[Score]) -> Paired:
    """The difference of two models' utilities on the same items, tested."""
    if is_mean(task, after):
        return paired_test([s.value for s in after], [s.value for s in before])
    return utility_test(
        lambda places: (
            task.utility([after[i] for i in places]) - task.utility([before[i] for i in places])
        ),
        [s.part for s in after],
    )


def is_mean(task: Task, scores: Sequence[Score]) -> bool:
    """Whether the utility is the plain mean; that of a mixture is not, whatever it comes to."""
    mean = sum(s.value for s in scores) / len(scores)
    return not scores[0].part and abs(task.utility(scores) - mean) < 1e-9


def poll(
    task: Task,
    items: Sequence[Item],
    voices: Sequence[Sequence[Score]],
    weights: Sequence[float],
    choose: Callable[[Sequence[str | None], Sequence[float]], str | None] = vote,
) -> list[Score]:
    """The scores of the answers that several voices give together; their texts list all answers.

    Args:
        voices: Each one's scores, in the order of the items.
        weights: One a voice.
        choose: The answer of one item, from all answers to it and the weights.
    """
    polled = []
    for i, item in enumerate(items):
        answers = [scores[i].answer for scores in voices]
        answer = choose(answers, weights)
        said = " | ".join("-" if one is None else one for one in answers)
        polled.append(Score(task.grade(item, answer), answer, said, voices[0][i].part))
    return polled
