"""Free text scored by a reward model, on a scale set by the experts' own answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from swarm._util import validation as keys
from swarm.errors import UserError
from swarm.tasks.base import Item, Score, TaskRun
from swarm.tasks.free_text import FreeText, Scorer

MODES = ("default", "verbose", "concise", "reverse")


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
        name: See `FreeText`; the scorer returns the measures "reward" and "length".
        scorer: See `name`.
        mode: As above.
        low: The rewards worth 0 and 1, in the reward model's unit; `None` measures both.
        high: See `low`.
        length_low: The lengths at 0 and 1, in tokens of the reward model; `None` measures both.
        length_high: See `length_low`.
        chat: Send the prompt as one user turn through the model's chat template.
        **written: Further arguments of `FreeText`.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        name: str,
        scorer: Scorer,
        mode: str = "default",
        low: float | None = None,
        high: float | None = None,
        length_low: float | None = None,
        length_high: float | None = None,
        chat: bool = True,
        **written: Any,
    ) -> None:
        super().__init__(name, scorer, chat=chat, **written)
        self.mode = keys.check_one_of("mode", mode, MODES)
        self.given = _scale_limits("low", low, high) | _scale_limits(
            "length_low", length_low, length_high
        )
        self.needed = {"reward": ("low", "high")}
        if self.mode in ("verbose", "concise"):
            self.needed["length"] = ("length_low", "length_high")
        known = all(limit in self.given for pair in self.needed.values() for limit in pair)
        self.scale: Mapping[str, float] | None = self.given if known else None
        self.highest, self.lowest = (-0.5, -1.0) if mode == "reverse" else (1.0, 0.0)

    def run(self, items: Sequence[Item]) -> TaskRun:
        """Request a text for every item in one round."""
        scores = yield from super().run(items)
        return [self.apply_scale(score) for score in scores]

    def grade(self, item: Item, answer: str | None) -> float:
        """Return the value of an answer, scored as a text, on the scale."""
        return self.apply_scale(self.scorer.score([item], [answer or ""])[0]).value

    def calibrate(self, scores: Sequence[Score]) -> dict[str, float]:
        """See `HasScoreScale.calibrate`.

        Raises:
            UserError: None of the scores has a reward.
        """
        measures = [score.measures for score in scores if "reward" in score.measures]
        if not measures:
            raise UserError(
                f"task.scorer: the reward model returned no finite score for any of "
                f"{len(scores)} answers; try task.scorer.dtype=float32"
            )
        found: dict[str, float] = {}
        for name, (low, high) in self.needed.items():
            values = [float(mine[name]) for mine in measures]
            found |= {low: min(values), high: max(values)}
        self.restore_scale(found | self.given)
        return found | self.given

    def restore_scale(self, scale: Mapping[str, Any]) -> None:
        """See `HasScoreScale.restore_scale`."""
        self.scale = dict(scale)

    def check_scale(self, alone: bool = True) -> None:
        """Check that values are meaningful where no experts set the scale, as in an evaluation.

        Args:
            alone: The task is no part of a mixture, whose other parts are no rewards.

        Raises:
            UserError: The mode, or the mixture, needs limits that are unknown.
        """
        if self.scale is None and not (alone and self.mode in ("default", "reverse")):
            keys = [limit for pair in self.needed.values() for limit in pair]
            raise UserError(
                f"task={self.name}: the scale of mode {self.mode} is measured by a search on "
                f"its experts; set task.{', task.'.join(keys)}, or use candidate=run with such "
                "a search"
            )

    def apply_scale(self, score: Score) -> Score:
        """See `HasScoreScale.apply_scale`."""
        if self.scale is None:
            if "reward" not in score.measures:
                return score
            sign = -1 if self.mode == "reverse" else 1
            return replace(score, value=sign * score.measures["reward"])
        if "reward" not in score.measures:
            return replace(score, value=self.lowest)
        value = self._scaled_value(score.measures["reward"], score.measures["length"], self.scale)
        return replace(score, value=value)

    def _scaled_value(self, reward: float, length: float, scale: Mapping[str, float]) -> float:
        quality = relative_value(reward, scale["low"], scale["high"])
        if self.mode == "reverse":
            return -(quality + 1) / 2
        if self.mode == "default":
            return quality
        size = relative_value(length, scale["length_low"], scale["length_high"])
        return (quality + (size if self.mode == "verbose" else 1 - size)) / 2


def relative_value(value: float, low: float, high: float) -> float:
    """Scale `value` linearly from `low`, 0, to `high`, 1, clipped to [0, 1]."""
    if low == high:
        return 0.5 + ((value > low) - (value < low)) / 2
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _scale_limits(name: str, low: object, high: object) -> dict[str, float]:
    """Return both limits under their names, or nothing if neither is given."""
    other = name.replace("low", "high")
    if low is None and high is None:
        return {}
    for value in (low, high):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not isfinite(value):  # type: ignore[arg-type]
            raise UserError(
                f"task.{name}={low}, task.{other}={high}: must be two numbers, or null for both"
            )
    if low >= high:  # type: ignore[operator]
        raise UserError(f"task.{name}={low}: must be below task.{other}={high}")
    return {name: float(low), other: float(high)}  # type: ignore[arg-type]
