"""Protocols of engines, which answer requests for many positions at once, and of expert pools.

Also the choice of the plan by which an engine answers several positions.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np

from swarm.engine.base_model import BaseModel
from swarm.errors import NotFinite, UserError
from swarm.models.base import Completion, Example, Request, prompt_text
from swarm.pool.prompt_router import PromptRouter

if TYPE_CHECKING:
    from swarm.engine.gradient import Gradient
    from swarm.pool.discovery import NamedModel
    from swarm.pool.pool import Pool


LENGTH_BUCKET = 64
"""Multiple to which the tokens of a slot (`swarm.engine.slots`) are rounded up."""

POSITIONS_BUCKET = 16
"""Multiple to which the number of positions with different requests is rounded up in slots."""

PREFILL_DIVISOR = 4
"""Share of the slots' tokens that is read at once."""

CACHE_BATCHES = 4
"""Tokens of all slots on a GPU, per token of a batch: a step computes only one in each slot."""


class ExpertPool(Protocol):
    """The experts that a position mixes: a pool of adapters, or a panel of full models.

    Attributes:
        names: Names of the K experts, in the order of a position's coefficients; set by `open`.
        saves: The kind of artifact that `save` writes ("model").
        groups: Names of the module groups with separate coefficients; a single group is "all".
    """

    names: list[str]
    saves: str
    groups: Sequence[str]

    @property
    def expert_count(self) -> int:
        """Number of leading names that are the user's models, as opposed to generated experts."""
        ...

    def open(self, base: "str | NamedModel | None" = None) -> "ExpertPool":
        """Read the pool without any weights, and return it; fast, and may be called again.

        Args:
            base: The base model that the experts have to belong to, or its name, if they have one.

        Raises:
            UserError: Something is missing or inconsistent.
        """
        ...

    def check(self) -> None:
        """Check, before anything is written, that the weights exist and are finite.

        Raises:
            UserError: They are not.
        """
        ...

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change with the experts."""
        ...

    def save(
        self, coefficients: Iterable[float], folder: str | Path, extra: dict[str, Any] | None = None
    ) -> None:
        """Write the artifact of a position [K], and a swarm.json describing it, with `extra`."""
        ...


Answer = Callable[[np.ndarray, Sequence[Sequence[Request]]], list[list[Completion]]]
"""Answers each of the positions' [P, D] own list of requests; see `Engine.generate`."""


def answer_by_route(
    router: PromptRouter,
    answer: Answer,
    positions: np.ndarray,
    requests: Sequence[Sequence[Request]],
) -> list[list[Completion]]:
    """Answer each request with the coefficients of its route.

    Args:
        answer: Answers at positions [P', D] of one route each.
        positions: [P, R * D], for R routes.
    """
    parts = [
        (number, part, indices)
        for number, (position, row) in enumerate(zip(positions, requests, strict=True))
        for part, indices in split_position(router, position, row)
    ]
    if not parts:
        return [[] for _ in requests]
    try:
        answers = answer(
            np.array([part for _, part, _ in parts]),
            [[requests[number][i] for i in indices] for number, _, indices in parts],
        )
    except NotFinite as error:
        raise NotFinite(parts[error.position][0], error.quantity) from None
    found: list[dict[int, Completion]] = [{} for _ in requests]
    for (number, _, indices), completions in zip(parts, answers, strict=True):
        found[number].update(zip(indices, completions, strict=True))
    return [[mine[i] for i in range(len(mine))] for mine in found]


def split_position(
    router: PromptRouter, position: np.ndarray, requests: Sequence[Request]
) -> list[tuple[np.ndarray, list[int]]]:
    """Return the coefficients [D] of each route that has requests, and their indices.

    Routes with equal coefficients are one, as for a position that does not use the routes.
    """
    rows = position.reshape(len(router.names), -1)
    if (rows == rows[0]).all():
        return [(rows[0], list(range(len(requests))))] if requests else []
    found: dict[bytes, tuple[np.ndarray, list[int]]] = {}
    for route, indices in router.split([prompt_text(one.prompt) for one in requests]).items():
        found.setdefault(rows[route].tobytes(), (rows[route], []))[1].extend(indices)
    return [(row, sorted(indices)) for row, indices in found.values()]


def as_adapter_pool(pool: ExpertPool) -> "Pool":
    """Return the pool as a pool of adapters.

    Raises:
        UserError: It is of another kind.
    """
    if hasattr(pool, "modules"):
        return cast("Pool", pool)
    raise UserError(
        "engine=hf mixes adapters and needs pool=adapters; for models use engine=token or full"
    )


def request_shapes(requests: Sequence[Sequence[Request]]) -> set[tuple[bool, ...]]:
    """Return the different shapes of the particles' requests: which ones have choices."""
    return {tuple(bool(request.choices) for request in row) for row in requests}


def check_mixed_finite(stack: Any) -> None:
    """Check that the mixed weights of each position are finite in the model's type.

    Raises:
        NotFinite: They are not.
    """
    spoiled = getattr(stack, "first_nonfinite", None)
    if spoiled and (bad := spoiled()) is not None:
        raise NotFinite(bad, "weights")


