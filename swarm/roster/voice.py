"""One model on this machine as it is used by name: asked, asked piece by piece, from any thread."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from swarm.engine.base import BaseModel
from swarm.engine.device import choose_device
from swarm.engine.stands import model_group
from swarm.engine.together import PendingRequest, ModelIndex, Batcher
from swarm.errors import UserError
from swarm.models import Completion, Delta, Request, Stream

if TYPE_CHECKING:
    from swarm.roster.local import LocalModels


class SharedLocalModel:
    """A model that `swarm.roster.local.Locals` has made; opens itself when it is first asked.

    Without a temperature it is greedy; a seed of `None` is 0. What it draws follows from its name
    too, so that voices of one base do not all draw alike. No more is written than its context has
    room for.
    """

    def __init__(self, home: "LocalModels", name: str, folder: Path | None, base: BaseModel) -> None:
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
        """Answer all requests; see `swarm.models.Model.generate`.

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
        """What each request comes to; see `swarm.models.attempt`."""
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
        """Answer piece by piece; see `swarm.models.stream`."""
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
