"""The engine on transformers: one resident base model, experts mixed in memory, big batches."""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from swarm.errors import NotFinite
from swarm.engine import ExpertPool
from swarm.engine.base import BaseModel
from swarm.engine.plan import BATCH_CPU, BATCH_GPU, choose_plan, profile_device
from swarm.engine.tokens import (
    TokenCache,
    build_completion,
    count_choice_tokens,
    encode_choice,
    context_length_of,
    end_token_ids,
    stop_check,
    encode_prompt,
    decode_text,
    clip_new_tokens,
)
from swarm.errors import UserError
from swarm.models import Completion, Example, Request
from swarm.pool import Pool

if TYPE_CHECKING:
    from swarm.engine.decode import DecodingRow
    from swarm.engine.gradient import Gradient, TokenizedExample
    from swarm.engine.stacked import Factors

log = logging.getLogger(__name__)

PLANS = ("auto", "swap", "merged", "stacked")

LOGITS_DIVISOR = 16
"""Logits are held of one in so many of a batch's tokens at most, when choices are scored."""


class HFEngine:
    """Answers with transformers' models.

    Args:
        plan: "swap" gives the model one particle after the other, "merged" does so with the
            particle added to a copy of the weights, "stacked" gives it all of a job at once; "auto"
            chooses (`swarm.engine.plan.choose`).
        max_tokens: The most padded prompt and new tokens in one batch; `None` chooses 4,096 on a
            CPU and 65,536 on a GPU. Halved, and remembered, when the device runs out of memory.
        checkpointing: Compute activations again in the backward pass of a gradient, which takes a
            forward pass more and much less memory; switched on when memory runs out.
    """

    def __init__(
        self, plan: str = "auto", max_tokens: int | None = None, checkpointing: bool = False
    ) -> None:
        if plan not in PLANS:
            raise UserError(f"engine.plan={plan}: must be one of {', '.join(PLANS)}")
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise UserError(f"engine.max_tokens={max_tokens}: must be null or a whole number > 0")
        self.plan = plan
        if not isinstance(checkpointing, bool):
            raise UserError(f"engine.checkpointing={checkpointing}: must be true or false")
        self.max_tokens, self.checkpointing = max_tokens, checkpointing
        self._tokens = TokenCache()
        self._said: set[str] = set()

    context = math.inf
    """See `swarm.engine.Engine`."""

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """See `swarm.engine.Engine`."""
        import torch

        from swarm.engine.stacked import install_lora_layers

        pool = as_adapter_pool(pool)
        model, tokenizer = base.load_without_weights()
        basis = {
            name: tuple(
                torch.empty(len(pool.names), *shape, device="meta")
                for shape in ((rank, inputs), (outputs, rank))
            )
            for name, (inputs, outputs, rank) in pool.modules.items()
        }
        install_lora_layers(model, basis, "meta", base, pool.folder)
        self.context = context_length_of(model)
        return tokenizer

    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """See `swarm.engine.Engine`."""
        pool = as_adapter_pool(pool)
        basis = {name: pool.expert_factors(name) for name in pool.modules}
        self.load_base(base, device, basis, pool.folder)

    def load_base(
        self, base: BaseModel, device: str, basis: Mapping[str, "Factors"], folder: str | Path
    ) -> None:
        """As `open`, with what `swarm.engine.stacked.Stack` keeps of each module.

        Without any the base answers as it is, at positions [P, 0].
        """
        self._model, self._tokenizer = base.load(device)
        self._budget = self.max_tokens or (BATCH_CPU if device == "cpu" else BATCH_GPU)
        self._ends = end_token_ids(self._model, self._tokenizer)
        self._context = context_length_of(self._model)
        self._stack: Any = None
        self.replace_adapters(base, device, basis, folder)

    def replace_adapters(
        self, base: BaseModel, device: str, basis: Mapping[str, "Factors"], folder: str | Path
    ) -> None:
        """Put these in the place of what the loaded base had in its layers; see `load`."""
        from swarm.engine.stacked import install_lora_layers

        if self._stack:
            self._stack.remove()
        self._stack = install_lora_layers(self._model, basis, device, base, folder)
        shapes = [(down.shape[-1], up.shape[-2]) for down, up, *_ in basis.values()]
        self._facts = profile_device(self._model, device, shapes)

    def generate(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """See `swarm.engine.Engine`."""
        import torch

        plan = self._choose_plan(requests)
        groups = (
            [range(len(positions))] if plan == "stacked" else [[i] for i in range(len(positions))]
        )
        answers: list[list[Completion]] = []
        for group in groups:
            chosen = torch.from_numpy(np.ascontiguousarray(positions[list(group)]))
            self._stack.set_positions(chosen, merge=plan == "merged")
            try:
                check_mixed_finite(self._stack)
                answers += self._generate_group([requests[i] for i in group])
            except NotFinite as error:
                raise NotFinite(group[error.position], error.what) from None
        return answers

    def compute_gradient(
        self, position: np.ndarray, examples: Sequence[Example], slope: bool = True
    ) -> "Gradient":
        """See `swarm.engine.Differentiable`."""
        import torch

        from swarm.engine.gradient import batch_examples, compute_loss_and_gradient

        rows = [self._tokenize_example(one) for one in examples]
        while True:
            batches = batch_examples(rows, self._tokenizer.pad_token_id, self._budget)
            try:
                found = compute_loss_and_gradient(
                    self._model, self._stack, position, batches, slope, self.checkpointing
                )
            except torch.OutOfMemoryError:
                if self.checkpointing or not slope:
                    self._reduce_batch(len(rows), max(one.length for one in rows))
                    continue
                # Slower by a forward pass, and memory for one layer in the place of all.
                log.warning("out of memory: activations are computed again (engine.checkpointing)")
                self.checkpointing = True
                torch.cuda.empty_cache()
                continue
            if not np.isfinite(found.slope).all() and OVERFLOW not in self._said:
                self._said.add(OVERFLOW)
                log.warning(OVERFLOW)
            return found

    def _tokenize_example(self, one: Example) -> "TokenizedExample":
        from swarm.engine.gradient import TokenizedExample

        if one.unlabelled and len(one.choices) == 1:
            # Any token will do: what counts is the distribution of the place.
            return TokenizedExample(self._prompt_ids(one.prompt), [[self._tokenizer.eos_token_id]], one)
        choices = self._choice_ids(Request(one.prompt, 0, one.choices))
        end = [self._tokenizer.eos_token_id] if one.ends else []
        return TokenizedExample(self._prompt_ids(one.prompt), [[*choice, *end] for choice in choices], one)

    def _choose_plan(self, requests: Sequence[Sequence[Request]]) -> str:
        """The plan for these requests; stacking needs the same shape of all particles."""
        shapes = {tuple(bool(request.choices) for request in asked) for asked in requests}
        plan = self.plan
        if plan == "auto":
            rows = max(len(asked) for asked in requests)
            plan, why = choose_plan(len(requests), rows, self._facts)
            if why not in self._said:
                self._said.add(why)
                log.info("plan %s: %s", plan, why)
        return "swap" if plan == "stacked" and len(shapes) > 1 else plan

    def _generate_group(self, requests: Sequence[Sequence[Request]]) -> list[list[Completion]]:
        """Answer equally many requests of each particle in the layers, in the same batches."""
        answers: list[list[Completion | None]] = [[None] * len(asked) for asked in requests]
        cost = [max(self._count_row_tokens(asked[i]) for asked in requests) for i in range(len(requests[0]))]
        for scored in (False, True):
            mine = [i for i in range(len(cost)) if bool(requests[0][i].choices) == scored]
            self._fill_completions(requests, sorted(mine, key=lambda i: (-cost[i], i)), cost, answers)
        return [[c for c in row if c is not None] for row in answers]

    def _fill_completions(
        self,
        requests: Sequence[Sequence[Request]],
        waiting: list[int],
        cost: Sequence[int],
        answers: list[list[Completion | None]],
    ) -> None:
        """Answer the requests numbered in `waiting`: the longest first, so that a batch that does
        not fit shows at once."""
        import torch

        while waiting:
            size = max(1, self._budget // (cost[waiting[0]] * len(requests)))
            chosen = waiting[:size]
            try:
                done = self._generate_batch([[asked[i] for i in chosen] for asked in requests])
            except torch.OutOfMemoryError:
                self._reduce_batch(len(chosen) * len(requests), cost[waiting[0]])
                continue
            for row, completions in zip(answers, done, strict=True):
                for i, completion in zip(chosen, completions, strict=True):
                    row[i] = completion
            waiting = waiting[size:]

    def _reduce_batch(self, rows: int, tokens: int) -> None:
        import torch

        torch.cuda.empty_cache()
        if self._budget <= tokens:
            raise UserError(
                f"out of memory on {self._model.device} with plan={self.plan}, {rows} rows of "
                f"{tokens} tokens; lower job.particles, max_new_tokens or the model's size"
            )
        self._budget = max(tokens, min(self._budget, rows * tokens) // 2)
        log.warning("out of memory: batches now hold at most %d tokens", self._budget)

    def _generate_batch(self, requests: Sequence[Sequence[Request]]) -> list[list[Completion]]:
        """One batch, either scored or generated."""
        flat = [request for asked in requests for request in asked]
        if flat[0].choices:
            done = self._score_choices(flat, len(requests))
        else:
            done = self._generate_texts(flat, len(requests))
        size = len(requests[0])
        return [done[p * size : (p + 1) * size] for p in range(len(requests))]

    def _generate_texts(self, flat: Sequence[Request], particles: int) -> list[Completion]:
        from swarm.engine.decode import generate_rows

        rows = [self._build_row(request) for request in flat]
        generate_rows(self._model, rows, particles, self._tokenizer.pad_token_id, self._ends)
        return list(map(partial(build_completion, self._tokenizer), flat, rows))

    def _build_row(self, request: Request) -> "DecodingRow":
        from swarm.engine.decode import DecodingRow
        from swarm.engine.sampling import build_sampling_state

        ended, prompt = stop_check(request), self._prompt_ids(request.prompt)
        settled = None if ended is None else (lambda new: ended(decode_text(self._tokenizer, new)))
        return DecodingRow(prompt, request.max_new_tokens, settled, build_sampling_state(request, prompt))

    def _score_choices(self, flat: Sequence[Request], particles: int) -> list[Completion]:
        from swarm.engine.scoring import score_choices

        prompts = [self._prompt_ids(request.prompt) for request in flat]
        choices = [self._choice_ids(request) for request in flat]
        positions = self._budget // LOGITS_DIVISOR
        pad = self._tokenizer.pad_token_id
        rows = score_choices(self._model, prompts, choices, particles, pad, positions)
        for place, row in enumerate(rows):
            if any(math.isnan(one.logprob) for one in row):
                raise NotFinite(place // (len(rows) // particles), "activations")
        done = []
        for prompt, tokens, row in zip(prompts, choices, rows, strict=True):
            logprobs, greedy = zip(*row, strict=True)
            counts = tuple(map(len, tokens))
            done.append(Completion("", logprobs, len(prompt), count_choice_tokens(tokens), greedy, counts))
        return done

    def clip_to_context(self, request: Request) -> Request:
        """The request with no more new tokens than the model has positions for.

        `answer` asks whatever it is given: a search's items have been looked at before.

        Raises:
            UserError: A value is not allowed, turns cannot be written, or there are more tokens
                than positions.
        """
        from swarm.engine.sampling import build_sampling_state

        prompt = self._prompt_ids(request.prompt)
        build_sampling_state(request, prompt)
        longest = max(map(len, self._choice_ids(request)), default=0)
        return clip_new_tokens(self._context, request, len(prompt), longest)

    def _count_row_tokens(self, request: Request) -> int:
        """The most tokens of one row of it in a batch."""
        longest = max(map(len, self._choice_ids(request)), default=0)
        return len(self._prompt_ids(request.prompt)) + max(request.max_new_tokens, longest - 1)

    def _choice_ids(self, request: Request) -> list[list[int]]:
        """The token ids of each of the request's choices."""
        pairs = [(request.prompt, choice) for choice in request.choices]
        return [self._tokens.get_ids(p, partial(encode_choice, self._tokenizer, *p)) for p in pairs]

    def _prompt_ids(self, prompt: object) -> list[int]:
        """The prompt's token ids."""
        return self._tokens.get_ids(prompt, partial(encode_prompt, self._tokenizer, prompt))


OVERFLOW = (
    "a derivative is not finite, and its step is left out: model.dtype holds no such numbers "
    "(float16 ends at 65,504; try bfloat16 or float32)"
)


def check_mixed_finite(stack: Any) -> None:
    """See that what was mixed for each position is finite in the model's type.

    Raises:
        NotFinite: It is not.
    """
    spoiled = getattr(stack, "first_nonfinite", None)
    if spoiled and (bad := spoiled()) is not None:
        raise NotFinite(bad, "weights")


def as_adapter_pool(pool: ExpertPool) -> Pool:
    """The pool, as the pool of adapters that it has to be.

    Raises:
        UserError: It is of another kind.
    """
    if hasattr(pool, "modules"):
        return cast(Pool, pool)
    raise UserError("engine=hf mixes adapters and needs pool=adapters; models: engine=token, full")
