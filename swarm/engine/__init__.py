"""The engine answers requests for many positions at once; the only room with much torch in it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from swarm.engine.base import Base
from swarm.models import Completion, Request
from swarm.pool import Pool


class Engine(Protocol):
    """Answers requests with mixtures of a pool's experts."""

    def open(self, base: Base, pool: Pool, device: str) -> None:
        """Load the base once on `device` ("cpu", "cuda:0", ...) and make the pool's experts ready.

        Raises:
            UserError: The pool does not fit the base, or the device has no room for them.
        """
        ...

    def answer(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """Answer, for each of the P positions [P, K], its own list of requests, order kept."""
        ...
