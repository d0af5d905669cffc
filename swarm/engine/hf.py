"""The engine on transformers: one resident base model, experts mixed in memory, large batches.

`HFModel` is a base model without experts, for example a local judge.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from swarm._util.settings import Positive, checked
from swarm.engine.base import (
    Engine,
    Gradient,
    Mixer,
    as_adapter_pool,
    available_memory_bytes,
    choose_plan,
    free_memory_bytes,
    out_of_memory,
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
from swarm.errors import NotFinite
from swarm.models.base import Completion, Example, Message, Model, Request
from swarm.pool.pool import ExpertPool

if TYPE_CHECKING:
    from swarm.engine.decode import DecodingRow
    from swarm.engine.gradient import TokenizedExample
    from swarm.engine.lora import Factors

BATCH_CPU, BATCH_GPU = 4096, 65536
"""Padded tokens per batch if `engine.max_tokens` is not set."""

log = logging.getLogger(__name__)

LOGITS_DIVISOR = 16
"""Logits are held for at most one in this many of a batch's tokens when choices are scored."""

Asked = tuple[int, Request]
"""The index of a position, and one of its requests."""


@checked("engine")
class HFEngine(Engine):
    """Answers with transformers' models.

    Args:
        plan: "merged" runs one position after the other, added to a copy of the weights, "stacked"
            runs all of a job at once; "auto" chooses (`swarm.engine.base.choose_plan`).
        max_tokens: Maximum number of padded prompt and new tokens in one batch; `None` chooses
            4,096 on a CPU and 65,536 on a GPU, where the slots of texts have up to four times as
            many. Halved permanently when the device runs out of memory.
        checkpointing: Recompute activations in the backward pass of a gradient, which costs one
            more forward pass and much less memory; switched on when memory runs out.
    """

    routes = True
    differentiable = True

    fixed_weights = True
    """Whether the weights of the base remain as loaded."""

    def __init__(
        self,
        plan: Literal["auto", "merged", "stacked"] = "auto",
        max_tokens: Positive | None = None,
        checkpointing: bool = False,
    ) -> None:
        self.plan, self.max_tokens, self.checkpointing = plan, max_tokens, checkpointing
        self._tokens = TokenCache()
        self._logged: set[str] = set()
        self._mixer: Any = None

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """See `swarm.engine.base.Engine`."""
        import torch

        from swarm.engine.lora import install_lora_layers

        pool = as_adapter_pool(pool, "hf")
        model, tokenizer = base.load_without_weights()
        basis = {
            name: [
                torch.empty(shape, device="meta")
                for shape in ((rank, inputs), (outputs, rank), (rank,))
            ]
            for name, (inputs, outputs, rank) in pool.modules.items()
        }
        install_lora_layers(model, basis, str(base.path), pool.folder)
        self.context = context_length_of(model)
        return tokenizer

    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """See `swarm.engine.base.Engine`."""
        pool = as_adapter_pool(pool, "hf")
        self.router = pool.router
        self.load_base(base, device)
        self.set_adapters({name: pool.expert_factors(name) for name in pool.modules}, pool.folder)

    def load_base(self, base: BaseModel, device: str) -> None:
        """Load the base; it answers unchanged after `set_adapters({})`, at positions [P, 0]."""
        import torch

        model, self._tokenizer = base.load(device)
        if model.device.type == "cuda":
            # cuBLAS may otherwise add parts of a sum in 16 bits.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        else:
            from swarm.engine.cpu_forward import install_cpu_forward

            # An eighth: other workers may load at the same time.
            install_cpu_forward(model, available_memory_bytes() // 8 if self.fixed_weights else 0)
        self._model, self._path = model, str(base.path)
        self._ends = end_token_ids(model, self._tokenizer)
        self._context = context_length_of(model)
        self._budget = self.max_tokens or (BATCH_CPU if device == "cpu" else BATCH_GPU)
        self._packs_choices: bool | None = None

    def set_adapters(self, basis: Mapping[str, "Factors"], folder: str | Path = "") -> None:
        """Set or replace the experts in the loaded base's layers.

        Raises:
            UserError: They do not fit the base.
        """
        from swarm.engine.lora import install_lora_layers

        if self._mixer is not None:
            self._mixer.remove()
        self._set_mixer(install_lora_layers(self._model, basis, self._path, folder))
        size = sum(factors[0].shape[-1] * factors[1].shape[-2] for factors in basis.values())
        room = size * self._model.dtype.itemsize <= self._free_bytes
        self._merges = (room, self._model.dtype.itemsize == 4)

    def _set_mixer(self, mixer: Mixer) -> None:
        from swarm.engine.decode import Decoder, Reader

        self._mixer = mixer
        self._reader = Reader(self._model, mixer, self._tokenizer.pad_token_id)
        self._decoder = Decoder(self._reader, self._ends, self._context)
        self._free_bytes = free_memory_bytes(str(self._model.device))
        self._slot_tokens = math.inf  # in all slots, after more did not fit into memory

    def generate_alike(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """See `swarm.engine.base.Engine`."""
        import torch

        plan, count = self._choose_plan(requests), len(positions)
        groups = [range(count)] if plan == "stacked" else [[i] for i in range(count)]
        answers: list[list[Completion]] = []
        for group in groups:
            chosen = torch.from_numpy(np.ascontiguousarray(positions[list(group)]))
            self._mixer.set_positions(chosen, merge=plan == "merged")
            asked = [(p, one) for p, i in enumerate(group) for one in requests[i]]
            try:
                found = iter(self._answer(asked))
            except NotFinite as error:
                raise NotFinite(group[error.position], error.quantity) from None
            answers += [[next(found) for _ in requests[i]] for i in group]
        return answers

    def _choose_plan(self, requests: Sequence[Sequence[Request]]) -> str:
        if self.plan != "auto":
            return self.plan
        rows = sum(map(len, requests)) / len(requests)
        (room, exact), gpu = self._merges, self._model.device.type == "cuda"
        plan, reason = choose_plan(len(requests), rows, gpu, exact, room)
        if reason not in self._logged:
            self._logged.add(reason)
            log.info("plan %s: %s", plan, reason)
        return plan

    def _answer(self, asked: Sequence[Asked]) -> list[Completion]:
        """Answer requests of the positions that are set."""
        texts = [i for i, (_, request) in enumerate(asked) if not request.choices]
        scored = [i for i, (_, request) in enumerate(asked) if request.choices]
        found = dict(zip(texts, self._write_texts([asked[i] for i in texts]), strict=True))
        # The longest come first, so that a batch that is too large fails at once.
        cost = {i: self._count_row_tokens(asked[i][1]) for i in scored}
        left = sorted(scored, key=lambda i: -cost[i])
        self._run_batches(left, cost, lambda some: found.update(self._score_choices(some, asked)))
        return [found[i] for i in range(len(asked))]

    def _run_batches(
        self, left: list[int], tokens: Mapping[int, int], act: Callable[[list[int]], None]
    ) -> None:
        """Call `act` with each batch, the longest rows first; halve them when memory runs out."""
        import torch

        while left:
            longest = tokens[left[0]]
            chosen = left[: max(1, self._budget // longest)]
            try:
                act(chosen)
            except torch.OutOfMemoryError:
                self._reduce_batch(len(chosen), longest)
                continue
            left = left[len(chosen) :]

    def _write_texts(self, asked: Sequence[Asked]) -> list[Completion]:
        import torch

        from swarm.engine.decode import cache_tokens

        rows = [self._build_row(*one) for one in asked]
        while waiting := [i for i, row in enumerate(rows) if row.live]:
            for i in waiting:  # from their beginning, after memory ran out
                rows[i] = self._build_row(*asked[i])
            most = cache_tokens(self._model, self._budget, self._free_bytes)
            try:
                self._decoder.generate(
                    [rows[i] for i in waiting], int(min(most, self._slot_tokens))
                )
            except torch.OutOfMemoryError:
                slots, length = self._decoder.limit, self._decoder.row_length
                torch.cuda.empty_cache()
                if slots == 1:
                    raise out_of_memory(self._model.device, self.plan, 1, length) from None
                self._slot_tokens = slots * length // 2
                log.warning("out of memory: slots now hold at most %d tokens", self._slot_tokens)
        return [
            build_completion(self._tokenizer, request, row)
            for (_, request), row in zip(asked, rows, strict=True)
        ]

    def _reduce_batch(self, rows: int, tokens: int) -> None:
        import torch

        held = self._decoder.slots > 0
        self._decoder.release()
        torch.cuda.empty_cache()
        if held:
            return  # the slots' cache may be all that was too much
        if self._budget <= tokens:
            raise out_of_memory(self._model.device, self.plan, rows, tokens)
        self._budget = max(tokens, min(self._budget, rows * tokens) // 2)
        log.warning("out of memory: batches now hold at most %d tokens", self._budget)

    def _build_row(self, particle: int, request: Request) -> "DecodingRow":
        from swarm.engine.decode import DecodingRow, build_sampling_state

        ended, prompt = stop_check(request), self._prompt_ids(request.prompt)
        settled = None if ended is None else (lambda new: ended(decode_text(self._tokenizer, new)))
        draw = build_sampling_state(request, prompt)
        return DecodingRow(prompt, request.token_limit, settled, draw, particle)

    def _score_choices(
        self, chosen: Sequence[int], asked: Sequence[Asked]
    ) -> dict[int, Completion]:
        from swarm.engine.decode import score_choices

        particles = [asked[i][0] for i in chosen]
        prompts = [self._prompt_ids(asked[i][1].prompt) for i in chosen]
        choices = [self._choice_ids(asked[i][1]) for i in chosen]
        most = self._budget // LOGITS_DIVISOR
        rows = score_choices(self._reader, prompts, choices, particles, most)
        for particle, row in zip(particles, rows, strict=True):
            if any(math.isnan(one.logprob) for one in row):
                raise NotFinite(particle, "activations")
        found = map(build_scored_completion, map(len, prompts), choices, rows)
        return dict(zip(chosen, found, strict=True))

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
        """Return the maximum number of tokens of one row of a request with choices."""
        longest = max(map(len, self._choice_ids(request)))
        return len(self._prompt_ids(request.prompt)) + max(request.token_limit, longest - 1)

    def _choice_ids(self, request: Request) -> list[list[int]]:
        """Return the token ids of each of the request's choices."""
        pairs = [(request.prompt, choice) for choice in request.choices]
        return [self._tokens.get_ids(p, partial(encode_choice, self._tokenizer, *p)) for p in pairs]

    def _prompt_ids(self, prompt: object) -> list[int]:
        """Return the prompt's token ids."""
        return self._tokens.get_ids(prompt, partial(encode_prompt, self._tokenizer, prompt))

    def compute_gradient(
        self, position: np.ndarray, examples: Sequence[Example], slope: bool = True
    ) -> Gradient:
        """See `swarm.engine.base.Engine`."""
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
            self._mixer.clear_positions()
            self._packs_choices = can_pack_choices(self._model)
        while True:
            batches = batch_examples(
                rows, self._tokenizer.pad_token_id, self._budget, self._packs_choices
            )
            try:
                found = compute_loss_and_gradient(
                    self._model, self._mixer, position, batches, slope, self.checkpointing
                )
            except torch.OutOfMemoryError:
                if self._decoder.slots or self.checkpointing or not slope:
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

        prompt, end = self._prompt_ids(one.prompt), [self._tokenizer.eos_token_id]
        if one.unlabelled and len(one.choices) == 1:
            # Any token will do: only the distribution at its position counts.
            return TokenizedExample(prompt, [end], one)
        choices = self._choice_ids(Request(one.prompt, 0, one.choices))
        return TokenizedExample(prompt, [[*ids, *end * one.final] for ids in choices], one)


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
        self._engine = HFEngine("stacked", max_tokens)

    def check(self) -> None:
        """Look for the model on this machine; see `swarm.models.base.Model.check`.

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
        """Load the model; see `swarm.models.base.Model.open`.

        Raises:
            UserError: As `BaseModel.load`.
        """
        self._engine.load_base(self.base, self.device or device)
        self._engine.set_adapters({})

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer all requests; see `swarm.models.base.Model.generate`.

        Raises:
            UserError: A request is too long for the model, or has a value that is not allowed.
        """
        clipped = [self._engine.clip_to_context(request) for request in requests]
        return self._engine.generate(np.zeros((1, 0)), [clipped])[0] if clipped else []
