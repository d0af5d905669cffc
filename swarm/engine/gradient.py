"""The loss of gold or scored answers at a position, and its derivative by the coefficients.

Only the G x K coefficients are parameters, and the factors of a learned adapter if there is one:
the base and the experts are frozen, so a position with 9 coefficients has 9 partial derivatives,
whatever the size of the model. The loss passes through the LoRA layers (`swarm.engine.lora`), where
autograd sums the derivative of every adapted module into the coefficients of its group.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from swarm.engine.base import Gradient
from swarm.engine.lora import LoraLayers, LoraLinear
from swarm.errors import NotFinite
from swarm.models.base import Example
from swarm.pool.learned import LearnedAdapter

OVERFLOW = (
    "a gradient is not finite, and its step is skipped: it exceeds the range of model.dtype "
    "(float16: 65,504; try bfloat16 or float32)"
)
"""Warning about a nonfinite derivative."""

LINE_TOKENS = 128
"""Least number of tokens of a line of several rows."""

ATTENTION_TOKENS = 4096
"""Length of a line at which attention costs as much as all else (SmolLM2-135M on a CPU; this is
extrapolated from 200 tokens)."""


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
            packed: Whether a row may have several; see `swarm.engine.decode.supports_slots`.
        """
        tails = list(dict.fromkeys(tuple(choice[:-1]) for choice in self.choices))
        return [tails] if packed else [[tail] for tail in tails]

    def row_length(self, packed: bool) -> int:
        """Return the number of tokens of its longest row."""
        return len(self.prompt) + max(sum(map(len, tails)) for tails in self.rows(packed))


