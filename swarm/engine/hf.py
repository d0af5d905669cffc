"""The engine on transformers: one resident base model, experts mixed in memory, large batches.

It chooses one of three plans to answer many particles. `HFModel` is a base model without experts,
for example a local judge.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swarm.engine.base import (
    POSITIONS_BUCKET,
    ExpertPool,
    answer_by_route,
    as_adapter_pool,
    available_memory_bytes,
    check_mixed_finite,
    choose_plan,
    out_of_memory,
    profile_device,
    request_shapes,
)
from swarm.engine.base_model import BaseModel, validate_device
from swarm.engine.tokenization import (
    TokenCache,
    build_completion,
    build_scored_completion,
    clip_new_tokens,
    context_length_of,
    decode_text,
    encode_choice,
    encode_prompt,
    end_token_ids,
    stop_check,
)
from swarm.errors import NotFinite, UserError
from swarm.models.base import Completion, Example, Message, Model, Request
from swarm.pool.prompt_router import PromptRouter

if TYPE_CHECKING:
    from swarm.engine.batched_lora import Factors, ProductChooser, RoutedRows
    from swarm.engine.decode import DecodingRow
    from swarm.engine.gradient import Gradient, TokenizedExample
    from swarm.engine.slots import SlotDecoder

BATCH_CPU, BATCH_GPU = 4096, 65536
"""Padded tokens per batch if `engine.max_tokens` is not set."""

log = logging.getLogger(__name__)

PLANS = ("auto", "swap", "merged", "stacked")

LOGITS_DIVISOR = 16
"""Logits are held for at most one in this many of a batch's tokens when choices are scored."""


