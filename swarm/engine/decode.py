"""Decoding and teacher-forced scoring of one batch: equal blocks of rows, or rows in any order.

Sampling is counter-based: the noise of a draw depends only on seed, sample, prompt and token index.
So a text does not depend on the other rows of its batch, on the plan or on the order, as far as the
logits do not. Rounding changes these slightly between batches; a draw changes with them where two
tokens are nearly equal after the noise, about as rarely as the argmax does.
"""

import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from swarm.errors import NotFinite, UserError
from swarm.models.base import Request

if TYPE_CHECKING:
    from swarm.engine.batched_lora import RoutedRows

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


def sample_tokens(logits: torch.Tensor, rows: "Sequence[DecodingRow]") -> torch.Tensor:
    """Return the next token of each row, [R], from logits [R, vocabulary]; appends their log
    probabilities to the rows' sampling states.

    A draw is the argmax of the tempered logits plus Gumbel noise, which is a draw from their
    softmax (Gumbel 1954).
    """
    tokens = logits.argmax(dim=-1)
    live = [(row_index, row.draw, len(row.new)) for row_index, row in enumerate(rows) if row.live]
    if drawn := [
        (row_index, draw, new) for row_index, draw, new in live if draw and draw.temperature
    ]:
        row_indices = torch.tensor([row_index for row_index, _, _ in drawn], device=logits.device)
        temperatures = logits.new_tensor(
            [max(draw.temperature, MIN_TEMPERATURE) for _, draw, _ in drawn]
        )
        noise = gumbel_noise([random_key(draw.key, new) for _, draw, new in drawn], logits)
        tokens[row_indices] = (
            logits[row_indices].div_(temperatures[:, None]).add_(noise).argmax(dim=-1)
        )
    if with_logprobs := [(row_index, draw) for row_index, draw, _ in live if draw and draw.top]:
        _record_logprobs(logits, tokens, with_logprobs)
    return tokens


def _record_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, rows: Sequence[tuple[int, SamplingState]]
) -> None:
    """Record the log probabilities of the rows at these indices."""
    indices = torch.tensor([index for index, _ in rows], device=logits.device)
    logprobs = logits[indices].log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[indices, None])[:, 0].tolist()
    width = min(max(0, *(draw.top for _, draw in rows)), logits.shape[1])
    values, ids = (found.tolist() for found in logprobs.topk(width, dim=-1))
    for row, (_, draw) in enumerate(rows):
        top = list(zip(ids[row], values[row], strict=True))[: max(0, draw.top)]
        draw.logprobs.append((chosen[row], top))


def random_key(key: bytes, position: int) -> tuple[int, int]:
    """Return two 32-bit numbers that seed the noise of the token at an index."""
    digest = hashlib.blake2b(position.to_bytes(8, "big"), key=key, digest_size=8).digest()
    return tuple(int.from_bytes(half, "big", signed=True) for half in (digest[:4], digest[4:]))  # type: ignore[return-value]


