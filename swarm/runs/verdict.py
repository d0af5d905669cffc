"""The verdict on a search: its best found beside the models that needed no search.

`Verdict` is computed once, when a search or a fine-tuning ends, and stored in its folder. The
functions below put it in words; terminal, report, page, model card, trackers and studies call them.
"""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from swarm._util.terminal import format_count, format_p
from swarm.stats.significance import PairedTest
from swarm.tasks.base import Item, Score, Task
from swarm.tasks.metrics import (
    KIND_PREFIX,
    Measured,
    OneAnswer,
    best_constant_answers,
    measure,
    paired_gain,
)

EXPERT, CONSTANT, BY_DOMAIN, FOUND = "expert", "constant", "experts", "found"
"""Names: best expert, constant answers, each domain's best expert, best found.

The third has to know the domain of a prompt, which the best found does not, and so is listed but
does not decide.
"""

FRESH_LABEL = "the base"
"""Name of the start of a fine-tuning that trains a new LoRA."""

CONTROL = "random twins of the experts"
"""What pool.control=random searches."""

MODEL_LABELS = ("best expert", "best found")

MAX_DOMAINS = 12
"""Maximum number of domains in a table; with more, only the verdict contains the numbers."""

MAX_LISTED = 5
"""Maximum number of domains named in a sentence."""

MIN_UNREAD = 0.1
"""From this share on, unread answers are mentioned below the tables."""


@dataclass(frozen=True)
class Compared:
    """A model on dev and test, and how much better the best found is.

    Attributes:
        name: `FOUND`, `EXPERT`, `CONSTANT` or one of `BASELINE_LABELS` (loop/final_evaluation.py).
        label: Its description, with what was chosen on dev in parentheses.
        dev, test: Its results; `None` if not scored there.
        gain: Utility of the best found minus that of this model on test, with the paired test;
            `None` without a test, and for the best found itself.
        position: [G * K] coefficients; `None` if it is not one position.
        choices: What was chosen for each domain: an expert, or a constant answer.
    """

    name: str
    label: str
    dev: Measured | None = None
    test: Measured | None = None
    gain: PairedTest | None = None
    position: list[float] | None = None
    choices: dict[str, str] = field(default_factory=dict)

    @property
    def is_beaten(self) -> bool:
        """Whether the best found is better, and distinguishably so."""
        return self.gain is not None and self.gain.difference > 0 and self.gain.p < 0.05

    @property
    def beats(self) -> bool:
        """Whether this model is better than the best found, and distinguishably so."""
        return self.gain is not None and self.gain.difference < 0 and self.gain.p < 0.05


@dataclass(frozen=True)
class Start:
    """How much of the best found is what the search started from.

    Attributes:
        whole: Whether it is a position of the first iteration, on each route.
        label: Which one.
        iterations: Number of iterations after the first.
        ended: Why no more followed.
    """

    whole: bool
    label: str
    iterations: int
    ended: str | None


@dataclass(frozen=True)
class HeldOut:
    """Both bests on dev items that the search did not see.

    Attributes:
        gain: Of the best found over the best expert.
        selected: Whether the best found was chosen by these items.
    """

    expert: Measured
    found: Measured
    gain: PairedTest
    selected: bool


@dataclass(frozen=True)
class NoiseFloor:
    """The effect of rounding alone: the best found on dev once more, in other batches."""

    n: int
    changed_answers: int
    difference: float


@dataclass(frozen=True)
class Constraint:
    """A lower bound of one part of a task.

    Attributes:
        at_least: The bound.
        base: Whether it is the base model's value.
        dev: Value of the best found on dev; `met` if it reaches the bound.
        test, test_base: The best found and the base on test; `None` if not scored.
        gain: Of the best found over the base on test.
    """

    at_least: float
    base: bool
    dev: float
    met: bool
    test: Measured | None = None
    test_base: Measured | None = None
    gain: PairedTest | None = None


