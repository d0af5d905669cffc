"""A stand's model in memory, asked by many threads: what waits at the same time shares batches."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from swarm.models.base import Completion, Request
from swarm.registry.model_groups import ModelGroup

ModelIndex = int | tuple[tuple[int, float], ...]
"""A voice's place; or those of several with the coefficients of a mixture of them."""

BATCH_WAIT_S = 0.005
"""Seconds that the first who asks waits for others; a token of a small model takes longer."""


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A question on its way.

    Attributes:
        place: Of the voice that is asked, or of those that are mixed.
        answer: Will hold the completion, or what went wrong.
        left: Whether whoever asked has gone; what is being written for them ends at the next token.
    """

    place: ModelIndex
    request: Request
    answer: "Future[Completion]" = field(default_factory=Future)
    left: bool = False


class Batcher:
    """Voices that one model in memory answers for, whichever threads they are asked by.

    A thread of its own asks the model. It takes what is waiting, equally many requests of each
    voice that has any, answers these in the same batches, and looks again; it ends when nobody
    waits. So a request may wait for a round of others, and a round lasts as long as its longest
    answer. Who has an answer alone has the same in company, up to rounding.
    """

    def __init__(self) -> None:
        self._stand: ModelGroup | None = None
        self._engine: Any = None
        self._device = "cpu"
        self._positions = np.zeros((0, 0))
        # Held while the engine answers or changes, and while the list of who waits does.
        self._busy, self._gate = threading.Lock(), threading.Lock()
        self._waiting: list[PendingRequest] = []
        self._answering = False

    def add_model(self, stand: ModelGroup) -> int:
        """Add the voice of a stand of the same key; gives its place. Nothing is loaded.

        Raises:
            UserError: Its adapter does not go together with those that are there.
        """
        with self._gate:
            self._stand = self._stand.merge_with(stand) if self._stand else stand
            return len(self._stand.places) - 1

    def open(self, device: str) -> None:
        """Load the model, once, and whichever voices have joined since; on the first `device`.

        Raises:
            UserError: The files do not make a model, or the device has no room for it.
        """
        with self._busy:
            stand = self._stand
            assert stand is not None
            if len(self._positions) == len(stand.places):
                return
            if self._engine is None:
                self._device = device
            # Nobody knows what is there if this fails.
            engine, self._engine, self._positions = self._engine, None, np.zeros((0, 0))
            self._engine = stand.load(self._device, engine)
            # One plan for all rounds, so that an answer does not depend on how many ask.
            self._engine.plan = "stacked"
            self._positions = stand.positions

    def is_loaded(self, place: int) -> bool:
        """Whether a voice can be asked."""
        return place < len(self._positions)

    def submit_requests(
        self, place: ModelIndex, requests: Sequence[Request]
    ) -> list[PendingRequest]:
        """Put requests to open voices; the answers come later, each on its own."""
        asked = [PendingRequest(place, request) for request in requests]
        for one in asked:
            one.request = replace(one.request, decided=_build_stop_check(one))
        with self._gate:
            self._waiting += asked
            if asked and not self._answering:
                self._answering = True
                # The process waits for it, whoever asks: one that torch is in must not be cut off.
                threading.Thread(target=self._run_rounds, name="swarm-local", daemon=False).start()
        return asked

    def _run_rounds(self) -> None:
        """Answer round by round until nobody waits."""
        ready: list[PendingRequest] = []
        while True:
            time.sleep(BATCH_WAIT_S)
            with self._gate:
                fresh, self._waiting = self._waiting, []
                if not fresh and not ready:
                    self._answering = False
                    return
            with self._busy:
                ready += [one for one in fresh if self._fits_context(one)]
                ready = [one for one in ready if not one.left]
                if ready:
                    chosen = select_round(ready)
                    self._run_round(chosen)
                    done = {one for row in chosen for one in row}
                    ready = [one for one in ready if one not in done]

    def _fits_context(self, one: PendingRequest) -> bool:
        """Whether a request can be answered; who asked hears why if it cannot."""
        try:
            one.request = self._engine.clip_to_context(one.request)
        except Exception as error:  # whatever it is, it is theirs and not this thread's
            one.answer.set_exception(error)
            return False
        return True

    def _run_round(self, chosen: Sequence[Sequence[PendingRequest]]) -> None:
        """Answer equally many requests of several voices; what goes wrong goes to all who asked."""
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

    def _build_position(self, place: ModelIndex) -> np.ndarray:
        """Of one voice, or the sum of several by their coefficients."""
        parts = ((place, 1.0),) if isinstance(place, int) else place
        found: np.ndarray = sum(share * self._positions[one] for one, share in parts)
        return found


def select_round(ready: Sequence[PendingRequest]) -> list[list[PendingRequest]]:
    """Of each voice that has any equally many requests, oldest first; all scored or all written."""
    scored = bool(ready[0].request.choices)
    rows: dict[ModelIndex, list[PendingRequest]] = {}
    for one in ready:
        if bool(one.request.choices) == scored:
            rows.setdefault(one.place, []).append(one)
    most = min(map(len, rows.values()))
    return [row[:most] for row in rows.values()]


def _build_stop_check(one: PendingRequest) -> Callable[[str], bool]:
    """Whether a text is done: as the request says, or as nobody waits for it any more."""
    decided = one.request.decided
    return lambda text: one.left or bool(decided and decided(text))
