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
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from swarm.engine.base import Mixer
from swarm.engine.tokenization import DecodingRow

log = logging.getLogger(__name__)

HASH_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))
"""Shifts and multipliers of a 32-bit integer hash of low bias (Wellons 2018, lowbias32)."""

MIN_TEMPERATURE = 1e-6
"""Lower bound of a temperature, which is greedy except for ties and cannot overflow."""


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
    found = {"tokens": torch.where(fine, tokens, -1)}
    if top >= 0:
        logprobs = logits.log_softmax(dim=-1)
        found["logprobs"] = logprobs.gather(1, tokens[:, None])[:, 0]
        found["values"], found["ids"] = logprobs.topk(min(top, logits.shape[1]), dim=-1)
    return found


def noise_keys(rows: Sequence[DecodingRow | None], steps: int, device: Any) -> torch.Tensor:
    """Return the keys of the next tokens' noise, [steps, R, 2]; zeros for greedy rows."""
    numbers = [
        [
            random_key(row.key, len(row.new) + step) if row and row.temperature else (0, 0)
            for row in rows
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
    first, second = (int.from_bytes(half, "big", signed=True) for half in (digest[:4], digest[4:]))
    return first, second


def gumbel_noise(keys: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise [R, vocabulary], the same on every device up to rounding.

    A token's number is its id and the row's keys passed through two rounds of a hash.

    Args:
        keys: Two 32-bit numbers for each row, [R, 2].
        like: A tensor of the result's shape, on its device.
    """
    numbers = torch.arange(like.shape[1], dtype=torch.int32, device=like.device)
    for key in keys.T[:, :, None]:
        numbers = numbers ^ key
        for shift, factor in HASH_ROUNDS:
            # An arithmetic shift extends the sign; the mask removes it.
            numbers ^= (numbers >> shift).bitwise_and_((1 << (32 - shift)) - 1)
            numbers *= factor
        numbers ^= (numbers >> 16).bitwise_and_(0xFFFF)
    # Uniform in (0, 1), with the finest resolution near 0, where the largest noise originates; a
    # token at 1 is never chosen.
    uniform = numbers.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_().log_().neg_()


MINIMUM_PREFIX = 16
"""Minimum number of shared tokens for which a separate prefill per position is worthwhile."""


class PrefilledBatch(NamedTuple):
    """A batch of R rows after their prompts."""

    cache: Any
    """The model's own key-value cache."""
    mask: torch.Tensor
    """[R, tokens so far], 1 where a token is real."""
    position: torch.Tensor
    """[R, 1], the position of each row's last token."""
    logits: torch.Tensor
    """[R, vocabulary] after the last token, float32."""


class Prefix(NamedTuple):
    """The first tokens of several prompts, read once per position."""

    length: int
    cache: Any
    rows: dict[int, int]
    """Row of the cache of each position."""


@dataclass
class Reader:
    """Reads prompts of any positions with a model.

    Attributes:
        model: A causal language model of transformers.
        mixer: Its positions.
        pad: The token id to pad with; never attended.
    """

    model: Any
    mixer: Mixer
    pad: int

    def __post_init__(self) -> None:
        self.copies = can_share_prefix(self.model)
        self.tensor = partial(torch.tensor, device=self.model.device)

    def pad_rows(self, rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids padded on the left, [R, T], and the mask of the real ones."""
        longest = max(map(len, rows))
        ids = [[self.pad] * (longest - len(row)) + row for row in rows]
        real = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        return self.tensor(ids), self.tensor(real)

    def read_prefix(self, prompts: Sequence[list[int]], particles: Sequence[int]) -> Prefix | None:
        """Read what all prompts begin with, if that is long and shared by rows of a position."""
        different = sorted(set(particles))
        if len(prompts) == len(different) or not self.copies:
            return None
        if (length := shared_prefix_length(prompts)) < MINIMUM_PREFIX:
            return None
        self.mixer.route_rows(self.tensor(different))
        out = self.model(
            input_ids=self.tensor([prompts[0][:length]] * len(different)),
            position_ids=self.tensor([range(length)] * len(different)),
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
        prefix = prefix or self.read_prefix(prompts, particles)
        cache, skip = None, 0
        self.mixer.route_rows(self.tensor(particles))
        if prefix is not None:
            cache, skip = copy_cache(prefix.cache), prefix.length
            cache.batch_select_indices(self.tensor([prefix.rows[p] for p in particles]))
        ids, real = self.pad_rows([prompt[skip:] for prompt in prompts])
        positions = (real.cumsum(1) - 1).clamp(min=0) + skip
        mask = torch.cat([real.new_ones(len(prompts), skip), real], dim=1)
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache_argument(self.model, cache),
        )
        return PrefilledBatch(output_cache(out), mask, positions[:, -1:], out.logits[:, -1].float())


def shared_prefix_length(prompts: Sequence[list[int]]) -> int:
    """Return the number of leading tokens that all prompts share, leaving each at least one."""
    first, last = min(prompts), max(prompts)
    limit = min(map(len, prompts)) - 1
    return next((i for i in range(limit) if first[i] != last[i]), limit)


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Return the keyword argument of a model's key-value cache.

    transformers names it `cache` since 5.24, and `past_key_values` before.
    """
    return {_cache_keyword(type(model)): cache}  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _cache_keyword(kind: Any) -> str:
    taken = inspect.signature(kind.forward).parameters
    return "cache" if "cache" in taken else "past_key_values"


def output_cache(out: Any) -> Any:
    """Return the key-value cache of a model's output; see `cache_argument`."""
    return out.cache if hasattr(out, "cache") else out.past_key_values


def copy_cache(cache: Any) -> Any:
    """Return a copy that shares the tensors; updates of the copy leave the original as it is."""
    copied = copy.copy(cache)
    if isinstance(cache, Cache):
        copied.layers = [copy.copy(layer) for layer in cache.layers]
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
    """Everything that a captured step depends on."""

    width: int
    """Number of slots, the first ones."""
    length: int
    """Number of cached tokens that are read."""
    drawn: bool
    """Whether any row is sampled."""
    top: int
    """See `choose_tokens`."""


class OwnCache:
    """A model's own cache of one batch, whose rows are not replaced."""

    def fill(self, batch: PrefilledBatch, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Take over these rows of a prefill."""
        self._cache, self._mask = batch.cache, batch.mask
        if len(rows) < len(batch.mask):
            self.select(rows)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows alone, in this order."""
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]

    def inputs(self, model: Any, length: int, positions: torch.Tensor) -> dict[str, Any]:
        """Return the cache and the mask for one more token of each row at `positions`."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(positions), 1)], dim=1)
        return {"attention_mask": self._mask, **cache_argument(model, self._cache)}


class SlotCache(Cache):
    """A static cache of S slots, each with its own part, written at its own position.

    Args:
        slots, length: S, and the maximum number of tokens of a slot.
        device: Device of the model.
    """

    def __init__(self, slots: int, length: int, device: Any) -> None:
        super().__init__(layers=[])
        self.slots, self.length = slots, length
        self._rows = torch.arange(slots, device=device)
        self._columns = torch.arange(length, device=device)
        # Keys and values of each layer, [S, heads, length, D].
        self._stored: list[tuple[torch.Tensor, torch.Tensor]] = []

    def fill(self, batch: PrefilledBatch, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy these rows of a prefill to the beginning of these slots."""
        # Real tokens first: padding is before a prompt, or between a shared prefix and its rest.
        mask = batch.mask[rows]
        columns = mask.argsort(dim=1, descending=True, stable=True)[:, : int(mask.sum(1).max())]
        for number, layer in enumerate(batch.cache.layers):
            read = layer.keys, layer.values
            if number == len(self._stored):
                keys, values = (
                    one.new_zeros(self.slots, one.shape[1], self.length, one.shape[3])
                    for one in read
                )
                self._stored.append((keys, values))
            for stored, one in zip(self._stored[number], read, strict=True):
                chosen = one[rows]
                index = columns[:, None, :, None].expand(-1, chosen.shape[1], -1, chosen.shape[3])
                stored[slots, :, : columns.shape[1]] = chosen.gather(2, index)

    def select(self, rows: torch.Tensor) -> None:
        """Make these slots the first ones."""
        moved = (rows != self._rows[: len(rows)]).nonzero()[:, 0]
        for layer in self._stored:
            for stored in layer:
                stored[moved] = stored[rows[moved]]

    def inputs(self, model: Any, length: int, positions: torch.Tensor) -> dict[str, Any]:
        """Return the cache and the mask for one more token of the first slots at `positions`."""
        self._read, self._positions = length, positions
        mask = (self._columns[:length] <= positions[:, None])[:, None, None]
        return {"attention_mask": mask, **cache_argument(model, self)}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token per slot, and return the active part."""
        keys, values = self._stored[layer_idx]
        width = len(self._positions)
        rows = self._rows[:width]
        keys[rows, :, self._positions] = key_states[:, :, 0]
        values[rows, :, self._positions] = value_states[:, :, 0]
        return keys[:width, :, : self._read], values[:width, :, : self._read]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the length and offset of the mask."""
        return self._read, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions and mask are given to the model, as slots differ in length."""
        return 0


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
        self._captures = self._device.type == "cuda" and self._refills
        self.capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None
        self.forwards: Counter[tuple[int, int]] = Counter()
        self._graphs: dict[StepShape, Callable[[], None] | None] = {}
        self._graph_key: object = None
        self.release()

    def release(self) -> None:
        """Free the memory of the slots."""
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
        self._cache: SlotCache | OwnCache = (
            SlotCache(slots, length, self._device) if self._refills else OwnCache()
        )
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        if self._captures:
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
        self._drawn = any(row.temperature for row in rows)
        self._top = max((max(0, row.top) for row in rows if row.top), default=-1)
        self._width = self._narrow(len(rows), self.limit)
        self._particles.zero_()  # a slot that stays empty may have had a position of an earlier job
        if (key := self._mixer.graph_key) != self._graph_key:
            self._graph_key = key
            self._forget_graphs()
        prompts, particles = [row.prompt for row in rows], [row.particle for row in rows]
        prefix = self._reader.read_prefix(prompts, particles) if self._refills else None
        waiting = deque(sorted(rows, key=lambda row: -len(row.prompt) - row.limit))
        try:
            while waiting or any(self._rows):
                self._refill(waiting, tokens // PREFILL_DIVISOR, prefix)
                if any(self._rows):
                    self._run_steps()
        except BaseException:
            # A masked value that is NaN would still spoil a later row of its slot.
            self.release()
            raise

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

    def _refill(self, waiting: deque[DecodingRow], tokens: int, prefix: Prefix | None) -> None:
        """Read waiting prompts into free slots; without any, use fewer slots."""
        free = [slot for slot in range(self._width) if self._rows[slot] is None]
        if not waiting or (len(free) < self._width and not self._refills):
            self._compact()
        elif not self._refills:
            # All are read at once, as one cache holds them.
            self._width = self.limit
            batch = [waiting.popleft() for _ in range(min(self.limit, len(waiting)))]
            self._prefill(batch, list(range(self.limit)), None)
        elif len(free) == self._width or len(free) >= min(
            len(waiting), max(1, int(REFILL_SHARE * self._width))
        ):
            while waiting and free:
                batch = [waiting.popleft()]
                longest = len(batch[0].prompt)
                while waiting and len(batch) < len(free):
                    longest = max(longest, len(waiting[0].prompt))
                    if (len(batch) + 1) * longest > tokens:
                        break
                    batch.append(waiting.popleft())
                self._prefill(batch, free, prefix)

    def _prefill(self, rows: Sequence[DecodingRow], free: list[int], prefix: Prefix | None) -> None:
        """Read prompts, and put those that go on into free slots."""
        tensor, particles = self._reader.tensor, [row.particle for row in rows]
        batch = self._reader.read_prompts([row.prompt for row in rows], particles, prefix)
        heats = tensor([row.temperature for row in rows], dtype=torch.float32)
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
        target, source = tensor(slots), tensor(kept)
        self._cache.fill(batch, source, target)
        self._tokens[target], self._heats[target] = chosen["tokens"][source], heats[source]
        self._positions[target] = batch.position[source, 0] + 1
        self._particles[target] = tensor(particles)[source]

    def _compact(self) -> None:
        """Move the last rows to the first slots, and use fewer of them."""
        live = [slot for slot in range(self._width) if self._rows[slot] is not None]
        width = self._narrow(max(1, len(live)), self._width)
        if width == self._width or not live:
            return
        late = iter([slot for slot in live if slot >= width])
        order = [s if self._rows[s] is not None else next(late, s) for s in range(width)]
        self._width, index = width, self._reader.tensor(order)
        self._cache.select(index)
        for tensor in (self._tokens, self._positions, self._heats, self._particles):
            tensor[:width] = tensor[index]
        rows = [self._rows[slot] for slot in order]
        self._rows = [*rows, *[None] * (self.slots - width)]

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
        # The first use also initializes what must not be in a graph.
        if self.capture is None or shape not in self._graphs:
            self._graphs[shape] = None
            self._forward()
            return
        replay = self._graphs[shape]
        if replay is None:
            try:
                replay = self.capture(self._forward)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                log.warning("decoding without CUDA graphs, which is slower: %s", error)
                self._captures, self.capture, replay = False, None, self._forward
            self._graphs[shape] = replay
        replay()

    def _forward(self) -> None:
        """Read each active slot's token, choose the next, and write what is recorded."""
        width, length, drawn, top = self._shape
        positions = self._positions[:width]
        self._mixer.route_rows(self._particles[:width])
        out = self._model(
            input_ids=self._tokens[:width, None],
            position_ids=positions[:, None],
            use_cache=True,
            logits_to_keep=1,
            **self._cache.inputs(self._model, length, positions),
        )
        keys = self._keys[:width] if drawn else None
        found = choose_tokens(out.logits[:, -1].float(), self._heats[:width], keys, top)
        for name, values in found.items():
            # To an address that a captured step may contain, so it is never freed.
            if (name, top) not in self._outputs:
                self._outputs[name, top] = values.new_zeros(self.slots, *values.shape[1:])
            self._outputs[name, top][:width].copy_(values)
        self._tokens[:width].copy_(found["tokens"].clamp(min=0))
        # A text that has ended is decoded on until the host reads it.
        positions.add_(1).clamp_(max=self.length - 1)


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


def score_tokens(
    logits: torch.Tensor, targets: Sequence[TokenIds]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's log probability of its targets, [R] float64, and whether all are likeliest.

    Args:
        logits: [R, w, vocabulary] of w positions.
        targets: A token for each position; -1 is none.
    """
    wanted = torch.tensor(targets, device=logits.device)
    total = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    greedy = torch.ones_like(total, dtype=torch.bool)
    # One position at a time: a float32 copy of all logits could take gigabytes.
    for column in range(wanted.shape[1]):
        row, target = logits[:, column].float(), wanted[:, column]
        known = target >= 0
        picked = row.gather(1, target.clamp(min=0)[:, None])[:, 0]
        total += torch.where(known, picked - row.logsumexp(-1), 0.0)
        greedy &= ~known | (row.argmax(-1) == target)
    return total, greedy


@torch.inference_mode()
def score_choices(
    reader: Reader,
    prompts: Sequence[list[int]],
    choices: Sequence[Sequence[TokenIds]],
    particles: Sequence[int],
    most: int,
) -> list[list[tuple[float, bool]]]:
    """Score each prompt's choices, whose number may differ between prompts.

    The prompts are read once, and choices of similar lengths together after copies of the prompts'
    caches. Choices of one token need no more than the prompts.

    Args:
        reader: Reads the prompts.
        prompts: R prompts of at least one token.
        choices: Each prompt's continuations.
        particles: Position of each prompt.
        most: Approximate number of tokens whose logits are in memory at once, over all rows.

    Returns:
        Of each choice its natural log probability, and whether greedy decoding generates exactly
        it; 0 and `True` of an empty one.
    """
    pairs = [(row, number) for row, mine in enumerate(choices) for number in range(len(mine))]
    pairs.sort(key=lambda pair: len(choices[pair[0]][pair[1]]))
    found = [[(0.0, False)] * len(row) for row in choices]
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
        reader.mixer.route_rows(reader.tensor([particles[row] for row in rows]))
        if batch is not None:
            total, greedy = _score_after_prompts(reader, batch, rows, tokens, most)
        else:
            total, greedy = _score_sequences(reader, [prompts[row] for row in rows], tokens)
        scored = zip(total.tolist(), greedy.tolist(), strict=True)
        for (row, number), one in zip(group, scored, strict=True):
            found[row][number] = one
    return found


def _score_after_prompts(
    reader: Reader,
    batch: PrefilledBatch,
    rows: Sequence[int],
    tokens: Sequence[TokenIds],
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score continuations of some rows of a batch, one each, on a copy of the rows' cache."""
    last = max(map(len, tokens)) - 1

    def columns(start: int, end: int, fill: int) -> list[list[int]]:
        return [[*row[start:end], *[fill] * (end - max(start, len(row)))] for row in tokens]

    chosen = reader.tensor(rows)
    total, greedy = score_tokens(batch.logits[chosen][:, None], columns(0, 1, -1))
    if last < 1:
        return total, greedy
    cache, mask, position = copy_cache(batch.cache), batch.mask[chosen], batch.position[chosen]
    cache.batch_select_indices(chosen)
    width = max(1, most // len(tokens))
    for start in range(0, last, width):
        end = min(start + width, last)
        real = [[int(offset < len(row)) for offset in range(start, end)] for row in tokens]
        mask = torch.cat([mask, reader.tensor(real)], dim=1)
        out = reader.model(
            input_ids=reader.tensor(columns(start, end, reader.pad)),
            attention_mask=mask,
            position_ids=position + torch.arange(start + 1, end + 1, device=mask.device),
            use_cache=True,
            **cache_argument(reader.model, cache),
        )
        more, likeliest = score_tokens(out.logits, columns(start + 1, end + 1, -1))
        total, greedy = total + more, greedy & likeliest
    return total, greedy


def _score_sequences(
    reader: Reader, prompts: Sequence[list[int]], tokens: Sequence[TokenIds]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score one continuation per row in a full forward, for caches that cannot be copied."""
    longest = max(1, *map(len, tokens))
    ids, mask = reader.pad_rows(
        [[*one, *mine[:-1]] for one, mine in zip(prompts, tokens, strict=True)]
    )
    out = reader.model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=longest,
    )
    return score_tokens(out.logits, [[-1] * (longest - len(mine)) + [*mine] for mine in tokens])
