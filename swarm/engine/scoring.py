"""Teacher-forced scoring: how likely a model finds given continuations of its prompts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from swarm.engine.decode import DecodingBatch, can_share_prefix, prefill_batch

TokenIds = Sequence[int]


class ContinuationScore(NamedTuple):
    """One continuation's natural log probability; nothing is certain: 0 and greedy."""

    logprob: float
    greedy: bool
    """Whether greedy decoding would say just this."""


class ScoreAccumulator:
    """Collects what R rows' target tokens are worth, piece by piece."""

    def __init__(self) -> None:
        self._logprobs: list[torch.Tensor] = []
        self._likeliest: list[torch.Tensor] = []

    def add(self, logits: torch.Tensor, targets: Sequence[TokenIds]) -> None:
        """Add the logits [R, w, vocabulary] of w positions and what follows each; -1 is nothing."""
        wanted = torch.tensor(targets, device=logits.device)
        # One position after the other: a float32 copy of all logits could be gigabytes.
        for place in range(wanted.shape[1]):
            row, target = logits[:, place].float(), wanted[:, place]
            known = target >= 0
            picked = row.gather(1, target.clamp(min=0)[:, None])[:, 0]
            self._logprobs.append(torch.where(known, picked - row.logsumexp(-1), 0.0))
            self._likeliest.append(~known | (row.argmax(-1) == target))

    def to_scores(self) -> list[ContinuationScore]:
        """The rows' sums."""
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
) -> list[list[ContinuationScore]]:
    """Score each prompt's choices, of which there may be more for one prompt than for another.

    The prompts are read once; each choice is read after them, as a whole, and cut off again.
    Choices of one token need no more than the prompts.

    Args:
        model: A causal language model of transformers.
        prompts: R = P * b rows, particle by particle, of at least one token.
        choices: Each prompt's continuations.
        particles: P, the number of equal blocks.
        pad: The token id to pad with; never attended.
        positions: About how many positions' logits to hold at once, of all rows together.
    """
    batch = prefill_batch(model, prompts, particles, pad) if can_share_prefix(model) else None
    found: list[list[ContinuationScore]] = [[] for _ in prompts]
    for number in range(max(map(len, choices))):
        tokens = [row[number] if number < len(row) else () for row in choices]
        if batch:
            scored = _score_after_prompt(model, batch, tokens, pad, positions)
        else:
            scored = _score_full_sequences(model, prompts, tokens, particles, pad, positions)
        for mine, row, one in zip(found, choices, scored, strict=True):
            if number < len(row):
                mine.append(one)
    return found


def _score_after_prompt(
    model: Any, batch: DecodingBatch, tokens: Sequence[TokenIds], pad: int, positions: int
) -> list[ContinuationScore]:
    """Score one continuation a row on the prompts' cache, which is left as it was."""
    tally = ScoreAccumulator()
    tally.add(batch.logits[:, None], _slice_columns(tokens, 0, 1, -1))
    cache, mask, position = batch.cache, batch.mask, batch.position
    last = max(len(row) for row in tokens) - 1
    width = max(1, positions // len(tokens))
    for start in range(0, last, width):
        end = min(start + width, last)
        ids = torch.tensor(_slice_columns(tokens, start, end, pad), device=mask.device)
        real = [[int(place < len(row)) for place in range(start, end)] for row in tokens]
        mask = torch.cat([mask, torch.tensor(real, device=mask.device)], dim=1)
        places = position + torch.arange(start + 1, end + 1, device=mask.device)
        out = model(input_ids=ids, attention_mask=mask, position_ids=places,
                    past_key_values=cache, use_cache=True)  # fmt: skip
        tally.add(out.logits, _slice_columns(tokens, start + 1, end + 1, -1))
    if last > 0:
        cache.crop(-last)
    return tally.to_scores()


def _score_full_sequences(
    model: Any,
    prompts: Sequence[list[int]],
    tokens: Sequence[TokenIds],
    particles: int,
    pad: int,
    positions: int,
) -> list[ContinuationScore]:
    """Score one continuation a row in one forward each, for models whose cache cannot be cut."""
    size, longest = len(prompts) // particles, max(1, *map(len, tokens))
    width = max(1, positions // (particles * longest))
    found: dict[int, ContinuationScore] = {}
    for start in range(0, size, width):
        blocks = [range(p * size + start, min(p * size + start + width, (p + 1) * size))
                  for p in range(particles)]  # fmt: skip
        rows = [row for block in blocks for row in block]
        whole = [[*prompts[row], *tokens[row][:-1]] for row in rows]
        length = max(map(len, whole))
        ids = [[pad] * (length - len(one)) + one for one in whole]
        real = [[0] * (length - len(one)) + [1] * len(one) for one in whole]
        mask = torch.tensor(real, device=model.device)
        out = model(input_ids=torch.tensor(ids, device=model.device), attention_mask=mask,
                    position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False,
                    logits_to_keep=longest)  # fmt: skip
        tally = ScoreAccumulator()
        tally.add(out.logits, [[-1] * (longest - len(tokens[r])) + [*tokens[r]] for r in rows])
        found |= zip(rows, tally.to_scores(), strict=True)
    return [found[row] for row in range(len(prompts))]


def _slice_columns(tokens: Sequence[TokenIds], start: int, end: int, fill: int) -> list[list[int]]:
    """The same places of all rows, filled up where a row has ended."""
    return [[*row[start:end], *[fill] * (end - max(start, min(end, len(row))))] for row in tokens]
