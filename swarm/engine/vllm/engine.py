"""The engine on vLLM: its batches and its paged cache, one position in the weights at a time."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from swarm._util.settings import Positive, checked
from swarm.engine.base import Engine, as_adapter_pool
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.vllm.launch import (
    check_installed,
    check_options,
    start_vllm,
    stop_vllm,
    wrap_start_errors,
)
from swarm.errors import NotFinite, UserError
from swarm.models.base import Completion, Request
from swarm.pool.pool import ExpertPool, Pool

if TYPE_CHECKING:
    from swarm.engine.vllm.requests import VLLMScheduler


@checked("engine")
class VLLMEngine(Engine):
    """Answers with vLLM, in this process (with tensor parallelism: in its processes as well).

    A position is added to the base weights in place, so that answers come at the speed of the plain
    model, whatever the rank. In 16 bits this rounds the update, as every merged model does. Sampled
    texts are drawn by vLLM's generators, so they differ from those of `engine=hf`.

    Args:
        tensor_parallel_size: GPUs that share one model; this many of `gpus` form one worker.
        gpu_memory_utilization: The share of a GPU's memory that vLLM takes.
        max_model_len: Maximum number of tokens of a prompt and its answer; `None` is the model's
            context.
        options: More arguments of vLLM's `EngineArgs`, by name.
    """

    routes = first_devices = True

    def __init__(
        self,
        tensor_parallel_size: Positive = 1,
        gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9,
        max_model_len: Positive | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_options(options or {})
        self.devices = tensor_parallel_size
        self.settings: dict[str, Any] = {
            "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": float(gpu_memory_utilization),
            **({"max_model_len": max_model_len} if max_model_len else {}),
        }
        self.options = dict(options or {})
        self._llm: Any = None
        self._held: np.ndarray | None = None
        self._scheduler: VLLMScheduler | None = None

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """See `swarm.engine.base.Engine`; vLLM's own checks run only when it starts."""
        mixed, plain = as_adapter_pool(pool, "vllm"), HFEngine()
        tokenizer = plain.check(base, mixed)
        self.context = self.settings.get("max_model_len") or plain.context
        check_installed()
        return tokenizer

    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """See `swarm.engine.base.Engine`; starts vLLM.

        Args:
            device: "cpu", or "cuda:0": vLLM takes the first devices that the process sees.
        """
        from swarm.engine.vllm.requests import VLLMScheduler

        mixed = as_adapter_pool(pool, "vllm")
        self.router = mixed.router
        check_installed()
        folder = Path(base.resolve())
        self._llm = start_vllm(base, folder, device, {**self.settings, **self.options})
        try:
            self._scheduler = VLLMScheduler(self._llm, base.load_tokenizer(folder), folder)
            with wrap_start_errors():
                self._hold_experts(mixed, folder)
                self._call("swarm_watch")
                self._check_updates(mixed)
        except BaseException:
            self.close()
            raise

    def _hold_experts(self, pool: Pool, folder: Path) -> None:
        from safetensors.torch import save_file

        tensors: dict[str, Any] = {}
        for module in pool.modules:
            factors = zip(("down", "up", "places"), pool.expert_factors(module), strict=True)
            tensors |= {f"{module} {name}": tensor.contiguous() for name, tensor in factors}
        with tempfile.TemporaryDirectory(prefix="model-swarms-") as scratch:
            file = str(Path(scratch) / "experts.safetensors")
            save_file(tensors, file)
            missing = self._call("swarm_hold", str(folder), file)[0]
        if missing:
            raise UserError(
                f"engine=vllm: the base's files have no weight of {missing[0]}, which the experts "
                "adapt; use engine=hf"
            )

    def _check_updates(self, pool: Pool) -> None:
        """Check that other weights give other answers; the loader of some builds has no effect."""
        asked = [Request("", 0, ("a", "b", "c", "1"))]
        width = len(pool.split_routes([0.0] * len(pool.names) * len(pool.groups))[0])
        rows = np.array([[0.0] * width, [1.0 / len(pool.names)] * width])
        first, second = (row[0].logprobs for row in self.generate_alike(rows, [asked] * 2))
        if first == second:
            raise UserError("engine=vllm: vLLM does not update its weights; use engine=hf")

    def generate_alike(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """See `swarm.engine.base.Engine`.

        Raises:
            UserError: A request does not fit into the model's context.
        """
        assert self._scheduler is not None, "the engine is not open"
        answers: list[list[Completion]] = []
        for i, (position, asked) in enumerate(zip(positions, requests, strict=True)):
            self._set_position(position, i)
            answers.append(self._scheduler.generate(asked))
            if not all(self._call("swarm_finite")):
                self._forget_prompts()
                self._call("swarm_clear")
                raise NotFinite(i, "activations")
        return answers

    def _set_position(self, position: np.ndarray, number: int) -> None:
        if self._held is not None and np.array_equal(position, self._held):
            return
        self._held = None
        if not all(self._call("swarm_set", position.tolist())):
            raise NotFinite(number, "weights")
        # What is cached of a prompt was computed with other weights.
        self._forget_prompts()
        self._held = position.copy()

    def _forget_prompts(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise UserError(
                "engine=vllm: the cache of prompts cannot be cleared; rerun the same command to "
                "resume with a new engine"
            )

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `swarm.engine.vllm.extension.WorkerExtension` in all workers."""
        found: list[Any] = self._llm.collective_rpc(method, args=args)
        return found

    def close(self) -> None:
        """Shut vLLM down and release its memory; it may be opened again."""
        if self._llm is not None:
            stop_vllm(self._llm)
        self._llm = self._held = self._scheduler = None
