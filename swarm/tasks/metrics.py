"""Metrics of scores: utility with interval, a tested difference, votes, constant answers.

Also utilities by domain, and the domains in which a model gives one answer throughout. The domain
of an item is its part of a mixture, else its "domain", else the kind of its gold answer: "gold
answer: " and "letter" (multiple choice), "yes or no", "true or false", "number" or "phrase".
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from swarm.stats.significance import (
    MeanInterval,
    PairedTest,
    mean_interval,
    paired_test,
    plurality_vote,
    utility_interval,
    utility_test,
)
from swarm.tasks.base import Item, Score, Task, unparsed_rate
from swarm.tasks.mixture import Mixture
from swarm.tasks.parsing import answer_kind

KIND_PREFIX = "gold answer: "
"""Beginning of the domain of items that have no "domain": the kind of their gold answer follows."""

NO_GOLD_DOMAIN = "no gold answer"
"""Domain of items that have neither a "domain" nor a gold answer."""

MAX_CONSTANT_CANDIDATES = 50
"""Number of gold answers, the most frequent on dev, considered as constant answers."""

ONE_ANSWER_SHARE = 0.9
"""Above this share of a domain's answers, one value counts as a constant answer."""

MIN_ANSWERS = 10
"""Minimum number of answers for the check of a constant answer."""


def utility_with_interval(task: Task, scores: Sequence[Score]) -> MeanInterval:
    """Return a task's utility of these scores with its 95 % interval."""
    if is_mean_utility(task, scores):
        return mean_interval([score.value for score in scores], signed=task.lowest < 0)
    return utility_interval(
        lambda indices: task.utility([scores[i] for i in indices]), [s.part for s in scores]
    )


def paired_gain(task: Task, after: Sequence[Score], before: Sequence[Score]) -> PairedTest:
    """Test the difference of two models' utilities on the same items."""
    if is_mean_utility(task, after):
        return paired_test([s.value for s in after], [s.value for s in before])
    return utility_test(
        lambda indices: (
            task.utility([after[i] for i in indices]) - task.utility([before[i] for i in indices])
        ),
        [s.part for s in after],
    )


def is_mean_utility(task: Task, scores: Sequence[Score]) -> bool:
    """Return whether the utility is the plain mean; never true of a mixture."""
    mean = sum(s.value for s in scores) / len(scores)
    return not scores[0].part and abs(task.utility(scores) - mean) < 1e-9


@dataclass(frozen=True)
class OneAnswer:
    """A domain in which a model gives the same answer to nearly every item.

    Attributes:
        domain: Its name; `None` for all items.
        share: Of the parsed answers, 0 to 1; `answers` is their number.
        right: Share of the items for which that answer has a value above 0.
    """

    domain: str | None
    answer: str
    share: float
    answers: int
    right: float


@dataclass(frozen=True)
class Measured:
    """Utility of a model on n items, with its 95 % interval.

    Attributes:
        unparsed: Share of answers that could not be parsed.
        parts: Utility of each part of a mixture.
        domains: The same by domain, in the order of the items.
        one_answer: Domains with the same answer throughout.
        commonest: Most common answer of a domain, if answers are graded; `commonest_share` of the
            parsed ones have it.
        entropy, length: Of a scorer's texts, which can be gamed: the entropy of their distribution
            in bits, at most log2(n), and their mean number of words.
    """

    utility: float
    low: float
    high: float
    n: int
    unparsed: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    domains: "dict[str, Measured]" = field(default_factory=dict)
    one_answer: list[OneAnswer] = field(default_factory=list)
    commonest: str | None = None
    commonest_share: float = 0.0
    entropy: float | None = None
    length: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Ends of the 95 % interval; `None` if they are not known."""
        return None if math.isnan(self.low) else (self.low, self.high)


def measure(task: Task, scores: Sequence[Score], items: Sequence[Item] = ()) -> Measured:
    """Return a utility with its interval, by part and, with `items`, by domain.

    Args:
        items: The scored items, in the same order; empty leaves domains out.
    """
    interval = utility_with_interval(task, scores)
    parts = task.subtask_utilities(scores) if isinstance(task, Mixture) else {}
    domains = measure_domains(task, items, scores) if items else {}
    one_answer = find_one_answer_domains(task, items, scores) if items else []
    found = Measured(*interval, unparsed_rate(scores), parts, domains, one_answer)
    if not task.black_box:
        return found
    texts = [score.text.strip() for score in scores]
    shares = [count / len(texts) for count in Counter(texts).values()]
    length = fmean(len(text.split()) for text in texts)
    return replace(found, entropy=-sum(p * math.log2(p) for p in shares), length=length)


def item_domain(item: Item) -> str:
    """Return the domain of an item; see the module's docstring."""
    for key in ("part", "domain"):
        if item.get(key) not in (None, ""):
            return str(item[key])
    golds = _gold_answers(item)
    if not golds:
        return NO_GOLD_DOMAIN
    return KIND_PREFIX + ("letter" if "choices" in item else answer_kind(golds[0]))


def group_items_by_domain(items: Sequence[Item]) -> dict[str, list[int]]:
    """Return the indices of each domain's items."""
    found: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        found.setdefault(item_domain(item), []).append(index)
    return found


def domain_scores(
    task: Task, items: Sequence[Item], scores: Sequence[Score]
) -> dict[str, tuple[Task, list[Score]]]:
    """Return each domain's scores with the task that they are of: of a mixture's item, its part."""
    found = {}
    for domain, indices in group_items_by_domain(items).items():
        leaf, mine = task, [scores[index] for index in indices]
        if task.tasks:
            for name in mine[0].part.split("/"):
                leaf = leaf.tasks[name]
            mine = [replace(score, part="") for score in mine]
        found[domain] = leaf, mine
    return found


