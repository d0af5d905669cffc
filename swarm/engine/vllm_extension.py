"""Code that runs inside vLLM's workers; all that uses their internals (0.32 and 0.33)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from swarm.engine.full import Checkpoint


class WorkerExtension:
    """Methods added to vLLM's worker (`worker_extension_cls`), called by `collective_rpc`.

    A worker holds the experts' factors and a copy of the base weights that they adapt. The weights
    at a position are always computed from that copy, so that no rounding adds up, and put where the
    model's own are by vLLM's own reloading, which knows packed, sharded and converted layers.
    """

    model_runner: Any

    def swarm_hold(self, folder: str, basis: str) -> list[str]:
        """Read the experts, and the base weights that they adapt.

        Args:
            folder: Folder of the base's weights.
            basis: A file with A, B and coefficient indices of each module, see
                `swarm.engine.lora.Factors`, as "MODULE down", "MODULE up" and "MODULE places".

        Returns:
            The modules whose weight is not in the base's files, as of a tied output layer.
        """
        model = self.model_runner.get_model()
        device = next(model.parameters()).device
        self._swarm_factors: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in load_file(basis, device=str(device)).items():
            module, factor = name.split()
            self._swarm_factors.setdefault(module, {})[factor] = tensor
        checkpoint = Checkpoint(Path(folder))
        missing = [m for m in self._swarm_factors if f"{m}.weight" not in checkpoint.tensors]
        # vLLM packs layers of one parent (q_proj, k_proj, v_proj), and reloads packed ones whole.
        parents = {module.rpartition(".")[0] or module for module in self._swarm_factors}
        # In main memory: a second copy on a GPU would take that of the cache.
        self._swarm_base = {
            name: checkpoint.read_rows(name, ...).to(self.model_runner.model_config.dtype)
            for parent in sorted(parents)
            for name in checkpoint.tensors
            if name.startswith(f"{parent}.")
        }
        return missing

    def swarm_set(self, position: Sequence[float]) -> bool:
        """Add the update at a position [G * K] to the base weights, in place of the last one.

        Returns:
            Whether all weights are finite in their type.
        """
        self._swarm_finite_weights = True
        self.model_runner.reload_weights(weights_iterator=self._swarm_mix(position))
        return self._swarm_finite_weights

    def _swarm_mix(self, position: Sequence[float]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights at a position, by their names in the base's files."""
        for name, base in self._swarm_base.items():
            factors = self._swarm_factors.get(name.removesuffix(".weight"))
            if factors is None:
                yield name, base
                continue
            down, up = factors["down"], factors["up"]
            row = torch.tensor(position, dtype=torch.float32, device=down.device)
            shares = row[factors["places"]]
            if down.dim() == 2:
                update = (up * shares) @ down
            else:
                update = torch.einsum("k,kor->or", shares, up)
                update = update @ torch.einsum("k,kri->ri", shares, down)
            weight = (base.to(down.device).float() + update).to(base.dtype)
            if not weight.isfinite().all():
                self._swarm_finite_weights = False
            yield name, weight

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

    def swarm_clear(self) -> None:
        """Overwrite the key-value cache by zeros; prompts in it must have been forgotten.

        Kernels may multiply what earlier requests have left in it by 0, which keeps a NaN.
        """
        waiting = list(self.model_runner.kv_caches)
        while waiting:
            found = waiting.pop()
            if isinstance(found, torch.Tensor):
                found.zero_()
            else:
                waiting += found
