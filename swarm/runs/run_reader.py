"""Read-only access to a run folder for analysis: positions, utilities and answers."""

import hashlib
import zlib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from swarm._util.files import as_path, parse_json, read_gzip_json
from swarm._util.secrets import clean, read_config
from swarm.errors import UserError
from swarm.merging.positions import position_label
from swarm.runs.manifest import REPAIR_HINT, read_state, verify_run_file
from swarm.runs.pareto_front import ParetoFront
from swarm.runs.verdict import read_verdict

PositionIndex = tuple[int, int]
"""(iteration, particle)."""

RUNS_FOLDER = "search"
"""Default parent folder of runs (conf/search.yaml)."""

MAX_RUNS_SHOWN = 4
"""Maximum number of runs that an error lists."""


class RunFolder:
    """A finished or running search.

    Attributes:
        path: The run folder.
        experts: The pool's K names.
        expert_count: Number of first rows that are experts, not rows made by the pool.
        groups: Names of the G groups of modules, each with its own coefficients.
        rounds: The state's entry of each iteration; 0 is the start.
        positions: [T, N, G * K] mixing coefficients.
        utilities: [T, N] on dev, NaN where none was measured.
        finished: Reason why the search ended; `None` while it runs.
        verdict: The verdict; `None` while it runs.
        optimizer: The optimizer's state after the last iteration.
        identity: The settings and digests that identify the search.
        chosen: Indices of the best expert ("starting") and best position ("ending"), if the task's
            own metric chose them and not the searched signal.
        scale: Score scale of a task that calibrates one on the experts; else `None`.
        front: The Pareto front of a task of several parts; else `None`.

    Raises:
        UserError: The folder is not a run's, or no iteration is finished.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path(path)
        self._verified: set[Path] = set()
        state = _load_state(self.path)
        verify_run_file(self.path / "config.json")
        self.experts: list[str] = state["experts"]
        self.expert_count: int = state.get("own", len(self.experts))
        self.groups: list[str] = state.get("groups", ["all"])
        self.chosen: dict[str, list[int]] = state.get("chosen", {})
        self.rounds: list[dict[str, Any]] = state["rounds"]
        self.finished: str | None = state["finished"]
        self.verdict = read_verdict(state)
        self.identity: dict[str, Any] = clean(state["identity"])
        self.scale: dict[str, Any] | None = state.get("scale")
        self.optimizer: dict[str, Any] = state.get("optimizer") or {}
        self.front = ParetoFront.from_state(state)
        if not self.rounds:
            raise UserError(f"{self.path}: no iteration has finished yet; wait for the first")
        try:
            self.positions = np.array([entry["positions"] for entry in self.rounds], dtype=float)
            self.utilities = np.array([entry["utilities"] for entry in self.rounds], dtype=float)
        except (TypeError, KeyError, ValueError):
            raise UserError(f"{self.path}/state.json is not the state of a search") from None

    @property
    def name(self) -> str:
        """Name of the run, "SWEEP/trial_00" for one of a sweep, a study or a comparison."""
        path = self.path.resolve()
        home = path.parent
        nested = home.parent.name == RUNS_FOLDER != home.name
        return f"{home.name}/{path.name}" if nested else path.name

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the start, with environment variables resolved.

        Raises:
            UserError: The folder has none (a run created in Python).
        """
        path = self.path / "config.json"
        if not path.is_file():
            raise UserError(
                f"{path} is missing: this run was not started by python -m swarm.search"
            )
        verify_run_file(path)
        try:
            config: Any = parse_json(path.read_text())
        except (OSError, ValueError):
            config = None
        if not isinstance(config, dict):
            raise UserError(f"{path} is not the configuration of a search")
        found: dict[str, Any] = read_config(config)
        return found

    @property
    def means(self) -> np.ndarray:
        """Mean of each expert's coefficient over the groups of modules, [T, N, K]."""
        shape = (*self.positions.shape[:2], len(self.groups), len(self.experts))
        found: np.ndarray = self.positions.reshape(shape).mean(axis=2)
        return found

    def position_label(self, index: PositionIndex) -> str | None:
        """Return the optimizer's name for a position, such as "uniform soup", or `None`."""
        return position_label(self.optimizer, self.positions[index].tolist())

    @property
    def test_items(self) -> str | None:
        """Digest of the test items; `None` if nothing was tested."""
        found: str | None = self.verdict.settings.get("test_items") if self.verdict else None
        return found

    @property
    def particles(self) -> int:
        """Number of particles N."""
        return int(self.positions.shape[1])

    def find_best(self, particle: int | None = None) -> PositionIndex:
        """Return the index of the first highest utility, of one particle or of all."""
        if particle is None and self.chosen:
            return self.chosen["ending"][0], self.chosen["ending"][1]
        known = np.where(np.isnan(self.utilities), -np.inf, self.utilities)
        if particle is not None:
            return int(known[:, particle].argmax()), particle
        number, found = np.unravel_index(known.argmax(), known.shape)
        return int(number), int(found)

    def best_expert(self) -> PositionIndex:
        """Return the index of the first best expert in the start."""
        if self.chosen:
            return self.chosen["starting"][0], self.chosen["starting"][1]
        start = self.utilities[0, : self.expert_count]
        return 0, int(np.where(np.isnan(start), -np.inf, start).argmax())

    def best_so_far(self) -> np.ndarray:
        """Return the highest utility up to each iteration, [T], NaN before the first."""
        highest = np.where(np.isnan(self.utilities), -np.inf, self.utilities).max(axis=1)
        found: np.ndarray = np.maximum.accumulate(highest)
        return np.where(np.isinf(found), np.nan, found)

    def load_answers(self, index: PositionIndex) -> list[dict[str, Any]]:
        """Return a particle's answers to the dev items it was scored on in an iteration."""
        path = self.path / "answers" / f"iteration_{index[0]:04d}.json.gz"
        try:
            found: list[dict[str, Any]] = self.load_packed(path)[str(index[1])]
        except (KeyError, TypeError):
            raise UserError(f"{path} has no answers of particle {index[1]}") from None
        return found

    def load_packed(self, path: Path) -> Any:
        """Return the content of a file of answers.

        Raises:
            UserError: It is damaged or missing.
        """
        if path not in self._verified:
            verify_run_file(path)
            self._verified.add(path)
        try:
            return read_gzip_json(path)
        except (OSError, ValueError, EOFError, zlib.error):
            raise UserError(f"{path} is damaged or missing; {REPAIR_HINT}") from None

    def load_answer_values(self, index: PositionIndex) -> np.ndarray:
        """Return the values of a particle's answers, [items]."""
        return np.array([row["value"] for row in self.load_answers(index)], dtype=float)

    def load_test_answers(self, index: PositionIndex) -> list[dict[str, Any]] | None:
        """Return a position's answers to the test items; `None` if it was not scored on test."""
        return self.load_answers_at(self.positions[index])

    def load_answers_at(
        self, position: Iterable[float], items: str | None = None
    ) -> list[dict[str, Any]] | None:
        """Return the answers to test items of a position, possibly new to the search.

        Args:
            position: [G * K] coefficients.
            items: Digest of the items; all test items by default.

        Returns:
            The answers; `None` if the position was not scored on these items.
        """
        items = items or self.test_items
        key = " ".join(float(c).hex() for c in position)
        name = hashlib.sha256(f"{items} {key}".encode()).hexdigest()[:16]
        path = self.path / "answers" / f"test_{name}.json.gz"
        if items:
            verify_run_file(path)
        return self.load_packed(path) if items and path.is_file() else None


