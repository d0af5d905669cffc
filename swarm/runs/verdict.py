"""The verdict on a search: its best found against the strongest model that needed no search.

Every text on a result (terminal, report, page, card, tracker) begins with the sentence made here.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from swarm._util.terminal import format_p
from swarm.runs.describe import MODEL_LABELS, describe_constant_answers

EXPERT, CONSTANT, BY_DOMAIN = "expert", "constant", "experts"
"""Names of alternatives: best initial expert, constant answers, each domain's best expert.

The last has to know the domain of a prompt, which the best found does not, and so is listed but
does not decide.
"""


@dataclass(frozen=True)
class Alternative:
    """A model that needs no search, beside the best found on the same test items.

    Attributes:
        name: `EXPERT`, `CONSTANT` or a name of `swarm.loop.search_inputs.BASELINE_LABELS`.
        label: Its description, with what was chosen on dev in parentheses.
        dev, test: Utility and ends of its 95 % interval on each split; `None` if not scored.
        gain: Utility of the best found minus that of this model on test.
        gain_interval: Ends of the 95 % interval of the gain.
        p_value: Of the paired test of the gain.
    """

    name: str
    label: str
    dev: tuple[float, float, float] | None
    test: tuple[float, float, float]
    gain: float
    gain_interval: tuple[float, float]
    p_value: float

    @property
    def is_beaten(self) -> bool:
        """Whether the best found is better, and distinguishably so."""
        return self.gain > 0 and self.p_value < 0.05

    @property
    def beats(self) -> bool:
        """Whether this model is better than the best found, and distinguishably so."""
        return self.gain < 0 and self.p_value < 0.05


@dataclass(frozen=True)
class Verdict:
    """What a search was worth.

    Attributes:
        kind: "better", "worse", "unclear", or "open" without a test.
        headline: "Worth it", "Not worth it", "Not distinguishable", or why there is no verdict.
        sentence: Its reason with numbers, and what to use.
        strongest: The alternative that decides; `None` without a test.
    """

    kind: Literal["better", "worse", "unclear", "open"]
    headline: str
    sentence: str
    strongest: Alternative | None = None

    def __str__(self) -> str:
        return f"{self.headline}: {self.sentence}"


def list_alternatives(metrics: Mapping[str, Any]) -> list[Alternative]:
    """Return the models beside the best found on test, the highest utility first.

    Args:
        metrics: Result of `swarm.loop.final_metrics.final_metrics`; without a test there are none.
    """
    if "test_gain" not in metrics:
        return []
    expert = {
        "name": EXPERT,
        "label": f"{MODEL_LABELS[0]} ({metrics['starting_best_expert']})",
        "dev": _named_result(metrics, "starting_best_validation", "utility"),
        "test": _named_result(metrics, "starting_best_single_test", "accuracy"),
        "gain": metrics["test_gain"],
        "gain_interval": metrics["test_gain_interval"],
        "p_value": metrics["test_gain_p_value"],
    }
    found = [expert, *metrics.get("baselines", ())]
    constant = metrics.get("constant_answers") or {}
    if "gain" in constant:
        label = constant_label(constant)
        found.append({**constant, **constant["by_domain"], "name": CONSTANT, "label": label})
    alternatives = [
        Alternative(
            one["name"],
            one["label"],
            _with_interval(one["dev"]) if one.get("dev") else None,
            _with_interval(one["test"]),
            one["gain"],
            tuple(one["gain_interval"]),
            one["p_value"],
        )
        for one in found
    ]
    return sorted(alternatives, key=lambda one: -one.test[0])


def constant_label(constant: Mapping[str, Any]) -> str:
    """Describe the best constant answers, chosen on dev."""
    each = " of each domain" * (len(constant["by_domain"]["answers"]) > 1)
    return f"best constant answer{each} ({describe_constant_answers(constant)})"


def _named_result(metrics: Mapping[str, Any], name: str, measure: str) -> dict[str, Any]:
    return {"utility": metrics[f"{name}_{measure}"], "interval": metrics[f"{name}_interval"]}


def _with_interval(found: Mapping[str, Any]) -> tuple[float, float, float]:
    return found["utility"], *found["interval"]


def judge_search(metrics: Mapping[str, Any], folder: Path | None = None) -> Verdict:
    """Return the verdict on a finished search.

    The best found is worth its search if it is distinguishably better than each alternative that
    can be deployed as it is. The strongest of these decides, so no correction for their number is
    needed (an intersection-union test: Berger, 1982, Technometrics 24:295).

    Args:
        metrics: Result of `swarm.loop.final_metrics.final_metrics`.
        folder: The run folder, to name the command for what should be used, and the results of
            fine-tunings that were compared with this search; `None` leaves both out.
    """
    alternatives = [one for one in list_alternatives(metrics) if one.name != BY_DOMAIN]
    if not alternatives:
        return Verdict("open", "Not tested", _describe_dev(metrics))
    # The highest of those that beat the best found, else of those that it does not beat.
    strongest = min(alternatives, key=lambda one: (not one.beats, one.is_beaten))
    end = metrics["ending_best_single_test_accuracy"]
    items = f"{metrics['ending_best_single_test_items']} test items"
    difference, tuned = format_gain(metrics, strongest), _describe_tuned(folder)
    label, start = f"the {strongest.label}", metrics.get("start") or {}
    both = (
        f"the best found has {end:.3f} on {items}, and {label}, {_rank(strongest, alternatives)}, "
        f"{strongest.test[0]:.3f}"
    )
    if strongest.beats:
        sentence = (
            f"use {label}: {strongest.test[0]:.3f} on {items}. The best found has {end:.3f}, a "
            f"difference of {difference}{tuned}. {_command(strongest.name, folder)}"
        )
        return Verdict("worse", "Not worth it", sentence.strip(), strongest)
    if strongest.is_beaten:
        return Verdict("better", "Worth it", f"{both}: a gain of {difference}{tuned}.", strongest)
    if start.get("iterations") == 0:
        sentence = f"the search ended before it moved ({start['ended']}); {both}{tuned}."
        return Verdict("open", "Nothing searched", sentence, strongest)
    if start.get("whole"):
        sentence = (
            f"the search found nothing better than the {start['label']}, which is the result: "
            f"{end:.3f} on {items}{tuned}. {_command('', folder)}"
        )
        return Verdict("worse", "Not worth it", sentence.strip(), strongest)
    if strongest.gain == 0 == strongest.gain_interval[0] == strongest.gain_interval[1]:
        sentence = f"the best found and {label} have equal scores on each of {items}{tuned}."
        return Verdict("unclear", "Not distinguishable", sentence, strongest)
    sentence = (
        f"{both}: a difference of {difference}{tuned}. With so many items, less than about "
        f"{_resolution(metrics, strongest)} cannot be shown."
    )
    return Verdict("unclear", "Not distinguishable", sentence, strongest)


def _rank(one: Alternative, among: Sequence[Alternative]) -> str:
    """Describe an alternative's place among those compared, the highest first."""
    if len(among) == 1:
        return "the only one compared that needs no search"
    place = "the strongest" if one is among[0] else "one"
    return f"{place} of {len(among)} compared that need no search"


