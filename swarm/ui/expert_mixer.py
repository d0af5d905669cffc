"""Experts, bests of runs and saved mixtures: what can be mixed by hand, scored and chosen."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from swarm._util.terminal import format_interval
from swarm.errors import UserError
from swarm.evaluation.positions import MixtureScoring
from swarm.merging.positions import describe_position
from swarm.pool.adapter import WEIGHTS_FILE, Adapter, read_adapter, read_note
from swarm.pool.discovery import find_pool
from swarm.pool.pool import Pool
from swarm.report.paired_comparison import PairedComparison
from swarm.runs.folder import RUNS_FOLDER, RunFolder, find_run_folders
from swarm.tasks.base import Task
from swarm.ui.state import RUN_NAME_PATTERN, AppState, readable

MIXTURES_FOLDER = "mixtures"
"""Folder of saved mixtures, beside that of the runs."""

BASE_ROW = "base"
"""Row of a pool that represents the base, which adds nothing to a mixture."""


def list_experts(home: AppState) -> Iterator[Adapter | str]:
    """Yield the pool's experts; an error message for each one that cannot be read."""
    for folder in home.roster.local.expert_folders():
        try:
            yield read_adapter(folder)
        except UserError as error:
            yield str(error)


def describe_expert(expert: Adapter) -> str:
    """Describe an expert: rank, adapted modules, size and base."""
    ranks = sorted({rank for _, _, rank in expert.shapes.values()})
    size = (expert.folder / WEIGHTS_FILE).stat().st_size
    facts = [
        f"rank {ranks[0]}" + f" to {ranks[-1]}" * (len(ranks) > 1),
        ", ".join(sorted({module.rpartition(".")[2] for module in expert.shapes})),
        f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB",
        f"of {expert.base_model}" if expert.base_model else "",
    ]
    return "; ".join(filter(None, facts))


class BestOfRun(NamedTuple):
    """The best of a finished run.

    Attributes:
        run: Name of the run.
        words: Its composition, and its utilities on dev and test.
        coefficients: Coefficients of the pool's experts; `None` if these cannot reproduce it.
        reason: Reason why they cannot.
    """

    run: str
    words: str
    coefficients: dict[str, float] | None
    reason: str


def list_bests(home: AppState) -> list[BestOfRun]:
    """Return the bests of the finished runs, sorted by name; a damaged run is left out."""
    have = sorted(folder.name for folder in home.roster.local.expert_folders())
    found = []
    for folder in find_run_folders(home.runs_folder):
        if not (folder / "global_best" / "swarm.json").is_file():
            continue
        try:
            with readable():
                run = RunFolder(folder)
                if run.finished is not None and run.verdict:
                    found.append(_best_of_run(home, run, have))
        except UserError:
            continue
    return found


def _best_of_run(home: AppState, run: RunFolder, have: Sequence[str]) -> BestOfRun:
    position = run.positions[run.find_best()].tolist()
    shares = dict(zip(run.experts, position, strict=False))
    words = [describe_position(run.experts, position, run.groups)]
    for split in ("dev", "test"):
        if one := PairedComparison(run).results(split)[1]:
            words.append(f"{split} {format_interval(one.utility, one.interval)}, n = {one.n}")
    reason = _unmixable_reason(home, run, shares, have)
    coefficients = None if reason else {name: shares.get(name, 0.0) for name in have}
    name = run.path.relative_to(home.runs_folder).as_posix()
    return BestOfRun(name, "; ".join(words), coefficients, reason)


def _unmixable_reason(
    home: AppState, run: RunFolder, shares: Mapping[str, float], have: Sequence[str]
) -> str:
    """Return why a run's best cannot be mixed from the present experts; empty if it can."""
    note = read_note(run.path / "global_best")
    if note.get("space") != "delta" or len(run.groups) > 1:
        return "it does not have one coefficient per expert in the delta space"
    if note.get("learned"):
        return "it has learned an adapter beside the experts"
    used = {name for name, share in shares.items() if share and name != BASE_ROW}
    if missing := sorted(used.difference(have)):
        return f"{missing[0]} is not an expert of {home.pool}"
    try:
        folder = run.config["pool"]["folder"]
    except (UserError, KeyError, TypeError):
        return ""
    same = find_pool(folder).resolve() == find_pool(home.pool).resolve()
    return "" if same else f"its experts are from {folder}"


