"""Source of an export: a result of a search, a fine-tuned adapter, or any adapter."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swarm._util.files import find_path
from swarm._util.secrets import clean_words, read_config
from swarm._util.terminal import pluralize
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.finetune.run import read_state as read_tuning
from swarm.pool.adapter import CONFIG_FILE, read_adapter, read_note, read_routed_adapter
from swarm.pool.pool import Pool
from swarm.report.analyses import search_signal
from swarm.runs import folder as run_files
from swarm.runs.folder import RunFolder, load_command, verify_run_file
from swarm.runs.verdict import Compared, Verdict, read_verdict

TUNING_FILE = "tuning.json"


@dataclass(frozen=True)
class ExportSource:
    """Files and metadata of one result.

    Attributes:
        name: Name of the run, or of the folder.
        folder: Folder of an adapter or of a complete model.
        kind: "search", "finetune" or "folder".
        routes: Names of the routes, if the folder has an adapter for each kind of prompt.
        note: Content of its swarm.json.
        config: Configuration of the run; empty if there is none.
        state: State of the run; empty if there is none.
        verdict: The run's verdict, if it applies to the exported result.
        point: Entry in front.json of the point that is exported; empty for anything else.
        baseline: The alternative to the best found that is exported; `None` for anything else.
        signal: Signal that a search optimized; empty if it was the task's measure.
        unfinished: Note that a search has not ended; empty for anything else.
        arguments: Stored arguments of a search's command line; empty if there are none.
        run: The search's folder; `None` for anything else.
    """

    name: str
    folder: Path
    kind: str = "folder"
    routes: Sequence[str] = ()
    note: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    verdict: Verdict | None = None
    point: dict[str, Any] = field(default_factory=dict)
    baseline: Compared | None = None
    signal: str = ""
    unfinished: str = ""
    arguments: Sequence[str] = ()
    run: RunFolder | None = None

    @property
    def is_full_model(self) -> bool:
        """True if the source is a complete model instead of an adapter."""
        return not self.routes and not (self.folder / CONFIG_FILE).is_file()

    @property
    def adapter_folders(self) -> list[Path]:
        """Folders of the adapters: one, or one for each route."""
        return [self.folder / name for name in self.routes] or [self.folder]

    @property
    def base_name(self) -> str | None:
        """Public name of the base model; `None` if neither adapter nor configuration has one."""
        named = None if self.is_full_model else read_adapter(self.adapter_folders[0]).base_model
        model = self.config.get("model", {})
        return named or model.get("name") or model.get("path")

    @property
    def stand_in(self) -> str | None:
        """Description of the weights that replaced the hub's in the measurement, else `None`."""
        if self.is_full_model or not self.config.get("model"):
            return None
        base = self.load_base(None)
        try:
            found = base.describe_substitute()
        except UserError:
            return None
        measured = (self.state.get("identity") or {}).get("base weights")
        if not found or measured not in (None, base.fingerprint()):
            return None
        return found.removeprefix("the weights of ")

    def max_rank(self) -> int:
        """Return the highest rank of all modules of all adapters."""
        adapters = map(read_adapter, self.adapter_folders)
        return max(rank for adapter in adapters for _, _, rank in adapter.shapes.values())

    def load_base(self, given: str | None) -> BaseModel:
        """Return the base model.

        Args:
            given: Folder or hub id that replaces the one of the run or the adapter.

        Raises:
            UserError: The base is unknown.
        """
        if not given and (model := self.config.get("model")):
            return BaseModel(**{key: value for key, value in model.items() if key != "_target_"})
        if not (name := given or self.base_name):
            raise UserError(f"{self.folder} names no base model; give one as base=FOLDER_OR_HUB_ID")
        return BaseModel(name)


def read_source(
    given: str,
    point: int | None = None,
    baseline: str | None = None,
) -> ExportSource:
    """Return the result in a run folder or an adapter's folder.

    Args:
        given: The folder.
        point: For a search: use this point of its front, saved to front/point_NUMBER in its folder.
        baseline: For a search: use this alternative of its verdict, `EXPERT` or a name of
            `swarm.loop.final_evaluation.BASELINE_LABELS`, saved to baselines/NAME in its folder.

    Raises:
        UserError: It does not exist.
    """
    path = find_path(given)
    named = [f"point={point}"] * (point is not None) + [f"baseline={baseline}"] * bool(baseline)
    search = (path / run_files.RECORD_FILE).is_file()
    if named and (not search or len(named) > 1):
        raise UserError(f"{' '.join(named)}: one of these may be set, and of a search alone")
    source = ExportSource(path.resolve().name, path)
    if search:
        source = _read_search(source, RunFolder(path), point, baseline)
    elif (path / TUNING_FILE).is_file():
        for file in (path / TUNING_FILE, path / "tuned"):
            verify_run_file(file)
        state = read_tuning(path / TUNING_FILE)
        source = replace(
            source,
            folder=path / "tuned",
            kind="finetune",
            config=read_config(state.get("config") or {}),
            state=state,
            verdict=read_verdict(state),
        )
    folder = source.folder
    routed = read_routed_adapter(folder)
    full = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if not (routed or full or (folder / CONFIG_FILE).is_file()):
        raise UserError(
            f"{folder} contains neither an adapter nor a model in safetensors; give the folder of "
            "an adapter, or of a run with at least one iteration"
        )
    return replace(source, note=read_note(folder), routes=routed[0].names if routed else ())


