"""Models on this machine by name: the base, an expert, a run's best, whatever lies in a folder."""

import threading
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from swarm.adapters import CONFIG, read_adapter
from swarm.engine.base import Base
from swarm.engine.device import named
from swarm.engine.panel import MIXTURE, is_adapter, opened_like
from swarm.engine.together import Together
from swarm.errors import UserError
from swarm.places import conf_folder, find
from swarm.report.folder import HOME
from swarm.roster.runs import as_base, base_of, best, finished
from swarm.roster.voice import Voice

BASE = "base"
"""The name of the base without an expert."""

SHOWN = 20
"""Names that an error lists."""


class Locals:
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
        base: str | Base | None = None,
        pool: str | Path = "initial_experts",
        device: str | None = None,
    ) -> None:
        self.given, self.pool, self.device = base, Path(pool), named(device)
        self.lock = threading.Lock()
        self._voices: dict[str, Voice] = {}
        self._together: dict[object, Together] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """It travels to another process as its settings, with nothing loaded."""
        return Locals, (self.given, self.pool, self.device)

    @cached_property
    def base(self) -> Base:
        """The base that was given, or that the pool's experts name, or that of those that ship.

        Raises:
            UserError: It is missing, or the first expert cannot be read.
        """
        if isinstance(self.given, Base):
            return self.given
        if self.given:
            return _base(str(self.given))
        experts = self.experts()
        return _base_named(experts[0]) if experts else shipped_base()

    def model(self, name: str) -> Voice:
        """The model of a name, always the same; nothing is loaded.

        Raises:
            UserError: There is none.
        """
        with self.lock:
            if name not in self._voices:
                self._voices[name] = Voice(self, name, *self._place(name))
            return self._voices[name]

    def names(self) -> list[str]:
        """What there is: the base, the pool's experts, and the runs that have a best."""
        experts = [folder.name for folder in self.experts()]
        runs = sorted(f"{HOME}/{one.parent.name}" for one in find(HOME).glob("*/global_best"))
        return [BASE, *experts, *runs]

    def experts(self) -> list[Path]:
        """The folders of the pool's experts."""
        return sorted(file.parent for file in find(self.pool).glob(f"*/{CONFIG}"))

    def together(self, key: object) -> Together:
        """Who answers for a stand of this key; to be called with the lock held."""
        return self._together.setdefault(key, Together())

    def _place(self, name: str) -> tuple[Path | None, Base]:
        """The folder of a name, `None` for the base, and what it is based on."""
        if name == BASE:
            return None, self.base
        here = [folder for folder in (find(self.pool) / name, find(name)) if folder.is_dir()]
        if not here or not name.strip():
            raise UserError(self._unknown(name))
        folder = here[0]
        if (folder / "state.json").is_file() or not _holds_model(folder):
            run = finished(folder, f"take what it has so far, local/{folder}/global_best")
            return best(run), self.base if self.given else base_of(run)
        other = not self.given and is_adapter(str(folder))
        return folder, _base_named(folder, self.base) if other else self.base

    def _unknown(self, name: str) -> str:
        names = self.names()
        near = get_close_matches(name, names, 1)
        meant = f"did you mean local/{near[0]}? " if near else ""
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return (
            f"local/{name}: there is no such model; {meant}there are {', '.join(names[:SHOWN])}"
            f"{more}, or give a folder with a finished search, an adapter, a model or a mixture"
        )


def shipped_base() -> Base:
    """The base of the experts that ship."""
    file = conf_folder() / "model" / "smollm2.yaml"
    return as_base(yaml.safe_load(file.read_text(encoding="utf-8")))


def _base(path: str) -> Base:
    """The base in a folder or on the hub; the one that ships under its name is as it ships."""
    shipped = shipped_base()
    return shipped if path == shipped.path else Base(path)


def _base_named(folder: Path, usual: Base | None = None) -> Base:
    """What an adapter says it is of: the usual base, or one that is opened like it."""
    usual = usual or shipped_base()
    name = read_adapter(folder).base
    known = {Path(one).name.lower() for one in (usual.path, usual.name) if one}
    if name is None or Path(name).name.lower() in known:
        return usual
    return opened_like(usual, name)


def _holds_model(folder: Path) -> bool:
    return any((folder / file).is_file() for file in (CONFIG, MIXTURE, "config.json"))