class ExampleBatch:
    """Examples as one batch, of which the model computes logits only where answers are predicted.

    A row is a prompt with all but the last token of a choice; choices of one token share the row of
    their prompt. In a packed row all choices follow the prompt, and each attends to the prompt and
    to itself. A line of the batch is one row, padded on the left, or several, each of which attends
    to itself.

    Args:
        examples: Examples, the longest first.
        pad: Token of padding.
        packed: Whether a row may contain several choices; see `swarm.engine.decode.supports_slots`.
        line: About how many tokens a line has; 0 for one row each.

    Attributes:
        predicting: Positions in the flattened batch whose logits are computed.
        routes: Route of each line, or of each token if a line has several rows.
        shares_lines: Whether a line has several rows.
        needs_mask: Whether tokens do not attend to all that precede them in their line.
    """

    def __init__(
        self, examples: Sequence[TokenizedExample], pad: int, packed: bool = False, line: int = 0
    ) -> None:
        rows: dict[tuple[tuple[int, ...], ...], int] = {}
        routes: list[int] = []
        self.examples = [one.example for one in examples]
        self.sizes = [len(one.choices) for one in examples]
        self.lengths: list[int] = []
        # For each token of an answer: the row and the place in it that predict it.
        sources: list[tuple[int, int]] = []
        self.token: list[int] = []
        for one in examples:
            places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
            for tails in one.rows(packed):
                row = rows.setdefault((tuple(one.prompt), *tails), len(rows))
                # A route depends on the prompt alone, so equal rows have equal routes.
                routes += [one.route] * (row == len(routes))
                end = len(one.prompt)
                for tail in tails:
                    places[tail] = [(row, len(one.prompt) - 1)]
                    places[tail] += [(row, end + i) for i in range(len(tail))]
                    end += len(tail)
            for choice in one.choices:
                sources += places[tuple(choice[:-1])]
                self.token += choice
                self.lengths.append(len(choice))
        starts = self._lay_out(list(rows), line, pad)
        where = [starts[row] + place for row, place in sources]
        self.predicting = sorted(set(where))
        index = {place: i for i, place in enumerate(self.predicting)}
        self.target = [index[place] for place in where]
        self.shares_lines = len(self.ids) < len(rows)
        self.routes = routes
        if self.shares_lines:
            # Padding, row -1, takes the last row's.
            self.routes = [routes[row] for row in self.rows.flatten()]
        self.needs_mask = self.shares_lines or any(len(row) > 2 for row in rows)

    def _lay_out(
        self, rows: Sequence[tuple[tuple[int, ...], ...]], line: int, pad: int
    ) -> list[int]:
        """Set token ids, positions, rows and parts, [B, L] each; return the rows' first tokens.

        Padding has row -1, a prompt part 0, and what follows it parts 1, 2, ...
        """
        sizes = [sum(map(len, row)) for row in rows]
        lines = assign_lines(sizes, line)
        filled = np.bincount(lines, sizes).astype(int)
        shape = len(filled), max(filled)
        self.ids, self.rows = np.full(shape, pad), np.full(shape, -1)
        self.positions, self.parts = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
        starts: list[int] = []
        column = shape[1] - filled  # of each line's next token
        for number, (row, on) in enumerate(zip(rows, lines, strict=True)):
            starts.append(int(on * shape[1] + column[on]))
            for part, tokens in enumerate(row):
                here = on, slice(column[on], column[on] + len(tokens))
                first = len(row[0]) if part else 0
                self.ids[here], self.rows[here], self.parts[here] = tokens, number, part
                self.positions[here] = range(first, first + len(tokens))
                column[on] += len(tokens)
        return starts

    def compute_logits(self, model: Any) -> torch.Tensor:
        """Return the logits [P, vocabulary] at `predicting`."""
        new = partial(torch.tensor, device=model.device)
        rows, chosen, head = new(self.rows), new(self.predicting), model.get_output_embeddings()
        mask = (rows >= 0).long()
        if self.needs_mask:
            # Added to attention scores, [B, 1, L, L]. Padding attends to padding, as positions that
            # attend to nothing are NaN.
            parts = new(self.parts)
            query, key = parts[:, :, None], parts[:, None, :]
            allowed = (rows[:, :, None] == rows[:, None, :]) & ((key == query) | (key == 0))
            least = torch.finfo(model.dtype).min
            mask = torch.full_like(allowed, least, dtype=model.dtype)
            mask = mask.masked_fill(allowed.tril(), 0.0)[:, None]
        with ExitStack() as stack:
            # Logits at the chosen positions alone; an adapted head computes all, as it needs to
            # know the particle of each position.
            if head is not None and not isinstance(head, LoraLinear):
                hook = head.register_forward_pre_hook(
                    lambda _, states: (states[0].flatten(0, 1)[chosen][None],)
                )
                stack.enter_context(hook)
            out = model(
                input_ids=new(self.ids),
                attention_mask=mask,
                position_ids=new(self.positions),
                use_cache=False,
            )
        logits: torch.Tensor = out.logits.flatten(0, 1)
        return logits if len(logits) == len(chosen) else logits[chosen]

    def compute_loss(self, model: Any) -> torch.Tensor:
        """Return the sum of the examples' weighted losses, float32."""
        logits = self.compute_logits(model).float()
        choice = np.repeat(np.arange(len(self.lengths)), self.lengths)
        target, token, choices = (
            torch.tensor(index, device=model.device) for index in (self.target, self.token, choice)
        )
        logprobs = (logits - logits.logsumexp(-1, keepdim=True))[target, token]
        # The log probability of each choice of all examples.
        sums = logprobs.new_zeros(len(self.lengths)).index_add(0, choices, logprobs)
        total, first = sums.new_zeros(()), 0
        for example, size in zip(self.examples, self.sizes, strict=True):
            mine = sums[first : first + size]
            if example.units:
                mine = mine / mine.new_tensor(example.units)
            if example.values:
                tokens = mine.new_tensor(self.lengths[first : first + size])
                values = mine.new_tensor(example.values)
                loss = expected_score_loss(mine, values, tokens, example.relative)
            elif size == 1:
                loss = -mine[0] / (example.unit or self.lengths[first])
            else:
                loss = mine.logsumexp(0) - mine[example.gold]
            if example.bounded:
                loss = -torch.expm1(-loss)
            total, first = total + example.weight * loss, first + size
        return total


def expected_score_loss(
    logprobs: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor, relative: bool = False
) -> torch.Tensor:
    """Return the loss of an item by scored answers, a number.

    With p_t the probability of answer t and r_t its score, it is -log sum_t r_t p_t per token: of
    the expected score, as far as the answers are known. Where scores are grades this teaches
    little, as every answer has some; then it is the mean of this and of minimum risk training,
    -log(sum_t r_t q_t / sum_t q_t) with q_t = p_t^(1 / tokens), so that long texts count at all
    (Shen et al. 2016, arXiv 1512.02433). That ratio alone may improve while all answers lose their
    probability to texts that are not among them.

    Args:
        logprobs: [T], the log probability of each answer as a whole.
        values: [T], from 0 to 1, of which one at least is positive.
        tokens: [T], the length of each answer.
    """
    absolute = -(logprobs + values.log()).logsumexp(0) / tokens.mean()
    if not relative:
        return absolute
    shares = logprobs / tokens
    ratio = shares.logsumexp(0) - (shares + values.log()).logsumexp(0)
    return (absolute + ratio) / 2


