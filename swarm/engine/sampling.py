"""How the next token is chosen where it is not just the likeliest, and what is told of the choice.

A draw is counter-based: its noise follows from seed, sample, prompt and place alone. So a text does
not depend on who else is in its batch, on the plan or on the order, as far as the logits do not.
Rounding changes them a little from one batch to another; a draw changes with them where two tokens
are as good as even after the noise, about as rarely as the likeliest token does.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from swarm.errors import UserError
from swarm.models import Request

if TYPE_CHECKING:
    from swarm.engine.decode import DecodingRow

HASH_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))
"""Shifts and multipliers of a 32-bit integer hash of low bias (Wellons 2018, lowbias32)."""

MIN_TEMPERATURE = 1e-6
"""A temperature below counts as this one, which is greedy but for ties, and overflows nothing."""


@dataclass(slots=True)
class SamplingState:
    """How one row's tokens are chosen and told of.

    Attributes:
        temperature: 0 takes the likeliest.
        key: What the row's noise is made from.
        top: See `Request.top_logprobs`.
        told: Of each token so far its log probability, and token ids with theirs, likeliest first;
            of the model's own distribution, whatever the temperature.
    """

    temperature: float
    key: bytes
    top: int
    told: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)


def build_sampling_state(request: Request, prompt: Sequence[int]) -> SamplingState | None:
    """How a request's tokens are chosen; `None`: the likeliest, and nothing is told.

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
        raise UserError("stop: an empty text would end every answer at once; leave it out")
    if not heat and not top:
        return None
    told = repr((request.seed or 0, request.sample, list(prompt)))
    return SamplingState(heat, hashlib.blake2b(told.encode(), digest_size=16).digest(), top)


def sample_tokens(logits: torch.Tensor, rows: "Sequence[DecodingRow]") -> torch.Tensor:
    """The next token of each row, [R], from logits [R, vocabulary]; `Draw.told` grows.

    A draw is the likeliest token after Gumbel noise is added to the tempered logits, which is a
    draw from their softmax (Gumbel 1954).
    """
    tokens = logits.argmax(dim=-1)
    live = [(place, row.draw, len(row.new)) for place, row in enumerate(rows) if row.live]
    if drawn := [(place, draw, new) for place, draw, new in live if draw and draw.temperature]:
        places = torch.tensor([place for place, _, _ in drawn], device=logits.device)
        heat = logits.new_tensor([max(draw.temperature, MIN_TEMPERATURE) for _, draw, _ in drawn])
        noise = gumbel_noise([random_key(draw.key, new) for _, draw, new in drawn], logits)
        tokens[places] = logits[places].div_(heat[:, None]).add_(noise).argmax(dim=-1)
    if told := [(place, draw) for place, draw, _ in live if draw and draw.top]:
        _record_logprobs(logits, tokens, told)
    return tokens


def _record_logprobs(logits: torch.Tensor, tokens: torch.Tensor, told: Sequence[tuple[int, SamplingState]]) -> None:
    """Note what the rows at these places are about to say."""
    places = torch.tensor([place for place, _ in told], device=logits.device)
    logprobs = logits[places].log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[places, None])[:, 0].tolist()
    most = min(max(0, *(draw.top for _, draw in told)), logits.shape[1])
    values, ids = (found.tolist() for found in logprobs.topk(most, dim=-1))
    for row, (_, draw) in enumerate(told):
        top = list(zip(ids[row], values[row], strict=True))[: max(0, draw.top)]
        draw.told.append((chosen[row], top))


def random_key(key: bytes, place: int) -> tuple[int, int]:
    """Two 32-bit numbers that the token at a place draws its noise from."""
    digest = hashlib.blake2b(place.to_bytes(8, "big"), key=key, digest_size=8).digest()
    return tuple(int.from_bytes(half, "big", signed=True) for half in (digest[:4], digest[4:]))  # type: ignore[return-value]


def gumbel_noise(keys: Sequence[tuple[int, int]], like: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [R, vocabulary], the same on every device up to rounding.

    A token's number is its id and the row's keys through two rounds of a hash.
    """
    first, second = torch.tensor(keys, dtype=torch.int32, device=like.device).T[:, :, None]
    numbers = _hash_numbers(torch.arange(like.shape[1], dtype=torch.int32, device=like.device) ^ first)
    numbers = _hash_numbers(numbers ^ second).bitwise_and_(0x7FFFFFFF)
    # Uniform in (0, 1), finest near 0, whence the largest noise comes; one at 1 is never chosen.
    uniform = numbers.float().add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _hash_numbers(numbers: torch.Tensor) -> torch.Tensor:
    for shift, factor in HASH_ROUNDS:
        # The shift keeps the sign, which the mask takes away.
        numbers ^= (numbers >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        numbers *= factor
    return numbers.bitwise_xor_((numbers >> 16).bitwise_and_(0xFFFF))