def gumbel_noise(
    keys: Sequence[tuple[int, int]] | torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """Return standard Gumbel noise [R, vocabulary], the same on every device up to rounding.

    A token's number is its id and the row's keys passed through two rounds of a hash.

    Args:
        keys: Two 32-bit numbers for each row; as a tensor [R, 2] on the device, nothing is copied.
        like: A tensor of the result's shape, on its device.
    """
    first, second = torch.as_tensor(keys, dtype=torch.int32, device=like.device).T[:, :, None]
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
"""Minimum number of shared tokens for which a separate prefill per particle is worthwhile."""

COMPACT_BELOW = 0.75
"""Share of live rows below which finished rows are dropped from the batch."""


@dataclass(slots=True)
class DecodingRow:
    """One prompt being continued.

    Attributes:
        prompt: Prompt token ids.
        limit: Maximum number of new tokens.
        stop_check: Returns whether these new tokens determine the answer.
        draw: Sampling state; `None` is greedy.
        new: Token ids generated so far, without the end token.
        live: Whether more tokens are wanted.
    """

    prompt: list[int]
    limit: int
    stop_check: Callable[[list[int]], bool] | None = None
    draw: SamplingState | None = None
    new: list[int] = field(default_factory=list)
    live: bool = True

    def add_token(self, token: int, end_tokens: frozenset[int]) -> None:
        """Append one token, and update `live`."""
        if not self.live:
            return
        if token in end_tokens:
            self.live = False
            return
        self.new.append(token)
        self.live = len(self.new) < self.limit and not (
            self.stop_check and self.stop_check(self.new)
        )


@dataclass(slots=True)
class DecodingBatch:
    """State of a batch of R = P * b rows between decoding steps.

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


def shared_prefix_length(prompts: Sequence[list[int]]) -> int:
    """Return the number of leading tokens that all prompts share, leaving each at least one."""
    first, last = min(prompts), max(prompts)
    limit = min(len(prompt) for prompt in prompts) - 1
    same = 0
    while same < limit and first[same] == last[same]:
        same += 1
    return same


def prefill_batch(
    model: Any,
    prompts: Sequence[list[int]],
    particles: int,
    pad: int,
    routed: "RoutedRows | None" = None,
) -> DecodingBatch:
    """Prefill R prompts, left-padded; a long prefix that blocks share is read once per particle."""
    rows = len(prompts)
    blocks = routed is None and rows > particles and can_share_prefix(model)
    prefix = shared_prefix_length(prompts) if blocks else 0
    if routed:
        routed.activate(range(rows))
    if prefix < MINIMUM_PREFIX:
        return read_prompts(model, prompts, pad)
    cache = read_prefix(model, prompts[0][:prefix], particles)
    cache.batch_repeat_interleave(rows // particles)
    return read_prompts(model, prompts, pad, cache, prefix)


def read_prefix(model: Any, prefix: list[int], particles: int) -> Any:
    """Return the key-value cache of the same tokens read by each particle."""
    ids = torch.tensor([prefix] * particles, device=model.device)
    positions = torch.arange(len(prefix), device=model.device).expand(particles, -1)
    out = model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1)
    return output_cache(out)


def read_prompts(
    model: Any, prompts: Sequence[list[int]], pad: int, cache: Any = None, skip: int = 0
) -> DecodingBatch:
    """Prefill R prompts, left-padded, whose first `skip` tokens `cache` contains."""
    rows, device = len(prompts), model.device
    longest = max(len(prompt) for prompt in prompts) - skip
    padded = [[pad] * (longest - len(p) + skip) + list(p[skip:]) for p in prompts]
    real = [[0] * (longest - len(p) + skip) + [1] * (len(p) - skip) for p in prompts]
    ids, real_tokens = torch.tensor(padded, device=device), torch.tensor(real, device=device)
    positions = (real_tokens.cumsum(1) - 1).clamp(min=0) + skip
    mask = torch.cat([real_tokens.new_ones(rows, skip), real_tokens], dim=1)
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **cache_argument(model, cache),
    )
    return DecodingBatch(output_cache(out), mask, positions[:, -1:], out.logits[:, -1].float())


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


def can_share_prefix(model: Any) -> bool:
    """Return whether a cache may be copied to more rows: full attention in all layers."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and not getattr(config, "sliding_window", None)


def decode_step(model: Any, batch: DecodingBatch, tokens: torch.Tensor) -> None:
    """Read one more token per row, [R]; the batch is advanced in place."""
    batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(tokens), 1)], dim=1)
    batch.position = batch.position + 1
    out = model(
        input_ids=tokens[:, None],
        attention_mask=batch.mask,
        position_ids=batch.position,
        use_cache=True,
        logits_to_keep=1,
        **cache_argument(model, batch.cache),
    )
    batch.cache = output_cache(out)
    batch.logits = out.logits[:, -1].float()


def rows_to_keep(live: Sequence[bool], particles: int) -> list[int] | None:
    """Return the rows to continue, equally many per particle; `None` if dropping is not worthwhile.

    All live rows are included; a particle with fewer live rows than another retains finished ones.
    """
    size = len(live) // particles
    blocks = [range(p * size, (p + 1) * size) for p in range(particles)]
    width = max(sum(live[row] for row in block) for block in blocks)
    if width > COMPACT_BELOW * size:
        return None
    kept: list[int] = []
    for block in blocks:
        order = sorted(block, key=lambda row: (not live[row], row))
        kept += sorted(order[:width])
    return kept


def find_nonfinite_row(logits: torch.Tensor, highest: torch.Tensor) -> int | None:
    """Return the first row [of R] with logits that are not finite, from the rows' argmax [R].

    argmax treats NaN as the highest, so one number per row detects them all.
    """
    fine = logits.gather(1, highest[:, None])[:, 0].isfinite()
    return None if fine.all() else int((~fine).nonzero()[0])