def save_mixture(home: AppState, coefficients: Mapping[str, float], name: str) -> str:
    """Save a mixture as a PEFT adapter in mixtures/NAME and return its model name.

    Raises:
        UserError: The name exists or is invalid, the mixture is the base alone, or it cannot be
            written.
    """
    name = name.strip()
    if not RUN_NAME_PATTERN.fullmatch(name):
        raise UserError(f"{name!r:.80} is not a valid name; it must not contain / or begin with .")
    shares = {expert: share for expert, share in coefficients.items() if share}
    if not shares:
        raise UserError("all coefficients are 0, which is the base itself; change one of them")
    pool = Pool(home.pool, experts=list(shares), space="delta").open(home.roster.local.base)
    target = home.folder / MIXTURES_FOLDER / name
    try:
        # mkdir is atomic: it reserves the name, and an existing mixture is never overwritten.
        target.mkdir(parents=True)
    except OSError as error:
        reason = "already exists" if target.is_dir() else f"cannot be written: {error.strerror}"
        raise UserError(f"{MIXTURES_FOLDER}/{name} {reason}; choose another name") from None
    try:
        pool.save([shares[one] for one in pool.names], target, {"mixed": "by hand"})
    finally:
        if not any(target.iterdir()):
            target.rmdir()
    return f"local/{MIXTURES_FOLDER}/{name}"


def score_mixture(
    home: AppState,
    coefficients: Mapping[str, float],
    task: str,
    settings: Sequence[str],
    items: int,
) -> MixtureScoring:
    """Prepare the score of a mixture on dev items; its `run` does the work.

    Args:
        coefficients: Coefficients by expert.
        task: An option of conf/task.
        settings: Further keys of the task, "task.KEY=VALUE".
        items: Number of dev items.

    Raises:
        UserError: A value is not allowed.
    """
    from swarm.api.overrides import compose_config, instantiate_part

    keys = [f"task={task}", f"task.dev_limit={items}", *settings]

    def load_task() -> Task:
        with compose_config("evaluate", keys, home.config_dir) as config:
            return instantiate_part(config["task"]).metric_task

    return MixtureScoring(home.roster, coefficients, load_task, items)


def list_saved_mixtures(home: AppState) -> list[str]:
    """List the saved mixtures by model name."""
    notes = sorted((home.folder / MIXTURES_FOLDER).glob("*/adapter_config.json"))
    return [f"local/{MIXTURES_FOLDER}/{note.parent.name}" for note in notes]


def list_model_names(home: AppState) -> list[str]:
    """List the models that can be selected: local ones, mixtures of agents and consortia."""
    from swarm.multi_agent.consortium.store import ConsortiumStore
    from swarm.multi_agent.moa import read_preset
    from swarm.multi_agent.presets import preset_names

    names = home.roster.local.list_names()
    local = [name for name in names if not name.startswith(f"{RUNS_FOLDER}/")]
    local += [f"{RUNS_FOLDER}/{one.run}" for one in list_bests(home)]
    try:
        saved = ConsortiumStore().list_names()
    except UserError:
        saved = []
    complete = [
        name
        for name in preset_names("moa")
        if all(agent.model for agent in read_preset(name).agents)
    ]
    return [
        *(f"local/{name}" for name in local),
        *list_saved_mixtures(home),
        *(f"moa/{name}" for name in complete),
        *(f"consortium/{name}" for name in dict.fromkeys([*saved, *preset_names("consortium")])),
    ]


def describe_members(name: str) -> str:
    """Describe the members of a mixture of agents or a consortium, or the error in finding them."""
    from swarm.multi_agent.consortium.store import load_config
    from swarm.multi_agent.moa import read_preset

    kind, _, rest = name.partition("/")
    try:
        if kind == "consortium":
            return str(load_config(rest))
        preset = read_preset(rest)
    except UserError as error:
        return str(error)
    proposers = ", ".join(str(one.model) for one in preset.proposers)
    return f"{proposers} propose, {preset.aggregator.model} answers"
