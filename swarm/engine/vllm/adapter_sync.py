"""Positions as adapters in vLLM: written as folders, or as coefficients into its slots."""

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

from swarm.errors import NotFinite, UserError
from swarm.pool.adapter import CONFIG_FILE, WEIGHTS_FILE
from swarm.pool.pool import Pool

if TYPE_CHECKING:
    import torch


class HostBasis:
    """The experts of an open pool in memory, float32 on the CPU.

    Attributes:
        count: K x G, the coefficients of a position on one route.
        rows: K.
        shared: Whether A is the same at every position and only B has coefficients, as in the delta
            space.
        starts: For each module, the index of its group's first coefficient in a position.
    """

    def __init__(self, pool: Pool) -> None:
        self._held = {name: pool.expert_factors(name) for name in pool.modules}
        self.rows = len(pool.names)
        self.count = len(pool.split_routes([0.0] * self.rows * len(pool.groups))[0])
        self.shared = pool.space == "delta"
        self.starts = {
            name: int(places[0]) // self.rows * self.rows
            for name, (_, _, places) in self._held.items()
        }
        self._rank = pool.rank

    def write_adapter(
        self, position: Sequence[float] | np.ndarray, folder: Path, dtype: str
    ) -> None:
        """Write the adapter at a position [G * K], summed in float32, to a new folder.

        Args:
            dtype: Type of the file's weights, such as "bfloat16".

        Raises:
            NotFinite: A weight is not finite in this type.
        """
        import torch
        from safetensors.torch import save_file

        coefficients = torch.as_tensor(np.asarray(position), dtype=torch.float32)
        tensors = {}
        for module, factors in self._held.items():
            for side, weight in zip("AB", mix_factors(factors, coefficients), strict=True):
                key = f"base_model.model.{module}.lora_{side}.weight"
                tensors[key] = weight.to(getattr(torch, dtype)).contiguous()
                if not tensors[key].isfinite().all():
                    raise NotFinite(0, "weights")
        # B includes the scaling, so alpha equals the rank.
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
    """Return A [r, in] and B [out, r] of one module, from `swarm.pool.pool.Pool.expert_factors`."""
    import torch

    down, up, places = factors
    weights = coefficients.index_select(0, places)
    if down.dim() == 2:
        return down, up * weights
    return torch.einsum("k,kri->ri", weights, down), torch.einsum("k,kor->or", weights, up)


SHARED_MEMORY = Path("/dev/shm")
"""Memory-backed storage on Linux."""

FOLDER_PREFIX = "model-swarms-"
"""Prefix of the names of folders there; followed by the process id."""

STALE_AFTER_S = 600.0
"""Seconds after which a folder of a finished process is removed."""


class AdapterSync:
    """Loads positions into vLLM; repeated positions are not loaded again.

    Args:
        llm: The engine, vLLM's `LLM`.
        basis: The experts.
        max_positions: Maximum number of positions at once.
    """

    def __init__(self, llm: Any, basis: HostBasis, max_positions: int) -> None:
        self.llm, self.basis, self.max_positions = llm, basis, max_positions
        self.dtype = str(llm.model_config.dtype).removeprefix("torch.")
        self.requests: list[Any] = []
        self._held: np.ndarray | None = None
        remove_stale_folders()

    def update_positions(self, positions: np.ndarray) -> list[Any]:
        """Replace the loaded positions by positions [P, G * K].

        Returns:
            vLLM's name of each, a `LoRARequest`.

        Raises:
            NotFinite: The weights at a position are not finite in the model's type.
            UserError: vLLM refuses them, or does not contain what was written.
        """
        if self._held is None or not np.array_equal(positions, self._held):
            self._held = None
            self.sync_positions(positions)
            self._held = positions.copy()
        return self.requests

    def sync_positions(self, positions: np.ndarray) -> None:
        """Load other positions, and set their names in `requests`."""
        raise NotImplementedError

    def verify_loaded(self) -> None:
        """Check that vLLM still holds the loaded adapters.

        Raises:
            UserError: It does not.
        """
        raise NotImplementedError

    def load_adapter(self, position: np.ndarray, number: int) -> Any:
        """Load the adapter at a position [G * K] into vLLM under a number, and return its name.

        Raises:
            UserError: vLLM refuses the adapter, or part of it.
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
    """Refuse an adapter of which vLLM leaves something out, which it does silently.

    Raises:
        UserError: There are such modules.
    """
    if modules:
        raise UserError(
            f"engine=vllm: vLLM ignores {len(modules)} of the experts' modules, such as "
            f"{modules[0]}, which it has under no such name; use engine=hf"
        )


def check_sound(problem: str) -> None:
    """Refuse to continue with other weights than those requested.

    Raises:
        UserError: There is a problem.
    """
    if problem:
        raise unsound_error(problem)


def unsound_error(problem: str) -> UserError:
    """Return the error for a state of vLLM that no answer may come from."""
    return UserError(f"engine=vllm: {problem}; rerun the same command to resume with a new engine")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a temporary folder: in memory, or on disk if less than 1 GiB of memory is free."""
    try:
        memory = shutil.disk_usage(SHARED_MEMORY).free > 2**30
    except OSError:
        memory = False
    with tempfile.TemporaryDirectory(
        prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=SHARED_MEMORY if memory else None
    ) as folder:
        yield Path(folder)


