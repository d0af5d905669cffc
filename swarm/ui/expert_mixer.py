"""Experts, bests of runs and saved mixtures: what can be mixed by hand, scored and chosen."""

import json
import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swarm._util.files import find_path
from swarm._util.terminal import format_interval
from swarm._util.threads import run_concurrently
from swarm.errors import UserError
from swarm.models.base import Completion, Request
from swarm.pool.adapter import WEIGHTS_FILE, Adapter, read_adapter, read_note
from swarm.pool.pool import Pool
from swarm.report.paired_comparison import PairedComparison
from swarm.runs.describe import describe_position
from swarm.runs.run_reader import RUNS_FOLDER, PositionIndex, RunFolder, find_run_folders
from swarm.stats.significance import PairedTest
from swarm.tasks.base import HasScoreScale, Item, RequiresSetup, Score, Task, metric_task
from swarm.tasks.metrics import paired_gain, utility_with_interval
from swarm.ui.state import RUN_NAME_PATTERN, UNREADABLE_ERRORS, AppState

MIXTURES_FOLDER = "mixtures"
"""Folder of saved mixtures, beside that of the runs."""

BASE_ROW = "base"
"""Row of a pool that represents the base, which adds nothing to a mixture."""


class BestOfRun(NamedTuple):
    """The best of a finished run.

    Attributes:
        run: Name of the run.
        words: Description of its composition.
        dev, test: Utilities, with intervals where known; empty if missing.
        coefficients: Coefficients of the pool's experts; `None` if these cannot reproduce it.
        reason: Reason why they cannot.
    """

    run: str
    words: str
    dev: str
    test: str
    coefficients: dict[str, float] | None
    reason: str


def list_experts(home: AppState) -> Iterator[Adapter | str]:
    """Yield the pool's experts; an error message for each one that cannot be read."""
    for folder in home.roster.local.expert_folders():
        try:
            yield read_adapter(folder)
        except UserError as error:
            yield str(error)


def describe_expert(expert: Adapter) -> str:
    """Describe an expert: rank, adapted modules, size, base, and first line of its card."""
    ranks = sorted({rank for _, _, rank in expert.shapes.values()})
    size = (expert.folder / WEIGHTS_FILE).stat().st_size
    facts = [
        "rank " + " to ".join(dict.fromkeys(str(rank) for rank in (ranks[0], ranks[-1]))),
        ", ".join(sorted({module.rpartition(".")[2] for module in expert.shapes})),
        f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB",
        f"of {expert.base_model}" if expert.base_model else "",
        _read_card(expert.folder / "README.md"),
    ]
    return "; ".join(filter(None, facts))


def _read_card(card: Path) -> str:
    """Return the first line of an expert's card that is no heading; empty without one."""
    try:
        text = card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    if text.startswith("---\n"):
        text = text.partition("\n---")[2]
    plain = (line.strip() for line in text.splitlines())
    first = next((line for line in plain if line and line[0] not in "#-|`!<"), "")
    return "" if first.startswith("[More Information Needed]") else first


def list_bests(home: AppState) -> list[BestOfRun]:
    """Return the bests of the finished runs, sorted by name."""
    have = {folder.name for folder in home.roster.local.expert_folders()}
    found = []
    for folder in find_run_folders(home.runs_folder):
        if not (folder / "global_best" / "swarm.json").is_file():
            continue
        try:
            run = RunFolder(folder)
            if run.finished is not None and run.metrics:
                found.append(_best_of_run(home, run, have))
        except (UserError, *UNREADABLE_ERRORS):
            continue
    return found


def _best_of_run(home: AppState, run: RunFolder, have: set[str]) -> BestOfRun:
    position = run.positions[run.find_best()].tolist()
    description = describe_position(run.experts, position, run.groups)
    numbers = {}
    for split in ("dev", "test"):
        try:
            one = PairedComparison(run).split_result("ending", split)
        except (UserError, *UNREADABLE_ERRORS):
            one = None
        numbers[split] = (
            f"{format_interval(one.utility, one.interval)}, n = {one.items}" if one else ""
        )
    reason = _unmixable_reason(home, run, dict(zip(run.experts, position, strict=False)), have)
    shares = dict(zip(run.experts, position, strict=False))
    coefficients = None if reason else {name: shares.get(name, 0.0) for name in sorted(have)}
    name = run.path.relative_to(home.runs_folder).as_posix()
    return BestOfRun(name, description, numbers["dev"], numbers["test"], coefficients, reason)


