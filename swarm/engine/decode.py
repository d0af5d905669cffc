"""Decoding of texts in slots, and scoring of choices, for rows of any positions in any order.

A slot is a row of the batch with its own part of a static key-value cache. Where a text has ended,
the next waiting prompt is read and copied into its slot, so that the batch remains full whatever
the lengths of the texts (iteration-level scheduling: Yu et al. 2022, Orca). On a GPU a step of a
fixed shape is captured once as a CUDA graph and replayed, and the host reads tokens every few
steps. Models that cannot run with such a cache (sliding windows, token ensembles) keep their own,
and the next prompts are read when all texts of a batch have ended.

Sampling is counter-based: the noise of a draw depends only on seed, sample, prompt and token index.
So a text does not depend on the other rows of its batch or on the order, as far as the logits do
not. Rounding changes these slightly between batches; a draw changes with them where two tokens are
nearly equal after the noise, about as rarely as the argmax does.
"""

import copy
import hashlib
import inspect
import logging
import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from swarm.engine.base import Mixer
from swarm.errors import NotFinite, UserError
from swarm.models.base import Request

log = logging.getLogger(__name__)

HASH_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))
"""Shifts and multipliers of a 32-bit integer hash of low bias (Wellons 2018, lowbias32)."""

MIN_TEMPERATURE = 1e-6
"""Lower bound of a temperature, which is greedy except for ties and cannot overflow."""


@dataclass(slots=True)
class SamplingState:
    """Sampling parameters and recorded log probabilities of one row.

    Attributes:
        temperature: 0 is greedy.
        key: Key of the row's noise.
        top: See `Request.top_logprobs`.
        logprobs: For each generated token its log probability, and the most likely token ids with
            theirs, in descending order; of the model's own distribution, at any temperature.
    """

    temperature: float
    key: bytes
    top: int
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)


def build_sampling_state(request: Request, prompt: Sequence[int]) -> SamplingState | None:
    """Return the sampling state of a request; `None` if greedy and without log probabilities.

    A seed of `None` is 0.

    Raises:
        UserError: A value is not allowed.
    """
    heat, top = request.temperature or 0.0, request.top_logprobs
    if not 0 <= heat < math.inf:
        raise UserError(f"temperature={heat}: must be a number from 0 on; 0 is greedy")
    if top < -1:
        raise UserError(
            f"top_logprobs={top}: must be -1 (the chosen token alone), 0 (none) or more"
        )
    if not all(request.stop):
        raise UserError("stop: must not contain an empty string")
    if not heat and not top:
        return None
    key_text = repr((request.seed or 0, request.sample, list(prompt)))
    return SamplingState(heat, hashlib.blake2b(key_text.encode(), digest_size=16).digest(), top)


@dataclass(slots=True)
class DecodingRow:
    """One prompt being continued.

    Attributes:
        prompt: Prompt token ids.
        limit: Maximum number of new tokens.
        stop_check: Returns whether these new tokens determine the answer.
        draw: Sampling state; `None` is greedy.
        particle: Index of its position.
        new: Token ids generated so far, without the end token.
        live: Whether more tokens are wanted.
    """

    prompt: list[int]
    limit: int
    stop_check: Callable[[list[int]], bool] | None = None
    draw: SamplingState | None = None
    particle: int = 0
    new: list[int] = field(default_factory=list)
    live: bool = True

    @property
    def temperature(self) -> float:
        """Its temperature; 0 is greedy."""
        return self.draw.temperature if self.draw else 0.0

    def add_token(self, found: dict[str, Any], end_tokens: frozenset[int]) -> None:
        """Append one token, and update `live`.

        Args:
            found: The row's values of a result of `choose_tokens`.

        Raises:
            NotFinite: The logits were not finite.
        """
        if (token := found["tokens"]) < 0:
            raise NotFinite(self.particle, "activations")
        if self.draw and self.draw.top:
            top = list(zip(found["ids"], found["values"], strict=True))[: max(0, self.draw.top)]
            self.draw.logprobs.append((found["logprobs"], top))
        if token in end_tokens:
            self.live = False
            return
        self.new.append(token)
        self.live = len(self.new) < self.limit and not (
            self.stop_check and self.stop_check(self.new)
        )