class Engine(Protocol):
    """Answers requests with mixtures of experts.

    Attributes:
        context: Context length in tokens, known after `check`; infinity if the model sets none.
    """

    context: float

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """Check everything that `open` needs, without weights, and return the prompts' tokenizer.

        Raises:
            UserError: What `open` would raise, as far as shapes and settings show it.
        """
        ...

    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """Load what is needed on `device` ("cpu", "cuda:0", ...), once.

        Raises:
            UserError: The pool does not fit the base, or the device is out of memory.
        """
        ...

    def generate(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """Answer each of the P positions' [P, K] own list of requests, in order."""
        ...


@runtime_checkable
class DifferentiableEngine(Engine, Protocol):
    """An engine with derivatives with respect to the mixing coefficients."""

    def compute_gradient(
        self, position: np.ndarray, examples: Sequence[Example], slope: bool = True
    ) -> "Gradient":
        """Return the loss of the examples' gold answers at a position [G * K], and its derivative.

        Args:
            slope: `False` leaves the derivative out, which saves the backward pass.
        """
        ...


@runtime_checkable
class SupportsClose(Protocol):
    """An engine that holds resources besides its own memory."""

    def close(self) -> None:
        """Release what `open` acquired; the engine may be opened again."""
        ...


@runtime_checkable
class MultiGpuEngine(Protocol):
    """An engine that uses the first devices visible to its process.

    Attributes:
        devices: Number of GPUs per engine.
    """

    devices: int


STACK_BELOW = 20
"""Requests per particle below which a CPU gains by stacking; from benchmarks/batching.py."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Properties of the device and the model that determine the plan, besides the work.

    Attributes:
        gpu: Whether the model is on a GPU.
        exact_merge: Whether products are in float32, so that a small update is not rounded away.
        copy_bytes: Size of a copy of the adapted weights.
        free_bytes: Free memory on the device.
    """

    gpu: bool
    exact_merge: bool
    copy_bytes: int
    free_bytes: int


def choose_plan(
    particles: int, rows: int, facts: DeviceProfile, stackable: bool = True
) -> tuple[str, str]:
    """Return the plan for `particles` positions with `rows` requests each, and the reason.

    Merging runs one particle at a time at the base's own speed, but in bfloat16 it rounds the
    update away: of one that is 1 % of the weight's norm, bfloat16's 8 bits leave an error of 17 %,
    unmerged 0.2 % (test_plan.py). Stacking reads the base weights once for all particles. On an
    H100 it was the fastest for 4 to 100 requests per particle, and 1 % slower than merging for 200
    (Llama 1B in bfloat16, without CUDA graphs).

    Args:
        stackable: Whether the particles' requests can share batches: they have the same shape, or
            the particles the same factors.
    """
    stackable = stackable and particles > 1
    if stackable and facts.gpu:
        return "stacked", "the fastest plan on a GPU"
    # In bfloat16 a CPU computes a token in less time than it reads the weights.
    if stackable and (rows < STACK_BELOW or not facts.exact_merge):
        below = f", below {STACK_BELOW}" if rows < STACK_BELOW else " while the weights are read"
        return "stacked", f"{rows} requests per particle leave the device idle{below}"
    if not facts.exact_merge:
        return "swap", "products are not in float32 and merging would round the update away"
    if facts.copy_bytes > facts.free_bytes:
        return "swap", "a copy of the adapted weights does not fit in the memory left"
    if particles == 1:
        return "merged", "a single particle runs as fast as the base alone"
    if not stackable:
        return "merged", "particles with different requests share no batches outside delta space"
    return "merged", f"{rows} requests per particle, enough to run as fast as the base alone"


def profile_device(model: Any, device: str, shapes: Sequence[Sequence[int]]) -> DeviceProfile:
    """Return the profile that `choose_plan` needs, from the shapes of the adapted linear layers."""
    import torch

    gpu = device != "cpu"
    if gpu:
        torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0] if gpu else available_memory_bytes()
    size = sum(rows * columns for rows, columns in shapes) * model.dtype.itemsize
    return DeviceProfile(gpu, model.dtype == torch.float32, size, free)


def limit_cache_tokens(budget: int, token_bytes: int, free_bytes: int) -> int:
    """Return the maximum number of tokens in all slots of a GPU.

    Args:
        budget: Padded tokens in a batch.
        token_bytes: Bytes of one token in the key-value cache.
        free_bytes: Memory beside the weights. The cache takes at most half, if that is a batch.
    """
    # Whole batches: a little more or less memory must not change which rows decode together.
    return budget * max(1, min(CACHE_BATCHES, free_bytes // 2 // (budget * token_bytes)))


def out_of_memory(device: Any, plan: str, rows: int, tokens: int) -> UserError:
    """Return the error for a smallest batch that does not fit on the device."""
    return UserError(
        f"out of memory on {device} with plan={plan}, {rows} rows of {tokens} tokens; lower "
        "job.particles, max_new_tokens or the model's size"
    )


def available_memory_bytes() -> int:
    """Return the bytes of main memory that are free or reclaimable; a large number if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 60
    found = {name: int(rest.split()[0]) for name, _, rest in (row.partition(":") for row in lines)}
    return found.get("MemAvailable", 1 << 50) * 1024
