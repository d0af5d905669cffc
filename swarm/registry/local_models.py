"""Models on this machine by name: the base, experts, runs and folders, and blends of experts.

All of them can be used from any thread; models with a common base share it in memory.
"""

import hashlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import yaml

from swarm._util.files import conf_folder, find_path
from swarm._util.terminal import suggest
from swarm._util.threads import start_thread
from swarm.engine.base_model import BaseModel, choose_device, validate_device
from swarm.engine.token_ensemble import MIXTURE_FILE, base_model_like, is_adapter_folder
from swarm.errors import UserError
from swarm.merging.positions import describe_position
from swarm.models.base import (
    Completion,
    Delta,
    Model,
    Request,
    Stream,
    stable_prefix,
)
from swarm.pool.adapter import (
    CONFIG_FILE,
    ROUTER_FILE,
    read_adapter,
    read_note,
    read_routed_adapter,
)
from swarm.pool.prompt_router import PromptRouter
from swarm.registry.model_groups import (
    ModelGroup,
    base_from_settings,
    base_of_run,
    load_finished_run,
    model_group,
)
from swarm.runs.folder import RUNS_FOLDER, find_run_folders, is_run_folder

Mix = tuple[tuple[int, float], ...]
"""A model as rows of the positions with coefficients: one row, or several for a blend."""