def choose_tokens(
    logits: torch.Tensor, heats: torch.Tensor, keys: torch.Tensor | None, top: int
) -> dict[str, torch.Tensor]:
    """Choose the next token of each of R rows.

    A draw is the argmax of the tempered logits plus Gumbel noise, which is a draw from their
    softmax (Gumbel 1954).

    Args:
        logits: [R, vocabulary], float32.
        heats: Temperatures [R]; 0 is greedy.
        keys: Keys of the noise [R, 2]; `None` if all rows are greedy.
        top: Number of likeliest tokens to record; -1 records no log probabilities.

    Returns:
        "tokens" [R], -1 where logits are not finite, and if recorded "logprobs" [R], "ids" and
        "values" [R, top].
    """
    tokens = logits.argmax(dim=-1)
    # argmax treats NaN as the highest, so one number per row detects them all.
    fine = logits.gather(1, tokens[:, None])[:, 0].isfinite()
    if keys is not None:
        hot = logits / heats[:, None].clamp(min=MIN_TEMPERATURE)
        hot = hot.add_(gumbel_noise(keys, logits)).argmax(dim=-1)
        tokens = torch.where(heats > 0, hot, tokens)
    found = {}
    if top >= 0:
        logprobs = logits.log_softmax(dim=-1)
        found["logprobs"] = logprobs.gather(1, tokens[:, None])[:, 0]
        found["values"], found["ids"] = logprobs.topk(min(top, logits.shape[1]), dim=-1)
    return {**found, "tokens": torch.where(fine, tokens, -1)}


def noise_keys(rows: "Sequence[DecodingRow | None]", steps: int, device: Any) -> torch.Tensor:
    """Return the keys of the next tokens' noise, [steps, R, 2]; zeros for greedy rows."""
    drawn = [row if row and row.temperature else None for row in rows]
    numbers = [
        [
            random_key(row.draw.key, len(row.new) + step) if row and row.draw else (0, 0)
            for row in drawn
        ]
        for step in range(steps)
    ]
    keys = torch.tensor(numbers, dtype=torch.int32)
    if device.type == "cuda":
        keys = keys.pin_memory()
    return keys.to(device, non_blocking=True)


def random_key(key: bytes, position: int) -> tuple[int, int]:
    """Return two 32-bit numbers that seed the noise of the token at an index."""
    digest = hashlib.blake2b(position.to_bytes(8, "big"), key=key, digest_size=8).digest()
    return tuple(int.from_bytes(half, "big", signed=True) for half in (digest[:4], digest[4:]))  # type: ignore[return-value]


