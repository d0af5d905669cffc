"""One model on this machine as it is used by name: asked, asked piece by piece, from any thread."""

import hashlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import yaml

from swarm._util.files import conf_folder, find_path
from swarm.engine.base_model import BaseModel, choose_device, validate_device
from swarm.engine.token_ensemble.members import MIXTURE_FILE, base_model_like, is_adapter_folder
from swarm.errors import UserError
from swarm.models.base import Completion, Delta, Request, Stream
from swarm.pool.adapter import CONFIG_FILE, read_adapter
from swarm.registry.batcher import Batcher, ModelIndex, PendingRequest
from swarm.registry.model_groups import (
    base_from_settings,
    base_of_run,
    best_folder,
    load_finished_run,
    model_group,
)
from swarm.runs.describe import describe_position
from swarm.runs.run_reader import RUNS_FOLDER


class SharedLocalModel:
    """A model that `swarm.registry.local_models.LocalModels` has made; opens itself when it is
    first asked.

    Without a temperature it is greedy; a seed of `None` is 0. What it draws follows from its name
    too, so that voices of one base do not all draw alike. No more is written than its context has
    room for.
    """

    def __init__(
        self, home: "LocalModels", name: str, folder: Path | None, base: BaseModel
    ) -> None:
        self.home, self.name, self.folder, self.base = home, name, folder, base
        self._together: Batcher | None = None
        self._place: ModelIndex = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return self.home.get_model, (self.name,)

    def check(self) -> None:
        """See that the files make a model, and have the base on this disk; see `swarm.tasks`.

        Raises:
            UserError: They do not, or it cannot be downloaded.
        """
        with self.home.lock:
            if self._together is None:
                stand = model_group(self.folder, self.base)
                stand.check()
                together = self.home.get_batcher(stand.group_key)
                self._place = together.add_model(stand)
                self._together = together

    def fingerprint(self) -> str:
        """A text that changes with the weights.

        Raises:
            UserError: They are not there.
        """
        return model_group(self.folder, self.base).fingerprint()

    @property
    def is_loaded(self) -> bool:
        """Whether it is in memory."""
        return self._together is not None and self._together.is_loaded(self._last_index)

    @property
    def _last_index(self) -> int:
        """The place that is loaded last, of those that it needs."""
        return self._place if isinstance(self._place, int) else max(self._place)[0]

    def open(self, device: str | None = None) -> None:
        """Load what is not in memory yet.

        Args:
            device: Where, unless `Locals` was told; `None` is the first GPU, or the CPU.

        Raises:
            UserError: As `check`, or the device is not there or has no room.
        """
        self.check()
        assert self._together is not None
        if not self.is_loaded:
            self._together.open(choose_device(self.home.device or device))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer all requests; see `swarm.models.base.Model.generate`.

        Raises:
            UserError: One of them cannot be answered.
        """
        found = []
        for answer in self.generate_each(requests):
            if isinstance(answer, UserError):
                raise answer
            found.append(answer)
        return found

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        """What each request comes to; see `swarm.models.base.generate_each`."""
        try:
            asked, began = self._submit_requests(requests), time.monotonic()
        except UserError as error:
            return [error] * len(requests)
        try:
            return [self._wait_for_completion(one, began) for one in asked]
        finally:
            for one in asked:
                one.left = True

    def stream(self, request: Request) -> Stream:
        """Answer piece by piece; see `swarm.models.base.stream`."""
        texts: SimpleQueue[str | None] = SimpleQueue()

        def on_text(text: str) -> bool:
            texts.put(text)
            return bool(request.decided and request.decided(text))

        (one,), began = self._submit_requests([replace(request, decided=on_text)]), time.monotonic()
        one.answer.add_done_callback(lambda _: texts.put(None))
        said = ""
        try:
            while (text := _next_text(texts, _remaining_seconds(request, began))) is not None:
                ready = stable_prefix(text, request.stop)
                if ready.startswith(said) and ready != said:
                    yield Delta(ready[len(said) :])
                    said = ready
            answer = self._wait_for_completion(one, began)
            if isinstance(answer, UserError):
                raise answer
            if answer.text[len(said) :]:
                yield Delta(answer.text[len(said) :])
            return answer
        finally:
            one.left = True

    def _submit_requests(self, requests: Sequence[Request]) -> list[PendingRequest]:
        if not self.is_loaded:
            self.open()
        assert self._together is not None
        own = [self._with_model_seed(one) if one.temperature else one for one in requests]
        return self._together.submit_requests(self._place, own)

    def _with_model_seed(self, request: Request) -> Request:
        digest = hashlib.blake2b(f"{request.seed or 0} {self.name}".encode(), digest_size=8)
        return replace(request, seed=int.from_bytes(digest.digest(), "big"))

    def _wait_for_completion(self, one: PendingRequest, began: float) -> Completion | UserError:
        """The answer when it is there, or why there is none."""
        try:
            answer = one.answer.result(_remaining_seconds(one.request, began))
        except UserError as error:
            return UserError(f"local/{self.name}: {error}", error.code)
        except TimeoutError:
            seconds = one.request.timeout
            return UserError(f"local/{self.name}: no answer within {seconds:g} s (timeout)")
        return replace(answer, model=self.name, seconds=time.monotonic() - began)


def stable_prefix(text: str, stop: Sequence[str]) -> str:
    """What of a text so far will stay: no half character, nor what may begin a stop text."""
    text = text.rstrip("\ufffd")
    begun = (k for one in stop for k in range(1, len(one)) if text.endswith(one[:k]))
    return text[: len(text) - max(begun, default=0)]


def _remaining_seconds(request: Request, began: float) -> float | None:
    """Seconds that are left for an answer; `None` is any number."""
    if request.timeout is None:
        return None
    return max(0.0, began + request.timeout - time.monotonic())


def _next_text(texts: "SimpleQueue[str | None]", seconds: float | None) -> str | None:
    """The next text so far; `None` at the end, or when the time is over."""
    try:
        return texts.get(timeout=seconds)
    except Empty:
        return None


# A mixture of experts by hand: another voice of the base that is in memory, and no file.


class BlendedModel(SharedLocalModel):
    """The sum of experts by coefficients, as a position of a search in the factor space is.

    It is asked together with the other voices of the base, and loads nothing but experts that were
    not asked before.

    Args:
        home: Whose experts.
        coefficients: By the experts' names, as `Locals.model` takes them; without any, or with all
            of them 0, it is the base.

    Raises:
        UserError: A coefficient is not a finite number, or there is no such expert.
    """

    def __init__(self, home: "LocalModels", coefficients: Mapping[str, float]) -> None:
        for name, share in coefficients.items():
            if isinstance(share, bool) or not isinstance(share, int | float):
                raise UserError(f"{name}: {share!r} is no coefficient; give a number")
            if not math.isfinite(share):
                raise UserError(f"{name}: {share} is no coefficient; give a finite number")
        self.parts = {name: float(share) for name, share in coefficients.items() if share}
        super().__init__(
            home, describe_position(list(self.parts), list(self.parts.values())), None, home.base
        )
        self._voices = [home.get_model(name) for name in self.parts or ("base",)]

    def __reduce__(self) -> tuple[Any, ...]:
        return BlendedModel, (self.home, self.parts)

    def check(self) -> None:
        """See that the experts are there and go together; see `Voice.check`.

        Raises:
            UserError: They do not.
        """
        if self._together is not None:
            return
        for voice in self._voices:
            voice.check()
        first, *others = self._voices
        if alone := [one.name for one in others if one._together is not first._together]:
            raise UserError(
                f"{alone[0]} and {first.name} cannot be mixed: they are no adapters of one base"
            )
        places = [voice._place for voice in self._voices]
        shares = self.parts.values() or [1.0]
        self._place = tuple(
            (place, share)
            for place, share in zip(places, shares, strict=True)
            if isinstance(place, int)
        )
        self._together = first._together

    def fingerprint(self) -> str:
        """A text that changes with the weights and with the coefficients."""
        told = [(voice.fingerprint(), self.parts.get(voice.name)) for voice in self._voices]
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


# Models on this machine by name: the base, an expert, a run's best, whatever lies in a folder.

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
        runs = sorted(
            f"{RUNS_FOLDER}/{one.parent.name}"
            for one in find_path(RUNS_FOLDER).glob("*/global_best")
        )
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
        here = [
            folder for folder in (find_path(self.pool) / name, find_path(name)) if folder.is_dir()
        ]
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
            f"local/{name}: there is no such model; {meant}there are "
            f"{', '.join(names[:MAX_NAMES_SHOWN])}"
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