@dataclass(frozen=True)
class Vote:
    """The vote of the best personal bests; their number was chosen on dev.

    Attributes:
        members: (iteration, particle) and dev utility of each voter.
        dev_by_size: Utility on dev of the first 1, 2, ... voters.
        test: Result on test; `None` if not scored.
    """

    members: list[tuple[int, int, float]]
    dev_by_size: list[float]
    test: Measured | None = None

    @property
    def dev(self) -> float:
        """Utility on dev."""
        return self.dev_by_size[len(self.members) - 1]


@dataclass(frozen=True)
class FrontPoint:
    """A point of the Pareto front, part by part, by the task's own metric."""

    place: tuple[int, int]
    dev: Measured
    test: Measured
    dev_parts: dict[str, Measured]
    test_parts: dict[str, Measured]


@dataclass(frozen=True)
class Verdict:
    """What a search or a fine-tuning was worth.

    Attributes:
        found: The best found.
        expert: Name of the best expert.
        alternatives: Models that need no search, the highest on test first; on dev alone, the best
            initial expert and constant answers.
        in_points: Whether utilities are shares, whose differences are reported in points.
        places: (iteration, particle) of the best expert and of the best found.
        signal: What the search maximized instead of the task's metric.
        no_gradient: The best found on dev items that no gradient used.
        front_size, hypervolume: Points of the Pareto front; its volume at the start and the end.
        front: The points that were tested.
        costs: As `swarm.runs.folder.RunState.count_prompts`.
        kinds: What was decided about kinds of prompts; empty if nothing was.
        scoring_costs: Costs of scoring by measure, of texts seen "first" and "again".
        settings: What was evaluated; `test_items` is the digest of the test items, `control` that
            of the pool.
    """

    found: Compared
    expert: str
    alternatives: list[Compared]
    in_points: bool = True
    places: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    start: Start | None = None
    signal: str | None = None
    held_out: HeldOut | None = None
    no_gradient: Measured | None = None
    noise_floor: NoiseFloor | None = None
    constraints: dict[str, Constraint] = field(default_factory=dict)
    vote: Vote | None = None
    front_size: int = 0
    hypervolume: tuple[float, float] = (0.0, 0.0)
    front: list[FrontPoint] = field(default_factory=list)
    costs: dict[str, int] = field(default_factory=dict)
    kinds: str = ""
    scoring_costs: dict[str, dict[str, float]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Verdict":
        """Read what `to_dict` returned, after JSON."""
        return _adapter().validate_python(values)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return asdict(self)

    @property
    def tested(self) -> bool:
        """Whether the best found was scored on test."""
        return self.found.test is not None

    @property
    def split(self) -> str:
        """The split that decides: "test", or "dev" without a test."""
        return "test" if self.tested else "dev"

    def measured(self, one: Compared) -> Measured | None:
        """Return a model's result on the split that decides."""
        return one.test if self.tested else one.dev

    @property
    def cost(self) -> int:
        """Cost on dev in prompt-equivalents."""
        return self.costs.get("prompt_equivalents", self.costs.get("prompts_scored", 0))

    @property
    def dev(self) -> Measured:
        """The best found on dev."""
        assert self.found.dev is not None
        return self.found.dev

    @property
    def start_model(self) -> Compared:
        """The best expert."""
        return next(one for one in self.alternatives if one.name == EXPERT)

    @property
    def constant(self) -> Compared | None:
        """The best constant answers of each domain; `None` if answers cannot be graded."""
        return next((one for one in self.alternatives if one.name == CONSTANT), None)

    @property
    def strongest(self) -> Compared | None:
        """The alternative that decides; `None` without a test.

        The best found is worth its search if it is distinguishably better than each alternative
        that can be deployed as it is. The strongest of these decides, so no correction for their
        number is needed (an intersection-union test: Berger, 1982, Technometrics 24:295).
        """
        deciding = self._deciding()
        # The highest of those that beat the best found, else of those that it does not beat.
        return min(deciding, key=lambda one: (not one.beats, one.is_beaten), default=None)

    def _deciding(self) -> list[Compared]:
        return [one for one in self.alternatives if one.gain and one.name != BY_DOMAIN]

    def original_names(self) -> dict[str, float]:
        """Return the numbers under the names that the original implementation logs."""
        names = {
            "starting_best_validation_utility": self.start_model.dev,
            "ending_best_validation_utility": self.found.dev,
            "starting_best_single_test_accuracy": self.start_model.test,
            "ending_best_single_test_accuracy": self.found.test,
            "ending_top-k_ensemble_test_accuracy": self.vote.test if self.vote else None,
        }
        return {name: one.utility for name, one in names.items() if one is not None}


def describe_kinds(kinds: Mapping[str, Any]) -> str:
    """Describe what a search has decided about kinds of prompts.

    Args:
        kinds: Its `router`, if there are several kinds, and the `numbers` of
            `swarm.pool.prompt_router.KindChoice`, unless the router was given.
    """
    names = kinds.get("router", {}).get("names", [])
    words = f"{len(names)} kinds of prompts have coefficients of their own: {', '.join(names)}."
    if "numbers" not in kinds:
        return words if names else ""
    each, single, error = (kinds["numbers"][key] for key in ("each", "single", "error"))
    numbers = (
        f"the best start of each kind has {each:.3f}, the best of all prompts {single:.3f} (cross-"
        f"validated on dev; standard error of the difference {error:.3f})"
    )
    if not names:
        return f"Kinds of prompts were considered and rejected: {numbers}."
    return f"{words} {numbers[:1].upper()}{numbers[1:]}; pool.routes=1 searches one adapter."


def compare_constant_answers(
    task: Task, dev: Sequence[Item], test: Sequence[Item] = (), after: Sequence[Score] = ()
) -> Compared | None:
    """Compare a model with the best constant answers, chosen on dev for each domain.

    Args:
        test: Further items to score on; empty leaves them out.
        after: The model's scores of the test items; empty leaves the gain out.

    Returns:
        `None` as `swarm.tasks.metrics.best_constant_answers`.
    """
    constants = best_constant_answers(task, dev)
    if constants is None:
        return None
    on_dev = measure(task, constants.score_items(task, dev), dev)
    choices = dict(constants.domains)
    label = "best constant answer" + " of each domain" * (len(choices) > 1)
    shown = [f"{shorten_text(domain)}: {quote_answer(one)}" for domain, one in choices.items()]
    if len(set(choices.values())) == 1:
        shown = [quote_answer(next(iter(choices.values())))]
    more = f" and {len(shown) - MAX_LISTED} more" * (len(shown) > MAX_LISTED)
    label += f" ({', '.join(shown[:MAX_LISTED])}{more})"
    if not test:
        return Compared(CONSTANT, label, on_dev, choices=choices)
    scores = constants.score_items(task, test)
    gain = paired_gain(task, after, scores) if after else None
    return Compared(CONSTANT, label, on_dev, measure(task, scores, test), gain, choices=choices)


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Verdict)


