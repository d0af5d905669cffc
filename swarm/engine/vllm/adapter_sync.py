"""A way into vLLM for positions, and the folders that both ways load adapters from."""

import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swarm.errors import UserError
from swarm.pool.adapter import CONFIG_FILE, WEIGHTS_FILE
from swarm.pool.pool import Pool

if TYPE_CHECKING:
    import torch

# Adapters at a position, made of what the pool holds, and written as vLLM reads them.


class HostBasis:
    """The experts of an open pool in memory, float32 on the CPU.

    Attributes:
        count: K x G, the coefficients of a position.
        rows: K.
        shared: Whether A is the same at every position and the coefficients are in B alone, as in
            the delta space.
        starts: Of each module, where the coefficients of its group begin in a position.
    """

    def __init__(self, pool: Pool) -> None:
        self._held = {name: pool.expert_factors(name) for name in pool.modules}
        self.rows = len(pool.names)
        self.count = self.rows * len(pool.groups)
        self.shared = pool.space == "delta"
        self.starts = {
            name: int(places[0]) // self.rows * self.rows
            for name, (_, _, places) in self._held.items()
        }
        self._rank = pool.rank

    def write_adapter(
        self, position: Sequence[float] | np.ndarray, folder: Path, dtype: str
    ) -> None:
        """Write the adapter at a position [G * K], summed in float32, in a new folder.

        Args:
            dtype: Of the file's weights, such as "bfloat16".
        """
        import torch
        from safetensors.torch import save_file

        coefficients = torch.as_tensor(np.asarray(position), dtype=torch.float32)
        tensors = {}
        for module, factors in self._held.items():
            for side, weight in zip("AB", mix_factors(factors, coefficients), strict=True):
                key = f"base_model.model.{module}.lora_{side}.weight"
                tensors[key] = weight.to(getattr(torch, dtype)).contiguous()
        # The scaling is in B: alpha is the rank.
        config = {
            "peft_type": "LORA",
            "r": self._rank,
            "lora_alpha": self._rank,
            "bias": "none",
            "target_modules": sorted({name.rpartition(".")[2] for name in self._held}),
        }
        folder.mkdir()
        (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        save_file(tensors, folder / WEIGHTS_FILE)


def mix_factors(
    factors: "tuple[torch.Tensor, torch.Tensor, torch.Tensor]", coefficients: "torch.Tensor"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """A [r, in] and B [out, r] of one module, from what `swarm.pool.pool.Pool.expert_factors`
    gives."""
    import torch

    down, up, places = factors
    weights = coefficients.index_select(0, places)
    if down.dim() == 2:
        return down, up * weights
    return torch.einsum("k,kri->ri", weights, down), torch.einsum("k,kor->or", weights, up)


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


# Positions as adapters in folders, vLLM's own way in.


class FolderSync(AdapterSync):
    """Writes each position as an adapter, has vLLM load it, and removes the folder at once.

    No name or number comes twice in the life of an engine: vLLM's prefix cache goes by the name,
    its loaded adapters go by the number.
    """

    def __init__(self, llm: Any, basis: HostBasis, most: int) -> None:
        super().__init__(llm, basis, most)
        self._numbers = itertools.count(1)

    def sync_positions(self, positions: np.ndarray) -> None:
        """See `Way.bring`."""
        while self.requests:
            self.llm.llm_engine.remove_lora(self.requests.pop().lora_int_id)
        for position in positions:
            self.requests.append(self.load_adapter(position, next(self._numbers)))

    def verify_loaded(self) -> None:
        """See `Way.verify`."""
        gone = {one.lora_int_id for one in self.requests} - self.llm.llm_engine.list_loras()
        check_sound(f"vLLM has dropped {len(gone)} adapters of a job under way" if gone else "")


# Positions as coefficients, which vLLM's workers write into the places of adapters.


class SlotSync(AdapterSync):
    """Keeps as many adapters as positions in their places, for good, and has them written over.

    vLLM's prefix cache goes by an adapter's name and path, and each writing gives new ones, so
    cached prompts of other weights stay apart; the number finds the place. Nothing may be evicted
    or put to sleep, since vLLM's own copy of an adapter stays what it was at first.

    Raises:
        UserError: vLLM does not take the experts, or has layers that cannot be written like this.
    """

    def __init__(self, llm: Any, basis: HostBasis, most: int) -> None:
        super().__init__(llm, basis, most)
        self._versions = itertools.count(1)
        units = [(np.arange(basis.count) % basis.rows == row) * 1.0 for row in range(basis.rows)]
        for unit in units:
            with temporary_folder() as folder:
                basis.write_adapter(unit, folder / "expert", "float32")
                llm.collective_rpc("swarm_take", args=(str(folder / "expert"),))
        for problem, ignored in llm.collective_rpc("swarm_hold", args=(basis.starts, basis.shared)):
            check_ignored(ignored)
            if problem:
                raise UserError(f"engine.way=slots: {problem}; choose engine.way=folders")
        self._numbers = list(range(1, most + 1))
        for number in self._numbers:
            self.load_adapter(units[0], number)
            llm.llm_engine.pin_lora(number)

    def sync_positions(self, positions: np.ndarray) -> None:
        """See `Way.bring`."""
        from vllm.lora.request import LoRARequest

        numbers = self._numbers[: len(positions)]
        for problem in self.llm.collective_rpc("swarm_write", args=(numbers, positions.tolist())):
            check_sound(problem)
        version = next(self._versions)
        self.requests = [
            LoRARequest(f"written-{version}-{number}", number, f"written/{version}/{number}")
            for number in numbers
        ]

    def verify_loaded(self) -> None:
        """See `Way.verify`."""
        for problem in self.llm.collective_rpc("swarm_changed"):
            check_sound(problem)
