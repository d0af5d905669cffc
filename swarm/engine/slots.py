"""Decoding in slots: a batch of fixed shape whose rows are replaced as their texts end.

A slot is a row of the batch with its own part of a static key-value cache. Where a text has ended,
the next waiting prompt of any particle is read and copied into its slot, so that the batch remains
full whatever the lengths of the texts (iteration-level scheduling: Yu et al. 2022, Orca). A step
has a fixed shape, a number of slots and a multiple of `LENGTH_BUCKET` tokens. On a GPU it is
captured once as a CUDA graph and then replayed, tokens are drawn on the device, and the host reads
them every few steps. On a CPU the same steps run one by one. Texts are those of
`swarm.engine.decode.generate_rows`, up to rounding.
"""

import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from swarm.engine.base import LENGTH_BUCKET, PREFILL_DIVISOR, limit_cache_tokens
from swarm.engine.batched_lora import BatchedLoraModel, Routing, find_others
from swarm.engine.decode import (
    COMPACT_BELOW,
    MIN_TEMPERATURE,
    MINIMUM_PREFIX,
    DecodingBatch,
    DecodingRow,
    cache_argument,
    can_share_prefix,
    copy_cache,
    find_nonfinite_row,
    gumbel_noise,
    prefill_batch,
    random_key,
    read_prefix,
    read_prompts,
    sample_tokens,
    shared_prefix_length,
)
from swarm.errors import NotFinite

log = logging.getLogger(__name__)

STEPS_PER_READ = 8
"""Steps on a GPU between two times that the host reads tokens; an ended text decodes on until then.
"""

REFILL_SHARE = 0.125
"""Share of free slots from which prompts are read: a prefill costs more than a few idle slots."""

MIN_WIDTH = 8
"""Number of slots below which a step is not made narrower on a GPU."""


def supports_slots(model: Any) -> bool:
    """Return whether a model runs with a static cache and a mask of its own.

    That is full attention in all layers, by torch's `scaled_dot_product_attention`.
    """
    return bool(
        getattr(model, "_can_compile_fullgraph", False)
        and can_share_prefix(model)
        and model.config._attn_implementation == "sdpa"
    )