def read_verdict(state: Mapping[str, Any]) -> Verdict | None:
    """Return the verdict in the state of a search or a fine-tuning; `None` before its end."""
    known = state.get("verdict")
    return Verdict.from_dict(known) if known else None


class Statement(NamedTuple):
    """A verdict in words.

    Attributes:
        kind: "better", "worse", "unclear", or "open" without a test.
        headline: "Worth it", "Not worth it", "Not distinguishable", or why there is no verdict.
        finding: Its reason: the best found against the strongest alternative.
        advice: What to use.
        command: What makes it an adapter; empty if there is none.
    """

    kind: Literal["better", "worse", "unclear", "open"]
    headline: str
    finding: str
    advice: str = ""
    command: str = ""

    @property
    def sentence(self) -> str:
        """Finding, advice and command."""
        command = f"Command: {self.command}" if self.command else ""
        return " ".join(filter(None, [self.finding, self.advice, command]))

    def __str__(self) -> str:
        return f"{self.headline}: {self.sentence}"


def state_verdict(verdict: Verdict, folder: Path | None = None) -> Statement:
    """Put a verdict in words.

    Args:
        folder: The run folder, to name the command for what should be used; `None` leaves it out.
    """
    if verdict.settings.get("control"):
        own = state_verdict(replace(verdict, settings={}), folder)
        return own._replace(headline=f"Control with {CONTROL}, {own.headline.lower()}")
    strongest, found, start = verdict.strongest, verdict.found.test, verdict.start
    export = _export("", folder)
    if strongest is None or found is None or strongest.test is None or strongest.gain is None:
        expert = verdict.start_model
        finding = (
            f"on the {verdict.dev.n} dev items, where the maximum of many is biased upwards, the "
            f"best found has {verdict.dev.utility:.3f} and the {expert.label} "
            f"{expert.dev.utility if expert.dev else 0:.3f}."
        )
        return Statement("open", "Not tested", finding, "Test it before you use it.", export)
    items, gain, among = f"{found.n} test items", strongest.gain, verdict._deciding()
    (scale, unit), label = _scale(verdict.in_points), f"the {strongest.label}"
    if strongest.name == CONSTANT:
        label = label.split(" (")[0]
    rank = "the only one compared that needs no search"
    if len(among) > 1:
        place = "the strongest" if strongest is among[0] else "one"
        rank = f"{place} of {len(among)} that need no search"
    finding = (
        f"the best found has {found.utility:.3f} on {items}, and {label}, {rank}, "
        f"{strongest.test.utility:.3f}: {scale * gain.difference:+.3g}{unit}, {format_p(gain.p)}."
    )
    instead = f"Use {label}, which needs no search.", _export(strongest.name, folder)
    if strongest.name in ("base", CONSTANT):
        model = strongest.name == "base"
        instead = "Use the base model as it is." if model else "No model is needed for it.", ""
    if strongest.beats:
        return Statement("worse", "Not worth it", finding, *instead)
    if strongest.is_beaten:
        return Statement("better", "Worth it", finding, "Use the best found.", export)
    if start and start.iterations == 0:
        finding = f"the search ended before it moved ({start.ended}); {finding}"
        return Statement("open", "Nothing searched", finding, "Give it a larger budget, or time.")
    if start and start.whole:
        by = ", by dev items that it did not train on," * (verdict.no_gradient is not None)
        finding = (
            f"the search found nothing better{by} than the {start.label}, which has "
            f"{found.utility:.3f} on {items}; {label}, {rank}, has {strongest.test.utility:.3f}."
        )
        return Statement("worse", "Not worth it", finding, f"Use the {start.label}.", export)
    if gain.difference == 0 == gain.low == gain.high:
        finding = f"the best found and {label} have equal scores on each of {items}."
    else:
        least = f"{scale * (gain.high - gain.low) / 2:.2g}{unit}"
        finding += f" With so many items, less than about {least} cannot be shown."
    return Statement("unclear", "Not distinguishable", finding, *instead)