def compute_loss_and_gradient(
    model: Any,
    layers: LoraLayers,
    position: np.ndarray,
    batches: Iterable[ExampleBatch],
    slope: bool = True,
    checkpointing: bool = False,
    learned: LearnedAdapter | None = None,
) -> Gradient:
    """Return loss and derivative at a position, flattened [R * G * K].

    Args:
        model: A causal language model of transformers with these layers.
        position: [R, G * K], coefficients of each route.
        slope: Whether to compute the derivative.
        checkpointing: Recompute each layer's activations in the backward pass.
        learned: An adapter of the position, whose factors' gradients are accumulated too.

    Raises:
        torch.OutOfMemoryError: One batch does not fit on the device.
        NotFinite: The loss is not finite. A nonfinite derivative, as where
            float16 overflows in the backward pass alone, is left to the caller.
    """
    leaf = torch.tensor(position, dtype=torch.float32, device=model.device, requires_grad=slope)
    total = Gradient(0.0, np.zeros(position.size))
    try:
        with torch.set_grad_enabled(slope), checkpoint_activations(model, checkpointing and slope):
            for batch in batches:
                # Attach again for each batch: a backward pass frees the graph of the coefficients.
                layers.attach_positions(leaf, learned)
                layers.route_rows(torch.tensor(batch.routes, device=model.device))
                loss = batch.compute_loss(model)
                if not math.isfinite(value := loss.item()):
                    raise NotFinite(0, "activations")
                if slope:
                    loss.backward()
                total += Gradient(value, np.zeros(position.size))
    finally:
        layers.clear_positions()
    if leaf.grad is None:
        return total
    return Gradient(total.loss, leaf.grad.flatten().double().cpu().numpy())


def batch_examples(
    examples: Sequence[TokenizedExample],
    pad: int,
    budget: int,
    packed: bool,
) -> Iterator[ExampleBatch]:
    """Yield batches, the longest examples first.

    Args:
        examples: Examples of any lengths.
        pad: Token of padding.
        budget: Tokens of a batch. If each row has a line, they contain the padding; otherwise,
            there is little.
        packed: Whether a row may contain several choices, if that fits into the budget.
    """
    packed = packed and max(one.row_length(True) for one in examples) <= budget
    line = LINE_TOKENS if packed else 0
    waiting = sorted(examples, key=lambda one: -one.row_length(packed))
    while waiting:
        sizes = [one.row_length(packed) if line else len(one.rows(packed)) for one in waiting]
        limit = budget if line else budget // waiting[0].row_length(packed)
        size = max(1, int(np.searchsorted(np.cumsum(sizes), limit, side="right")))
        yield ExampleBatch(waiting[:size], pad, packed, line)
        waiting = waiting[size:]


def assign_lines(sizes: Sequence[int], line: int) -> list[int]:
    """Return the line of each row: lines of `line` to twice as many tokens, with little padding.

    Args:
        sizes: Tokens of the rows, in descending order.
        line: Tokens of a line if all rows are shorter; 0 for one row each.
    """
    if not line:
        return list(range(len(sizes)))
    found: list[tuple[float, list[int]]] = []
    for width in np.linspace(1, 2, 9) * max(line, *sizes):
        # Each row to the line that is the emptiest at the time.
        filled = [(0, number) for number in range(math.ceil(sum(sizes) / width))]
        lines = []
        for size in sizes:
            tokens, number = filled[0]
            lines.append(number)
            heapq.heapreplace(filled, (tokens + size, number))
        longest = max(filled)[0]
        cost = len(np.unique(lines)) * longest * (1 + longest / ATTENTION_TOKENS)
        found.append((cost, lines))
    return min(found, key=lambda plan: plan[0])[1]


@contextmanager
def checkpoint_activations(model: Any, wanted: bool) -> Iterator[None]:
    """Enable activation checkpointing of the model's decoder layers inside the block.

    transformers' own switch has an effect in training mode alone, which would turn dropout on.
    """
    from torch.utils.checkpoint import checkpoint

    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)] if wanted else []
    layers = list(max(stacks, key=len, default=[]))
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