def _read_search(
    source: ExportSource,
    run: RunFolder,
    point: int | None,
    baseline: str | None,
) -> ExportSource:
    path, iterations = run.path, pluralize(len(run.rounds) - 1, "iteration")
    signal, unfinished = search_signal(run), ""
    if not run.finished:
        unfinished = f"the search had not ended ({iterations} done)"
        if signal:
            unfinished += (
                f"; it maximizes its signal ({signal}), and the best is chosen by the task's "
                "metric at the end"
            )
    verify_run_file(path / run_files.COMMAND_FILE)
    command = load_command(path)
    source = replace(
        source,
        folder=path / "global_best",
        kind="search",
        run=run,
        config=run.config if (path / run_files.CONFIG_FILE).is_file() else {},
        state=run.state,
        signal=signal,
        unfinished=unfinished,
        arguments=clean_words([*map(str, command["arguments"])]) if command else (),
    )
    if point is not None:
        source = _save_front_point(source, run, point)
    elif baseline is not None:
        source = _save_baseline(source, run, baseline)
    else:
        source = replace(source, verdict=run.verdict)
    verify_run_file(source.folder)
    return source


def _save_front_point(source: ExportSource, run: RunFolder, point: int) -> ExportSource:
    """Save a point of the front with the run's pool, and return it."""
    if run.front is None:
        raise UserError(
            f"point={point}: {run.path} has no front, as its task is not a mixture; omit point"
        )
    points = run.front.to_dict(run.state)["points"]
    if point >= len(points):
        raise UserError(
            f"point={point}: the front has 0 to {len(points) - 1}; {run.path}/front.json lists them"
        )
    found = points[point]
    facts = {key: found[key] for key in ("iteration", "particle", "point")}
    facts |= {"validation_utility": found["utility"], "objectives": found["dev"]}
    folder = run.path / "front" / f"point_{point}"
    _save_position(source, found["coefficients"], folder, facts)
    return replace(source, folder=folder, point=found)


def _save_baseline(source: ExportSource, run: RunFolder, name: str) -> ExportSource:
    """Save an alternative to the best found with the run's pool, and return it."""
    others = run.verdict.alternatives if run.verdict else []
    found = {one.name: one for one in others if one.position and one.name != "base"}
    if name not in found:
        names = ", ".join(found) or "none: the search has not ended"
        raise UserError(f"baseline={name}: {run.path} has these: {names}")
    folder = run.path / "baselines" / name
    _save_position(source, found[name].position or [], folder, {"baseline": name})
    return replace(source, folder=folder, baseline=found[name])


def open_pool(source: ExportSource) -> Pool:
    """Return the pool of a search, open, with its learned adapters.

    Raises:
        UserError: There is none, or it has changed since.
    """
    from hydra.utils import instantiate

    config, run = source.config, source.run
    if run is None or not config.get("pool"):
        raise UserError(f"{source.folder}: has no configuration of a pool, as a search has")
    pool: Pool = instantiate(config["pool"], _convert_="all")
    model = instantiate(config["model"], _convert_="all")
    # A search that chooses kinds does so after it has read its experts.
    router, pool.router = pool.router, None
    pool.open(model)
    if pool.fingerprint() != source.state["identity"]["pool weights"]:
        raise UserError(f"{run.path}: the experts of its pool have changed since the search")
    if router:
        pool.router = router
        pool.open(model)
    pool.learned = run.learned_files()
    return pool


def _save_position(
    source: ExportSource, position: Sequence[float], folder: Path, facts: dict[str, Any]
) -> None:
    """Save a position of a search with its pool, which must not have changed since."""
    form = read_note(source.folder).get("prompt_form", "chat")
    open_pool(source).save(position, folder, {"prompt_form": form} | facts)