def _scale(in_points: bool) -> tuple[float, str]:
    return (100.0, " points") if in_points else (1.0, "")


def format_gain(verdict: Verdict, one: Compared) -> str:
    """Format a gain: "+17.1 points [+12.2, +21.9], p < 0.001" (brackets: 95 % interval)."""
    if one.gain is None:
        return "–"
    (scale, unit), gain = _scale(verdict.in_points), one.gain
    low, high = (f"{scale * end:+.3g}" for end in (gain.low, gain.high))
    return f"{scale * gain.difference:+.3g}{unit} [{low}, {high}], {format_p(gain.p)}"


def describe_difference(gain: PairedTest, of: str, points: bool) -> str:
    """Describe in one sentence whether a difference is distinguishable from chance.

    Args:
        of: Description of the items.
        points: Utilities are shares, reported in points (hundredths).
    """
    if not (gain.difference or gain.low or gain.high):
        return f"No difference: none of {gain.n} {of} differs."
    scale, unit = _scale(points)
    low, high = (f"{scale * end:+.3g}" for end in (gain.low, gain.high))
    kind = "gain" if gain.difference >= 0 else "loss"
    chance = "is" if gain.p < 0.05 else "is not"
    return (
        f"The {kind} of {scale * abs(gain.difference):.3g}{unit} on {gain.n} {of} {chance} "
        f"distinguishable from chance ({format_p(gain.p)}; 95 % interval {low} to {high})."
    )