def _describe_dev(metrics: Mapping[str, Any]) -> str:
    start = metrics["starting_best_validation_utility"]
    return (
        f"on the {metrics['ending_best_validation_items']} dev items, where the maximum of many is "
        f"biased upwards, the best found has {metrics['ending_best_validation_utility']:.3f} and "
        f"the {MODEL_LABELS[0]} ({metrics['starting_best_expert']}) {start:.3f}."
    )


def format_gain(metrics: Mapping[str, Any], one: Alternative) -> str:
    """Format a gain: "+17.1 points [+12.2, +21.9], p < 0.001" (brackets: 95 % interval)."""
    scale, unit = _scale(metrics)
    low, high = (f"{scale * end:+.3g}" for end in one.gain_interval)
    return f"{scale * one.gain:+.3g}{unit} [{low}, {high}], {format_p(one.p_value)}"


def _scale(metrics: Mapping[str, Any]) -> tuple[float, str]:
    return (100.0, " points") if metrics.get("in_points", False) else (1.0, "")


def _resolution(metrics: Mapping[str, Any], one: Alternative) -> str:
    """Format half of the gain's interval: what a smaller gain cannot exceed."""
    scale, unit = _scale(metrics)
    return f"{scale * (one.gain_interval[1] - one.gain_interval[0]) / 2:.2g}{unit}"


def _command(name: str, folder: Path | None) -> str:
    """Return how to get an alternative, or the result for an empty name."""
    if name == "base":
        return "Use the base model as it is."
    if name == CONSTANT:
        return "No model is needed for it."
    if folder is None:
        return ""
    source, target = (shlex.quote(one) for one in (str(folder), f"exported/{folder.name}"))
    which = f" baseline={name}" if name else ""
    return f"Command: python -m swarm.export {source}{which} to={target}"


def _describe_tuned(folder: Path | None) -> str:
    """Return a clause on the fine-tunings beside a run that were compared with it on test."""
    found = find_tuned(folder) if folder is not None else []
    return "".join(
        f"; fine-tuning on the same items ({name}) has {utility:.3f}" for name, utility in found
    )


def find_tuned(folder: Path) -> Sequence[tuple[str, float]]:
    """Return the test utilities of fine-tunings on a run's dev items that were compared with it.

    Args:
        folder: The run folder; fine-tunings are its neighbours.
    """
    found = []
    for path in sorted(folder.parent.glob("*/tuning.json")):
        try:
            metrics = json.loads(path.read_text(encoding="utf-8"))["metrics"] or {}
            searched = metrics["searched"]
            if searched["run"] == folder.name and searched["same_items"]:
                found.append((path.parent.name, float(metrics["ending_best_single_test_accuracy"])))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # unfinished, or not compared with a search
    return found
