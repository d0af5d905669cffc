"""A mixture of tasks: their items together, their utilities combined into one; itself a task."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, harmonic_mean
from typing import Any, Literal

from swarm._util.settings import Number, Text, checked
from swarm.errors import UserError
from swarm.models.base import Completion, Example, Request
from swarm.tasks.base import Candidate, Item, Score, Task, TaskRun

Combination = Literal["harmonic", "mean", "minimum", "weights"]


@checked("task")
class Mixture(Task):
    """Several tasks as one; its parts may be of any kind, mixtures too.

    An item is the part's item with three changes: its "id" is "part/id", "part" names the part
    ("outer/inner" where the part is a mixture), and "item" contains the part's own item, which the
    part's requests are built from.

    The utility combines those of the parts, each over its own items, independent of their number:

    - "harmonic", the harmonic mean, as the paper takes it for two tasks (Model Swarms): near the
      worse of two, so that a search cannot trade one part for another. 0 if a part is 0; the
      original replaces both by .01 where both are 0, which makes no ranking. Refused if a part's
      `lowest` is below 0.
    - "mean", the arithmetic mean.
    - "minimum", the worst part.
    - "weights", the mean with the `weights`.

    Args:
        name: The task's name.
        tasks: The parts by name, or a list of parts, which are then named by their `name`.
        combine: How the parts' utilities become one.
        weights: With `combine` "weights", a number from 0 on for each part; only their ratios
            count. Otherwise `None`.
    """

    def __init__(
        self,
        name: Text,
        tasks: Mapping[str, Task] | Sequence[Task],
        combine: Combination = "harmonic",
        weights: Mapping[str, Number] | None = None,
    ) -> None:
        self.name, self.combine, self.weights = name, combine, weights
        pairs = list(tasks.items()) if isinstance(tasks, Mapping) else [(t.name, t) for t in tasks]
        self.tasks = dict(pairs)
        if not pairs:
            raise UserError("""task.tasks: a mixture needs at least one task, such as
                +task@task.tasks.one=nlgraph_mini""")
        if len(self.tasks) < len(pairs):
            raise UserError("task.tasks: a name occurs more than once; give a mapping of names")
        if unnamed := [part for part in self.tasks if not part or "/" in part]:
            raise UserError(f'task.tasks: the name "{unnamed[0]}" is empty or contains a "/"')
        if undecided := [part for part, task in self.tasks.items() if task.chat == "auto"]:
            raise UserError(f"task.tasks.{undecided[0]}.chat=auto: in a mixture, set true or false")
        if (combine == "weights") != (weights is not None):
            raise UserError("task.weights: goes with task.combine=weights, which needs it")
        if weights is not None and (set(weights) != set(self.tasks) or not any(weights.values())):
            names = ", ".join(self.tasks)
            raise UserError(f"""task.weights={weights}: must be a number for each of {names}, not
                all 0""")
        parts = self.tasks.values()
        self.votes = all(task.votes for task in parts)
        self.needs_setup = any(task.needs_setup for task in parts)
        self.black_box = any(task.black_box for task in parts)
        self.rounds = max(task.rounds for task in parts)
        self.constants = tuple(dict.fromkeys(one for task in parts for one in task.constants))
        signals = {name: task.signal for name, task in self.tasks.items() if task.signal}
        self.signal = ", ".join(f"{name}: {signal}" for name, signal in signals.items())
        self._check_no_negative()

    @property
    def lowest(self) -> float:  # type: ignore[override]
        """The lowest of the parts' bounds, or 0; some parts know theirs only after loading."""
        return min(0.0, *(task.lowest for task in self.tasks.values()))

    @property
    def metric_task(self) -> "Mixture":
        """The mixture of the parts scored by their metrics; itself if they already are."""
        parts = {part: task.metric_task for part, task in self.tasks.items()}
        if all(parts[part] is task for part, task in self.tasks.items()):
            return self
        return Mixture(self.name, parts, self.combine, self.weights)

    @property
    def gold_error(self) -> str | None:
        """Why a part has no gold answers; `None` if all have."""
        return next(filter(None, (task.gold_error for task in self.tasks.values())), None)

    @property
    def scores_error(self) -> str | None:
        """Why scored texts cannot teach a part; `None` if they can teach all."""
        return next(filter(None, (task.scores_error for task in self.tasks.values())), None)

    def items(self, split: str) -> Sequence[Item]:
        """Return the items of all parts, one part after the other; see `Task.items`."""
        found = tuple(
            {
                **item,
                "id": f"{part}/{item['id']}",
                "part": f"{part}/{item['part']}" if isinstance(task, Mixture) else part,
                "item": item,
            }
            for part, task in self.tasks.items()
            for item in task.items(split)
        )
        self._check_no_negative()
        return found

    def run(self, items: Sequence[Item]) -> TaskRun:
        """Run the parts in lockstep: a round sends the requests of all parts together.

        A part with fewer rounds than another ends earlier. The scores are in the order of the
        items.
        """
        indices: dict[str, list[int]] = {}
        for index, item in enumerate(items):
            indices.setdefault(_subtask_name(item), []).append(index)
        plays = {
            part: self.tasks[part].run([items[index]["item"] for index in mine])
            for part, mine in indices.items()
        }
        ended = yield from _run_lockstep(plays)
        found: dict[int, Score] = {}
        for part, scores in ended.items():
            for index, score in zip(indices[part], scores, strict=True):
                path = f"{part}/{score.part}" if score.part else part
                found[index] = replace(score, part=path)
        return [found[index] for index in range(len(items))]

    def gold_examples(self, items: Sequence[Item]) -> list[Example]:
        """See `Task.gold_examples`.

        Weighted so that the mean loss over all dev items is the mean of the parts' mean losses, by
        the `weights` if given; every other combination weights the parts equally.
        """
        found = []
        for item in items:
            (example,) = self.tasks[_subtask_name(item)].gold_examples([item["item"]])
            found.append(self._weigh(item, example))
        return found

    def resolve(self, item: Item) -> tuple[Task, Item]:
        return self.tasks[_subtask_name(item)].resolve(item["item"])

    def scored_example(self, item: Item, candidates: Sequence[Candidate]) -> Example:
        return self._weigh(item, super().scored_example(item, candidates))

    def _weigh(self, item: Item, example: Example) -> Example:
        sizes = {part: len(task.items("dev")) for part, task in self.tasks.items()}
        shares = self.weights or dict.fromkeys(sizes, 1.0)
        part, scale = _subtask_name(item), sum(sizes.values()) / sum(shares.values())
        return replace(example, weight=example.weight * scale * shares[part] / sizes[part])

    def check(self) -> None:
        for task in self.tasks.values():
            task.check()

    def open(self, device: str) -> None:
        for task in self.tasks.values():
            task.open(device)

    def source_digests(self) -> dict[str, str]:
        """Return those of all parts, with the parts' keys; see `Setup.source_digests`."""
        return {
            f"tasks.{part}.{key}": digest
            for part, task in self.tasks.items()
            for key, digest in task.source_digests().items()
        }

    def calibrate(self, scores: Sequence[Score]) -> dict[str, Any] | None:
        """Set the scale of every part that has one."""
        mine = self.scores_by_subtask(scores)
        found = {part: task.calibrate(mine[part]) for part, task in self.tasks.items()}
        return {part: scale for part, scale in found.items() if scale is not None} or None

    def restore_scale(self, scale: Mapping[str, Any]) -> None:
        for part in self.tasks.keys() & scale.keys():
            self.tasks[part].restore_scale(scale[part])

    def apply_scale(self, score: Score) -> Score:
        """Return the score on the scale of its part."""
        part, _, inner = score.part.partition("/")
        scaled = self.tasks[part].apply_scale(replace(score, part=inner))
        return replace(scaled, part=score.part)

    def check_scale(self, alone: bool = True) -> None:
        for task in self.tasks.values():
            task.check_scale(alone=False)

    def grade(self, item: Item, answer: str | None) -> float:
        """Return the value of a parsed answer, graded by the item's part."""
        return self.tasks[_subtask_name(item)].grade(item["item"], answer)

    def scores_by_subtask(self, scores: Sequence[Score]) -> dict[str, list[Score]]:
        """Return the scores of each part, as the part itself returned them."""
        found: dict[str, list[Score]] = {part: [] for part in self.tasks}
        for score in scores:
            part, _, inner = score.part.partition("/")
            if part not in found:
                raise ValueError(f'{self.name}: a score of an unknown part "{score.part}"')
            found[part].append(replace(score, part=inner))
        return found

    def subtask_utilities(self, scores: Sequence[Score]) -> dict[str, float]:
        """Return each part's utility, in the parts' order and units.

        Raises:
            ValueError: A part has no score, or a score belongs to no part.
        """
        sorted_out = self.scores_by_subtask(scores)
        if empty := [part for part, mine in sorted_out.items() if not mine]:
            raise ValueError(f"{self.name}: no score of the part {', '.join(empty)}")
        return {part: self.tasks[part].utility(mine) for part, mine in sorted_out.items()}

    def utility(self, scores: Sequence[Score]) -> float:
        """Return the combined utility of the parts.

        Raises:
            UserError: A part's utility is below 0, where the harmonic mean is undefined.
            ValueError: As `subtask_utilities`.
        """
        utilities = self.subtask_utilities(scores)
        values = list(utilities.values())
        if self.combine == "minimum":
            return min(values)
        if self.combine == "harmonic":
            part = min(utilities, key=lambda part: utilities[part])
            if utilities[part] < 0:
                raise _no_harmonic_mean(part, f"is {utilities[part]:.4g}")
            return float(harmonic_mean(values))
        return fmean(values, [(self.weights or {}).get(part, 1.0) for part in utilities])

    def _check_no_negative(self) -> None:
        for part, task in self.tasks.items():
            if self.combine == "harmonic" and task.lowest < 0:
                if task.signal == "logprob":
                    remedy = f", or task.tasks.{part}.signal=both"
                    raise _no_harmonic_mean(part, "by its signal=logprob can be negative", remedy)
                raise _no_harmonic_mean(part, "can be negative")


def _no_harmonic_mean(part: str, why: str, remedy: str = "") -> UserError:
    return UserError(
        f"task.combine=harmonic: {part} {why}, and the harmonic mean needs values of 0 or more: "
        f"use task.combine=mean, minimum or weights{remedy}."
    )


def _run_lockstep(
    plays: Mapping[str, TaskRun],
) -> Generator[list[Request], list[Completion], dict[str, list[Score]]]:
    """Run all tasks to their end, one batch of requests per round; returns each task's scores."""
    ended: dict[str, list[Score]] = {}
    answers: dict[str, list[Completion] | None] = dict.fromkeys(plays)
    while answers:
        pending: dict[str, list[Request]] = {}
        for part, answer in answers.items():
            try:
                # A generator's first `send` has to be None.
                pending[part] = plays[part].send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                ended[part] = end.value
        together = [request for requests in pending.values() for request in requests]
        completions = (yield together) if together else []
        if len(completions) != len(together):
            raise ValueError(f"{len(completions)} completions of {len(together)} requests")
        rest = iter(completions)
        answers = {part: [next(rest) for _ in requests] for part, requests in pending.items()}
    return ended


def _subtask_name(item: Item) -> str:
    part: str = item["part"]
    return part.partition("/")[0]
