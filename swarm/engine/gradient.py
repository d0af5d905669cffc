"""The loss of gold answers at a position, and its derivative by the mixing coefficients.

Only the G x K coefficients are parameters: the base and the experts are frozen, so a position with
9 coefficients has 9 partial derivatives, whatever the size of the model. The loss passes through
the batched LoRA layers (`swarm.engine.batched_lora`), where autograd sums the derivative of every
adapted module into the coefficients of its group.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from swarm.engine.decode import can_share_prefix
from swarm.errors import NotFinite
from swarm.models.base import Example, prompt_text
from swarm.pool.prompt_router import PromptRouter

if TYPE_CHECKING:
    from swarm.engine.batched_lora import BatchedLoraModel


OVERFLOW = (
    "a gradient is not finite, and its step is skipped: it exceeds the range of model.dtype "
    "(float16: 65,504; try bfloat16 or float32)"
)
"""Warning about a nonfinite derivative."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """The loss of some examples at one position; sums over examples, so that parts can be added.

    Attributes:
        loss: The sum of the weighted losses, nats.
        slope: [G * K] float64, its derivative by the coefficients; zeros if not computed.
    """

    loss: float
    slope: np.ndarray

    def __add__(self, other: "Gradient") -> "Gradient":
        return Gradient(self.loss + other.loss, self.slope + other.slope)

    def mean_over(self, count: int) -> "Gradient":
        """Return the mean over `count` examples."""
        return Gradient(self.loss / count, self.slope / count)


@dataclass(slots=True)
class TokenizedExample:
    """An example as token ids.

    Attributes:
        prompt: Token ids of the prompt.
        choices: The token ids of each choice, at least one each.
        route: Row of the position whose coefficients answer it.
    """

    prompt: list[int]
    choices: list[list[int]]
    example: Example
    route: int = 0

    def rows(self, packed: bool) -> list[list[tuple[int, ...]]]:
        """Return the rows that are read: each a list of what follows the prompt, mostly one.

        Args:
            packed: Whether a row may have several; see `can_pack_choices`.
        """
        tails = list(dict.fromkeys(tuple(choice[:-1]) for choice in self.choices))
        return [tails] if packed else [[tail] for tail in tails]

    def row_length(self, packed: bool) -> int:
        """Return the number of tokens of its longest row."""
        return len(self.prompt) + max(sum(map(len, tails)) for tails in self.rows(packed))


def assign_routes(rows: Sequence[TokenizedExample], router: PromptRouter | None) -> int:
    """Set the route of each example; return the number of routes, 1 without a router."""
    if router is None:
        return 1
    routes = router.assign([prompt_text(row.example.prompt) for row in rows]).tolist()
    for row, route in zip(rows, routes, strict=True):
        row.route = route
    return len(router.names)


class ExampleBatch:
    """Examples as one batch of rows, padded on the left.

    A row is a prompt with all but the last token of a choice; choices of one token share the row of
    their prompt. In a packed row all choices follow the prompt, and each attends to the prompt and
    to itself.

    Attributes:
        width: Number of last positions that contain all those that predict answers.
        routes: Route of each row.
    """

    def __init__(
        self, examples: Sequence[TokenizedExample], pad: int, packed: bool = False
    ) -> None:
        rows: dict[tuple[tuple[int, ...], ...], int] = {}
        routes: list[int] = []
        self.examples = [one.example for one in examples]
        self.sizes = [len(one.choices) for one in examples]
        self.lengths: list[int] = []
        targets: list[tuple[int, int, int, int]] = []
        for one in examples:
            # For each choice: its row, and how far before the row's end its tokens are predicted.
            places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
            for tails in one.rows(packed):
                row = rows.setdefault((tuple(one.prompt), *tails), len(rows))
                # A route depends on the prompt alone, so equal rows have equal routes.
                routes += [one.route] * (row == len(routes))
                total = left = sum(map(len, tails))
                for tail in tails:
                    places[tail] = [(row, total), *((row, left - 1 - i) for i in range(len(tail)))]
                    left -= len(tail)
            for choice in one.choices:
                found = zip(places[tuple(choice[:-1])], choice, strict=True)
                targets += [(row, back, token, len(self.lengths)) for (row, back), token in found]
                self.lengths.append(len(choice))
        self.row, backs, self.token, self.choice = zip(*targets, strict=True)
        self.width = max(backs) + 1
        self.place = [self.width - 1 - back for back in backs]
        self.rows, self.routes, self.pad = list(rows), routes, pad

    def compute_logits(self, model: Any) -> torch.Tensor:
        """Return the logits [R, width, vocabulary] of the rows' last positions."""
        longest = max(sum(map(len, row)) for row in self.rows)
        ids, parts, positions = [], [], []
        for prompt, *tails in self.rows:
            pads = longest - len(prompt) - sum(map(len, tails))
            ids.append([self.pad] * pads + [token for part in (prompt, *tails) for token in part])
            parts.append([-1] * pads + [0] * len(prompt))
            positions.append([0] * pads + [*range(len(prompt))])
            for number, tail in enumerate(tails, 1):
                parts[-1] += [number] * len(tail)
                positions[-1] += range(len(prompt), len(prompt) + len(tail))
        part = torch.tensor(parts, device=model.device)
        mask: torch.Tensor = (part >= 0).long()
        if max(map(len, self.rows)) > 2:
            mask = _mask_other_parts(part, model.dtype)
        out = model(
            input_ids=torch.tensor(ids, device=model.device),
            attention_mask=mask,
            position_ids=torch.tensor(positions, device=model.device),
            use_cache=False,
            logits_to_keep=self.width,
        )
        logits: torch.Tensor = out.logits
        return logits

    def compute_loss(self, model: Any) -> torch.Tensor:
        """Return the sum of the examples' weighted losses, float32."""
        device, logits = model.device, self.compute_logits(model)
        row, position, token, choice = (
            torch.tensor(index, device=device)
            for index in (self.row, self.place, self.token, self.choice)
        )
        # Drop positions that predict no answer before the float32 copy over the vocabulary.
        pairs, where = torch.unique(row * self.width + position, return_inverse=True)
        logits = logits.flatten(0, 1)[pairs].float()
        normalized = logits - logits.logsumexp(-1, keepdim=True)
        logprobs = normalized[where, token]
        sums = logprobs.new_zeros(len(self.lengths)).index_add(0, choice, logprobs)
        return self._weighted_loss(sums, normalized, where)

    def _weighted_loss(
        self, sums: torch.Tensor, logprobs: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss.

        Args:
            sums: Log probabilities [C] of all choices.
            logprobs: [P, V], of all tokens at the positions that predict answers.
            targets: Rows of `logprobs` for the answers' tokens, choice by choice.
        """
        total, first = sums.new_zeros(()), 0
        for example, size in zip(self.examples, self.sizes, strict=True):
            mine = sums[first : first + size]
            if example.units:
                mine = mine / mine.new_tensor(example.units)
            if example.unlabelled:
                # A single choice of an unlabelled example is one token.
                alone = logprobs[targets[sum(self.lengths[:first])]]
                shares = alone if size == 1 else mine.log_softmax(0)
                loss = -(shares.exp() * shares).sum()
            elif size == 1:
                loss = -mine[0] / (example.unit or self.lengths[first])
            else:
                loss = mine.logsumexp(0) - mine[example.gold]
            total, first = total + example.weight * loss, first + size
        return total


def _mask_other_parts(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask [R, 1, L, L] to add to attention scores, from each token's part [R, L].

    Part 0 is the prompt; -1 is padding, which attends to padding, as rows without a key are NaN.
    """
    query, key = part[:, :, None], part[:, None, :]
    allowed = ((key == query) | ((key == 0) & (query > 0))).tril()
    mask = torch.full(allowed.shape, torch.finfo(dtype).min, dtype=dtype, device=part.device)
    return mask.masked_fill(allowed, 0.0)[:, None]


def can_pack_choices(model: Any) -> bool:
    """Return whether the model applies a mask for each pair of tokens and the given positions.

    Measured on ten tokens, as models with sliding windows, or with positions in the mask, do not.
    """
    if not can_share_prefix(model):
        return False
    tokens = [number % model.config.get_text_config().vocab_size for number in range(3, 13)]
    prompt, first, second = tokens[:4], tokens[4:7], tokens[7:]
    example = Example("", ("", ""))
    with torch.inference_mode():
        try:
            packed = ExampleBatch(
                [TokenizedExample(prompt, [[*first, 0], [*second, 0]], example)], 0, True
            ).compute_logits(model)[0, -1]
            alone = ExampleBatch(
                [TokenizedExample(prompt, [[*second, 0]], example)], 0
            ).compute_logits(model)[0, -1]
        except (TypeError, ValueError, RuntimeError):
            return False
    # bfloat16 differs by some hundredths; a wrong mask by as much as logits differ from each other.
    return bool((packed - alone).float().std() < 0.1 * alone.float().std())


def compute_loss_and_gradient(
    model: Any,
    stack: "BatchedLoraModel",
    position: np.ndarray,
    batches: Iterable[ExampleBatch],
    slope: bool = True,
    checkpointing: bool = False,
) -> Gradient:
    """Return loss and derivative at a position, flattened [R * G * K].

    Args:
        model: A causal language model of transformers with the layers of `stack`.
        position: [R, G * K], coefficients of each route.
        slope: Whether to compute the derivative.
        checkpointing: Recompute each layer's activations in the backward pass.

    Raises:
        torch.OutOfMemoryError: One batch does not fit on the device.
        NotFinite: Mixed weights, or the loss, are not finite. A nonfinite derivative, as where
            float16 overflows in the backward pass alone, is left to the caller.
    """
    leaf = torch.tensor(position, dtype=torch.float32, device=model.device, requires_grad=slope)
    total = Gradient(0.0, np.zeros(position.size))
    try:
        with torch.set_grad_enabled(slope), checkpoint_activations(model, checkpointing and slope):
            for batch in batches:
                # Attach again for each batch: a backward pass frees the graph of the coefficients.
                stack.attach_positions(leaf if len(leaf) == 1 else leaf[batch.routes])
                loss = batch.compute_loss(model)
                if not math.isfinite(value := loss.item()):
                    raise NotFinite(
                        0, "activations" if stack.first_nonfinite() is None else "weights"
                    )
                if slope:
                    loss.backward()
                total += Gradient(value, np.zeros(position.size))
    finally:
        stack.clear_positions()
    if leaf.grad is None:
        return total
    return Gradient(total.loss, leaf.grad.flatten().double().cpu().numpy())


def batch_examples(
    examples: Sequence[TokenizedExample], pad: int, budget: int, packed: bool = False
) -> Iterator[ExampleBatch]:
    """Yield batches of at most `budget` tokens, padding included, the longest examples first."""
    waiting = sorted(examples, key=lambda one: -one.row_length(packed))
    while waiting:
        rows = [len(one.rows(packed)) for one in waiting]
        limit = budget // waiting[0].row_length(packed)
        size = max(1, int(np.searchsorted(np.cumsum(rows), limit, side="right")))
        yield ExampleBatch(waiting[:size], pad, packed)
        waiting = waiting[size:]


@contextmanager
def checkpoint_activations(model: Any, wanted: bool) -> Iterator[None]:
    """Enable activation checkpointing of the model's decoder layers inside the block.

    transformers' own switch has an effect in training mode alone, which would turn dropout on.
    """
    from torch.utils.checkpoint import checkpoint

    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)] if wanted else []
    layers = list(max(stacks, key=len, default=[]))
    for layer in layers:
        layer.forward = partial(_checkpointed_forward, checkpoint, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _checkpointed_forward(
    checkpoint: Callable[..., Any], forward: Any, *args: Any, **kwargs: Any
) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