@torch.inference_mode()
def generate_rows(
    model: Any,
    rows: Sequence[DecodingRow],
    particles: int,
    pad: int,
    end_tokens: frozenset[int],
    routed: "RoutedRows | None" = None,
) -> None:
    """Continue all rows until each has ended, is decided, or has reached its limit.

    Args:
        model: A causal language model of transformers.
        rows: R = P * b rows, particle by particle; their `new` is filled in.
        particles: P, the number of equal blocks.
        pad: The token id to pad with; never attended.
        end_tokens: Token ids that end a text.
        routed: The particles of rows that are in any order, with `particles` = 1.
    """
    batch = prefill_batch(model, [row.prompt for row in rows], particles, pad, routed)
    numbers = list(range(len(rows)))
    greedy = all(row.draw is None for row in rows)
    while True:
        highest = batch.logits.argmax(dim=-1)
        if (spoiled := find_nonfinite_row(batch.logits, highest)) is not None:
            at = numbers[spoiled]
            block = at // (len(rows) // particles)
            raise NotFinite(routed.particles[at] if routed else block, "activations")
        current = [rows[number] for number in numbers]
        tokens = highest if greedy else sample_tokens(batch.logits, current)
        for row, token in zip(current, tokens.tolist(), strict=True):
            row.add_token(token, end_tokens)
        live = [row.live for row in current]
        if not any(live):
            return
        if (kept := rows_to_keep(live, particles)) is not None:
            index = torch.tensor(kept, device=tokens.device)
            batch.cache.batch_select_indices(index)
            batch.mask, batch.position = batch.mask[index], batch.position[index]
            tokens, numbers = tokens[index], [numbers[i] for i in kept]
            if routed:
                routed.activate(numbers)
        decode_step(model, batch, tokens)


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
    model: Any,
    prompts: Sequence[list[int]],
    choices: Sequence[Sequence[TokenIds]],
    particles: int,
    pad: int,
    positions: int,
    routed: "RoutedRows | None" = None,
) -> list[list[ContinuationScore]]:
    """Score each prompt's choices, whose number may differ between prompts.

    The prompts are read once, and choices of similar lengths together after copies of the prompts'
    caches. Choices of one token need no more than the prompts.

    Args:
        model: A causal language model of transformers.
        prompts: R = P * b rows, particle by particle, of at least one token.
        choices: Each prompt's continuations.
        particles: P, the number of equal blocks.
        pad: The token id to pad with; never attended.
        positions: Approximate number of positions whose logits are in memory at once, over all
            rows.
        routed: The particles of prompts that are in any order, with `particles` = 1.
    """
    if not can_share_prefix(model):
        return _score_without_cache(model, prompts, choices, particles, pad, positions, routed)
    batch = prefill_batch(model, prompts, particles, pad, routed)
    found = [[ContinuationScore(0.0, False)] * len(row) for row in choices]
    for group in _group_continuations(choices, particles, positions):
        rows, numbers = zip(*group, strict=True)
        tokens = [next(iter(choices[row][number:]), ()) for row, number in group]
        if routed:
            routed.activate(rows)
        scored = _score_after_prompt(model, batch, rows, tokens, pad, positions)
        for row, number, one in zip(rows, numbers, scored, strict=True):
            if number < len(choices[row]):
                found[row][number] = one
    return found


def _group_continuations(
    choices: Sequence[Sequence[TokenIds]], particles: int, positions: int
) -> list[list[tuple[int, int]]]:
    """Divide all choices into batches of P equal blocks, each a list of (row, number of choice).

    Choices of similar lengths share a batch, which is padded to its longest and has about
    `positions` tokens and at most as many rows as there are prompts.
    """
    size = len(choices) // particles
    starts = range(0, len(choices), size)
    lengths: dict[tuple[int, int], int] = {}
    for index, row in enumerate(choices):
        for number, tokens in enumerate(row):
            pair = (index % size, number)
            lengths[pair] = max(len(tokens), lengths.get(pair, 0))
    groups: list[list[tuple[int, int]]] = []
    for pair in sorted(lengths, key=lambda pair: (lengths[pair], pair)):
        count = len(groups[-1]) + 1 if groups else 0
        if 0 < count <= size and particles * count * (lengths[pair] - 1) <= positions:
            groups[-1].append(pair)
        else:
            groups.append([pair])
    return [
        [(start + row, number) for start in starts for row, number in group] for group in groups
    ]


