"""Code that runs inside vLLM's workers; all that uses their internals (0.32 and 0.33)."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarm.engine.full import Checkpoint, FullModelPool
from swarm.engine.lora import LoraLinear, Routing
from swarm.errors import UserError


class WorkerExtension:
    """Methods added to vLLM's worker (`worker_extension_cls`), called by `collective_rpc`.

    The weights at a position are those of the engines on transformers, computed by the same code
    and always from the base, so that no rounding adds up. They are put where the model's own are by
    vLLM's own reloading, which knows packed, sharded and converted layers.
    """

    model_runner: Any

    def swarm_hold(self, given: bytes) -> None:
        """Open the pool and, of adapters, read the base weights that they adapt.

        Args:
            given: The base and the pool, pickled.

        Raises:
            UserError: The base's files lack an adapted weight, as of a tied output layer.
        """
        base, pool = pickle.loads(given)
        self._swarm_pool = pool.open()
        if isinstance(pool, FullModelPool):
            return
        checkpoint = Checkpoint(Path(base.resolve()))
        dtype, device = self.model_runner.model_config.dtype, self.model_runner.device
        own = {name for name, _ in self.model_runner.get_model().named_modules()}
        # vLLM packs layers of one parent (q_proj, k_proj, v_proj), and reloads packed ones whole.
        packed = {module.rpartition(".")[0] for module in pool.modules if module not in own}
        held: dict[str, Any] = {}
        for name in checkpoint.tensors:
            module = name.rpartition(".")[0]
            beside = module not in own and module.rpartition(".")[0] in packed
            if beside or module in pool.modules:
                weight = checkpoint.read_rows(name, ...).to(dtype)
                # In main memory: a second copy on a GPU would take that of the cache. Pinned, the
                # weights of 8B in 16 bits come in 0.3 s through PCIe 5, else in 2 s.
                held[name] = weight.pin_memory() if device.type == "cuda" else weight
        for module in pool.modules:
            if (name := f"{module}.weight") not in held:
                raise UserError(
                    f"engine=vllm: the base's files have no weight of {module}, which the experts "
                    "adapt; use engine=hf"
                )
            linear = nn.Linear(1, 1, bias=False, device=device)  # where the update is computed
            layer = LoraLinear(linear, pool.expert_factors(module), dtype, Routing())
            linear.weight = nn.Parameter(held[name], requires_grad=False)
            held[name] = layer
        self._swarm_held = held

    def swarm_set(self, position: Sequence[float]) -> bool:
        """Put the weights at a position [G * K] in place of the last one's.

        Returns:
            Whether all are finite in their type.
        """
        ends: list[torch.Tensor] = []
        full = isinstance(self._swarm_pool, FullModelPool)

        def checked() -> Iterator[tuple[str, torch.Tensor]]:
            mix = self._swarm_mix_models if full else self._swarm_mix_adapters
            for name, weight in mix(position):
                # Read after the last one, so that the device is never waited for.
                ends.extend(weight.aminmax())
                yield name, weight

        self.model_runner.reload_weights(weights_iterator=checked())
        if full and (head := getattr(self.model_runner.get_model(), "lm_head", None)):
            # A tied one is not reloaded, and on a CPU it has a packed copy of the weight.
            head.quant_method.process_weights_after_loading(head)
        return bool(torch.stack(ends).isfinite().all())

    def _swarm_mix_adapters(self, position: Sequence[float]) -> Iterator[tuple[str, torch.Tensor]]:
        device = self.model_runner.device
        row = torch.tensor(position, dtype=torch.float32, device=device)
        for name, held in self._swarm_held.items():
            if isinstance(held, LoraLinear):
                yield name, held.merge(row[held.places])
                held.merged = None
            else:
                yield name, held.to(device, non_blocking=True)

    def _swarm_mix_models(self, position: Sequence[float]) -> Iterator[tuple[str, torch.Tensor]]:
        device, dtype = self.model_runner.device, self.model_runner.model_config.dtype
        for name, shape in self._swarm_pool.tensors.items():
            weight = torch.empty(shape, dtype=dtype, device=device)
            yield name, self._swarm_pool.fill_tensor(weight, name, position)

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
