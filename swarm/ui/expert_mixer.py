"""Experts, bests of runs and saved mixtures: what can be mixed by hand, scored and chosen."""

import os
import random
from collections.abc import Iterator, Mapping, Sequence

from swarm._util.terminal import format_number
from swarm.api.overrides import compose_config, instantiate_part
from swarm.errors import UserError
from swarm.evaluation.positions import MixtureScoring
from swarm.pool.adapter import WEIGHTS_FILE, Adapter, read_adapter, read_routed_adapter
from swarm.pool.discovery import find_adapters, find_pool
from swarm.pool.pool import Pool
from swarm.runs.folder import RUNS_FOLDER, RunFolder
from swarm.tasks.base import Task, first_round
from swarm.ui.state import RUN_NAME_PATTERN, AppState, readable

MIXTURES_FOLDER = "mixtures"
"""Folder of saved mixtures, beside that of the runs."""

RUN_PREFIX = f"local/{RUNS_FOLDER}/"
"""Prefix of the names of the bests of runs."""

EARLIER = ("moa/paper", "moa/lite", "consortium/classic")
"""Presets that repeat earlier work with its models, many of which are retired; not listed."""

BEST_FOLDER = "global_best"
"""Folder of a run's best model."""


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


def list_bests(home: AppState) -> dict[str, str]:
    """Return the finished runs by name, the newest first, with their bests in words."""
    return {
        one.name: f"{one.best}; {format_number(one.score)} on dev; gain {one.gain_text}"
        for one in home.run_index.list_runs()
        if one.state == "finished"
        and (home.runs_folder / one.name / BEST_FOLDER / "swarm.json").is_file()
    }


@readable()
def list_parts(home: AppState, run: str = "") -> dict[str, float]:
    """Return the local models to mix, with their first coefficients.

    Args:
        run: Name of a finished run: its best, with a coefficient of 1 (of one that chooses among
            adapters by the prompt, each of them, the first with 1), and the experts that it mixed.
            Empty: the application's experts in equal parts.

    Raises:
        UserError: The run is not readable.
    """
    own = [folder.name for folder in home.roster.local.expert_folders()]
    if not run:
        return dict.fromkeys(own, 1 / max(1, len(own)))
    path = home.run_path(run) / BEST_FOLDER
    best = path.relative_to(home.folder).as_posix()
    routed = read_routed_adapter(path)
    parts = [f"{best}/{one.name}" for one in routed[1]] if routed else [best]
    pool = RunFolder(path.parent).config["pool"].get("folder")
    if pool is None:
        raise UserError(f"{run} has no adapters to mix: its models are whole ones")
    if find_pool(pool).resolve() != find_pool(home.pool).resolve():
        own = [(find_pool(pool) / name).as_posix() for name in find_adapters(find_pool(pool))]
    return {**dict.fromkeys([*parts, *own], 0.0), parts[0]: 1.0}


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
    folders = {expert: home.roster.local.get_model(expert).folder for expert in shares}
    places = {str(folder.resolve()): shares[expert] for expert, folder in folders.items() if folder}
    found = Pool(",".join([*places, ""]), space="delta")
    pool = found.subset(list(find_adapters(found.folder))).open(home.roster.local.base)
    target = home.folder / MIXTURES_FOLDER / name
    try:
        # mkdir is atomic: it reserves the name, and an existing mixture is never overwritten.
        target.mkdir(parents=True)
    except OSError as error:
        reason = "already exists" if target.is_dir() else f"cannot be written: {error.strerror}"
        raise UserError(f"{MIXTURES_FOLDER}/{name} {reason}; choose another name") from None
    try:
        weights = [places[str((pool.folder / one).resolve())] for one in pool.names]
        note = {"mixed": "by hand", "prompt_form": home.roster.blend(shares).prompt_form}
        pool.save(weights, target, note)
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
    local += [f"{RUNS_FOLDER}/{name}" for name in list_bests(home)]
    try:
        saved = ConsortiumStore().list_names()
    except UserError:
        saved = []
    complete = [
        name
        for name in preset_names("moa")
        if all(agent.model for agent in read_preset(name).agents)
    ]
    found = [
        *(f"local/{name}" for name in local),
        *list_saved_mixtures(home),
        *(f"moa/{name}" for name in complete),
        *(f"consortium/{name}" for name in dict.fromkeys([*saved, *preset_names("consortium")])),
    ]
    return [name for name in found if name not in EARLIER]


def label_models(home: AppState) -> dict[str, str]:
    """Return the models that can be selected with their labels, which say what one still needs."""
    try:
        needed = {name: one.api_key_env for name, one in home.roster.providers.items()}
    except UserError:  # of the user's file, as the page Models tells
        needed = {}
    missing = {name: key for name, key in needed.items() if key and not os.environ.get(key)}
    labels = {}
    for name in list_model_names(home):
        members = "" if name.startswith("local/") else describe_members(name)
        keys = [key for one, key in missing.items() if f" {one}/" in f" {members}"]
        labels[name] = f"{name} (needs {keys[0]})" if keys else name
    return labels


def newest_best(home: AppState) -> str:
    """Return the model of the newest finished run; the base without one."""
    return next((f"{RUN_PREFIX}{name}" for name in list_bests(home)), "local/base")


def example_question(home: AppState, names: Sequence[str] = ()) -> str:
    """Return a random dev item's prompt of the task of the first run among models.

    Without a run, it is one of the default task.

    Raises:
        UserError: The task cannot be loaded.
    """
    runs = [name.removeprefix(RUN_PREFIX) for name in names if name.startswith(RUN_PREFIX)]
    with compose_config("search", [], home.config_dir) as config, readable():
        if runs:
            config = RunFolder(home.run_path(runs[0])).config
        task = instantiate_part(config["task"])
        prompt = first_round(task, [random.choice(task.items("dev"))])[0].prompt
    return prompt if isinstance(prompt, str) else prompt[-1].content


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