def remove_stale_folders() -> None:
    """Remove folders that killed processes have left in memory."""
    for folder in SHARED_MEMORY.glob(f"{FOLDER_PREFIX}*"):
        number = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if not number.isdigit() or Path("/proc", number).exists():
            continue
        # Another container may share the memory but not the process ids, so a missing process alone
        # is no proof.
        if time.time() - folder.stat().st_mtime > STALE_AFTER_S:
            shutil.rmtree(folder, ignore_errors=True)


class FolderSync(AdapterSync):
    """Writes each position as an adapter, has vLLM load it, and removes the folder at once.

    No name or number is reused in the life of an engine: vLLM's prefix cache is keyed by the name,
    its loaded adapters by the number.
    """

    def __init__(self, llm: Any, basis: HostBasis, most: int) -> None:
        super().__init__(llm, basis, most)
        self._numbers = itertools.count(1)

    def sync_positions(self, positions: np.ndarray) -> None:
        """See `AdapterSync.sync_positions`."""
        while self.requests:
            self.llm.llm_engine.remove_lora(self.requests.pop().lora_int_id)
        for i, position in enumerate(positions):
            try:
                self.requests.append(self.load_adapter(position, next(self._numbers)))
            except NotFinite as error:
                raise NotFinite(i, error.quantity) from None

    def verify_loaded(self) -> None:
        """See `AdapterSync.verify_loaded`."""
        gone = {one.lora_int_id for one in self.requests} - self.llm.llm_engine.list_loras()
        check_sound(f"vLLM has dropped {len(gone)} adapters of a running job" if gone else "")


class SlotSync(AdapterSync):
    """Allocates a permanent slot per position, and has vLLM's workers overwrite the slots.

    Only coefficients are sent. vLLM's prefix cache is keyed by an adapter's name and path, and each
    write sets new ones, so that cached prompts of other weights are not reused; the number
    identifies the slot. Nothing may be evicted or put to sleep, since vLLM's own copy of an adapter
    is never updated.

    Raises:
        UserError: vLLM refuses the experts, or has layers that cannot be written like this.
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
                raise UserError(f"engine.way=slots: {problem}; use engine.way=folders")
        self._numbers = list(range(1, most + 1))
        for number in self._numbers:
            # Only allocates the slot. An expert itself may not be finite in the model's type.
            self.load_adapter(np.zeros(basis.count), number)
            llm.llm_engine.pin_lora(number)

    def sync_positions(self, positions: np.ndarray) -> None:
        """See `AdapterSync.sync_positions`."""
        from vllm.lora.request import LoRARequest

        numbers = self._numbers[: len(positions)]
        written = self.llm.collective_rpc("swarm_write", args=(numbers, positions.tolist()))
        for overflown, problem in written:
            if overflown:
                raise NotFinite(min(overflown), "weights")
            check_sound(problem)
        version = next(self._versions)
        self.requests = [
            LoRARequest(f"written-{version}-{number}", number, f"written/{version}/{number}")
            for number in numbers
        ]

    def verify_loaded(self) -> None:
        """See `AdapterSync.verify_loaded`."""
        for problem in self.llm.collective_rpc("swarm_changed"):
            check_sound(problem)