def _unmixable_reason(
    home: AppState, run: RunFolder, shares: Mapping[str, float], have: set[str]
) -> str:
    """Return why a run's best cannot be mixed from the present experts; empty if it can."""
    note = read_note(run.path / "global_best")
    if note.get("space") != "delta" or len(run.groups) > 1:
        return "it does not have one coefficient per expert in the delta space"
    used = {name for name, share in shares.items() if share and name != BASE_ROW}
    if missing := sorted(used - have):
        return f"{missing[0]} is not an expert of {home.pool}"
    try:
        folder = run.config["pool"]["folder"]
    except (UserError, KeyError, TypeError):
        return ""
    same = find_path(folder).resolve() == find_path(home.pool).resolve()
    return "" if same else f"its experts are from {folder}"


def normalize_coefficients(coefficients: Mapping[str, float]) -> dict[str, float]:
    """Scale the coefficients to a sum of 1.

    Raises:
        UserError: Their sum is 0.
    """
    total = sum(coefficients.values())
    if abs(total) < 1e-9:
        raise UserError("the coefficients sum to 0 and cannot be scaled to 1")
    return {name: share / total for name, share in coefficients.items()}


def save_mixture(home: AppState, coefficients: Mapping[str, float], name: str) -> str:
    """Save a mixture as a PEFT adapter in mixtures/NAME and return its model name.

    Raises:
        UserError: The name exists or is invalid, the mixture is the base alone, or it cannot be
            written.
    """
    name = name.strip()
    if not RUN_NAME_PATTERN.fullmatch(name) or name.startswith("."):
        raise UserError(
            f"{name!r:.80} is not a valid name; it must not contain / or begin with a dot"
        )
    shares = {expert: share for expert, share in coefficients.items() if share}
    if not shares:
        raise UserError("all coefficients are 0, which is the base itself; change one of them")
    pool = Pool(home.pool, experts=list(shares), space="delta").open(home.roster.local.base)
    target = home.folder / MIXTURES_FOLDER / name
    try:
        # mkdir is atomic: it reserves the name, and an existing mixture is never overwritten.
        target.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{MIXTURES_FOLDER}/{name} already exists; choose another name") from None
    except OSError as error:
        raise UserError(f"{MIXTURES_FOLDER}/{name} cannot be written: {error.strerror}") from None
    try:
        pool.save([shares[one] for one in pool.names], target, {"mixed": "by hand"})
    finally:
        if not any(target.iterdir()):
            target.rmdir()
    return f"local/{MIXTURES_FOLDER}/{name}"


CHUNK_ITEMS = 8
"""Items scored between two checks for a stop; a question to the same models waits that long."""

SCORED_NOW = "scored now"

NEAREST_POSITIONS = 3
"""Number of a run's evaluated positions that are listed, the nearest to the mixture."""


class ScoredPosition(NamedTuple):
    """A position and its utility on the items of a scoring.

    Attributes:
        name: What it is, "mixture" for the scored one.
        words: Description of its composition.
        source: `SCORED_NOW`, or the run whose records the answers are from.
        utility, interval: Utility on its `items`, with its 95 % interval.
        items: Number of items.
        gain: Paired test of the mixture against it on these items; `None` for the mixture.
    """

    name: str
    words: str
    source: str
    utility: float
    interval: tuple[float, float]
    items: int
    gain: PairedTest | None


