"""Free text scored by a reward model, on a scale set by the experts' own answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from swarm._util.settings import FiniteNumber, checked
from swarm.errors import UserError
from swarm.tasks.base import Item, Score, TaskRun
from swarm.tasks.free_text import FreeText

Mode = Literal["default", "verbose", "concise", "reverse"]


@checked("task")
@dataclass(eq=False)
class RewardModelTask(FreeText):
    """Answers to prompts, valued by a reward model; objective 3 of Model Swarms.

    With `q`, the reward scaled linearly between `low` and `high`, and `l`, the length scaled
    between `length_low` and `length_high`, each clipped to [0, 1], an answer's value is, as in the
    original's code:

    - "default", q.
    - "verbose", (q + l) / 2.
    - "concise", (q + 1 - l) / 2.
    - "reverse", -(q + 1) / 2: -1 for the best reward, -1/2 for the worst. (The original takes the
      mean of q and the unscaled length, which is 1 after clipping.)

    An answer without a reward has the mode's lowest value. Limits that the mode needs and that are
    not given are the minimum and the maximum of the experts' dev answers; if these are equal, an
    answer is at 0, 1/2 or 1, as it is below, at or above them. Before all limits are known, values
    are raw rewards, with "reverse" their negatives.

    Args:
        mode: As above.
        low, high: The rewards worth 0 and 1, in the reward model's unit; `None` measures both.
        length_low, length_high: The lengths at 0 and 1, in tokens of the reward model; `None`
            measures both.

    The others are those of `FreeText`; the scorer returns the measures "reward" and "length".
    """

    chat: bool = True
    mode: Mode = "default"
    low: FiniteNumber | None = None
    high: FiniteNumber | None = None
    length_low: FiniteNumber | None = None
    length_high: FiniteNumber | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.highest, self.lowest = (-0.5, -1.0) if self.mode == "reverse" else (1.0, 0.0)
        self.needed = {"reward": ("low", "high")}
        if self.mode in ("verbose", "concise"):
            self.needed["length"] = ("length_low", "length_high")
        self.given: dict[str, float] = {}
        for prefix, low, high in (
            ("", self.low, self.high),
            ("length_", self.length_low, self.length_high),
        ):
            if low is not None and high is not None and low < high:
                self.given |= {f"{prefix}low": low, f"{prefix}high": high}
            elif low is not None or high is not None:
                raise UserError(f"""task.{prefix}low={low}, task.{prefix}high={high}: must be two
                    numbers, the first below the second, or null""")
        known = all(limit in self.given for pair in self.needed.values() for limit in pair)
        self.scale: Mapping[str, float] | None = self.given if known else None

    def run(self, items: Sequence[Item]) -> TaskRun:
        """Request a text for every item in one round."""
        scores = yield from super().run(items)
        return [self.apply_scale(score) for score in scores]

    def grade(self, item: Item, answer: str | None) -> float:
        """Return the value of an answer, scored as a text, on the scale."""
        return self.apply_scale(self.scorer.score([item], [answer or ""])[0]).value

    def calibrate(self, scores: Sequence[Score]) -> dict[str, float]:
        """See `Task.calibrate`.

        Raises:
            UserError: None of the scores has a reward.
        """
        measures = [score.measures for score in scores if "reward" in score.measures]
        if not measures:
            raise UserError(f"""task.scorer: the reward model returned no finite score for any of
                {len(scores)} answers; try task.scorer.dtype=float32""")
        found: dict[str, float] = {}
        for name, (low, high) in self.needed.items():
            values = [float(mine[name]) for mine in measures]
            found |= {low: min(values), high: max(values)}
        self.restore_scale(found | self.given)
        return found | self.given

    def restore_scale(self, scale: Mapping[str, Any]) -> None:
        self.scale = dict(scale)

    def check_scale(self, alone: bool = True) -> None:
        """See `Task.check_scale`; raw rewards are an order, which suffices for one mode alone."""
        if self.scale is None and not (alone and self.mode in ("default", "reverse")):
            limits = [limit for pair in self.needed.values() for limit in pair]
            raise UserError(f"""task={self.name}: the scale of mode {self.mode} is measured by a
                search on its experts; set task.{", task.".join(limits)}, or use candidate=run with
                such a search""")

    def apply_scale(self, score: Score) -> Score:
        reward, scale = score.measures.get("reward"), self.scale
        if reward is None:
            return score if scale is None else replace(score, value=self.lowest)
        if scale is None:
            return replace(score, value=-reward if self.mode == "reverse" else reward)
        value = relative_value(reward, scale["low"], scale["high"])
        if self.mode == "reverse":
            value = -(value + 1) / 2
        elif self.mode != "default":
            length = score.measures["length"]
            size = relative_value(length, scale["length_low"], scale["length_high"])
            value = (value + (size if self.mode == "verbose" else 1 - size)) / 2
        return replace(score, value=value)


def relative_value(value: float, low: float, high: float) -> float:
    """Scale `value` linearly from `low`, 0, to `high`, 1, clipped to [0, 1]."""
    if low == high:
        return 0.5 + ((value > low) - (value < low)) / 2
    return min(1.0, max(0.0, (value - low) / (high - low)))