def gumbel_noise(keys: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise [R, vocabulary], the same on every device up to rounding.

    A token's number is its id and the row's keys passed through two rounds of a hash.

    Args:
        keys: Two 32-bit numbers for each row, [R, 2].
        like: A tensor of the result's shape, on its device.
    """
    first, second = keys.T[:, :, None]
    numbers = _hash_numbers(
        torch.arange(like.shape[1], dtype=torch.int32, device=like.device) ^ first
    )
    numbers = _hash_numbers(numbers ^ second).bitwise_and_(0x7FFFFFFF)
    # Uniform in (0, 1), with the finest resolution near 0, where the largest noise originates; a
    # token at 1 is never chosen.
    uniform = numbers.float().add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _hash_numbers(numbers: torch.Tensor) -> torch.Tensor:
    for shift, factor in HASH_ROUNDS:
        # An arithmetic shift extends the sign; the mask removes it.
        numbers ^= (numbers >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        numbers *= factor
    return numbers.bitwise_xor_((numbers >> 16).bitwise_and_(0xFFFF))


MINIMUM_PREFIX = 16
"""Minimum number of shared tokens for which a separate prefill per position is worthwhile."""


@dataclass(slots=True)
class PrefilledBatch:
    """A batch of R rows after their prompts.

    Attributes:
        cache: The model's own key-value cache.
        mask: [R, tokens so far], 1 where a token is real.
        position: [R, 1], the position of each row's last token.
        logits: [R, vocabulary] after the last token, float32.
    """

    cache: Any
    mask: torch.Tensor
    position: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first tokens of several prompts, read once per position.

    Attributes:
        length: Number of tokens.
        cache: The model's cache after them.
        rows: Row of the cache of each position.
    """

    length: int
    cache: Any
    rows: dict[int, int]


class Reader:
    """Reads prompts of any positions with a model.

    Args:
        model: A causal language model of transformers.
        mixer: Its positions.
        pad: The token id to pad with; never attended.
    """

    def __init__(self, model: Any, mixer: Mixer, pad: int) -> None:
        self.model, self.mixer, self.pad = model, mixer, pad
        self.copies = can_share_prefix(model)

    def route(self, particles: Sequence[int]) -> None:
        """Set the positions of the rows of the next forward passes."""
        self.mixer.route_rows(torch.tensor(particles, device=self.model.device))

    def read_prefix(self, prompts: Sequence[list[int]], particles: Sequence[int]) -> Prefix | None:
        """Read what all prompts begin with, if that is long and shared by rows of a position."""
        different = sorted(set(particles))
        if len(prompts) == len(different) or not self.copies:
            return None
        if (length := shared_prefix_length(prompts)) < MINIMUM_PREFIX:
            return None
        self.route(different)
        device = self.model.device
        out = self.model(
            input_ids=torch.tensor([prompts[0][:length]] * len(different), device=device),
            position_ids=torch.arange(length, device=device).expand(len(different), -1),
            use_cache=True,
            logits_to_keep=1,
        )
        return Prefix(length, output_cache(out), {p: row for row, p in enumerate(different)})

    def read_prompts(
        self,
        prompts: Sequence[list[int]],
        particles: Sequence[int],
        prefix: Prefix | None = None,
    ) -> PrefilledBatch:
        """Read R prompts, left-padded; by default, what they begin with is read once per position.

        Args:
            prefix: Tokens that all prompts begin with, already read.
        """
        if prefix is None:
            prefix = self.read_prefix(prompts, particles)
        device, cache, skip = self.model.device, None, 0
        self.route(particles)
        if prefix is not None:
            cache, skip = copy_cache(prefix.cache), prefix.length
            rows = [prefix.rows[particle] for particle in particles]
            cache.batch_select_indices(torch.tensor(rows, device=device))
        longest = max(map(len, prompts))
        padded = [[self.pad] * (longest - len(p)) + p[skip:] for p in prompts]
        real = [[0] * (longest - len(p)) + [1] * (len(p) - skip) for p in prompts]
        real_tokens = torch.tensor(real, device=device)
        positions = (real_tokens.cumsum(1) - 1).clamp(min=0) + skip
        mask = torch.cat([real_tokens.new_ones(len(prompts), skip), real_tokens], dim=1)
        out = self.model(
            input_ids=torch.tensor(padded, device=device),
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache_argument(self.model, cache),
        )
        logits = out.logits[:, -1].float()
        return PrefilledBatch(output_cache(out), mask, positions[:, -1:], logits)


def shared_prefix_length(prompts: Sequence[list[int]]) -> int:
    """Return the number of leading tokens that all prompts share, leaving each at least one."""
    first, last = min(prompts), max(prompts)
    limit = min(len(prompt) for prompt in prompts) - 1
    same = 0
    while same < limit and first[same] == last[same]:
        same += 1
    return same


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Return the keyword argument of a model's key-value cache.

    transformers names it `cache` since 5.24, and `past_key_values` before.
    """
    return {_cache_keyword(cast(Hashable, type(model))): cache}


@lru_cache(maxsize=64)
def _cache_keyword(kind: Any) -> str:
    taken = inspect.signature(getattr(kind, "forward", kind.__call__)).parameters
    return "cache" if "cache" in taken else "past_key_values"


def output_cache(out: Any) -> Any:
    """Return the key-value cache of a model's output; see `cache_argument`."""
    return out.cache if hasattr(out, "cache") else out.past_key_values


def copy_cache(cache: Any) -> Any:
    """Return a copy that shares the tensors; updates of the copy leave the original as it is."""
    copied = copy.copy(cache)
    if layers := getattr(cache, "layers", None):
        copied.layers = [copy.copy(layer) for layer in layers]
    return copied


def can_share_prefix(model: Any) -> bool:
    """Return whether a cache may be copied to more rows: full attention in all layers."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and not getattr(config, "sliding_window", None)


def supports_slots(model: Any) -> bool:
    """Return whether a model runs with a static cache and a mask of its own.

    That is full attention in all layers, by torch's `scaled_dot_product_attention`.
    """
    return bool(
        getattr(model, "_can_compile_fullgraph", False)
        and can_share_prefix(model)
        and model.config._attn_implementation == "sdpa"
    )


LENGTH_BUCKET = 64
"""Multiple to which a slot's tokens are rounded up on a GPU, so that few shapes are captured."""

PREFILL_DIVISOR = 4
"""Share of the slots' tokens that is read at once."""

CACHE_BATCHES = 4
"""Tokens of all slots on a GPU, per token of a batch: a step computes only one in each slot."""

COMPACT_BELOW = 0.75
"""Share of live rows below which a batch is made narrower."""

STEPS_PER_READ = 8
"""Captured steps between two reads of tokens by the host; an ended text decodes on until then."""

REFILL_SHARE = 0.125
"""Share of free slots from which prompts are read: a prefill costs more than a few idle slots."""

MIN_WIDTH = 8
"""Number of slots below which a captured step is not made narrower."""


class StepShape(NamedTuple):
    """Everything that a captured step depends on.

    Attributes:
        width: Number of slots, the first ones.
        length: Number of cached tokens that are read.
        drawn: Whether any row is sampled.
        top: See `choose_tokens`.
    """

    width: int
    length: int
    drawn: bool
    top: int


class OwnCache:
    """A model's own cache of one batch, whose rows are not replaced."""

    refills = False

    def fill(self, batch: PrefilledBatch, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Take over these rows of a prefill."""
        self._cache, self._mask = batch.cache, batch.mask
        if len(rows) < len(batch.mask):
            self.select(rows)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows alone, in this order."""
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]

    def inputs(self, model: Any, shape: StepShape, positions: torch.Tensor) -> dict[str, Any]:
        """Return the cache and the mask for one more token of each row at `positions`."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(positions), 1)], dim=1)
        return {"attention_mask": self._mask, **cache_argument(model, self._cache)}


class SlotCache(OwnCache):
    """A static cache of S slots, each with its own part.

    Args:
        slots, length: S, and the maximum number of tokens of a slot.
        device: Device of the model.

    Attributes:
        shape, positions: Of the current step.
    """

    refills = True

    def __init__(self, slots: int, length: int, device: Any) -> None:
        self.slots, self.length = slots, length
        self.rows = torch.arange(slots, device=device)
        self._columns = torch.arange(length, device=device)
        self._cache: Any = None

    def fill(self, batch: PrefilledBatch, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy these rows of a prefill into slots."""
        if self._cache is None:
            self._cache = SlotCacheLayers(
                layers=[SlotLayer(layer, self) for layer in batch.cache.layers]
            )
        # Real tokens first: padding is before a prompt, or between a shared prefix and its rest.
        mask = batch.mask[rows]
        columns = mask.argsort(dim=1, descending=True, stable=True)[:, : int(mask.sum(1).max())]
        for mine, read in zip(self._cache.layers, batch.cache.layers, strict=True):
            mine.fill(read, rows, columns, slots)

    def select(self, rows: torch.Tensor) -> None:
        """Make these slots the first ones."""
        moved = (rows != self.rows[: len(rows)]).nonzero()[:, 0]
        for layer in self._cache.layers:
            for stored in (layer.keys, layer.values):
                stored[moved] = stored[rows[moved]]

    def inputs(self, model: Any, shape: StepShape, positions: torch.Tensor) -> dict[str, Any]:
        """See `OwnCache.inputs`."""
        self.shape, self.positions = shape, positions
        mask = (self._columns[: shape.length] <= positions[:, None])[:, None, None]
        return {"attention_mask": mask, **cache_argument(model, self._cache)}


class SlotCacheLayers(Cache):
    """Keys and values of all layers in slots."""


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [S, heads, length, D], written at each slot's own position.

    Args:
        source: The layer's cache of a prefill, which has its shapes and types.
        owner: Has the active shape and positions.
    """

    is_sliding = False

    def __init__(self, source: Any, owner: SlotCache) -> None:
        super().__init__()
        self.keys, self.values = (
            states.new_zeros(owner.slots, states.shape[1], owner.length, states.shape[3])
            for states in (source.keys, source.values)
        )
        # Not a reference in a circle: a cache that is dropped is freed at once.
        self._owner: SlotCache = weakref.proxy(owner)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the tensors exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token per slot, and return the active part."""
        shape, columns = self._owner.shape, self._owner.positions
        rows, parts = self._owner.rows[: shape.width], []
        for stored, new in ((self.keys, key_states), (self.values, value_states)):
            stored[rows, :, columns] = new[:, :, 0]
            parts.append(stored[: shape.width, :, : shape.length])
        return parts[0], parts[1]

    def fill(
        self, source: Any, rows: torch.Tensor, columns: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Copy rows of a prefill, from its columns [n, T], to the beginning of these slots."""
        for stored, read in ((self.keys, source.keys), (self.values, source.values)):
            chosen = read[rows]
            index = columns[:, None, :, None].expand(-1, chosen.shape[1], -1, chosen.shape[3])
            stored[slots, :, : columns.shape[1]] = chosen.gather(2, index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the mask."""
        return self._owner.shape.length, 0

    def get_seq_length(self) -> int:
        """Return 0: positions and mask are given to the model, as slots differ in length."""
        return 0

    def get_max_length(self) -> int:
        """Return the number of tokens that a slot can have."""
        return self._owner.length


class Decoder:
    """Continues any number of rows of any positions in S slots.

    The object is used again and again: its cache and its captured steps remain.

    Args:
        reader: Reads the prompts.
        end_tokens: Token ids that end a text.
        context: Maximum number of tokens of a row.

    Attributes:
        slots, length: Size of the cache.
        limit, row_length: Slots and tokens per row that are used. They depend on the rows alone,
            not on earlier ones, which may have needed a larger cache: so do texts, by rounding.
        capture: Runs a function and returns one that repeats what it did to the same tensors; a
            CUDA graph. `None` runs each step by itself.
        forwards: Number of steps by slots and length.
    """

    def __init__(self, reader: Reader, end_tokens: frozenset[int], context: float) -> None:
        self._reader, self._ends, self._context = reader, end_tokens, context
        self._model, self._mixer = reader.model, reader.mixer
        self._device = self._model.device
        self._refills = supports_slots(self._model)
        self.capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None
        if self._device.type == "cuda" and self._refills:
            self.capture = partial(capture_graph, torch.cuda.graph_pool_handle())
        self.forwards: Counter[tuple[int, int]] = Counter()
        self._graphs: dict[StepShape, Callable[[], None] | None] = {}
        self._graph_key: object = None
        self._allocate(0, 0)

    def _allocate(self, slots: int, length: int) -> None:
        """Make room for this many slots and tokens; their state has fixed addresses."""
        self.slots, self.length = slots, length
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._positions, self._particles = (torch.zeros_like(self._tokens) for _ in range(2))
        self._heats = torch.zeros(slots, device=self._device)
        self._keys = torch.zeros(slots, 2, dtype=torch.int32, device=self._device)
        self._outputs: dict[tuple[str, int], torch.Tensor] = {}
        self._rows: list[DecodingRow | None] = [None] * slots
        self._cache = SlotCache(slots, length, self._device) if self._refills else OwnCache()
        self._forget_graphs()

    def release(self) -> None:
        """Free the memory of the slots."""
        self._allocate(0, 0)

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        if self._device.type == "cuda" and self.capture is not None:
            # A pool whose graphs are all gone cannot be used again.
            self.capture = partial(capture_graph, torch.cuda.graph_pool_handle())

    @torch.inference_mode()
    def generate(self, rows: Sequence[DecodingRow], tokens: int) -> None:
        """Continue all rows until each has ended, is decided, or has reached its limit.

        Args:
            rows: Rows in any order; their `new` is filled in. The longest are begun first.
            tokens: Maximum number of tokens in all slots.

        Raises:
            NotFinite: The logits of a position are not finite.
        """
        self._reserve(rows, tokens)
        draws = [row.draw for row in rows if row.draw]
        self._drawn = any(draw.temperature for draw in draws)
        self._top = max((max(0, draw.top) for draw in draws if draw.top), default=-1)
        self._width = self._narrow(len(rows), self.limit)
        if (key := self._mixer.graph_key) != self._graph_key:
            self._graph_key = key
            self._forget_graphs()
        prompts, particles = [row.prompt for row in rows], [row.particle for row in rows]
        self._prefix = self._reader.read_prefix(prompts, particles) if self._refills else None
        waiting = deque(sorted(rows, key=lambda row: -len(row.prompt) - row.limit))
        try:
            while waiting or any(self._rows):
                self._refill(waiting, tokens // PREFILL_DIVISOR)
                if any(self._rows):
                    self._run_steps()
        except BaseException:
            # A masked value that is NaN would still spoil a later row of its slot.
            self.release()
            raise
        finally:
            self._prefix = None

    def _reserve(self, rows: Sequence[DecodingRow], tokens: int) -> None:
        """Choose the slots for these rows, and make room for them."""
        bucket = LENGTH_BUCKET if self._device.type == "cuda" else 1
        longest = max(len(row.prompt) + row.limit for row in rows)
        length = int(min(-(-longest // bucket) * bucket, self._context))
        slots = max(1, min(len(rows), tokens // length))
        if slots > self.slots or length > self.length:
            both = max(slots, self.slots), max(length, self.length)
            # Of both sizes if possible: captured steps of the rows before would else be lost again.
            self._allocate(*(both if both[0] * both[1] <= tokens else (slots, length)))
        self.limit, self.row_length = slots, length

    def _narrow(self, live: int, width: int) -> int:
        """Return the number of slots for these rows; few different ones if steps are captured."""
        if self.capture is None:
            return min(live, width) if live <= COMPACT_BELOW * width else width
        while width > MIN_WIDTH and (width + 1) // 2 >= live:
            width = (width + 1) // 2
        return width

    def _refill(self, waiting: deque[DecodingRow], tokens: int) -> None:
        """Read waiting prompts into free slots; without any, use fewer slots."""
        free = [slot for slot in range(self._width) if self._rows[slot] is None]
        if not waiting or (len(free) < self._width and not self._refills):
            self._compact()
            return
        if not self._refills:
            # All are read at once, as one cache holds them.
            self._width, free = self.limit, list(range(self.limit))
            self._prefill([waiting.popleft() for _ in range(min(len(free), len(waiting)))], free)
            return
        enough = min(len(waiting), max(1, int(REFILL_SHARE * self._width)))
        if len(free) < self._width and len(free) < enough:
            return
        while waiting and free:
            batch = [waiting.popleft()]
            longest = len(batch[0].prompt)
            while waiting and len(batch) < len(free):
                longest = max(longest, len(waiting[0].prompt))
                if (len(batch) + 1) * longest > tokens:
                    break
                batch.append(waiting.popleft())
            self._prefill(batch, free)

    def _prefill(self, rows: Sequence[DecodingRow], free: list[int]) -> None:
        """Read prompts, and put those that go on into free slots."""
        prompts, particles = [row.prompt for row in rows], [row.particle for row in rows]
        batch = self._reader.read_prompts(prompts, particles, self._prefix)
        heats = torch.tensor([row.temperature for row in rows], device=self._device)
        keys = noise_keys(rows, 1, self._device)[0] if self._drawn else None
        chosen = choose_tokens(batch.logits, heats, keys, self._top)
        found = {name: values.tolist() for name, values in chosen.items()}
        for index, row in enumerate(rows):
            row.add_token({name: values[index] for name, values in found.items()}, self._ends)
        kept = [index for index, row in enumerate(rows) if row.live]
        if not kept:
            return
        slots, free[: len(kept)] = free[: len(kept)], []
        for slot, index in zip(slots, kept, strict=True):
            self._rows[slot] = rows[index]
        if not self._refills:
            self._width = len(kept)
        target, source = (torch.tensor(one, device=self._device) for one in (slots, kept))
        self._cache.fill(batch, source, target)
        self._tokens[target], self._heats[target] = chosen["tokens"][source], heats[source]
        self._positions[target] = batch.position[source, 0] + 1
        self._particles[target] = torch.tensor(particles, device=self._device)[source]

    def _compact(self) -> None:
        """Move the last rows to the first slots, and use fewer of them."""
        live = [slot for slot in range(self._width) if self._rows[slot] is not None]
        width = self._narrow(max(1, len(live)), self._width)
        if width == self._width or not live:
            return
        late = iter([slot for slot in live if slot >= width])
        order = [s if self._rows[s] is not None else next(late, s) for s in range(width)]
        self._width, index = width, torch.tensor(order, device=self._device)
        self._cache.select(index)
        for tensor in (self._tokens, self._positions, self._heats, self._particles):
            tensor[:width] = tensor[index]
        rest = [None] * (self.slots - width)
        self._rows = [*(self._rows[slot] for slot in order), *rest]

    def _run_steps(self) -> None:
        """Decode some tokens of all rows, read them, and free the slots of texts that ended."""
        live = [(slot, row) for slot, row in enumerate(self._rows[: self._width]) if row]
        steps = STEPS_PER_READ if self.capture else 1
        steps = min(steps, max(row.limit - len(row.new) for _, row in live))
        longest = max(len(row.prompt) + len(row.new) for _, row in live) - 1 + steps
        bucket = LENGTH_BUCKET if self.capture else 1
        length = min(self.row_length, -(-longest // bucket) * bucket)
        self._shape = StepShape(self._width, length, self._drawn, self._top)
        rows = self._rows[: self._width]
        keys = noise_keys(rows, steps, self._device) if self._drawn else None
        read: dict[str, list[torch.Tensor]] = {}
        for step in range(steps):
            if keys is not None:
                self._keys[: self._width].copy_(keys[step])
            self._run_step()
            for (name, top), values in self._outputs.items():
                if top == self._top:
                    read.setdefault(name, []).append(values[: self._width].clone())
        # One transfer for all steps.
        found = {name: torch.stack(tensors).tolist() for name, tensors in read.items()}
        for slot, row in live:
            for step in range(steps):
                row.add_token({name: one[step][slot] for name, one in found.items()}, self._ends)
                if not row.live:
                    self._rows[slot] = None
                    break

    def _run_step(self) -> None:
        """Run one step: at its shape's first use as it is, then captured, and replayed."""
        shape = self._shape
        self.forwards[shape.width, shape.length] += 1
        if self.capture is None:
            self._forward()
        elif shape not in self._graphs:
            # The first use also initializes what must not be in a graph.
            self._graphs[shape] = None
            self._forward()
        else:
            if (replay := self._graphs[shape]) is None:
                try:
                    replay = self._graphs[shape] = self.capture(self._forward)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    log.warning("decoding without CUDA graphs, which is slower: %s", error)
                    self.capture, replay = None, self._forward
            replay()

    def _forward(self) -> None:
        """Read each active slot's token, choose the next, and write what is recorded."""
        width, _, drawn, top = self._shape
        positions = self._positions[:width]
        self._mixer.route_rows(self._particles[:width])
        out = self._model(
            input_ids=self._tokens[:width, None],
            position_ids=positions[:, None],
            use_cache=True,
            logits_to_keep=1,
            **self._cache.inputs(self._model, self._shape, positions),
        )
        logits = out.logits[:, -1].float()
        keys = self._keys[:width] if drawn else None
        found = choose_tokens(logits, self._heats[:width], keys, top)
        for name, values in found.items():
            self._write(name, values)
        self._tokens[:width].copy_(found["tokens"].clamp(min=0))
        # A text that has ended is decoded on until the host reads it.
        positions.add_(1).clamp_(max=self.length - 1)

    def _write(self, name: str, values: torch.Tensor) -> None:
        """Copy results to an address that a captured step may contain, so it is never freed."""
        key = (name, self._shape.top)
        if key not in self._outputs:
            self._outputs[key] = values.new_zeros(self.slots, *values.shape[1:])
        self._outputs[key][: len(values)].copy_(values)


def capture_graph(pool: Any, act: Callable[[], None]) -> Callable[[], None]:
    """Capture a function as a CUDA graph, without running it, and return its replay.

    Args:
        pool: Memory that the graphs of a decoder share, as they never run at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate memory meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        act()
    replay: Callable[[], None] = graph.replay
    return replay


def cache_tokens(model: Any, budget: int, free_bytes: int) -> int:
    """Return the maximum number of tokens in all slots.

    Args:
        budget: Padded tokens in a batch.
        free_bytes: Memory beside the weights. On a GPU the cache takes at most half, if that is a
            batch.
    """
    if model.device.type == "cpu":
        return budget
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    # Whole batches: a little more or less memory must not change which rows decode together.
    return budget * max(1, min(CACHE_BATCHES, free_bytes // 2 // (budget * token_bytes)))


TokenIds = Sequence[int]


class ContinuationScore(NamedTuple):
    """Natural log probability of one continuation; an empty one has 0 and greedy."""

    logprob: float
    greedy: bool
    """True if greedy decoding would generate exactly this continuation."""


class ScoreAccumulator:
    """Accumulates the log probabilities of R rows' target tokens, chunk by chunk."""

    def __init__(self) -> None:
        self._logprobs: list[torch.Tensor] = []
        self._likeliest: list[torch.Tensor] = []

    def add(self, logits: torch.Tensor, targets: Sequence[TokenIds]) -> None:
        """Add the logits [R, w, vocabulary] of w positions and each one's target; -1 is none."""
        wanted = torch.tensor(targets, device=logits.device)
        # One position at a time: a float32 copy of all logits could take gigabytes.
        for column in range(wanted.shape[1]):
            row, target = logits[:, column].float(), wanted[:, column]
            known = target >= 0
            picked = row.gather(1, target.clamp(min=0)[:, None])[:, 0]
            self._logprobs.append(torch.where(known, picked - row.logsumexp(-1), 0.0))
            self._likeliest.append(~known | (row.argmax(-1) == target))

    def to_scores(self) -> list[ContinuationScore]:
        """Return the rows' sums."""
        sums = torch.stack(self._logprobs).sum(0, dtype=torch.float64).tolist()
        return list(map(ContinuationScore, sums, torch.stack(self._likeliest).all(0).tolist()))


@torch.inference_mode()
def score_choices(
    reader: Reader,
    prompts: Sequence[list[int]],
    choices: Sequence[Sequence[TokenIds]],
    particles: Sequence[int],
    most: int,
) -> list[list[ContinuationScore]]:
    """Score each prompt's choices, whose number may differ between prompts.

    The prompts are read once, and choices of similar lengths together after copies of the prompts'
    caches. Choices of one token need no more than the prompts.

    Args:
        reader: Reads the prompts.
        prompts: R prompts of at least one token.
        choices: Each prompt's continuations.
        particles: Position of each prompt.
        most: Approximate number of tokens whose logits are in memory at once, over all rows.
    """
    pairs = [(row, number) for row, mine in enumerate(choices) for number in range(len(mine))]
    pairs.sort(key=lambda pair: len(choices[pair[0]][pair[1]]))
    found = [[ContinuationScore(0.0, False)] * len(row) for row in choices]
    batch = reader.read_prompts(prompts, particles) if reader.copies else None
    while pairs:
        # Similar lengths, padded to the longest, and at most as many rows as there are prompts.
        count = 1
        while count < min(len(pairs), len(prompts)):
            row, number = pairs[count]
            if (count + 1) * (len(choices[row][number]) - (batch is not None)) > most:
                break
            count += 1
        group, pairs = pairs[:count], pairs[count:]
        tokens = [choices[row][number] for row, number in group]
        rows = [row for row, _ in group]
        reader.route([particles[row] for row in rows])
        if batch is not None:
            scored = _score_after_prompts(reader, batch, rows, tokens, most)
        else:
            scored = _score_sequences(reader, [prompts[row] for row in rows], tokens)
        for (row, number), one in zip(group, scored, strict=True):
            found[row][number] = one
    return found


def _score_after_prompts(
    reader: Reader,
    batch: PrefilledBatch,
    rows: Sequence[int],
    tokens: Sequence[TokenIds],
    most: int,
) -> list[ContinuationScore]:
    """Score continuations of some rows of a batch, one each, on a copy of the rows' cache."""
    tally = ScoreAccumulator()
    chosen = torch.tensor(rows, device=batch.mask.device)
    tally.add(batch.logits[chosen][:, None], _slice_columns(tokens, 0, 1, -1))
    last = max(map(len, tokens)) - 1
    if last < 1:
        return tally.to_scores()
    cache, mask, position = copy_cache(batch.cache), batch.mask[chosen], batch.position[chosen]
    cache.batch_select_indices(chosen)
    width = max(1, most // len(tokens))
    for start in range(0, last, width):
        end = min(start + width, last)
        ids = torch.tensor(_slice_columns(tokens, start, end, reader.pad), device=mask.device)
        real = [[int(offset < len(row)) for offset in range(start, end)] for row in tokens]
        mask = torch.cat([mask, torch.tensor(real, device=mask.device)], dim=1)
        out = reader.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position + torch.arange(start + 1, end + 1, device=mask.device),
            use_cache=True,
            **cache_argument(reader.model, cache),
        )
        tally.add(out.logits, _slice_columns(tokens, start + 1, end + 1, -1))
    return tally.to_scores()


def _score_sequences(
    reader: Reader, prompts: Sequence[list[int]], tokens: Sequence[TokenIds]
) -> list[ContinuationScore]:
    """Score one continuation per row in a full forward, for caches that cannot be copied."""
    longest = max(1, *map(len, tokens))
    sequences = [[*prompt, *mine[:-1]] for prompt, mine in zip(prompts, tokens, strict=True)]
    length = max(map(len, sequences))
    ids = [[reader.pad] * (length - len(one)) + one for one in sequences]
    real = [[0] * (length - len(one)) + [1] * len(one) for one in sequences]
    mask = torch.tensor(real, device=reader.model.device)
    out = reader.model(
        input_ids=torch.tensor(ids, device=reader.model.device),
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=longest,
    )
    tally = ScoreAccumulator()
    tally.add(out.logits, [[-1] * (longest - len(mine)) + [*mine] for mine in tokens])
    return tally.to_scores()


def _slice_columns(tokens: Sequence[TokenIds], start: int, end: int, fill: int) -> list[list[int]]:
    """Return the same columns of all rows, filled up where a row has ended."""
    return [[*row[start:end], *[fill] * (end - max(start, min(end, len(row))))] for row in tokens]