def round_length(tokens: int) -> int:
    """Return a number of tokens rounded up to a multiple of `LENGTH_BUCKET`."""
    return -(-tokens // LENGTH_BUCKET) * LENGTH_BUCKET


class StepShape(NamedTuple):
    """Everything that a captured step depends on.

    Attributes:
        width: Number of slots, the first ones.
        length: Number of cached tokens that are read.
        drawn: Whether any row is sampled.
        top: Number of most likely tokens whose log probabilities are recorded; -1 records none.
    """

    width: int
    length: int
    drawn: bool
    top: int


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [S, heads, length, D], written at each slot's own position.

    Args:
        source: The layer's cache of a prefill, which has its shapes and types.
        decoder: The decoder whose positions and active shape are used.
    """

    is_sliding = False

    def __init__(self, source: Any, decoder: "SlotDecoder") -> None:
        super().__init__()
        self.keys, self.values = (
            states.new_zeros(decoder.slots, states.shape[1], decoder.length, states.shape[3])
            for states in (source.keys, source.values)
        )
        # Not a reference in a circle: a decoder that is dropped frees its cache at once.
        self._decoder: SlotDecoder = weakref.proxy(decoder)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the tensors exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token per slot, and return the active part."""
        shape = self._decoder.shape
        rows, columns = self._decoder.row_indices[: shape.width], self._decoder.columns_to_write
        parts = []
        for stored, new in ((self.keys, key_states), (self.values, value_states)):
            stored[rows, :, columns] = new[:, :, 0]
            parts.append(stored[: shape.width, :, : shape.length])
        return parts[0], parts[1]

    def fill(self, source: Any, rows: torch.Tensor, columns: torch.Tensor, slots: Any) -> None:
        """Copy rows of a prefill, from its columns [n, T], to the beginning of these slots."""
        for stored, read in ((self.keys, source.keys), (self.values, source.values)):
            chosen = read[rows]
            index = columns[:, None, :, None].expand(-1, chosen.shape[1], -1, chosen.shape[3])
            stored[slots, :, : columns.shape[1]] = chosen.gather(2, index)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots to others."""
        for stored in (self.keys, self.values):
            stored[target] = stored[source]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the mask."""
        return self._decoder.shape.length, 0

    def get_seq_length(self) -> int:
        """Return 0: positions and mask are given to the model, as slots differ in length."""
        return 0

    def get_max_length(self) -> int:
        """Return the number of tokens that a slot can have."""
        return self._decoder.length


class SlotDecoder:
    """Decodes any number of rows of any particles in S slots.

    The object is used again and again: its cache and its captured steps remain.

    Args:
        model: A causal language model of transformers for which `supports_slots` holds.
        stack: The model's LoRA layers, with static factors; `None` if its weights are those of one
            position, at fixed addresses.
        slots: S.
        length: Maximum number of tokens of a row, prompt and new ones.
        pad: The token id to pad with; never attended.
        prefill_tokens: Approximate maximum number of padded tokens of one prefill.

    Attributes:
        limit, row_length: Slots and tokens per row that are used. They depend on the rows alone,
            not on earlier ones, which may have needed a larger cache: so do texts, by rounding.
        shape: Shape of the current step.
        row_indices: 0 to S - 1, on the device.
        steps_per_read: See `STEPS_PER_READ`; 1 on a CPU.
        capture: Runs a function and returns one that repeats what it did to the same tensors; a
            CUDA graph. `None` runs each step by itself.
        forwards: Number of steps by slots and length.
        prefills: Number of prefills by rows and tokens per row.
    """

    def __init__(
        self,
        model: Any,
        stack: BatchedLoraModel | None,
        slots: int,
        length: int,
        pad: int,
        prefill_tokens: int,
    ) -> None:
        self.slots, self.length = slots, length
        self.limit, self.row_length = slots, length
        self._model, self._stack, self._pad = model, stack, pad
        self._ends: frozenset[int] = frozenset()
        self._prefill_tokens = prefill_tokens
        self._on_gpu = model.device.type == "cuda"
        self.steps_per_read = STEPS_PER_READ if self._on_gpu else 1
        self.capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None
        if self._on_gpu:
            self.capture = partial(capture_graph, torch.cuda.graph_pool_handle())
        self.shape = StepShape(slots, length, False, -1)
        self.forwards: Counter[tuple[int, int]] = Counter()
        self.prefills: Counter[tuple[int, int]] = Counter()
        device = model.device
        self.row_indices = torch.arange(slots, device=device)
        self._columns = torch.arange(length, device=device)
        # The state of the slots, at fixed addresses.
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._temperatures = torch.zeros(slots, device=device)
        self._keys = torch.zeros(slots, 2, dtype=torch.int32, device=device)
        self._routing: Routing | None = None
        self._outputs: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._cache: Any = None
        self._graphs: dict[StepShape, Callable[[], None] | None] = {}
        self._addresses: Any = None
        self._rows: list[DecodingRow | None] = [None] * slots
        self._particles = [0] * slots
        self._width = slots

    @property
    def columns_to_write(self) -> torch.Tensor:
        """Position of each active slot's new token, [width]."""
        return self._positions[: self.shape.width]

    @torch.inference_mode()
    def generate(
        self,
        rows: Sequence[DecodingRow],
        particles: Sequence[int],
        count: int,
        end_tokens: frozenset[int],
    ) -> None:
        """Continue all rows until each has ended, is decided, or has reached its limit.

        Args:
            rows: Rows in any order; their `new` is filled in. The longest are begun first.
            particles: Each row's particle.
            count: P, the number of positions that are set.
            end_tokens: Token ids that end a text.

        Raises:
            NotFinite: A particle's logits are not finite.
        """
        self._ends = end_tokens
        self._begin(rows, count)
        order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].prompt) - rows[i].limit, i))
        waiting = deque((rows[i], particles[i]) for i in order)
        done = False
        try:
            while waiting or any(self._rows):
                self._refill(waiting)
                if any(self._rows):
                    self._run_steps()
            done = True
        finally:
            self._route_rows(None)
            self._prefix = None
            if not done:
                # A masked value that is NaN would still spoil a later row of its slot.
                self._rows = [None] * self.slots
                self._cache = None
                self._forget_graphs()

    def _begin(self, rows: Sequence[DecodingRow], count: int) -> None:
        """Prepare for these rows: shape of the steps, routing, and shared prefix."""
        draws = [row.draw for row in rows if row.draw]
        self._drawn = any(draw.temperature for draw in draws)
        tops = [draw.top for draw in draws if draw.top]
        vocabulary = self._model.config.get_text_config().vocab_size
        self._top = min(vocabulary, max(0, *tops)) if tops else -1
        self._count, self._width = count, self._narrow(len(rows), self.limit)
        # Graphs contain the addresses of factors, which new shapes change.
        factors = self._stack.static_addresses() if self._stack else ()
        if (addresses := (count, factors)) != self._addresses:
            self._addresses = addresses
            self._forget_graphs()
            particles = torch.zeros_like(self._tokens)
            others = find_others(particles, count)
            self._routing = Routing(particles, others) if count > 1 else None
        self._route_rows(None)
        self._prefix, self._skip = None, 0
        prompts = [row.prompt for row in rows]
        if len(rows) > count and (skip := shared_prefix_length(prompts)) >= MINIMUM_PREFIX:
            self._prefix, self._skip = read_prefix(self._model, prompts[0][:skip], count), skip

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        if self._on_gpu and self.capture is not None:
            # A pool whose graphs are all gone cannot be used again.
            self.capture = partial(capture_graph, torch.cuda.graph_pool_handle())

    def _route_rows(self, routing: Routing | None) -> None:
        if self._stack is not None:
            self._stack.route_rows(routing)

    def _narrow(self, live: int, width: int) -> int:
        """Return the number of slots for these rows; few different ones if steps are captured."""
        if self.capture is None:
            return min(live, width) if live <= COMPACT_BELOW * width else width
        while width > MIN_WIDTH and (width + 1) // 2 >= live:
            width = (width + 1) // 2
        return width

    def _refill(self, waiting: deque[tuple[DecodingRow, int]]) -> None:
        """Read waiting prompts into free slots; without any, use fewer slots."""
        free = [slot for slot in range(self._width) if self._rows[slot] is None]
        if not waiting:
            self._compact()
            return
        enough = min(len(waiting), max(1, int(REFILL_SHARE * self._width)))
        if len(free) < self._width and len(free) < enough:
            return
        while waiting and free:
            batch = [waiting.popleft()]
            longest = len(batch[0][0].prompt) - self._skip
            while waiting and len(batch) < len(free):
                longest = max(longest, len(waiting[0][0].prompt) - self._skip)
                if (len(batch) + 1) * longest > self._prefill_tokens:
                    break
                batch.append(waiting.popleft())
            self._prefill(sorted(batch, key=lambda one: one[1]), free)

    def _prefill(self, batch: Sequence[tuple[DecodingRow, int]], free: list[int]) -> None:
        """Read prompts, in the order of particles, and put those that go on into free slots."""
        rows, particles = [row for row, _ in batch], [particle for _, particle in batch]
        prompts = [row.prompt for row in rows]
        device = self._model.device
        each, rest = divmod(len(rows), self._count)
        blocks = not rest and particles == [p for p in range(self._count) for _ in range(each)]
        self._route_rows(None if blocks else Routing.of_rows(particles, self._count, device))
        if self._prefix is not None:
            cache = copy_cache(self._prefix)
            cache.batch_select_indices(torch.tensor(particles, device=device))
            state = read_prompts(self._model, prompts, self._pad, cache, self._skip)
        elif blocks:
            # These prompts may share a prefix that not all do.
            state = prefill_batch(self._model, prompts, self._count, self._pad)
        else:
            state = read_prompts(self._model, prompts, self._pad)
        self.prefills[len(rows), state.mask.shape[1] - self._skip] += 1
        spoiled = find_nonfinite_row(state.logits, state.logits.argmax(dim=-1))
        if spoiled is not None:
            raise NotFinite(particles[spoiled], "activations")
        tokens = sample_tokens(state.logits, rows)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.add_token(token, self._ends)
        kept = [index for index, row in enumerate(rows) if row.live]
        if kept:
            slots, free[: len(kept)] = free[: len(kept)], []
            for slot, index in zip(slots, kept, strict=True):
                self._rows[slot], self._particles[slot] = rows[index], particles[index]
            self._fill(slots, kept, state, tokens)

    def _fill(
        self, slots: list[int], kept: list[int], state: DecodingBatch, tokens: torch.Tensor
    ) -> None:
        """Copy these rows of a prefill, and their first tokens, into slots."""
        device = tokens.device
        if self._cache is None:
            self._cache = Cache(layers=[SlotLayer(layer, self) for layer in state.cache.layers])
        chosen = [self._rows[slot] for slot in slots]
        heats = [row.draw.temperature if row and row.draw else 0.0 for row in chosen]
        tokens_read = [len(row.prompt) for row in chosen if row]
        lengths = torch.tensor(tokens_read, device=device)
        target, rows = torch.tensor(slots, device=device), torch.tensor(kept, device=device)
        # Real tokens first: padding is before a prompt, or between a shared prefix and its rest.
        columns = state.mask[rows].argsort(dim=1, descending=True, stable=True)
        columns = columns[:, : max(tokens_read)]
        for mine, read in zip(self._cache.layers, state.cache.layers, strict=True):
            mine.fill(read, rows, columns, target)
        self._tokens[target], self._positions[target] = tokens[rows], lengths
        self._temperatures[target] = torch.tensor(heats, device=device)
        if self._routing is not None:
            index = torch.tensor([self._particles[slot] for slot in slots], device=device)
            self._routing.particles[target] = index
            self._routing.others[target] = find_others(index, self._count)

    def _compact(self) -> None:
        """Move the last rows to the first slots, and use fewer of them."""
        live = [slot for slot in range(self._width) if self._rows[slot] is not None]
        width = self._narrow(max(1, len(live)), self._width)
        if width == self._width:
            return
        targets = [slot for slot in range(width) if self._rows[slot] is None]
        moves = list(zip((slot for slot in live if slot >= width), targets, strict=False))
        self._width = width
        if not moves:
            return
        source, target = torch.tensor(moves, device=self._tokens.device).T
        for layer in self._cache.layers:
            layer.move(source, target)
        tensors = [self._tokens, self._positions, self._temperatures]
        if self._routing is not None:
            tensors += [self._routing.particles, self._routing.others]
        for tensor in tensors:
            tensor[target] = tensor[source]
        for before, after in moves:
            self._rows[after], self._rows[before] = self._rows[before], None
            self._particles[after] = self._particles[before]

    def _run_steps(self) -> None:
        """Decode some tokens of all rows, read them, and free the slots of texts that ended."""
        live = [(slot, row) for slot, row in enumerate(self._rows[: self._width]) if row]
        steps = min(self.steps_per_read, max(row.limit - len(row.new) for _, row in live))
        longest = max(len(row.prompt) + len(row.new) for _, row in live) - 1 + steps
        length = min(self.row_length, round_length(longest))
        self.shape = StepShape(self._width, length, self._drawn, self._top)
        keys = self._noise_keys(live, steps) if self._drawn else None
        written: list[tuple[str, tuple[int, ...]]] = [("tokens", ())]
        if self._top >= 0:
            written += [("logprobs", ()), ("values", (self._top,)), ("ids", (self._top,))]
        read: dict[str, list[torch.Tensor]] = {name: [] for name, _ in written}
        for step in range(steps):
            if keys is not None:
                self._keys[: self._width].copy_(keys[step])
            self._run_step()
            for name, size in written:
                read[name].append(self._outputs[name, size][: self._width].clone())
        # One transfer for all steps.
        found = {name: torch.stack(tensors).tolist() for name, tensors in read.items()}
        for slot, row in live:
            for step in range(steps):
                self._add_token(row, slot, {name: one[step][slot] for name, one in found.items()})
                if not row.live:
                    self._rows[slot] = None
                    break

    def _add_token(self, row: DecodingRow, slot: int, found: dict[str, Any]) -> None:
        if found["tokens"] < 0:
            raise NotFinite(self._particles[slot], "activations")
        if row.draw and row.draw.top:
            top = zip(found.get("ids", ()), found.get("values", ()), strict=True)
            row.draw.logprobs.append((found["logprobs"], list(top)[: max(0, row.draw.top)]))
        row.add_token(found["tokens"], self._ends)

    def _noise_keys(self, live: Sequence[tuple[int, DecodingRow]], steps: int) -> torch.Tensor:
        """Return the keys of the next tokens' noise, [steps, width, 2]."""
        keys = torch.zeros(steps, self._width, 2, dtype=torch.int32)
        for slot, row in live:
            if row.draw and row.draw.temperature:
                new = range(len(row.new), min(len(row.new) + steps, row.limit))
                keys[: len(new), slot] = torch.tensor(
                    [random_key(row.draw.key, index) for index in new], dtype=torch.int32
                )
        if self._keys.device.type == "cuda":
            keys = keys.pin_memory()
        return keys.to(self._keys.device, non_blocking=True)

    def _run_step(self) -> None:
        """Run one step: at its shape's first use as it is, then captured, and replayed."""
        shape = self.shape
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
        width, length, drawn, top = self.shape
        positions = self._positions[:width]
        if self._routing is not None:
            self._route_rows(Routing(self._routing.particles[:width], self._routing.others[:width]))
        logits = (
            self._model(
                input_ids=self._tokens[:width, None],
                attention_mask=(self._columns[:length] <= positions[:, None])[:, None, None],
                position_ids=positions[:, None],
                use_cache=True,
                logits_to_keep=1,
                **cache_argument(self._model, self._cache),
            )
            .logits[:, -1]
            .float()
        )
        tokens = logits.argmax(dim=-1)
        fine = logits.gather(1, tokens[:, None])[:, 0].isfinite()
        if drawn:
            heat = self._temperatures[:width, None]
            noise = gumbel_noise(self._keys[:width], logits)
            hot = (logits / heat.clamp(min=MIN_TEMPERATURE)).add_(noise).argmax(dim=-1)
            tokens = torch.where(heat[:, 0] > 0, hot, tokens)
        if top >= 0:
            logprobs = logits.log_softmax(dim=-1)
            self._write("logprobs", logprobs.gather(1, tokens[:, None])[:, 0])
            values, ids = logprobs.topk(top, dim=-1)
            self._write("values", values)
            self._write("ids", ids)
        self._write("tokens", torch.where(fine, tokens, -1))
        self._tokens[:width].copy_(tokens)
        # A text that has ended is decoded on until the host reads it.
        positions.add_(1).clamp_(max=self.length - 1)

    def _write(self, name: str, values: torch.Tensor) -> None:
        """Copy results to an address that a captured step may contain, so it is never freed."""
        key = (name, tuple(values.shape[1:]))
        if key not in self._outputs:
            self._outputs[key] = values.new_zeros(self.slots, *key[1])
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
    """Return the maximum number of tokens in all slots; see `limit_cache_tokens`."""
    if model.device.type == "cpu":
        return budget
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    return limit_cache_tokens(budget, token_bytes, free_bytes)


def fit_decoder(
    last: SlotDecoder | None,
    parts: tuple[Any, BatchedLoraModel | None, int],
    work: tuple[int, int, float],
    tokens: int,
) -> SlotDecoder:
    """Return a decoder for some rows: the last one if its cache is large enough, or a new one.

    Args:
        parts: Model, LoRA layers if there are any, and pad token.
        work: Number of rows, tokens of the longest, and the model's context.
        tokens: Maximum number of tokens in all slots.
    """
    (model, stack, pad), (rows, longest, context) = parts, work
    length = int(min(round_length(longest), context))
    slots = max(1, min(rows, tokens // length))
    if last is None or slots > last.slots or length > last.length:
        size = slots, length
        if last and max(slots, last.slots) * max(length, last.length) <= tokens:
            # For the rows before, too, whose captured steps would else be lost again.
            size = max(slots, last.slots), max(length, last.length)
        last = SlotDecoder(model, stack, *size, pad, tokens // PREFILL_DIVISOR)
    last.limit, last.row_length = slots, length
    return last
