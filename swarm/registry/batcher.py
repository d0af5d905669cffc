"""Requests from many threads to models that share one engine, answered in common batches."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from swarm.models.base import Completion, Embedding, NoEmbeddings, Request
from swarm.registry.model_groups import ModelGroup

ModelIndex = int | tuple[tuple[int, float], ...]
"""A model's row among the positions; or several rows with coefficients, for a blend."""

BATCH_WAIT_S = 0.005
"""Seconds the first request waits for others; shorter than a token of a small model takes."""


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A submitted request.

    Attributes:
        place: Index of the model, or of those blended.
        answer: Future of the completion or the error.
        left: True once the caller has gone; generation then ends at the next token.
    """

    place: ModelIndex
    request: Request
    answer: "Future[Completion]" = field(default_factory=Future)
    left: bool = False


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

    def add_model(self, stand: ModelGroup) -> int:
        """Add the model of a group with the same key and return its index. Nothing is loaded.

        Raises:
            UserError: Its adapter is incompatible with those already added.
        """
        with self._gate:
            self._group = self._group.merge_with(stand) if self._group else stand
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
            # One plan for all rounds, so that an answer does not depend on the number of requests.
            self._engine.plan = "stacked"
            self._positions = group.positions

    def is_loaded(self, place: int) -> bool:
        """Return whether a model is loaded."""
        return place < len(self._positions)

    def submit_requests(
        self, index: ModelIndex, requests: Sequence[Request]
    ) -> list[PendingRequest]:
        """Submit requests to loaded models; each answer arrives in its own future."""
        pending = [PendingRequest(index, request) for request in requests]
        for one in pending:
            one.request = replace(one.request, decided=_build_stop_check(one))
        with self._gate:
            self._waiting += pending
            if pending and not self._answering:
                self._answering = True
                # Not a daemon: the process must not end while this thread is inside torch.
                threading.Thread(target=self._run_rounds, name="swarm-local", daemon=False).start()
        return pending

    def embed(self, place: ModelIndex, texts: Sequence[str]) -> list[Embedding]:
        """Embed texts with a loaded model, between two rounds.

        Raises:
            NoEmbeddings: The engine has none.
            UserError: See `swarm.engine.hf.HFEngine.embed`.
        """
        with self._busy:
            embed = getattr(self._engine, "embed", None)
            if embed is None:
                raise NoEmbeddings("a mixture of several models' tokens has no embeddings")
            found: list[Embedding] = embed(self._build_position(place), texts)
            return found

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
                ready = [one for one in ready if not one.left]
                if ready:
                    chosen = select_round(ready)
                    self._run_round(chosen)
                    finished = {one for row in chosen for one in row}
                    ready = [one for one in ready if one not in finished]

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
        positions = np.stack([self._build_position(row[0].place) for row in chosen])
        try:
            found = self._engine.generate(
                positions, [[one.request for one in row] for row in chosen]
            )
        except Exception as error:  # as above
            for one in (one for row in chosen for one in row):
                one.answer.set_exception(error)
            return
        for row, completions in zip(chosen, found, strict=True):
            for one, completion in zip(row, completions, strict=True):
                one.answer.set_result(completion)

    def _build_position(self, index: ModelIndex) -> np.ndarray:
        """Return the position of one model, or the weighted sum of several."""
        parts = ((index, 1.0),) if isinstance(index, int) else index
        found: np.ndarray = sum(share * self._positions[one] for one, share in parts)
        return found


def select_round(ready: Sequence[PendingRequest]) -> list[list[PendingRequest]]:
    """Select equally many requests per model, oldest first; all scored or all generated."""
    scored = bool(ready[0].request.choices)
    rows: dict[ModelIndex, list[PendingRequest]] = {}
    for one in ready:
        if bool(one.request.choices) == scored:
            rows.setdefault(one.place, []).append(one)
    shortest = min(map(len, rows.values()))
    return [row[:shortest] for row in rows.values()]


def _build_stop_check(one: PendingRequest) -> Callable[[str], bool]:
    """Return a stop check: the request's own condition, or that its caller has gone."""
    decided = one.request.decided
    return lambda text: one.left or bool(decided and decided(text))