BATCH_WAIT_S = 0.005
"""Seconds the first request waits for others; shorter than a token of a small model takes."""


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A submitted request.

    Attributes:
        mix: Its model.
        answer: Future of the completion or the error.
        abandoned: True once the caller has gone; generation then ends at the next token.
    """

    mix: Mix
    request: Request
    answer: "Future[Completion]" = field(default_factory=Future)
    abandoned: bool = False

    def __post_init__(self) -> None:
        decided = self.request.stop_check

        def stop_check(text: str) -> bool:
            return self.abandoned or bool(decided and decided(text))

        self.request = replace(self.request, stop_check=stop_check)


class Batcher:
    """Batches requests to models that share one engine, from any number of threads.

    A worker thread runs the engine in rounds: each takes equally many waiting requests of every
    model that has any and answers them in the same batches; the thread ends when none are left. A
    request may therefore wait for one round, which lasts as long as its longest answer. An answer
    does not depend on the other requests in the batch, up to rounding.
    """

    def __init__(self) -> None:
        self._group: ModelGroup | None = None
        self._engine: Any = None
        self._device = "cpu"
        self._positions = np.zeros((0, 0))
        # `_busy` guards the engine while it answers or changes; `_gate` guards the waiting list.
        self._busy, self._gate = threading.Lock(), threading.Lock()
        self._waiting: list[PendingRequest] = []
        self._answering = False

    def add_model(self, group: ModelGroup) -> int:
        """Add the model of a group with the same key and return its index. Nothing is loaded.

        Raises:
            UserError: Its adapter is incompatible with those already added.
        """
        with self._gate:
            self._group = self._group.merge_with(group) if self._group else group
            return len(self._group.places) - 1

    def open(self, device: str) -> None:
        """Load the engine once, and the models added since, on the first `device` given.

        Raises:
            UserError: The files do not form a model, or the device lacks memory.
        """
        with self._busy:
            group = self._group
            assert group is not None
            if len(self._positions) == len(group.places):
                return
            if self._engine is None:
                self._device = device
            # Drop the engine first: its state is undefined if loading fails.
            engine, self._engine, self._positions = self._engine, None, np.zeros((0, 0))
            self._engine = group.load(self._device, engine)
            self._positions = group.positions

    def is_loaded(self, mix: Mix) -> bool:
        """Return whether a model is loaded; rows are loaded in order."""
        return max(row for row, _ in mix) < len(self._positions)

    def submit_requests(self, mix: Mix, requests: Sequence[Request]) -> list[PendingRequest]:
        """Submit requests to a loaded model; each answer arrives in its own future."""
        pending = [PendingRequest(mix, request) for request in requests]
        with self._gate:
            self._waiting += pending
            if pending and not self._answering:
                self._answering = True
                # Not a daemon: the process must not end while this thread is inside torch.
                start_thread(self._run_rounds, name="swarm-local", daemon=False)
        return pending

    def route_requests(self, router: PromptRouter, requests: Sequence[Request]) -> list[int]:
        """Return the route of each request, by one forward pass of the base over its prompt."""
        prompts = [request.prompt for request in requests]
        with self._busy:
            states = self._engine.embed_prompts(prompts, [router.layer])
        routes: list[int] = router.assign(states).tolist()
        return routes

    def _run_rounds(self) -> None:
        """Answer round by round until no requests are waiting."""
        ready: list[PendingRequest] = []
        while True:
            time.sleep(BATCH_WAIT_S)
            with self._gate:
                new, self._waiting = self._waiting, []
                if not new and not ready:
                    self._answering = False
                    return
            with self._busy:
                ready += [one for one in new if self._fits_context(one)]
                ready = [one for one in ready if not one.abandoned]
                if ready:
                    self._run_round(select_round(ready))
                    ready = [one for one in ready if not one.answer.done()]

    def _fits_context(self, one: PendingRequest) -> bool:
        """Return whether a request fits the context; otherwise set its error."""
        try:
            one.request = self._engine.clip_to_context(one.request)
        except Exception as error:  # any error belongs to the request
            one.answer.set_exception(error)
            return False
        return True

    def _run_round(self, chosen: Sequence[Sequence[PendingRequest]]) -> None:
        """Answer equally many requests of several models; an error is passed to all of them."""
        mixes = [row[0].mix for row in chosen]
        positions = [sum(share * self._positions[row] for row, share in mix) for mix in mixes]
        requests = [[one.request for one in row] for row in chosen]
        try:
            found = self._engine.generate(np.stack(positions), requests)
        except Exception as error:  # as above
            for one in (one for row in chosen for one in row):
                one.answer.set_exception(error)
            return
        for row, completions in zip(chosen, found, strict=True):
            for one, completion in zip(row, completions, strict=True):
                one.answer.set_result(completion)


def select_round(ready: Sequence[PendingRequest]) -> list[list[PendingRequest]]:
    """Select equally many requests per model, oldest first; all scored or all generated."""
    scored = bool(ready[0].request.choices)
    rows: dict[Mix, list[PendingRequest]] = {}
    for one in ready:
        if bool(one.request.choices) == scored:
            rows.setdefault(one.mix, []).append(one)
    shortest = min(map(len, rows.values()))
    return [row[:shortest] for row in rows.values()]


class SharedLocalModel(Model):
    """A model created by `LocalModels`; it loads itself on the first request.

    Without a temperature it is greedy; a seed of `None` is 0. The sampling seed also depends on the
    name, so that models of one base do not draw alike. Answers are limited by the context length.
    """

    def __init__(
        self, home: "LocalModels", name: str, folder: Path | None, base: BaseModel
    ) -> None:
        self.home, self.name, self.folder, self.base = home, name, folder, base
        self._batcher: Batcher | None = None
        self._mix: Mix = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return self.home.get_model, (self.name,)

    def check(self) -> None:
        """Check that the files form a model, and download the base if needed; see `swarm.tasks`.

        Raises:
            UserError: They do not, or the base cannot be downloaded.
        """
        with self.home.lock:
            if self._batcher is None:
                group = model_group(self.folder, self.base)
                group.check()
                batcher = self.home.batchers.setdefault(group.group_key, Batcher())
                self._mix = ((batcher.add_model(group), 1.0),)
                self._batcher = batcher

    def fingerprint(self) -> str:
        """Return a string that depends on the weights.

        Raises:
            UserError: The weights are missing.
        """
        return model_group(self.folder, self.base).fingerprint()

    @property
    def prompt_form(self) -> str:
        """Form of the prompts that the model was searched with, as its swarm.json has it.

        See `swarm.models.base.with_prompt_form`.
        """
        note = read_note(self.folder) if self.folder else {}
        return str(note.get("prompt_form", "chat"))

    @property
    def is_loaded(self) -> bool:
        """True if it is in memory."""
        return self._batcher is not None and self._batcher.is_loaded(self._mix)

    def open(self, device: str | None = None) -> None:
        """Load the model if it is not in memory.

        Args:
            device: Device, unless `LocalModels` specifies one; `None` is the first GPU, or the CPU.

        Raises:
            UserError: See `check`; also if the device does not exist or lacks memory.
        """
        self.check()
        assert self._batcher is not None
        if not self.is_loaded:
            self._batcher.open(choose_device(self.home.device or device))

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        try:
            pending = self._submit_requests(requests)
        except UserError as error:
            return [error] * len(requests)
        start = time.monotonic()  # loading is not counted
        try:
            return [self._wait_for_completion(one, start) for one in pending]
        finally:
            for one in pending:
                one.abandoned = True

    def stream(self, request: Request) -> Stream:
        texts: SimpleQueue[str | None] = SimpleQueue()

        def on_text(text: str) -> bool:
            texts.put(text)
            return bool(request.stop_check and request.stop_check(text))

        [one] = self._submit_requests([replace(request, stop_check=on_text)])
        start = time.monotonic()
        one.answer.add_done_callback(lambda _: texts.put(None))
        sent = ""
        try:
            with suppress(Empty):  # at the timeout, which is told below
                while (text := texts.get(timeout=_remaining_seconds(request, start))) is not None:
                    # A partial character may end the text.
                    ready = stable_prefix(text.rstrip("\ufffd"), request.stop)
                    if ready.startswith(sent) and ready != sent:
                        yield Delta(ready[len(sent) :])
                        sent = ready
            answer = self._wait_for_completion(one, start)
            if isinstance(answer, UserError):
                raise answer
            if answer.text[len(sent) :]:
                yield Delta(answer.text[len(sent) :])
            return answer
        finally:
            one.abandoned = True

    def _submit_requests(self, requests: Sequence[Request]) -> list[PendingRequest]:
        if not self.is_loaded:
            self.open()
        assert self._batcher is not None
        seeded = [self._with_model_seed(one) if one.temperature else one for one in requests]
        return self._batcher.submit_requests(self._mix, seeded)

    def _with_model_seed(self, request: Request) -> Request:
        digest = hashlib.blake2b(f"{request.seed or 0} {self.name}".encode(), digest_size=8)
        return replace(request, seed=int.from_bytes(digest.digest(), "big"))

    def _wait_for_completion(self, pending: PendingRequest, start: float) -> Completion | UserError:
        """Wait for the answer; return it or the error."""
        try:
            answer = pending.answer.result(_remaining_seconds(pending.request, start))
        except UserError as error:
            return UserError(f"local/{self.name}: {error}", error.code)
        except TimeoutError:
            seconds = pending.request.timeout
            return UserError(f"local/{self.name}: no response within {seconds:g} s (timeout)")
        return replace(answer, model=self.name, seconds=time.monotonic() - start)


def _remaining_seconds(request: Request, start: float) -> float | None:
    """Return the seconds left for an answer; `None` is no limit."""
    if request.timeout is None:
        return None
    return max(0.0, start + request.timeout - time.monotonic())


class CombinedModel(SharedLocalModel):
    """Base of models that consist of other ones of the same base, whose batches they share.

    Subclasses set `_parts` and the coefficients `_shares`.
    """

    _parts: list[SharedLocalModel]
    _shares: list[float]

    def check(self) -> None:
        """Check that the parts exist and are compatible; see `SharedLocalModel.check`.

        Raises:
            UserError: They are not.
        """
        for part in self._parts:
            part.check()
        first, *others = self._parts
        if separate := [one.name for one in others if one._batcher is not first._batcher]:
            raise UserError(
                f"{separate[0]} and {first.name} cannot be mixed: they are no adapters of one base"
            )
        shares = zip(self._parts, self._shares, strict=True)
        self._mix = tuple((row, share) for part, share in shares for row, _ in part._mix)
        self._batcher = first._batcher


class RoutedModel(CombinedModel):
    """A result with an adapter for each kind of prompt.

    Args:
        home, name, folder, base: See `SharedLocalModel`.
        router: Chooses the adapter of a prompt.
        folders: The folder of each route's adapter.
    """

    def __init__(
        self,
        home: "LocalModels",
        name: str,
        folder: Path,
        base: BaseModel,
        router: PromptRouter,
        folders: Sequence[Path],
    ) -> None:
        super().__init__(home, name, folder, base)
        self.router = router
        self._parts = [SharedLocalModel(home, name, one, base) for one in folders]
        self._shares = [1.0] * len(self._parts)

    def _submit_requests(self, requests: Sequence[Request]) -> list[PendingRequest]:
        if not self.is_loaded:
            self.open()
        assert self._batcher is not None
        routes = self._batcher.route_requests(self.router, requests)
        found: dict[int, PendingRequest] = {}
        for route in set(routes):
            indices = [index for index, one in enumerate(routes) if one == route]
            pending = self._parts[route]._submit_requests([requests[i] for i in indices])
            found.update(zip(indices, pending, strict=True))
        return [found[i] for i in range(len(requests))]


class BlendedModel(CombinedModel):
    """A weighted sum of the experts' updates, like a position of a search in the delta space.

    It loads only experts not used before.

    Args:
        home: Models to take the experts from.
        coefficients: Coefficients by expert name, see `LocalModels.get_model`; if empty or all 0,
            it is the base.

    Raises:
        UserError: A coefficient is not a finite number, or an expert does not exist.
    """

    def __init__(self, home: "LocalModels", coefficients: Mapping[str, float]) -> None:
        for name, share in coefficients.items():
            number = isinstance(share, int | float) and not isinstance(share, bool)
            if not number or not math.isfinite(share):
                raise UserError(f"{name}: {share!r} is not a coefficient; give a finite number")
        self.parts = {name: float(share) for name, share in coefficients.items() if share}
        described = describe_position(list(self.parts), list(self.parts.values()))
        super().__init__(home, described, None, home.base)
        self._parts = [home.get_model(name) for name in self.parts or ("base",)]
        self._shares = list(self.parts.values()) or [1.0]

    def __reduce__(self) -> tuple[Any, ...]:
        return BlendedModel, (self.home, self.parts)

    @property
    def prompt_form(self) -> str:
        """That of a part that was searched with another form than the usual one."""
        return next((one.prompt_form for one in self._parts if one.prompt_form != "chat"), "chat")

    def fingerprint(self) -> str:
        """Return a string that depends on the weights and the coefficients."""
        identities = [(part.fingerprint(), self.parts.get(part.name)) for part in self._parts]
        return hashlib.sha256(repr(identities).encode()).hexdigest()[:16]


BASE_NAME = "base"
"""Name of the base without an expert."""

MAX_NAMES_SHOWN = 20
"""Maximum number of names in an error message."""


class LocalModels:
    """The models of this machine; those with a common base share it and its batches.

    Names are "base"; an expert of the pool; a folder with a finished run, for its best model; a
    folder with a PEFT adapter, a complete model or a mixture.

    Args:
        base: Base model, or its folder or hub id, for adapters; `None` is the one named by the
            adapter or run.
        pool: Folder of the experts.
        device: "cpu", "cuda" or e.g. "cuda:1"; `None` is the device given on opening, or the first
            GPU, or the CPU.

    Raises:
        UserError: A value is invalid.
    """

    def __init__(
        self,
        base: str | BaseModel | None = None,
        pool: str | Path = "initial_experts",
        device: str | None = None,
    ) -> None:
        self.given, self.pool, self.device = base, Path(pool), validate_device(device)
        self.lock = threading.Lock()
        self._parts: dict[str, SharedLocalModel] = {}
        self.batchers: dict[object, Batcher] = {}  # by group key; changed under the lock

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as settings, with nothing loaded."""
        return LocalModels, (self.given, self.pool, self.device)

    @cached_property
    def base(self) -> BaseModel:
        """The given base, the one named by the pool's experts, or that of the shipped experts.

        Raises:
            UserError: It is missing, or the first expert cannot be read.
        """
        if isinstance(self.given, BaseModel):
            return self.given
        if self.given:
            shipped = shipped_base()  # has settings of its own
            return shipped if self.given == shipped.path else BaseModel(self.given)
        experts = self.expert_folders()
        return _base_of_adapter(experts[0], shipped_base()) if experts else shipped_base()

    def get_model(self, name: str) -> SharedLocalModel:
        """Return the model of a name, always the same instance; nothing is loaded.

        Raises:
            UserError: It does not exist.
        """
        with self.lock:
            if name not in self._parts:
                folder, base = self._locate_model(name)
                routed = read_routed_adapter(folder) if folder else None
                self._parts[name] = (
                    RoutedModel(self, name, folder, base, *routed)
                    if folder and routed
                    else SharedLocalModel(self, name, folder, base)
                )
            return self._parts[name]

    def list_names(self) -> list[str]:
        """List the base, the pool's experts, and the runs with a best model."""
        experts = [folder.name for folder in self.expert_folders()]
        home = find_path(RUNS_FOLDER)
        runs = [
            f"{RUNS_FOLDER}/{one.relative_to(home).as_posix()}"
            for one in find_run_folders(home)
            if (one / "global_best").exists()
        ]
        return [BASE_NAME, *experts, *runs]

    def expert_folders(self) -> list[Path]:
        """Return the folders of the pool's experts."""
        return sorted(file.parent for file in find_path(self.pool).glob(f"*/{CONFIG_FILE}"))

    def _locate_model(self, name: str) -> tuple[Path | None, BaseModel]:
        """Return the folder of a name, `None` for the base, and its base model."""
        if name == BASE_NAME:
            return None, self.base
        places = (find_path(self.pool) / name, find_path(name))
        folder = next((one for one in places if one.is_dir() and name.strip()), None)
        if folder is None:
            raise UserError(self._unknown_message(name))
        files = (CONFIG_FILE, ROUTER_FILE, MIXTURE_FILE, "config.json")
        if is_run_folder(folder) or not any((folder / file).is_file() for file in files):
            advice = f"use its best position so far, local/{folder}/global_best"
            run = load_finished_run(folder, advice)
            return run.path / "global_best", self.base if self.given else base_of_run(run)
        adapter = is_adapter_folder(str(folder)) or (folder / ROUTER_FILE).is_file()
        other = not self.given and adapter
        return folder, _base_of_adapter(folder, self.base) if other else self.base

    def _unknown_message(self, name: str) -> str:
        names = self.list_names()
        suggestion = suggest(name, names, "local/")
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        return (
            f"local/{name}: no such model; {suggestion}available: "
            f"{', '.join(names[:MAX_NAMES_SHOWN])}"
            f"{more}, or a folder with a finished search, an adapter, a model or a mixture"
        )


def shipped_base() -> BaseModel:
    """Return the base of the shipped experts."""
    file = conf_folder() / "model" / "smollm2.yaml"
    return base_from_settings(yaml.safe_load(file.read_text(encoding="utf-8")))


def _base_of_adapter(folder: Path, default: BaseModel) -> BaseModel:
    """Return the base named by an adapter: the usual one, or another with the same settings."""
    routed = read_routed_adapter(folder)
    name = read_adapter(routed[1][0] if routed else folder).base_model
    known = {Path(one).name.lower() for one in (default.path, default.name) if one}
    if name is None or Path(name).name.lower() in known:
        return default
    return base_model_like(default, name)
