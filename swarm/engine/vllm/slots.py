"""Positions as coefficients: vLLM's workers write them into the places of adapters."""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from swarm.engine.vllm.folders import check_ignored, load, storage
from swarm.engine.vllm.mixing import Basis
from swarm.errors import UserError


class Slots:
    """Keeps as many adapters as positions in their places, for good, and has them written over.

    vLLM's prefix cache goes by an adapter's name and path. The path of one that is loaded is never
    opened again, so a new one for each writing keeps cached prompts of other weights apart. Nothing
    may be evicted or put to sleep, since vLLM's own copy of an adapter stays what it was at first.

    Args:
        llm: The engine, of vLLM's `LLM`, started with `swarm.engine.vllm.extension.Extension`.
        basis: The experts; each is sent to the workers once.
        most: How many places.

    Raises:
        UserError: vLLM does not take the experts, or has layers that cannot be written like this.
    """

    def __init__(self, llm: Any, basis: Basis, most: int) -> None:
        self._llm = llm
        self._versions = itertools.count(1)
        self._held: np.ndarray | None = None
        self._requests: list[Any] = []
        with tempfile.TemporaryDirectory(prefix="model-swarms-", dir=storage()) as room:
            folders = []
            for row in range(basis.rows):
                folders.append(str(Path(room) / f"row-{row}"))
                unit = np.zeros(basis.count)
                unit[row :: basis.rows] = 1
                basis.write(unit, Path(folders[-1]), "float32")
            arguments = (folders, basis.starts, basis.shared)
            for problem, ignored in llm.collective_rpc("swarm_hold", args=arguments):
                check_ignored(ignored)
                raise_problem(problem)
        dtype = str(llm.model_config.dtype).removeprefix("torch.")
        start = np.zeros(basis.count)
        start[:: basis.rows] = 1
        self._ids = list(range(1, most + 1))
        for number in self._ids:
            load(llm, basis, start, number, dtype)
            llm.llm_engine.pin_lora(number)

    def put(self, positions: np.ndarray) -> list[Any]:
        """Write these positions [P, G * K]; see `swarm.engine.vllm.folders.Folders.put`."""
        from vllm.lora.request import LoRARequest

        if self._held is not None and np.array_equal(positions, self._held):
            return self._requests
        self._held = None
        ids = self._ids[: len(positions)]
        for problem in self._llm.collective_rpc("swarm_write", args=(ids, positions.tolist())):
            raise_changed(problem)
        version = next(self._versions)
        self._requests = [
            LoRARequest(f"position-{number}", number, f"written/{version}/{number}")
            for number in ids
        ]
        self._held = positions.copy()
        return self._requests

    def verify(self) -> None:
        """Make sure that the places still hold what was written into them."""
        for problem in self._llm.collective_rpc("swarm_changed"):
            raise_changed(problem)


def raise_problem(problem: str) -> None:
    """Say that these layers need the other way.

    Raises:
        UserError: There is a problem.
    """
    if problem:
        raise UserError(f"engine.way=slots: {problem}; choose engine.way=folders")


def raise_changed(problem: str) -> None:
    """Refuse to go on with other weights than those that were asked for."""
    if problem:
        raise RuntimeError(f"engine.way=slots: {problem}")
