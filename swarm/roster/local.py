"""Models on this machine by name: the base, an expert, a run's best, whatever lies in a folder."""

import threading
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from swarm.adapters import CONFIG_FILE, read_adapter
from swarm.engine.base import BaseModel
from swarm.engine.device import validate_device
from swarm.engine.panel import MIXTURE_FILE, is_adapter_folder, base_model_like
from swarm.engine.together import Batcher
from swarm.errors import UserError
from swarm.places import conf_folder, find_path
from swarm.report.folder import RUNS_FOLDER
from swarm.roster.runs import base_from_settings, base_of_run, best_folder, load_finished_run
from swarm.roster.voice import SharedLocalModel

BASE_NAME = "base"
"""The name of the base without an expert."""

MAX_NAMES_SHOWN = 20
"""Names that an error lists."""


class LocalModels:
    """The models of this machine; those on one base share it, and are asked together.

    Names are "base"; an expert's of the pool; a folder with a finished run, for its best; a folder
    with a PEFT adapter, a whole model or a mixture.

    Args:
        base: The base model, or its folder or hub id, for whatever is an adapter; `None` is the one
            that an adapter or a run names.
        pool: The folder of the experts.
        device: "cpu", "cuda" or e.g. "cuda:1"; `None` is where a model is opened, or the first
            GPU, or the CPU without one.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        base: str | BaseModel | None = None,
        pool: str | Path = "initial_experts",
        device: str | None = None,
    ) -> None:
        self.given, self.pool, self.device = base, Path(pool), validate_device(device)
        self.lock = threading.Lock()
        self._voices: dict[str, SharedLocalModel] = {}
        self._together: dict[object, Batcher] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """It travels to another process as its settings, with nothing loaded."""
        return LocalModels, (self.given, self.pool, self.device)

    @cached_property
    def base(self) -> BaseModel:
        """The base that was given, or that the pool's experts name, or that of those that ship.

        Raises:
            UserError: It is missing, or the first expert cannot be read.
        """
        if isinstance(self.given, BaseModel):
            return self.given
        if self.given:
            return _base_from_path(str(self.given))
        experts = self.expert_folders()
        return _base_of_adapter(experts[0]) if experts else shipped_base()

    def get_model(self, name: str) -> SharedLocalModel:
        """The model of a name, always the same; nothing is loaded.

        Raises:
            UserError: There is none.
        """
        with self.lock:
            if name not in self._voices:
                self._voices[name] = SharedLocalModel(self, name, *self._locate_model(name))
            return self._voices[name]

    def list_names(self) -> list[str]:
        """What there is: the base, the pool's experts, and the runs that have a best."""
        experts = [folder.name for folder in self.expert_folders()]
        runs = sorted(f"{RUNS_FOLDER}/{one.parent.name}" for one in find_path(RUNS_FOLDER).glob("*/global_best"))
        return [BASE_NAME, *experts, *runs]

    def expert_folders(self) -> list[Path]:
        """The folders of the pool's experts."""
        return sorted(file.parent for file in find_path(self.pool).glob(f"*/{CONFIG_FILE}"))

    def get_batcher(self, key: object) -> Batcher:
        """Who answers for a stand of this key; to be called with the lock held."""
        return self._together.setdefault(key, Batcher())

    def _locate_model(self, name: str) -> tuple[Path | None, BaseModel]:
        """The folder of a name, `None` for the base, and what it is based on."""
        if name == BASE_NAME:
            return None, self.base
        here = [folder for folder in (find_path(self.pool) / name, find_path(name)) if folder.is_dir()]
        if not here or not name.strip():
            raise UserError(self._unknown_message(name))
        folder = here[0]
        if (folder / "state.json").is_file() or not _holds_model(folder):
            run = load_finished_run(folder, f"take what it has so far, local/{folder}/global_best")
            return best_folder(run), self.base if self.given else base_of_run(run)
        other = not self.given and is_adapter_folder(str(folder))
        return folder, _base_of_adapter(folder, self.base) if other else self.base

    def _unknown_message(self, name: str) -> str:
        names = self.list_names()
        near = get_close_matches(name, names, 1)
        meant = f"did you mean local/{near[0]}? " if near else ""
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        return (
            f"local/{name}: there is no such model; {meant}there are {', '.join(names[:MAX_NAMES_SHOWN])}"
            f"{more}, or give a folder with a finished search, an adapter, a model or a mixture"
        )


def shipped_base() -> BaseModel:
    """The base of the experts that ship."""
    file = conf_folder() / "model" / "smollm2.yaml"
    return base_from_settings(yaml.safe_load(file.read_text(encoding="utf-8")))


def _base_from_path(path: str) -> BaseModel:
    """The base in a folder or on the hub; the one that ships under its name is as it ships."""
    shipped = shipped_base()
    return shipped if path == shipped.path else BaseModel(path)


def _base_of_adapter(folder: Path, usual: BaseModel | None = None) -> BaseModel:
    """What an adapter says it is of: the usual base, or one that is opened like it."""
    usual = usual or shipped_base()
    name = read_adapter(folder).base_model
    known = {Path(one).name.lower() for one in (usual.path, usual.name) if one}
    if name is None or Path(name).name.lower() in known:
        return usual
    return base_model_like(usual, name)


def _holds_model(folder: Path) -> bool:
    return any((folder / file).is_file() for file in (CONFIG_FILE, MIXTURE_FILE, "config.json"))