class HFEngine:
    """Answers with transformers' models.

    Args:
        plan: "swap" runs one particle after the other, "merged" does so with the particle added to
            a copy of the weights, "stacked" runs all of a job at once; "auto" chooses
            (`swarm.engine.base.choose_plan`).
        max_tokens: Maximum number of padded prompt and new tokens in one batch; `None` chooses
            4,096 on a CPU and 65,536 on a GPU, where the slots of texts have up to four times as
            many. Halved permanently when the device runs out of memory.
        checkpointing: Recompute activations in the backward pass of a gradient, which costs one
            more forward pass and much less memory; switched on when memory runs out.

    Attributes:
        router: Routes prompts to the parts of positions [R * G * K]; `None` for positions [G * K].
        continuous: Whether texts are decoded in slots (`swarm.engine.slots`) where the model allows
            it; `None` does so on a GPU. For tests and benchmarks.
        products: The choice of products with static factors; `None` measures them on a GPU and uses
            the default elsewhere. For tests and benchmarks.
    """

    router: PromptRouter | None = None
    continuous: bool | None = None
    products: "ProductChooser | None" = None
    _decoder: "SlotDecoder | None" = None
    _slot_tokens: float = math.inf  # in all slots, after more did not fit into memory

    def __init__(
        self,
        plan: str = "auto",
        max_tokens: int | None = None,
        checkpointing: bool = False,
    ) -> None:
        if plan not in PLANS:
            raise UserError(f"engine.plan={plan}: must be one of {', '.join(PLANS)}")
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise UserError(f"engine.max_tokens={max_tokens}: must be null or a positive integer")
        self.plan = plan
        if not isinstance(checkpointing, bool):
            raise UserError(f"engine.checkpointing={checkpointing}: must be true or false")
        self.max_tokens, self.checkpointing = max_tokens, checkpointing
        self._tokens = TokenCache()
        self._logged: set[str] = set()

    context = math.inf
    """See `swarm.engine.base.Engine`."""

    _packs_choices: bool | None = None
    """See `swarm.engine.gradient.can_pack_choices`; `None` before it was needed."""

    fixed_weights = True
    """Whether the weights of the base remain as loaded."""

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """See `swarm.engine.base.Engine`."""
        import torch

        from swarm.engine.batched_lora import install_lora_layers

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
        """See `swarm.engine.base.Engine`."""
        pool = as_adapter_pool(pool)
        self.router = pool.router
        basis = {name: pool.expert_factors(name) for name in pool.modules}
        self.load_base(base, device, basis, pool.folder)

    def load_base(
        self,
        base: BaseModel,
        device: str,
        basis: Mapping[str, "Factors"],
        folder: str | Path,
        summed: bool = False,
    ) -> None:
        """Load the base with a basis (see `swarm.engine.batched_lora.BatchedLoraModel`), as `open`.

        With an empty basis the base answers unchanged, at positions [P, 0].
        """
        import torch

        self._model, self._tokenizer = base.load(device)
        if self._model.device.type == "cuda":
            # cuBLAS may otherwise add parts of a sum in 16 bits.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        if device == "cpu":
            from swarm.engine.cpu_forward import install_cpu_forward

            # An eighth: other workers may load at the same time.
            spare = available_memory_bytes() // 8 if self.fixed_weights else 0
            install_cpu_forward(self._model, spare)
        self._budget = self.max_tokens or (BATCH_CPU if device == "cpu" else BATCH_GPU)
        self._ends = end_token_ids(self._model, self._tokenizer)
        self._context = context_length_of(self._model)
        self._stack: Any = None
        self._packs_choices = None
        self.replace_adapters(base, device, basis, folder, summed)

    def replace_adapters(
        self,
        base: BaseModel,
        device: str,
        basis: Mapping[str, "Factors"],
        folder: str | Path,
        summed: bool = False,
    ) -> None:
        """Replace the basis in the loaded base's layers; see `load_base`."""
        from swarm.engine.batched_lora import install_lora_layers

        self._decoder = None
        if self._stack:
            self._stack.remove_layers()
        self._stack = install_lora_layers(self._model, basis, device, base, folder, summed)
        shapes = [(down.shape[-1], up.shape[-2]) for down, up, *_ in basis.values()]
        self._facts = profile_device(self._model, device, shapes)

    def generate(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """See `swarm.engine.base.Engine`."""
        if self.router is None:
            return self._generate(positions, requests)
        return answer_by_route(self.router, self._generate, positions, requests)

    def _generate(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        import torch

        plan = self._choose_plan(requests)
        groups = (
            [range(len(positions))] if plan == "stacked" else [[i] for i in range(len(positions))]
        )
        answers: list[list[Completion]] = []
        self._choose_products()
        for group in groups:
            chosen = torch.from_numpy(np.ascontiguousarray(positions[list(group)]))
            mine = [requests[i] for i in group]
            ragged = len(group) > 1 and len(request_shapes(mine)) > 1
            if ragged and self._uses_slots():
                # Captured steps depend on the number of positions; unused ones are 0.
                spare = -len(group) % POSITIONS_BUCKET
                chosen = torch.nn.functional.pad(chosen, (0, 0, 0, spare))
            self._stack.set_positions(chosen, merge=plan == "merged")
            try:
                check_mixed_finite(self._stack)
                if ragged:
                    answers += self._generate_ragged(mine, len(chosen))
                else:
                    answers += self._generate_group(mine)
            except NotFinite as error:
                raise NotFinite(group[error.position], error.quantity) from None
        return answers

    def compute_gradient(
        self, position: np.ndarray, examples: Sequence[Example], slope: bool = True
    ) -> "Gradient":
        """See `swarm.engine.base.DifferentiableEngine`."""
        import torch

        from swarm.engine.gradient import (
            OVERFLOW,
            assign_routes,
            batch_examples,
            can_pack_choices,
            compute_loss_and_gradient,
        )

        rows = [self._tokenize_example(one) for one in examples]
        position = position.reshape(assign_routes(rows, self.router), -1)
        if self._packs_choices is None:
            self._stack.clear_positions()
            self._packs_choices = can_pack_choices(self._model)
        fill = len(position) == 1 or self._stack.shares_factors
        pad, packed = self._tokenizer.pad_token_id, self._packs_choices
        while True:
            batches = batch_examples(rows, pad, self._budget, packed, fill)
            try:
                found = compute_loss_and_gradient(
                    self._model, self._stack, position, batches, slope, self.checkpointing
                )
            except torch.OutOfMemoryError:
                if self._decoder or self.checkpointing or not slope:
                    read = sum(len(one.rows(packed=False)) for one in rows)
                    self._reduce_batch(read, max(one.row_length(False) for one in rows))
                    continue
                log.warning("out of memory: activations are recomputed (engine.checkpointing)")
                self.checkpointing = True
                torch.cuda.empty_cache()
                continue
            if not np.isfinite(found.slope).all() and OVERFLOW not in self._logged:
                self._logged.add(OVERFLOW)
                log.warning(OVERFLOW)
            return found

    def _tokenize_example(self, one: Example) -> "TokenizedExample":
        from swarm.engine.gradient import TokenizedExample

        if one.unlabelled and len(one.choices) == 1:
            # Any token will do: only the distribution at its position counts.
            return TokenizedExample(
                self._prompt_ids(one.prompt), [[self._tokenizer.eos_token_id]], one
            )
        choices = self._choice_ids(Request(one.prompt, 0, one.choices))
        end = [self._tokenizer.eos_token_id] if one.final else []
        return TokenizedExample(
            self._prompt_ids(one.prompt), [[*choice, *end] for choice in choices], one
        )

    def _choose_plan(self, requests: Sequence[Sequence[Request]]) -> str:
        """Return the plan; stacking needs the same shape for all particles, or shared factors."""
        if self.plan not in ("auto", "stacked"):
            return self.plan
        stackable = len(request_shapes(requests)) == 1 or self._stack.shares_factors
        if self.plan == "stacked":
            return "stacked" if stackable else "swap"
        rows = -(-sum(map(len, requests)) // len(requests))
        plan, reason = choose_plan(len(requests), rows, self._facts, stackable)
        if reason not in self._logged:
            self._logged.add(reason)
            log.info("plan %s: %s", plan, reason)
        return plan

    def _generate_ragged(
        self, requests: Sequence[Sequence[Request]], count: int
    ) -> list[list[Completion]]:
        """Answer any number of requests of each particle, of `count`, in the same batches."""
        from swarm.engine.batched_lora import RoutedRows

        particles = [particle for particle, row in enumerate(requests) for _ in row]
        routed = RoutedRows(self._stack, particles, count)
        try:
            (found,) = self._generate_group([[one for row in requests for one in row]], routed)
        finally:
            self._stack.route_rows(None)
        left = iter(found)
        return [list(islice(left, len(row))) for row in requests]

    def _generate_group(
        self, requests: Sequence[Sequence[Request]], routed: "RoutedRows | None" = None
    ) -> list[list[Completion]]:
        """Answer equally many requests of each particle in the layers, in the same batches.

        Args:
            routed: The particles of a single row of requests, in which they are in any order.
        """
        answers: list[list[Completion | None]] = [[None] * len(asked) for asked in requests]
        cost = [
            max(self._count_row_tokens(asked[i]) for asked in requests)
            for i in range(len(requests[0]))
        ]

        def answer_batch(chosen: Sequence[int]) -> None:
            here = routed and replace(routed, particles=[routed.particles[i] for i in chosen])
            asked = [[row[i] for i in chosen] for row in requests]
            for row, completions in zip(answers, self._generate_batch(asked, here), strict=True):
                for i, completion in zip(chosen, completions, strict=True):
                    row[i] = completion

        for scored in (False, True):
            mine = [i for i in range(len(cost)) if bool(requests[0][i].choices) == scored]
            if mine and not scored and self._uses_slots():
                self._fill_in_slots(requests, mine, answers, routed)
            else:
                self._run_batches(mine, cost, len(requests), answer_batch)
        return [[c for c in row if c is not None] for row in answers]

    def _run_batches(
        self,
        waiting: Iterable[int],
        tokens: Sequence[int],
        rows: int,
        act: Callable[[Sequence[int]], None],
    ) -> None:
        """Call `act` with the numbers of each batch; halve the batches when memory runs out.

        The longest come first, so that a batch that is too large fails at once.

        Args:
            waiting: Numbers of what is to be done.
            tokens: Number of tokens of a row of each.
            rows: Number of rows of each.
        """
        import torch

        left = sorted(waiting, key=lambda i: (-tokens[i], i))
        while left:
            longest = tokens[left[0]]
            chosen = left[: max(1, self._budget // (longest * rows))]
            try:
                act(chosen)
            except torch.OutOfMemoryError:
                self._reduce_batch(len(chosen) * rows, longest)
                continue
            left = left[len(chosen) :]

    def _uses_slots(self) -> bool:
        """Return whether texts are decoded in slots."""
        from swarm.engine.slots import supports_slots

        on_gpu = self._model.device.type == "cuda"
        wanted = on_gpu if self.continuous is None else self.continuous
        return wanted and supports_slots(self._model)

    def _choose_products(self) -> None:
        """Use static factors, at the next change of positions, if texts are decoded in slots."""
        from swarm.engine.batched_lora import BatchedLoraModel, ProductChooser

        if not isinstance(self._stack, BatchedLoraModel):
            return
        if not self._uses_slots():
            self._stack.use_static_factors(None)
            return
        if self.products is None:
            self.products = ProductChooser(measured=self._model.device.type == "cuda")
        self._stack.use_static_factors(self.products)

    def _fill_in_slots(
        self,
        requests: Sequence[Sequence[Request]],
        indices: Sequence[int],
        answers: list[list[Completion | None]],
        routed: "RoutedRows | None",
    ) -> None:
        """Answer the requests with these indices, of all particles, in slots that are refilled."""
        import torch

        from swarm.engine.batched_lora import BatchedLoraModel
        from swarm.engine.slots import cache_tokens, fit_decoder

        stack = self._stack if isinstance(self._stack, BatchedLoraModel) else None
        count = routed.count if routed else len(requests)
        waiting = [(row, i) for row in range(len(requests)) for i in indices]
        while waiting:
            longest = max(self._count_row_tokens(requests[p][i]) for p, i in waiting)
            rows = [self._build_row(requests[p][i]) for p, i in waiting]
            most = cache_tokens(self._model, self._budget, self._facts.free_bytes)
            tokens = int(min(most, self._slot_tokens))
            slots = max(1, min(len(rows), tokens // longest))
            try:
                self._decoder = fit_decoder(
                    self._decoder,
                    (self._model, stack, self._tokenizer.pad_token_id),
                    (len(rows), longest, self._context),
                    tokens,
                )
                particles = [routed.particles[i] if routed else p for p, i in waiting]
                self._decoder.generate(rows, particles, count, self._ends)
            except torch.OutOfMemoryError:
                self._decoder = None
                torch.cuda.empty_cache()
                if slots == 1:
                    raise out_of_memory(self._model.device, self.plan, 1, longest) from None
                self._slot_tokens = slots * longest // 2
                log.warning("out of memory: slots now hold at most %d tokens", self._slot_tokens)
            left = []
            for (particle, i), row in zip(waiting, rows, strict=True):
                if row.live:
                    left.append((particle, i))
                else:
                    request = requests[particle][i]
                    answers[particle][i] = build_completion(self._tokenizer, request, row)
            waiting = left

    def _reduce_batch(self, rows: int, tokens: int) -> None:
        import torch

        if self._decoder:
            # The slots' cache may be all that was too much.
            self._decoder = None
            torch.cuda.empty_cache()
            return
        torch.cuda.empty_cache()
        if self._budget <= tokens:
            raise out_of_memory(self._model.device, self.plan, rows, tokens)
        self._budget = max(tokens, min(self._budget, rows * tokens) // 2)
        log.warning("out of memory: batches now hold at most %d tokens", self._budget)

    def _generate_batch(
        self, requests: Sequence[Sequence[Request]], routed: "RoutedRows | None"
    ) -> list[list[Completion]]:
        """Run one batch, either scored or generated."""
        flat = [request for row in requests for request in row]
        answer = self._score_choices if flat[0].choices else self._generate_texts
        completions = answer(flat, len(requests), routed)
        size = len(requests[0])
        return [completions[p * size : (p + 1) * size] for p in range(len(requests))]

    def _generate_texts(
        self, flat: Sequence[Request], particles: int, routed: "RoutedRows | None"
    ) -> list[Completion]:
        from swarm.engine.decode import generate_rows

        rows = [self._build_row(request) for request in flat]
        pad = self._tokenizer.pad_token_id
        generate_rows(self._model, rows, particles, pad, self._ends, routed)
        return list(map(partial(build_completion, self._tokenizer), flat, rows))

    def _build_row(self, request: Request) -> "DecodingRow":
        from swarm.engine.decode import DecodingRow, build_sampling_state

        ended, prompt = stop_check(request), self._prompt_ids(request.prompt)
        settled = None if ended is None else (lambda new: ended(decode_text(self._tokenizer, new)))
        return DecodingRow(
            prompt, request.token_limit, settled, build_sampling_state(request, prompt)
        )

    def _score_choices(
        self, flat: Sequence[Request], particles: int, routed: "RoutedRows | None"
    ) -> list[Completion]:
        from swarm.engine.decode import score_choices

        prompts = [self._prompt_ids(request.prompt) for request in flat]
        choices = [self._choice_ids(request) for request in flat]
        positions = self._budget // LOGITS_DIVISOR
        pad = self._tokenizer.pad_token_id
        rows = score_choices(self._model, prompts, choices, particles, pad, positions, routed)
        for index, row in enumerate(rows):
            if any(math.isnan(one.logprob) for one in row):
                block = index // (len(rows) // particles)
                raise NotFinite(routed.particles[index] if routed else block, "activations")
        return list(map(build_scored_completion, map(len, prompts), choices, rows))

    def clip_to_context(self, request: Request) -> Request:
        """Return the request with no more new tokens than the model has positions for.

        `generate` does not check this: a search's items have been checked before.

        Raises:
            UserError: A value is not allowed, turns cannot be formatted, or there are more tokens
                than positions.
        """
        from swarm.engine.decode import build_sampling_state

        prompt = self._prompt_ids(request.prompt)
        build_sampling_state(request, prompt)
        longest = max(map(len, self._choice_ids(request)), default=0)
        return clip_new_tokens(self._context, request, len(prompt), longest)

    def _count_row_tokens(self, request: Request) -> int:
        """Return the maximum number of tokens of one row in a batch."""
        longest = max(map(len, self._choice_ids(request)), default=0)
        return len(self._prompt_ids(request.prompt)) + max(request.token_limit, longest - 1)

    def _choice_ids(self, request: Request) -> list[list[int]]:
        """Return the token ids of each of the request's choices."""
        pairs = [(request.prompt, choice) for choice in request.choices]
        return [self._tokens.get_ids(p, partial(encode_choice, self._tokenizer, *p)) for p in pairs]

    def _prompt_ids(self, prompt: object) -> list[int]:
        """Return the prompt's token ids."""
        return self._tokens.get_ids(prompt, partial(encode_prompt, self._tokenizer, prompt))


class HFModel(Model):
    """Answers with a transformers model, turns through its chat template; greedy by default.

    For models by name that share memory see `swarm.registry.local_models`.

    Args:
        base: The model; its weights are read from safetensors only.
        device: "cpu", "cuda" or "cuda:1"; `None` is the device of the worker's own model.
        max_tokens: See `swarm.engine.hf.HFEngine`.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self, base: BaseModel, device: str | None = None, max_tokens: int | None = None
    ) -> None:
        self.base = base
        self.device = validate_device(device)
        self._engine = HFEngine("swap", max_tokens)

    def check(self) -> None:
        """Look for the model on this machine; see `swarm.tasks.base.RequiresSetup.check`.

        Raises:
            UserError: There is no such folder, or it contains no model, or one without a chat
                template.
        """
        if folder := self.base.on_disk():
            encode_prompt(self.base.load_tokenizer(folder), (Message("user", "?"),))

    def fingerprint(self) -> str:
        """See `BaseModel.fingerprint`."""
        return self.base.fingerprint()

    def open(self, device: str) -> None:
        """Load the model; see `swarm.tasks.base.RequiresSetup.open`.

        Raises:
            UserError: As `BaseModel.load`.
        """
        self._engine.load_base(self.base, self.device or device, {}, "")

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer all requests; see `swarm.models.base.Model.generate`.

        Raises:
            UserError: A request is too long for the model, or has a value that is not allowed.
        """
        clipped = [self._engine.clip_to_context(request) for request in requests]
        return self._engine.generate(np.zeros((1, 0)), [clipped])[0] if clipped else []