def _score_after_prompt(
    model: Any,
    batch: DecodingBatch,
    rows: Sequence[int],
    tokens: Sequence[TokenIds],
    pad: int,
    positions: int,
) -> list[ContinuationScore]:
    """Score continuations of some rows of a batch, one each, on a copy of the rows' cache."""
    tally = ScoreAccumulator()
    chosen = torch.tensor(rows, device=batch.mask.device)
    tally.add(batch.logits[chosen][:, None], _slice_columns(tokens, 0, 1, -1))
    last = max(len(row) for row in tokens) - 1
    if last < 1:
        return tally.to_scores()
    cache, mask, position = copy_cache(batch.cache), batch.mask[chosen], batch.position[chosen]
    cache.batch_select_indices(chosen)
    width = max(1, positions // len(tokens))
    for start in range(0, last, width):
        end = min(start + width, last)
        ids = torch.tensor(_slice_columns(tokens, start, end, pad), device=mask.device)
        real = [[int(offset < len(row)) for offset in range(start, end)] for row in tokens]
        mask = torch.cat([mask, torch.tensor(real, device=mask.device)], dim=1)
        columns = position + torch.arange(start + 1, end + 1, device=mask.device)
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=columns,
            use_cache=True,
            **cache_argument(model, cache),
        )
        tally.add(out.logits, _slice_columns(tokens, start + 1, end + 1, -1))
    return tally.to_scores()


def copy_cache(cache: Any) -> Any:
    """Return a copy that shares the tensors; updates of the copy leave the original as it is."""
    copied = copy.copy(cache)
    if layers := getattr(cache, "layers", None):
        copied.layers = [copy.copy(layer) for layer in layers]
    return copied


def _score_without_cache(
    model: Any,
    prompts: Sequence[list[int]],
    choices: Sequence[Sequence[TokenIds]],
    particles: int,
    pad: int,
    positions: int,
    routed: "RoutedRows | None",
) -> list[list[ContinuationScore]]:
    """Score all choices where caches cannot be copied; prompts are read again for each."""
    found: list[list[ContinuationScore]] = [[] for _ in prompts]
    for number in range(max(map(len, choices))):
        tokens = [next(iter(row[number:]), ()) for row in choices]
        scored = _score_full_sequences(model, prompts, tokens, particles, pad, positions, routed)
        for mine, row, one in zip(found, choices, scored, strict=True):
            if number < len(row):
                mine.append(one)
    return found


def _score_full_sequences(
    model: Any,
    prompts: Sequence[list[int]],
    tokens: Sequence[TokenIds],
    particles: int,
    pad: int,
    positions: int,
    routed: "RoutedRows | None",
) -> list[ContinuationScore]:
    """Score one continuation per row in a full forward, for caches that cannot be copied."""
    size, longest = len(prompts) // particles, max(1, *map(len, tokens))
    width = max(1, positions // (particles * longest))
    found: dict[int, ContinuationScore] = {}
    for start in range(0, size, width):
        blocks = [
            range(p * size + start, min(p * size + start + width, (p + 1) * size))
            for p in range(particles)
        ]
        rows = [row for block in blocks for row in block]
        sequences = [[*prompts[row], *tokens[row][:-1]] for row in rows]
        length = max(map(len, sequences))
        ids = [[pad] * (length - len(one)) + one for one in sequences]
        real = [[0] * (length - len(one)) + [1] * len(one) for one in sequences]
        mask = torch.tensor(real, device=model.device)
        if routed:
            routed.activate(rows)
        out = model(
            input_ids=torch.tensor(ids, device=model.device),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
            logits_to_keep=longest,
        )
        tally = ScoreAccumulator()
        tally.add(out.logits, [[-1] * (longest - len(tokens[r])) + [*tokens[r]] for r in rows])
        found |= zip(rows, tally.to_scores(), strict=True)
    return [found[row] for row in range(len(prompts))]


def _slice_columns(tokens: Sequence[TokenIds], start: int, end: int, fill: int) -> list[list[int]]:
    """Return the same columns of all rows, filled up where a row has ended."""
    return [[*row[start:end], *[fill] * (end - max(start, min(end, len(row))))] for row in tokens]
