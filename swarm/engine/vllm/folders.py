"""Positions as adapters in folders: vLLM's own way in."""

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from swarm.engine.vllm.mixing import Basis
from swarm.errors import UserError

MEMORY = Path("/dev/shm")
"""Storage in memory, where Linux has it."""


class Folders:
    """Writes each position as an adapter, has vLLM load it, and removes the folder at once.

    No name or id comes twice in the life of an engine, since vLLM's prefix cache goes by the name
    and its loaded adapters by the id. Positions that come again right away stay where they are.

    Args:
        llm: The engine, of vLLM's `LLM`.
        basis: The experts.
        most: Positions at once.
    """

    def __init__(self, llm: Any, basis: Basis, most: int) -> None:
        self._llm, self._basis = llm, basis
        self._numbers = itertools.count(1)
        self._held: np.ndarray | None = None
        self._requests: list[Any] = []
        self._dtype = str(llm.model_config.dtype).removeprefix("torch.")

    def put(self, positions: np.ndarray) -> list[Any]:
        """Load these positions [P, G * K] in the place of those before.

        Returns:
            vLLM's name of each, a `LoRARequest`.
        """
        if self._held is not None and np.array_equal(positions, self._held):
            return self._requests
        self._held = None
        while self._requests:
            self._llm.llm_engine.remove_lora(self._requests.pop().lora_int_id)
        for position in positions:
            self._requests.append(load(self._llm, self._basis, position, next(self._numbers),
                                       self._dtype))  # fmt: skip
        self._held = positions.copy()
        return self._requests

    def verify(self) -> None:
        """Make sure that vLLM has let none of them go in the meantime."""
        gone = {one.lora_int_id for one in self._requests} - self._llm.llm_engine.list_loras()
        if gone:
            raise RuntimeError(f"vLLM has dropped {len(gone)} adapters of a job under way")


def load(llm: Any, basis: Basis, position: np.ndarray, number: int, dtype: str) -> Any:
    """Have vLLM load the adapter at a position under a number of its own; gives its name.

    Raises:
        UserError: vLLM does not take the adapter, or not all of it.
    """
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory(prefix="model-swarms-", dir=storage()) as room:
        folder = Path(room) / f"position-{number}"
        basis.write(position, folder, dtype)
        request = LoRARequest(f"position-{number}", number, str(folder))
        try:
            llm.llm_engine.add_lora(request)
        except ValueError as error:
            said = " ".join(str(error).replace(str(folder), "it").split())
            raise UserError(
                f"engine=vllm does not take the adapter: {said}; try engine=hf"
            ) from None
    for ignored in llm.collective_rpc("swarm_ignored", args=(number,)):
        check_ignored(ignored)
    return request


def check_ignored(modules: list[str]) -> None:
    """Refuse an adapter of which vLLM leaves something out, which it does without a word.

    Raises:
        UserError: There are such modules.
    """
    if modules:
        raise UserError(
            f"engine=vllm: vLLM leaves out {len(modules)} of the experts' modules, such as "
            f"{modules[0]}, which it does not have under that name; choose engine=hf"
        )


def storage() -> str | None:
    """A folder in memory, if there is one with room; `None` is where temporary files go."""
    try:
        free = shutil.disk_usage(MEMORY).free
    except OSError:
        return None
    return str(MEMORY) if free > 2**30 else None
