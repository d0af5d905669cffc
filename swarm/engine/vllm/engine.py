"""The engine on vLLM: its batches and its paged cache, one adapter per position."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from swarm.engine.base import Engine, ExpertPool, answer_by_route, as_adapter_pool
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.vllm.adapter_sync import (
    AdapterSync,
    FolderSync,
    HostBasis,
    SlotSync,
    unsound_error,
)
from swarm.engine.vllm.launch import (
    check_installed,
    check_modules,
    check_options,
    serving_rank,
    start_vllm,
    stop_vllm,
    wrap_start_errors,
)
from swarm.errors import NotFinite, UserError
from swarm.models.base import Completion, Request
from swarm.pool.pool import Pool

if TYPE_CHECKING:
    from swarm.engine.vllm.requests import VLLMScheduler

SYNC_CLASSES: dict[str, type[AdapterSync]] = {"folders": FolderSync, "slots": SlotSync}

MAX_LORAS = 8
"""Adapters per batch if `engine.max_loras` is not set."""


class VLLMEngine(Engine):
    """Answers with vLLM, in this process (with tensor parallelism: in its processes as well).

    Sampled texts are drawn by vLLM's generators, so they differ from those of `engine=hf`.

    Args:
        way: How a position is loaded into vLLM. "folders": as an adapter in memory-backed storage,
            under a name and id that were never used before. "slots": its coefficients, from which
            vLLM's own workers, who hold the experts, write the adapter into its slot.
        max_loras: Maximum number of positions in one batch; more are answered after each other.
        tensor_parallel_size: GPUs that share one model; this many of `gpus` form one worker.
        gpu_memory_utilization: The share of a GPU's memory that vLLM takes, 0 to 1.
        max_model_len: Maximum number of tokens of a prompt and its answer; `None` is the model's
            context.
        options: More arguments of vLLM's `EngineArgs`, by name.

    Attributes:
        devices: See `swarm.engine.base.MultiGpuEngine`.
        plan, why: The plan assumed by a dry run, and the reason.

    Raises:
        UserError: A value is not allowed.
    """

    routes = first_devices = True
    plan = "stacked"
    why = "as vLLM batches; memory and time are those of engine=hf"

    def __init__(
        self,
        way: str = "folders",
        max_loras: int | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if way not in SYNC_CLASSES:
            raise UserError(f"engine.way={way}: must be one of {', '.join(SYNC_CLASSES)}")
        for key, value, none in (
            ("max_loras", max_loras, True),
            ("tensor_parallel_size", tensor_parallel_size, False),
            ("max_model_len", max_model_len, True),
        ):
            whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if not whole and not (none and value is None):
                allowed = "null or " if none else ""
                raise UserError(f"engine.{key}={value}: must be {allowed}a positive integer")
        share = gpu_memory_utilization
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
            raise UserError(
                f"engine.gpu_memory_utilization={share}: must be a number above 0, at most 1"
            )
        check_options(options or {})
        self.way, self.max_loras = way, max_loras or MAX_LORAS
        self.devices = tensor_parallel_size
        self.settings: dict[str, Any] = {"gpu_memory_utilization": float(share)}
        if max_model_len:
            self.settings["max_model_len"] = max_model_len
        self.options = dict(options or {})
        self._llm: Any = None
        self._way: Any = None
        self._scheduler: VLLMScheduler | None = None

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """See `swarm.engine.base.Engine`; vLLM's own checks run only when it starts."""
        mixed = require_adapter_pool(pool)
        plain = HFEngine()
        tokenizer = plain.check(base, mixed)
        self.context = self.settings.get("max_model_len") or plain.context
        serving_rank(mixed)
        check_modules(mixed)
        check_installed()
        return tokenizer

    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """See `swarm.engine.base.Engine`; starts vLLM.

        Args:
            device: "cpu", or "cuda:0": vLLM takes the first devices that the process sees.
        """
        from swarm.engine.vllm.requests import VLLMScheduler

        mixed = require_adapter_pool(pool)
        self.router = mixed.router
        check_installed()
        folder = Path(base.resolve())
        self._llm = start_vllm(
            base,
            folder,
            mixed,
            device,
            max_loras=self.max_loras,
            tensor_parallel_size=self.devices,
            options=self.options,
            **self.settings,
        )
        try:
            self._scheduler = VLLMScheduler(self._llm, base.load_tokenizer(folder), folder)
            with wrap_start_errors():
                basis = HostBasis(mixed)
                self._way = SYNC_CLASSES[self.way](self._llm, basis, self.max_loras)
                self._llm.collective_rpc("swarm_watch")
                # Unsupported operations of a device fail only with the first token.
                self._generate(np.zeros((1, basis.count)), [[Request("", 1)]])
        except BaseException:
            self.close()
            raise

    def generate(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """See `swarm.engine.base.Engine`.

        Raises:
            NotFinite: The weights at a position, or the logits, are not finite.
            UserError: A request does not fit into the model's context.
        """
        if self.router is None:
            return self._generate(positions, requests)
        return answer_by_route(self.router, self._generate, positions, requests)

    def _generate(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        answers: list[list[Completion]] = []
        for first in range(0, len(positions), self.max_loras):
            chosen = slice(first, first + self.max_loras)
            try:
                answers += self._generate_batch(positions[chosen], requests[chosen])
            except NotFinite as error:
                raise NotFinite(first + error.position, error.quantity) from None
        return answers

    def _generate_batch(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """Answer the requests of at most `max_loras` positions."""
        assert self._scheduler is not None, "the engine is not open"
        named = self._way.update_positions(positions)
        answers = self._scheduler.generate(named, requests)
        self._way.verify_loaded()
        if not self._is_finite():
            self._raise_not_finite(named, requests)
        return answers

    def _raise_not_finite(
        self, named: Sequence[Any], requests: Sequence[Sequence[Request]]
    ) -> NoReturn:
        """Find the position in a batch whose logits are not finite, by asking each alone.

        The workers check all rows of a batch at once, and one row's NaN may spread: kernels may
        multiply what earlier requests have left in the cache by 0. So the cache is cleared before
        each request.
        """
        assert self._scheduler is not None
        try:
            for i, name in enumerate(named):
                self._clear_cache()
                self._scheduler.generate([name], [requests[i]])
                if not self._is_finite():
                    raise NotFinite(i, "activations")
        finally:
            self._clear_cache()
        raise unsound_error("a logit was not finite in a batch, but is for each position alone")

    def _clear_cache(self) -> None:
        """Overwrite vLLM's key-value cache by zeros, and forget which prompts it held."""
        if not self._llm.reset_prefix_cache():
            raise unsound_error("the cache of prompts cannot be cleared")
        self._llm.collective_rpc("swarm_clear")

    def _is_finite(self) -> bool:
        """Return whether all logits since the last call were finite, in all of vLLM's workers."""
        return all(self._llm.collective_rpc("swarm_finite"))

    def close(self) -> None:
        """Shut vLLM down and release its memory; it may be opened again."""
        if self._llm is not None:
            stop_vllm(self._llm)
        self._llm = self._way = self._scheduler = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the engine as its settings."""
        own = {**self.settings, "options": self.options}
        return partial(VLLMEngine, self.way, self.max_loras, self.devices, **own), ()


def require_adapter_pool(pool: ExpertPool) -> Pool:
    """Return the pool as a pool of adapters.

    Raises:
        UserError: It is of another kind.
    """
    return as_adapter_pool(pool, "vllm")
