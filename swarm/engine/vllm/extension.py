"""What runs inside vLLM's workers; the only place that knows vLLM's inside (0.32 and 0.33)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Part(NamedTuple):
    """One tensor of slots, and the experts' share of it.

    Attributes:
        name: Of the layer, in vLLM's words.
        slots: [slots, 1, ...], vLLM's own.
        basis: [K, 1, ...], float32, cut and packed as the slots are.
        start: Where the coefficients of its group begin in a position.
        fixed: Whether all positions have the first row alone.
        sums: [K], each row's checksum.
    """

    name: str
    slots: torch.Tensor
    basis: torch.Tensor
    start: int
    fixed: bool
    sums: torch.Tensor


class Extension:
    """Methods that vLLM's worker gets (`worker_extension_cls`), called by `collective_rpc`."""

    model_runner: Any

    def swarm_ignored(self, number: int) -> list[str]:
        """The modules of a loaded adapter that belong to no layer of the model."""
        manager = self.model_runner.lora_manager._adapter_manager
        return strange(manager, manager.get_adapter(number))

    def swarm_hold(
        self, folders: Sequence[str], starts: Mapping[str, int], shared: bool
    ) -> tuple[str, list[str]]:
        """Take the experts out of these folders, as vLLM itself would put them into a slot.

        Args:
            folders: Of the K experts.
            starts: See `swarm.engine.vllm.mixing.Basis`.
            shared: Likewise.

        Returns:
            Why that cannot be, empty if it can, and the modules that vLLM would leave out.
        """
        worker = self.model_runner.lora_manager
        manager = worker._adapter_manager
        rows = [read(worker, folder) for folder in folders]
        self._swarm_parts: list[Part] = []
        self._swarm_noted: dict[int, torch.Tensor] = {}
        if ignored := sorted({name for row in rows for name in strange(manager, row)}):
            return "", ignored
        for name, layer in manager.modules.items():
            weights = [row.get_lora(name) for row in rows]
            if not any(weights):
                continue
            members = manager.packed_modules.get(name, [name])
            where = [starts.get(member, -1) for member in members]
            if type(layer).__name__.startswith("FusedMoE"):
                return f"{name} is a mixture of experts, which it cannot write", []
            if len(set(starts.values())) > 1 and max(where) < 0:
                return f"{name} is called otherwise in vLLM, so its group is not known", []
            self._swarm_parts += parts(name, layer, weights, where, shared)
        return "", []

    def swarm_write(self, ids: Sequence[int], positions: Sequence[Sequence[float]]) -> str:
        """Write the combinations of positions [P, G * K] into the slots of these adapters.

        Returns:
            What the checksums find wrong; empty if nothing.
        """
        places = self._swarm_places(ids)
        weights = torch.tensor(positions, dtype=torch.float64)
        self._swarm_noted = {}
        for part in self._swarm_parts:
            rows = len(part.basis)
            mine = weights[:, part.start : part.start + rows].to(part.basis.device)
            if part.fixed:
                mine = torch.zeros_like(mine)
                mine[:, 0] = 1
            made = torch.einsum("pk,k...->p...", mine.float(), part.basis).to(part.slots.dtype)
            part.slots[places] = made
            if wrong := differing(part, part.slots[places], mine):
                return wrong
        self._swarm_noted = {one: self._swarm_sums([place]) for one, place in
                             zip(ids, places.tolist(), strict=True)}  # fmt: skip
        return ""

    def swarm_changed(self) -> str:
        """What is no longer as it was written; empty if nothing."""
        places = self._swarm_places(list(self._swarm_noted))
        for (one, noted), place in zip(self._swarm_noted.items(), places.tolist(), strict=True):
            if not torch.equal(self._swarm_sums([place]), noted):
                return f"the adapter {one} in slot {place} is not what was written there"
        return ""

    def _swarm_places(self, ids: Sequence[int]) -> torch.Tensor:
        """The slots [P] that these adapters are in."""
        manager = self.model_runner.lora_manager._adapter_manager
        found = [manager.lora_index_to_id.index(one) for one in ids]
        return torch.tensor(found, dtype=torch.long, device=manager.device)

    def _swarm_sums(self, places: Sequence[int]) -> torch.Tensor:
        """The checksums of all parts of some slots, [parts, P]."""
        return torch.stack([checksum(part.slots[places]) for part in self._swarm_parts])


def strange(manager: Any, adapter: Any) -> list[str]:
    """The modules of an adapter that vLLM has packed but will not find a layer for."""
    return sorted(name for name in adapter.loras if name not in manager.modules)


def read(worker: Any, folder: str) -> Any:
    """An adapter in float32 as vLLM packs it; registered nowhere."""
    from vllm.lora.request import LoRARequest

    manager, config = worker._adapter_manager, worker.lora_config
    kept, config.lora_dtype = config.lora_dtype, torch.float32
    try:
        adapter = worker._load_adapter(LoRARequest("row", 1, folder))
    finally:
        config.lora_dtype = kept
    manager._create_merged_loras_inplace(adapter)
    return adapter


def parts(
    name: str, layer: Any, weights: Sequence[Any], where: Sequence[int], shared: bool
) -> list[Part]:
    """The tensors of one layer; vLLM's own `set_lora` cuts and places the experts' weights.

    Args:
        weights: Of each expert, vLLM's packed weights, or `None`.
        where: Of each slice of the layer, the start of its group; -1 of one that no expert has.
    """
    stacks = {side: getattr(layer, f"lora_{side}_stacked") for side in "ab"}
    single = not isinstance(stacks["a"], tuple)
    basis = {side: tuple(torch.zeros(len(weights), *one.shape[1:], device=one.device)
                         for one in ([found] if single else found))
             for side, found in stacks.items()}  # fmt: skip
    try:
        for side, rows in basis.items():
            setattr(layer, f"lora_{side}_stacked", rows[0] if single else rows)
        for row, found in enumerate(weights):
            if found is not None:
                layer.set_lora(row, found.lora_a, found.lora_b)
    finally:
        for side, slots in stacks.items():
            setattr(layer, f"lora_{side}_stacked", slots)
    made = []
    for side, rows in basis.items():
        slots = [stacks[side]] if single else stacks[side]
        # A layer of one member may have several slices of it.
        starts = where if len(where) == len(rows) else [max(where)] * len(rows)
        for slot, experts, start in zip(slots, rows, starts, strict=True):
            fixed = shared and side == "a"
            made.append(Part(name, slot, experts, max(0, start), fixed, checksum(experts)))
    return made


def checksum(rows: torch.Tensor) -> torch.Tensor:
    """A number for each row [P] that changes with a value and, unlike a sum, with its place."""
    flat = rows.double().flatten(1)
    return flat @ ramp(flat)


def ramp(flat: torch.Tensor) -> torch.Tensor:
    """What a row's values are weighted with, 1 to 2."""
    return torch.linspace(1, 2, flat.shape[1], dtype=torch.float64, device=flat.device)


def differing(part: Part, written: torch.Tensor, weights: torch.Tensor) -> str:
    """Whether slots hold another sum than that of the experts' checksums; empty if not."""
    expected = weights @ part.sums
    flat = written.double().flatten(1)
    # Each value is rounded once to the slots' type, and summed in float32 before.
    size = flat.abs() @ ramp(flat) + weights.abs() @ checksum(part.basis.abs())
    error = (torch.finfo(part.slots.dtype).eps + torch.finfo(torch.float32).eps * 4) * size
    if bool(((checksum(written) - expected).abs() > error).any()):
        return f"the checksum of {part.name} is not that of the combination"
    return ""