def measure_domains(
    task: Task, items: Sequence[Item], scores: Sequence[Score]
) -> dict[str, Measured]:
    """Return the result of each domain, in the order of the items; a part's by its own metric."""
    found = {}
    for domain, (leaf, mine) in domain_scores(task, items, scores).items():
        answer, share, _ = _most_common_answer(mine) if leaf.votes else (None, 0.0, 0)
        found[domain] = Measured(
            *utility_with_interval(leaf, mine),
            unparsed_rate(mine),
            commonest=answer,
            commonest_share=share,
        )
    return found


def _most_common_answer(scores: Sequence[Score]) -> tuple[str | None, float, int]:
    """Return the most common parsed answer, its share, and the number of parsed answers."""
    counted = Counter(score.answer for score in scores if score.answer)
    count = counted.total()
    answer, times = counted.most_common(1)[0] if counted else (None, 0)
    return answer, times / max(1, count), count


def find_one_answer_domains(
    task: Task, items: Sequence[Item], scores: Sequence[Score]
) -> list[OneAnswer]:
    """Find the domains in which a model gives the same answer to nearly every item.

    A domain is listed if more than 90 % of at least 10 parsed answers are one value, unless that
    value is right for more than 90 % of the domain's items. If this is true of the answers to
    several domains together, one entry for all items is returned instead.
    """
    if not task.votes:
        return []
    domains = group_items_by_domain(items)
    answered = {item_domain(i) for i, s in zip(items, scores, strict=True) if s.answer}
    groups: list[list[tuple[str | None, Sequence[int]]]] = [list(domains.items())]
    if len(answered) > 1:
        groups.insert(0, [(None, range(len(items)))])
    found: list[OneAnswer] = []
    for group in groups:
        for domain, indices in group:
            answer, share, count = _most_common_answer([scores[index] for index in indices])
            if answer is None or count < MIN_ANSWERS or share <= ONE_ANSWER_SHARE:
                continue
            right = fmean(task.grade(items[index], answer) > 0 for index in indices)
            if right <= ONE_ANSWER_SHARE:
                found.append(OneAnswer(domain, answer, share, count, right))
        if found:
            break
    return found


@dataclass(frozen=True, slots=True)
class ConstantAnswers:
    """The best constant answers: the baseline reached without reading a question.

    Attributes:
        overall: One answer to all items.
        domains: One answer to all items of a domain, by domain.
    """

    overall: str
    domains: Mapping[str, str]

    def score_items(self, task: Task, items: Sequence[Item], by_domain: bool = True) -> list[Score]:
        """Score these answers; the overall answer is used where a domain has none."""
        given = self.domains if by_domain else {}
        answers = [given.get(item_domain(item), self.overall) for item in items]
        return [_grade_answer(task, item, one) for item, one in zip(items, answers, strict=True)]


def best_constant_answers(task: Task, dev: Sequence[Item]) -> ConstantAnswers | None:
    """Return the best constant answers; `None` if answers are ungraded or without candidates.

    Candidates are the 50 most frequent gold answers of the items concerned and the task's
    `constants`. A domain's answer maximizes the mean value, the overall answer the utility; ties go
    to the more frequent answer.

    Args:
        dev: Items to choose on; never those of test.
    """

    def candidates(items: Sequence[Item]) -> list[str]:
        counted = Counter(gold for item in items for gold in _gold_answers(item))
        golds = [gold for gold, _ in counted.most_common(MAX_CONSTANT_CANDIDATES)]
        return list(dict.fromkeys([*golds, *task.constants]))

    if not (task.votes or task.constants) or not candidates(dev):
        return None
    overall = max(
        candidates(dev), key=lambda one: task.utility([_grade_answer(task, i, one) for i in dev])
    )
    domains = {}
    for domain, indices in group_items_by_domain(dev).items():
        mine = [dev[index] for index in indices]
        domains[domain] = max(
            candidates(mine) or [overall],
            key=lambda one: fmean(task.grade(item, one) for item in mine),
        )
    return ConstantAnswers(overall, domains)


def _gold_answers(item: Item) -> list[str]:
    """Return the gold answers of an item, or of the innermost item of a mixture's item."""
    while "part" in item and isinstance(item.get("item"), Mapping):
        item = item["item"]
    gold = item.get("answer")
    several = gold if isinstance(gold, list) else [gold]
    return [str(one) for one in several if isinstance(one, str | int | float)]


def _grade_answer(task: Task, item: Item, answer: str) -> Score:
    part = str(item["part"]) if "part" in item and "item" in item else ""
    return Score(task.grade(item, answer), answer, part=part)


def majority_vote(
    task: Task,
    items: Sequence[Item],
    voices: Sequence[Sequence[Score]],
    weights: Sequence[float],
    choose: Callable[[Sequence[str | None], Sequence[float]], str | None] = plurality_vote,
) -> list[Score]:
    """Score the answers that several models give by vote; the texts list all answers.

    Args:
        voices: Each model's scores, in the order of the items.
        weights: One per model.
        choose: Returns the answer to one item from all answers to it and the weights.
    """
    polled = []
    for i, item in enumerate(items):
        answers = [scores[i].answer for scores in voices]
        answer = choose(answers, weights)
        joined = " | ".join("-" if one is None else one for one in answers)
        polled.append(Score(task.grade(item, answer), answer, joined, voices[0][i].part))
    return polled