def _export(name: str, folder: Path | None) -> str:
    """Return the command that exports an alternative, or the result for an empty name."""
    if folder is None:
        return ""
    words = ["python", "-m", "swarm.export", str(folder), *[f"baseline={name}"] * bool(name)]
    return shlex.join([*words, f"to=exported/{folder.name}"])


def list_controls(verdict: Verdict, folder: Path) -> list[str]:
    """Return a line for each control of a claimed gain: its results, or the command that makes it.

    Controls are neighbours of the run: the same search with random twins of the experts, and a new
    LoRA trained on the same dev items.

    Args:
        folder: The run folder.
    """
    run = _read_json(folder / "run.json").get("identity", {})
    if state_verdict(verdict).kind != "better" or verdict.settings.get("control"):
        return []
    if "pool.control" not in run:
        return []  # not a search for an adapter, or not started by a command
    free = {"pool.control", "pool.control_seed", "pool weights", "experts"}
    same = {key: value for key, value in run.items() if key not in free}
    twins, tuned = [], []
    for path in sorted([*folder.parent.glob("*/run.json"), *folder.parent.glob("*/tuning.json")]):
        state = _read_json(path)
        try:
            other: dict[str, Any] = dict(state["identity"])
            shown = f"{state['verdict']['found']['test']['utility']:.3f} ({path.parent.name})"
        except (KeyError, TypeError, ValueError):
            continue  # not ended, or not tested
        if path.name == "tuning.json":
            keys = ("task items", "base weights")
            alike = all(other.get(key) == run.get(key) for key in keys)
            tuned += [shown] * (alike and other.get("start") == FRESH_LABEL)
        elif other.get("pool.control") == "random":
            twins += [shown] * ({k: v for k, v in other.items() if k not in free} == same)
    found = verdict.found.test.utility if verdict.found.test else 0.0
    words = _read_json(folder / "command.json").get("arguments", [])
    kept = [word for word in words if not word.startswith(("name=", "pool.control"))]
    shared = ("task", "model", "folder=", "gpus=")
    like = [word for word in kept if word.lstrip("+").startswith(shared)]
    # An experiment may limit the items.
    limits = {key: run.get(key) for key in ("task.dev_limit", "task.test_limit")}
    like += [f"{k}={v}" for k, v in limits.items() if v and not any(k in word for word in like)]
    searched = ["swarm.search", *kept, "pool.control=random", f"name={folder.name}_twins"]
    trained = ["swarm.finetune", *like, f"budget={verdict.cost}", f"name={folder.name}_lora"]
    return [
        f"Control, {label}: {', '.join(results)} on test, against {found:.3f}."
        if results
        else f"Control not run yet, {label}: {shlex.join(['python', '-m', *command])}"
        for label, results, command in (
            (CONTROL, twins, searched),
            ("a new LoRA alone", tuned, trained),
        )
    ]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def describe_selection(found: Mapping[str, Any]) -> str:
    """Put in a sentence how a search chose its experts (`swarm.loop.selection`)."""
    count, values = len(found["values"]), found["values"]
    return (
        f"{len(found['chosen'])} of {count} adapters chosen by dev {found['by']}: best "
        f"{found['best']} {values[found['best']]:.3g}, cut-off {found['cut_off']:.3g} "
        f"({found['items']} dev items, {format_count(found['prompts'])} prompts beside the budget)"
    )


def format_measured(one: Measured | None) -> str:
    """Format a result with its 95 % interval: "0.684 [0.653, 0.713]"; a dash for `None`."""
    return f"{one.utility:.3f} [{one.low:.3f}, {one.high:.3f}]" if one else "–"