def _load_state(folder: Path) -> dict[str, Any]:
    state = read_state(folder)
    if state is None or not {"experts", "rounds", "finished"} <= set(state):
        raise UserError(f"{folder} {_describe_folder(folder)}")
    return state


def _describe_folder(folder: Path) -> str:
    """Describe a folder that is not a run's, with advice."""
    if (folder / "tuning.json").is_file():
        adapter = f", its adapter is {folder}/tuned" if (folder / "tuned").is_dir() else ""
        return (
            f"contains no search, but a fine-tuning: its results are in "
            f"{folder}/tuning.json{adapter}"
        )
    if runs := find_run_folders(folder):
        kinds = (("methods.json", "is a comparison"), ("summary.json", "is a sweep"))
        found = (text for file, text in kinds if (folder / file).is_file())
        kind = next(found, "contains no search")
        more = ", ..." * (len(runs) > MAX_RUNS_SHOWN)
        names = ", ".join(map(str, runs[:MAX_RUNS_SHOWN]))
        return f"{kind}: its runs are {names}{more}; name one of them"
    if (folder / "state.json").is_file():
        return (
            "has a state.json that is not the state of a search, or is damaged; name another folder"
        )
    if (folder.parent / "state.json").is_file():
        return f"contains no search; did you mean {folder.parent}?"
    parents = (Path(RUNS_FOLDER), folder.parent)
    known = {run.name: run for parent in parents for run in reversed(find_run_folders(parent))}
    if close := get_close_matches(folder.name, known, 1):
        return f"contains no search; did you mean {known[close[0]]}?"
    return f"contains no search; allowed: a folder of {RUNS_FOLDER}/ with a state.json"


def find_run_folders(folder: Path) -> list[Path]:
    """Return the run folders in a folder, sorted, those of sweeps, studies and comparisons last.

    The searches of a sweep, a study or a comparison are in a folder of their own, two levels down.
    """
    found: list[list[Path]] = [[], []]
    for one in _visible_folders(folder):
        if (one / "state.json").is_file():
            found[0].append(one)
        else:
            found[1] += [two for two in _visible_folders(one) if (two / "state.json").is_file()]
    return [*found[0], *found[1]]


def _visible_folders(folder: Path) -> list[Path]:
    try:
        return sorted(one for one in folder.iterdir() if one.name[0] != "." and one.is_dir())
    except OSError:
        return []
