"""A way into vLLM for positions, and the folders that both ways load adapters from."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from swarm.engine.vllm.mixing import HostBasis
from swarm.errors import UserError

SHARED_MEMORY = Path("/dev/shm")
"""Storage in memory, where Linux has it."""

FOLDER_PREFIX = "model-swarms-"
"""How the names of the folders there begin; the number of their process comes next."""

STALE_AFTER_S = 600.0
"""A folder of a process that is gone is removed after so many seconds."""


class AdapterSync:
    """Brings positions into vLLM; those that come again right away are there already.

    Args:
        llm: The engine, of vLLM's `LLM`.
        basis: The experts.
        most: Positions at once.
    """

    def __init__(self, llm: Any, basis: HostBasis, most: int) -> None:
        self.llm, self.basis, self.most = llm, basis, most
        self.dtype = str(llm.model_config.dtype).removeprefix("torch.")
        self.requests: list[Any] = []
        self._held: np.ndarray | None = None
        remove_stale_folders()

    def update_positions(self, positions: np.ndarray) -> list[Any]:
        """Bring in positions [P, G * K] in the place of those before.

        Returns:
            vLLM's name of each, a `LoRARequest`.

        Raises:
            UserError: vLLM does not take them, or does not hold what was written.
        """
        if self._held is None or not np.array_equal(positions, self._held):
            self._held = None
            self.sync_positions(positions)
            self._held = positions.copy()
        return self.requests

    def sync_positions(self, positions: np.ndarray) -> None:
        """Bring in other positions, whose names are `requests` then."""
        raise NotImplementedError

    def verify_loaded(self) -> None:
        """Make sure that vLLM still holds what it was given.

        Raises:
            UserError: It does not.
        """
        raise NotImplementedError

    def load_adapter(self, position: np.ndarray, number: int) -> Any:
        """Have vLLM load the adapter at a position [G * K] under a number; gives its name.

        Raises:
            UserError: vLLM does not take the adapter, or not all of it.
        """
        from vllm.lora.request import LoRARequest

        with temporary_folder() as folder:
            self.basis.write_adapter(position, folder / "adapter", self.dtype)
            request = LoRARequest(f"position-{number}", number, str(folder / "adapter"))
            self.llm.llm_engine.add_lora(request)
        for ignored in self.llm.collective_rpc("swarm_ignored", args=(number,)):
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


def check_sound(problem: str) -> None:
    """Refuse to go on with other weights than those that were asked for.

    Raises:
        UserError: There is a problem.
    """
    if problem:
        raise UserError(f"engine=vllm: {problem}; the same command goes on with a fresh engine")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for a moment: in memory, or with other temporary files where that has no room."""
    try:
        memory = shutil.disk_usage(SHARED_MEMORY).free > 2**30
    except OSError:
        memory = False
    with tempfile.TemporaryDirectory(
        prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=SHARED_MEMORY if memory else None
    ) as folder:
        yield Path(folder)


def remove_stale_folders() -> None:
    """Remove what processes that were killed have left in memory."""
    for folder in SHARED_MEMORY.glob(f"{FOLDER_PREFIX}*"):
        number = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if not number.isdigit() or Path("/proc", number).exists():
            continue
        # Another container may share the memory and not the numbers of processes.
        if time.time() - folder.stat().st_mtime > STALE_AFTER_S:
            shutil.rmtree(folder, ignore_errors=True)