def result_table(
    verdict: Verdict, names: tuple[str, str] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: each model on dev and test, the best found last.

    Args:
        names: Names of the initial model and of the best found.
    """
    labels = {EXPERT: names[0], FOUND: names[1]} if names else {}
    header = ["model", f"dev, n = {verdict.dev.n}"]
    if test := verdict.found.test:
        header += [f"test, n = {test.n}", "gain of best found"]
    rows = []
    for one in [*reversed(verdict.alternatives), verdict.found]:
        gain = format_gain(verdict, one) if one.name != FOUND else ""
        label = labels.get(one.name, one.label)
        rows.append([label, format_measured(one.dev), format_measured(one.test), gain])
    if (vote := verdict.vote) and len(vote.members) > 1:  # a vote of one is the best found
        label = f"vote of the top {len(vote.members)} (chosen on dev)"
        rows.append([label, f"{vote.dev:.3f}", format_measured(vote.test), ""])
    return header, [row[: len(header)] for row in rows]


def domain_table(
    verdict: Verdict, names: tuple[str, str] = MODEL_LABELS
) -> tuple[list[str], list[list[str]]] | None:
    """Return utilities by domain as table header and rows; `None` unless there are 2 to 12 domains.

    On test, without a test on dev. Intervals are omitted beside baselines, to limit the width.

    Args:
        names: Names of the initial model and of the best found.
    """
    found = verdict.measured(verdict.found)
    if found is None or not 2 <= len(found.domains) <= MAX_DOMAINS:
        return None
    models = [(one, verdict.measured(one)) for one in verdict.alternatives]
    known = [(one, result) for one, result in models if result and result.domains]
    labels = {EXPERT: names[0], CONSTANT: "best constant answer"}
    # Only the kind of a baseline, without its parenthesized choice, to limit the table's width.
    header = [f"domain of {verdict.split}", "n"]
    header += [labels.get(one.name, one.label.split(" (")[0]) for one, _ in known]
    header += [names[1], f"answers: {names[1]}"]
    warned, rows = {one.domain for one in found.one_answer}, []
    for domain, mine in found.domains.items():
        cells = [*(result.domains[domain] for _, result in known), mine]
        shown = [f"{one.utility:.3f}" if len(known) > 2 else format_measured(one) for one in cells]
        answer = format_most_common_answer(mine, bool(warned & {domain, None}))
        rows.append([shorten_text(domain), str(mine.n), *shown, answer])
    return header, rows


def format_most_common_answer(found: Measured, warned: bool) -> str:
    """Describe the most common answer in a domain, "No: 94 % (!)", and the share of unparsed."""
    parts = []
    if found.commonest is not None:
        share = f"{quote_answer(found.commonest)}: {100 * found.commonest_share:.0f} %"
        parts.append(share + " (!)" * warned)
    if found.unparsed:
        parts.append(f"{100 * found.unparsed:.0f} % not read")
    return ", ".join(parts) or "–"


def list_caveats(
    verdict: Verdict, names: tuple[str, str] = (f"the {MODEL_LABELS[0]}", f"the {MODEL_LABELS[1]}")
) -> list[str]:
    """Return caveats on the numbers: constant answers, held-out items, constraints and noise.

    Args:
        names: Names of the initial model and of the best found.
    """
    lines = [verdict.kinds] if verdict.kinds else []
    for name, one in zip(names, (verdict.start_model, verdict.found), strict=True):
        if result := verdict.measured(one):
            lines += format_one_answer_warnings(result.one_answer, name, verdict.split)
    every = [(one, verdict.measured(one)) for one in (*verdict.alternatives, verdict.found)]
    unread = [
        f"{one.label} {100 * result.unparsed:.0f} %"
        for one, result in every
        if result and result.unparsed >= MIN_UNREAD
    ]
    if unread:
        lines.append(
            f"Unread answers on {verdict.split} (empty, or without an answer that the task's "
            f"parser finds): {', '.join(unread)}."
        )
    texts = [
        f"{one.label} {result.entropy:.2f} and {result.length:.1f}"
        for one, result in every
        if result and result.entropy is not None and result.length is not None
    ]
    if texts:
        lines.append(
            f"A scorer can be gamed: the entropy of the texts on {verdict.split} in bits (at most "
            f"{math.log2((verdict.found.test or verdict.dev).n):.2f}) "
            f"and their mean number of words: {', '.join(texts)}."
        )
    if found := verdict.no_gradient:
        lines.append(
            f"No gradient used {found.n} of the {verdict.dev.n} dev items that the search saw. On "
            f"these the best found has {found.utility:.3f} (95 % interval {found.low:.3f} to "
            f"{found.high:.3f}), on all {verdict.dev.utility:.3f}."
        )
    if kept := verdict.held_out:
        bias = verdict.dev.utility - kept.found.utility
        chosen = " It was chosen among the finalists by these items." * kept.selected
        lines += [
            f"The search measured {verdict.dev.utility:.3f}; the {kept.found.n} held-out dev items "
            f"give {kept.found.utility:.3f} (difference {bias:+.3f}; the maximum of many is biased "
            f"upwards).{chosen}",
            describe_difference(kept.gain, "held-out dev items", verdict.in_points),
        ]
    lines += [_describe_constraint(part, one) for part, one in verdict.constraints.items()]
    if noise := verdict.noise_floor:
        lines.append(
            f"Noise floor: evaluated again in other batches, {noise.changed_answers} of {noise.n} "
            f"dev answers of the best found change, and its utility by {noise.difference:+.4f}."
        )
    return lines


def list_warnings(verdict: Verdict) -> list[str]:
    """Return what speaks against using the best found: one answer to all, a constraint not met."""
    result = verdict.measured(verdict.found)
    found = result.one_answer if result else ()
    unmet = [pair for pair in verdict.constraints.items() if not pair[1].met]
    return [
        *format_one_answer_warnings(found, f"the {MODEL_LABELS[1]}", verdict.split),
        *(_describe_constraint(*pair) for pair in unmet),
    ]


def format_one_answer_warnings(found: Sequence[OneAnswer], name: str, split: str) -> list[str]:
    """Return the warnings for one model on one split."""
    warnings = []
    for one in found[:MAX_LISTED]:
        where = "all domains"
        if one.domain is not None:
            kind = one.domain.startswith(KIND_PREFIX)
            where = f"the domain {f'({one.domain})' if kind else shorten_text(one.domain)}"
        warnings.append(
            f"Warning: in {where} of {split}, {name} gives one answer: {quote_answer(one.answer)} "
            f"is {100 * one.share:.3g} % of the {one.answers} parsed answers, and correct for "
            f"{100 * one.right:.3g} % of the items."
        )
    if (more := len(found) - MAX_LISTED) > 0:
        warnings.append(f"Warning: the same holds for {more} more domains of {split}.")
    return warnings


def _describe_constraint(part: str, one: Constraint) -> str:
    """Describe in one sentence whether the best position meets a constraint."""
    whose = "the base model's" if one.base else "given"
    met = "met" if one.met else "NOT met by any mixture; this one has the smallest violation"
    line = f"Constraint: {part} at least {one.at_least:.3f} ({whose}) on dev: {one.dev:.3f}, {met}"
    if one.test:
        line += f"; on test {one.test.utility:.3f} (n = {one.test.n})"
    if one.test_base and one.gain:
        line += (
            f" against the base model's {one.test_base.utility:.3f}, difference "
            f"{one.gain.difference:+.3f} (95 % interval {one.gain.low:+.3f} to "
            f"{one.gain.high:+.3f})"
        )
    return f"{line}."


def shorten_text(text: str, limit: int = 40) -> str:
    """Return a name or an answer as one short line of printable characters."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= limit else f"{words[: limit - 1]}…"


def quote_answer(answer: str) -> str:
    """Return an answer, shortened, in quotation marks."""
    return f'"{shorten_text(answer)}"'
