"""Code that runs inside vLLM's workers; the only module that uses its internals (0.32 and 0.33)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch


class SlotTensor(NamedTuple):
    """One tensor of slots, and the experts' share of it.

    Attributes:
        name: Name of the layer in vLLM.
        slots: [slots, 1, ...], vLLM's own.
        basis: [K, 1, ...], float32, cut and packed as the slots are; [1, 1, ...] if fixed.
        start: Index of its group's first coefficient in a position.
        fixed: Whether it is the same for all positions, and already in the slots.
        sums, sizes: [K], each row's checksum, and that of its absolute values.
    """

    name: str
    slots: torch.Tensor
    basis: torch.Tensor
    start: int
    fixed: bool
    sums: torch.Tensor
    sizes: torch.Tensor


class WorkerExtension:
    """Methods added to vLLM's worker (`worker_extension_cls`), called by `collective_rpc`."""

    model_runner: Any

    def swarm_ignored(self, number: int) -> list[str]:
        """Return the modules of a loaded adapter that belong to no layer of the model."""
        manager = self.model_runner.lora_manager._adapter_manager
        return unmatched_modules(manager, manager.get_adapter(number))

    def swarm_take(self, folder: str) -> None:
        """Read one more expert, packed by vLLM as for a slot."""
        self._swarm_rows = [
            *getattr(self, "_swarm_rows", []),
            read_adapter(self.model_runner.lora_manager, folder),
        ]

    def swarm_hold(self, starts: Mapping[str, int], shared: bool) -> tuple[str, list[str]]:
        """Store the experts that were read in the layout of the slots.

        Args:
            starts: See `swarm.engine.vllm.adapter_sync.HostBasis`.
            shared: Likewise.

        Returns:
            Why this is impossible, empty if it is not, and the modules that vLLM would leave out.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        rows, self._swarm_rows = self._swarm_rows, []
        self._swarm_parts: list[SlotTensor] = []
        self._swarm_noted: dict[int, torch.Tensor] = {}
        if ignored := sorted({name for row in rows for name in unmatched_modules(manager, row)}):
            return "", ignored
        for name, layer in manager.modules.items():
            weights = [row.get_lora(name) for row in rows]
            if not any(weights):
                continue
            members = manager.packed_modules.get(name, [name])
            where = [starts.get(member, -1) for member in members]
            if type(layer).__name__.startswith("FusedMoE"):
                return f"{name} is a mixture of experts, which it cannot write", []
            made = slot_tensors(name, layer, weights, where, shared)
            alone = len(set(starts.values())) == 1
            if not alone and (max(where) < 0 or len(where) * 2 not in (2, len(made))):
                return f"{name} is divided differently in vLLM, so its group is unknown", []
            self._swarm_parts += made
        return "", []

    def swarm_write(
        self, numbers: Sequence[int], positions: Sequence[Sequence[float]]
    ) -> tuple[list[int], str]:
        """Write the combinations of positions [P, G * K] into the slots of these adapters.

        Returns:
            The indices of the positions with weights beyond the range of the slots' type, and the
            error found by checksums afterwards; both empty if there is none.
        """
        self._swarm_noted = {}
        places, gone = self._swarm_places(numbers)
        if gone:
            return [], gone
        weights = torch.tensor(positions, dtype=torch.float64, device=places.device)
        expected, error = [], []
        overflown = torch.zeros(len(numbers), dtype=torch.bool, device=places.device)
        for part in self._swarm_parts:
            mine = weights.new_ones(len(numbers), 1)
            if not part.fixed:
                mine = weights[:, part.start : part.start + len(part.basis)]
                made = torch.einsum("pk,k...->p...", mine.float(), part.basis)
                part.slots[places] = cast = made.to(part.slots.dtype)
                overflown |= cast.isinf().flatten(1).any(1)
            expected.append(mine @ part.sums)
            error.append(
                mine.abs() @ part.sizes * relative_tolerance(part) + absolute_tolerance(part)
            )
        if overflown.any():
            return overflown.nonzero().flatten().tolist(), ""
        found = self._swarm_sums(places)
        # Negated comparison, so that NaN counts as an error too.
        right = (found - torch.stack(expected)).abs() <= torch.stack(error)
        if not bool(right.all()):
            part = self._swarm_parts[int((~right).any(1).nonzero()[0])]
            return [], f"the checksum of {part.name} is not that of the combination"
        self._swarm_noted = dict(zip(numbers, found.T, strict=True))
        return [], ""

    def swarm_watch(self) -> None:
        """Check all logits from now on; the result stays on the device until it is read."""
        self._swarm_finite: torch.Tensor | None = None
        model = self.model_runner.get_model()
        # The second computes a worker's part of the vocabulary, if vLLM shards sampling.
        for name in ("compute_logits", "compute_logits_local"):
            if compute := getattr(model, name, None):
                setattr(model, name, partial(self._swarm_checked, compute))

    def _swarm_checked(self, compute: Callable[..., Any], *args: Any, **more: Any) -> Any:
        logits = compute(*args, **more)
        if logits is not None:  # with tensor parallelism, some workers may have none
            # amax treats NaN as the highest, so one number per row detects all but -inf, which a
            # model may use to exclude a token.
            finite = logits.amax(dim=-1).isfinite().all()
            known = self._swarm_finite
            self._swarm_finite = finite if known is None else known & finite
        return logits

    def swarm_finite(self) -> bool:
        """Return whether all logits since the last call were finite."""
        finite, self._swarm_finite = self._swarm_finite, None
        return finite is None or bool(finite)

    def swarm_changed(self) -> str:
        """Return which slot has changed since it was written; empty if none."""
        places, gone = self._swarm_places(list(self._swarm_noted))
        if gone or not self._swarm_noted:
            return gone
        for number, now in zip(self._swarm_noted, self._swarm_sums(places).T, strict=True):
            if not torch.equal(now, self._swarm_noted[number]):
                return f"the slot of adapter {number} differs from what was written"
        return ""

    def swarm_clear(self) -> None:
        """Overwrite the key-value cache by zeros; prompts in it must have been forgotten."""
        waiting = list(self.model_runner.kv_caches)
        while waiting:
            found = waiting.pop()
            if isinstance(found, torch.Tensor):
                found.zero_()
            else:
                waiting += found

    def _swarm_places(self, numbers: Sequence[int]) -> tuple[torch.Tensor, str]:
        """Return the slots [P] of these adapters, and an error if one is missing."""
        manager = self.model_runner.lora_manager._adapter_manager
        held = manager.lora_index_to_id
        found = [held.index(number) for number in numbers if number in held]
        gone = "" if len(found) == len(numbers) else "vLLM has removed an adapter from its slot"
        return torch.tensor(found, dtype=torch.long, device=manager.device), gone

    def _swarm_sums(self, places: torch.Tensor) -> torch.Tensor:
        """Return the checksums of all tensors of some slots, [parts, P]."""
        return torch.stack([row_checksums(part.slots[places]) for part in self._swarm_parts])


def unmatched_modules(manager: Any, adapter: Any) -> list[str]:
    """Return the modules of an adapter that vLLM has packed but will not find a layer for."""
    return sorted(name for name in adapter.loras if name not in manager.modules)


def read_adapter(worker: Any, folder: str) -> Any:
    """Return an adapter in float32 as vLLM packs it, without registering it."""
    from vllm.lora.request import LoRARequest

    manager, config = worker._adapter_manager, worker.lora_config
    # vLLM casts to lora_dtype on loading, but positions are mixed in float32.
    kept, config.lora_dtype = config.lora_dtype, torch.float32
    try:
        adapter = worker._load_adapter(LoRARequest("row", 1, folder))
    finally:
        config.lora_dtype = kept
    manager._create_merged_loras_inplace(adapter)
    return adapter


def slot_tensors(
    name: str, layer: Any, weights: Sequence[Any], where: Sequence[int], shared: bool
) -> list[SlotTensor]:
    """Return the tensors of one layer; vLLM's own `set_lora` shards and places the weights.

    Args:
        weights: For each expert, vLLM's packed weights, or `None`.
        where: For each slice of the layer, the start of its group; -1 if no expert has the slice.
    """
    stacks = {side: getattr(layer, f"lora_{side}_stacked") for side in "ab"}
    single = not isinstance(stacks["a"], tuple)
    basis = {
        side: tuple(
            torch.zeros(len(weights), *one.shape[1:], device=one.device)
            for one in ([found] if single else found)
        )
        for side, found in stacks.items()
    }
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
            kept = experts[:1].clone() if fixed else experts
            sums = row_checksums(kept), row_checksums(kept.abs())
            made.append(SlotTensor(name, slot, kept, max(0, start), fixed, *sums))
    return made


def row_checksums(rows: torch.Tensor) -> torch.Tensor:
    """Return a number per row [P] that changes with a value and, unlike a sum, with its index."""
    flat = rows.float().flatten(1)
    ramp = torch.linspace(1, 2, flat.shape[1], device=flat.device)
    return (flat * ramp).sum(1, dtype=torch.float64)


def relative_tolerance(part: SlotTensor) -> float:
    """Return the relative error of a slot's values: rounded to its type once, in float32 before."""
    return torch.finfo(part.slots.dtype).eps + 8 * torch.finfo(torch.float32).eps


def absolute_tolerance(part: SlotTensor) -> float:
    """Return the absolute error of a slot's checksum from values that underflow its type."""
    values = part.slots[0].numel()
    kind = torch.finfo(part.slots.dtype)
    return 2.0 * values * kind.smallest_normal * kind.eps