class _RosterEngine:
    """Local models as an engine of positions [P, 1], the indices of the models."""

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = models

    def generate(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """Answer the requests of all models together; they share their batches."""
        chosen = [self._models[int(index)] for index in positions[:, 0]]
        calls = [partial(one.generate, row) for one, row in zip(chosen, requests, strict=True)]
        found = dict(run_concurrently(calls, name="swarm-scoring"))
        return [found[number] for number in range(len(calls))]


class MixtureScoring:
    """Scores a mixture and its neighbours on dev items; `run` does the work.

    The uniform soup and the expert with the largest coefficient are scored on the same items as the
    mixture. With a run, the task is the run's, and its nearest evaluated positions, its best expert
    and its best found are listed by the answers it has recorded to these items.

    Args:
        home: State with the models.
        coefficients: Coefficients by expert.
        task: An option of conf/task; without effect if a run is given.
        settings: Further keys of the task, "task.KEY=VALUE".
        items: Number of dev items; a task or a run with fewer gives all of its items.
        run: Name of a run of the same pool, as from `list_reference_runs`; empty for none.

    Attributes:
        done, total: Number of items scored, and in total; a total of 0 while a model is loaded.

    Raises:
        UserError: A setting is not a key of the task, or a value is not allowed.
    """

    def __init__(
        self,
        home: AppState,
        coefficients: Mapping[str, float],
        task: str,
        settings: Sequence[str],
        items: int,
        run: str = "",
    ) -> None:
        if items < 2:
            raise UserError("dev items: must be 2 or more")
        for word in settings:
            if not re.fullmatch(r"\+?task\.[\w.]+=.*", word):
                raise UserError(f"further keys: {word!r:.60} is not a task.KEY=VALUE")
        self._home, self._coefficients, self._task = home, dict(coefficients), task
        self._settings, self._count, self._run = settings, items, run
        self.done = self.total = 0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop after the items in progress."""
        self._stopped.set()

    def run(self) -> list[ScoredPosition]:
        """Score; return the mixture first, then the others in descending order of utility.

        Raises:
            UserError: It was stopped, or the task, the run or the models do not fit.
        """
        run = RunFolder(self._home.run_path(self._run)) if self._run else None
        task, items = self._load_run_items(run) if run else self._load_items()
        positions = self._positions_to_score()
        blend = self._home.roster.blend
        scores = self._score_items(task, items, [blend(one) for one in positions.values()])
        found = [
            _summarize(task, name, _describe(one), SCORED_NOW, mine, scores[0])
            for (name, one), mine in zip(positions.items(), scores, strict=True)
        ]
        if run:
            by_id = {item["id"]: score for item, score in zip(items, scores[0], strict=True)}
            found += self._recorded_positions(run, task, by_id)
        return [found[0], *sorted(found[1:], key=lambda one: -one.utility)]

    def _positions_to_score(self) -> dict[str, dict[str, float]]:
        """Return the positions by name, each different."""
        shares = self._coefficients
        nearest = max(shares, key=lambda name: shares[name])
        found = {"mixture": shares, "uniform soup": dict.fromkeys(shares, 1 / len(shares))}
        found["nearest expert"] = {name: float(name == nearest) for name in shares}
        return {
            name: one for name, one in found.items() if name == "mixture" or not _equal(one, shares)
        }

    def _load_items(self) -> tuple[Task, Sequence[Item]]:
        """Return the chosen task, and its first dev items in proportion to its domains."""
        from swarm.api.overrides import compose_config, instantiate_part
        from swarm.evaluation.evaluation import check_scale

        keys = [f"task={self._task}", f"task.dev_limit={self._count}", *self._settings]
        with compose_config("evaluate", keys) as config:
            task = metric_task(instantiate_part(config["task"]))
        check_scale(task)
        return task, task.items("dev")[: self._count]

    def _load_run_items(self, run: RunFolder) -> tuple[Task, Sequence[Item]]:
        """Return a run's task, and evenly spaced ones of the items that its best was scored on."""
        from swarm.api.overrides import instantiate_part

        base = self._home.roster.local.base
        if run.identity.get("base weights") not in (None, base.fingerprint()):
            raise UserError(f"{run.name}: its base is not {base.path}; start the page with --base")
        task: Task = instantiate_part(run.config["task"])
        if isinstance(task, HasScoreScale) and run.scale:
            task.restore_scale(run.scale)
        answered = {row["id"] for row in run.load_answers(run.find_best())}
        known = [item for item in task.items("dev") if item["id"] in answered]
        if not known:
            raise UserError(f"{run.name}: its items are no longer those of the task's file")
        count = min(self._count, len(known))
        return task, [known[i] for i in np.linspace(0, len(known) - 1, count).round().astype(int)]

    def _score_items(
        self, task: Task, items: Sequence[Item], models: Sequence[Any]
    ) -> list[list[Score]]:
        """Return one list of scores per model, in the order of the items."""
        from swarm.executors.worker import JobUsage, run_tasks_lockstep
        from swarm.loop.evaluator import apply_scale

        if isinstance(task, RequiresSetup):
            task.check()
        for model in models:
            model.check()
        if isinstance(task, RequiresSetup):
            task.open(self._home.device or "cpu")
        for model in models:
            model.open()
        self.total = len(items)
        rows = np.arange(len(models))[:, None]
        engine: Any = _RosterEngine(models)
        scores: list[list[Score]] = [[] for _ in models]
        while self.done < self.total:
            if self._stopped.is_set():
                raise UserError(f"stopped after {self.done} of {self.total} items")
            chunk = items[self.done : self.done + CHUNK_ITEMS]
            found = run_tasks_lockstep(task, engine, rows, chunk, JobUsage())
            for mine, more in zip(scores, found, strict=True):
                mine += [apply_scale(task, score) for score in more]
            self.done += len(chunk)
        return scores

    def _recorded_positions(
        self, run: RunFolder, task: Task, mine: Mapping[Any, Score]
    ) -> Iterator[ScoredPosition]:
        """Yield the run's neighbours of the mixture, each different, by its recorded answers."""
        from swarm.loop.evaluator import records_to_scores

        row = [self._coefficients.get(name, 0.0) for name in run.experts]
        best, expert = run.find_best(), run.best_expert()
        chosen: dict[PositionIndex, str] = {best: "best found", expert: "best expert"}
        if np.array_equal(run.positions[best], run.positions[expert]):
            chosen = {best: "best found, an expert"}
        for index, distance in find_nearest(run, row, NEAREST_POSITIONS):
            chosen.setdefault(index, f"at distance {distance:.2f}")
        for index, name in chosen.items():
            rows = [one for one in run.load_answers(index) if one["id"] in mine]
            if rows:
                words = describe_position(run.experts, run.positions[index].tolist(), run.groups)
                scores = records_to_scores(rows)
                ours = [mine[one["id"]] for one in rows]
                yield _summarize(task, name, words, run.name, scores, ours)


def find_nearest(
    run: RunFolder, row: Sequence[float], count: int
) -> list[tuple[PositionIndex, float]]:
    """Return the evaluated positions nearest to K coefficients, with their distances.

    The distance is the root of the mean over the groups of modules of the squared Euclidean one.
    Of equal positions the first is returned.
    """
    wanted = np.tile(np.asarray(row, dtype=float), len(run.groups))
    gaps = np.square(run.positions - wanted).sum(axis=2) / len(run.groups)
    distances = np.where(np.isfinite(run.utilities), np.sqrt(gaps), np.inf)
    found: list[tuple[PositionIndex, float]] = []
    for flat in np.argsort(distances, axis=None, kind="stable"):
        t, i = (int(one) for one in np.unravel_index(flat, distances.shape))
        if len(found) == count or not math.isfinite(distances[t, i]):
            break
        if not any(np.array_equal(run.positions[t, i], run.positions[one]) for one, _ in found):
            found.append(((t, i), float(distances[t, i])))
    return found


def _summarize(
    task: Task,
    name: str,
    words: str,
    source: str,
    scores: Sequence[Score],
    ours: Sequence[Score],
) -> ScoredPosition:
    """Return a position's utility and, unless the scores are the mixture's own, the paired test."""
    found = utility_with_interval(task, scores)
    gain = None if scores is ours else paired_gain(task, ours, scores)
    interval = (found.low, found.high)
    return ScoredPosition(name, words, source, found.mean, interval, len(scores), gain)


def _describe(coefficients: Mapping[str, float]) -> str:
    return describe_position(list(coefficients), list(coefficients.values()))


def _equal(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return all(abs(share - other[name]) < 1e-9 for name, share in one.items())


def list_reference_runs(home: AppState) -> list[str]:
    """List the runs whose positions can be compared with a mixture: same pool, delta space."""
    folder = find_path(home.pool).resolve()
    found = []
    for path in find_run_folders(home.runs_folder):
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            same = find_path(config["pool"]["folder"]).resolve() == folder
            if same and config["pool"]["space"] == "delta" and "_target_" in config["task"]:
                found.append(path.relative_to(home.runs_folder).as_posix())
        except (UserError, *UNREADABLE_ERRORS):
            continue
    return found


def list_saved_mixtures(home: AppState) -> list[str]:
    """List the saved mixtures by model name."""
    notes = sorted((home.folder / MIXTURES_FOLDER).glob("*/adapter_config.json"))
    return [f"local/{MIXTURES_FOLDER}/{note.parent.name}" for note in notes]


def list_model_names(home: AppState) -> list[str]:
    """List the models that can be selected: local ones, mixtures of agents and consortia."""
    from swarm.multi_agent import presets
    from swarm.multi_agent.consortium import config
    from swarm.multi_agent.consortium.store import ConsortiumStore

    finished = {f"{RUNS_FOLDER}/{one.run}" for one in list_bests(home)}
    local = [
        name
        for name in home.roster.local.list_names()
        if not name.startswith(f"{RUNS_FOLDER}/") or name in finished
    ]
    try:
        saved = ConsortiumStore().list_names()
    except UserError:
        saved = []
    consortia = dict.fromkeys([*saved, *config.preset_names()])
    moa = [
        f"moa/{name}"
        for name in presets.preset_names()
        if _has_all_models(presets.read_preset(name))
    ]
    return [
        *(f"local/{name}" for name in local),
        *list_saved_mixtures(home),
        *moa,
        *(f"consortium/{name}" for name in consortia),
    ]


def describe_members(name: str) -> str:
    """Describe the members of a mixture of agents or a consortium, or the error in finding them."""
    kind, _, rest = name.partition("/")
    try:
        if kind == "consortium":
            from swarm.consortium.cli.run import summarize_config
            from swarm.multi_agent.consortium.store import load_config

            return summarize_config(load_config(rest))
        from swarm.multi_agent.presets import read_preset

        preset = read_preset(rest)
    except UserError as error:
        return str(error)
    proposers = [slot["model"] for slot in preset["proposers"]]
    return f"{', '.join(proposers)} propose, {preset['aggregator']['model']} answers"


def _has_all_models(preset: Any) -> bool:
    """Return whether a preset names all of its models, so that it can be used by name alone."""
    slots = [*preset["proposers"], preset["aggregator"]]
    return all(json.dumps(slot).find('"model": null') < 0 for slot in slots)
