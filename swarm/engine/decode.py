"""Decoding of one batch whose rows come in equal blocks, one block a particle."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from swarm.errors import NotFinite

from swarm.engine.sampling import SamplingState, sample_tokens

MINIMUM_PREFIX = 16
"""Tokens that all rows must share before prefilling them once a particle is worth a forward."""

COMPACT_BELOW = 0.75
"""The share of live rows below which the finished ones are dropped from the batch."""


@dataclass(slots=True)
class DecodingRow:
    """One prompt being continued.

    Attributes:
        prompt: Token ids to read.
        limit: The most new tokens.
        decided: Whether these new tokens settle the answer.
        draw: How its tokens are chosen; `None` takes the likeliest.
        new: Token ids generated so far, without the end token.
        live: Whether more tokens are wanted.
    """

    prompt: list[int]
    limit: int
    decided: Callable[[list[int]], bool] | None = None
    draw: SamplingState | None = None
    new: list[int] = field(default_factory=list)
    live: bool = True

    def add_token(self, token: int, ends: frozenset[int]) -> None:
        """Add one token, and notice the end."""
        if not self.live:
            return
        if token in ends:
            self.live = False
            return
        self.new.append(token)
        self.live = len(self.new) < self.limit and not (self.decided and self.decided(self.new))


@dataclass(slots=True)
class DecodingBatch:
    """What a model needs to go on with a batch of R = P * b rows.

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
    """How many leading tokens all prompts share, leaving at least one token to each."""
    first, last = min(prompts), max(prompts)
    most = min(len(prompt) for prompt in prompts) - 1
    same = 0
    while same < most and first[same] == last[same]:
        same += 1
    return same


def prefill_batch(model: Any, prompts: Sequence[list[int]], particles: int, pad: int) -> DecodingBatch:
    """Prefill R prompts, left-padded; a long enough shared prefix is read once a particle."""
    device = model.device
    rows = len(prompts)
    prefix = shared_prefix_length(prompts) if rows > particles and can_share_prefix(model) else 0
    cache, skip = None, 0
    if prefix >= MINIMUM_PREFIX:
        ids = torch.tensor([prompts[0][:prefix]] * particles, device=device)
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(rows // particles)
        skip = prefix
    longest = max(len(prompt) for prompt in prompts) - skip
    padded = [[pad] * (longest - len(p) + skip) + list(p[skip:]) for p in prompts]
    real = [[0] * (longest - len(p) + skip) + [1] * (len(p) - skip) for p in prompts]
    ids, own = torch.tensor(padded, device=device), torch.tensor(real, device=device)
    positions = (own.cumsum(1) - 1).clamp(min=0) + skip
    mask = torch.cat([own.new_ones(rows, skip), own], dim=1)
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return DecodingBatch(out.past_key_values, mask, positions[:, -1:], out.logits[:, -1].float())


def can_share_prefix(model: Any) -> bool:
    """Whether a cache may be copied to more rows: plain attention over all earlier tokens."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and not getattr(config, "sliding_window", None)


def decode_step(model: Any, batch: DecodingBatch, tokens: torch.Tensor) -> None:
    """Read one more token a row, [R]; the batch is advanced in place."""
    batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(tokens), 1)], dim=1)
    batch.position = batch.position + 1
    out = model(
        input_ids=tokens[:, None],
        attention_mask=batch.mask,
        position_ids=batch.position,
        past_key_values=batch.cache,
        use_cache=True,
        logits_to_keep=1,
    )
    batch.cache = out.past_key_values
    batch.logits = out.logits[:, -1].float()


def rows_to_keep(live: Sequence[bool], particles: int) -> list[int] | None:
    """The rows to go on with, equally many of each particle; `None` if dropping is not worth it.

    Every live row is kept; a particle with fewer live rows than another keeps finished ones.
    """
    size = len(live) // particles
    blocks = [range(p * size, (p + 1) * size) for p in range(particles)]
    most = max(sum(live[row] for row in block) for block in blocks)
    if most > COMPACT_BELOW * size:
        return None
    kept: list[int] = []
    for block in blocks:
        order = sorted(block, key=lambda row: (not live[row], row))
        kept += sorted(order[:most])
    return kept


@torch.inference_mode()
def generate_rows(
    model: Any, rows: Sequence[DecodingRow], particles: int, pad: int, ends: frozenset[int]
) -> None:
    """Continue all rows until each has ended, is decided, or has reached its limit.

    Args:
        model: A causal language model of transformers.
        rows: R = P * b rows, particle by particle; their `new` is filled in.
        particles: P, the number of equal blocks.
        pad: The token id to pad with; never attended.
        ends: Token ids that end a text.
    """
    batch = prefill_batch(model, [row.prompt for row in rows], particles, pad)
    current = list(rows)
    greedy = all(row.draw is None for row in rows)
    while True:
        highest = batch.logits.argmax(dim=-1)
        # NaN counts as the highest, so that one number a row shows all that are not finite.
        if not (fine := batch.logits.gather(1, highest[:, None]).isfinite()).all():
            (spoiled,) = (~fine[:, 0]).nonzero()[0].tolist()
            place = next(i for i, row in enumerate(rows) if row is current[spoiled])
            raise NotFinite(place // (len(rows) // particles), "activations")
        tokens = highest if greedy else sample_tokens(batch.logits, current)
        for row, token in zip(current, tokens.tolist(), strict=True):
            row.add_token(token, ends)
        live = [row.live for row in current]
        if not any(live):
            return
        if (kept := rows_to_keep(live, particles)) is not None:
            index = torch.tensor(kept, device=tokens.device)
            batch.cache.batch_select_indices(index)
            batch.mask, batch.position = batch.mask[index], batch.position[index]
            tokens, current = tokens[index], [current[i] for i in kept]
        decode_step(model, batch, tokens)
