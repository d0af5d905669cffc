"""The engine on transformers: one resident base model, experts mixed in memory, large batches.

`HFModel` is a base model without experts, for example a local judge.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from swarm._util.settings import Positive, checked
from swarm.engine.base import (
    Engine,
    Gradient,
    Mixer,
    as_pool,
    available_memory_bytes,
    choose_plan,
)
from swarm.engine.base_model import BaseModel, validate_device
from swarm.engine.tokenization import (
    CachedEncoder,
    build_completion,
    build_row,
    build_scored_completion,
    clip_new_tokens,
    context_length_of,
    encode_choice,
    encode_prompt,
    end_token_ids,
)
from swarm.errors import NotFinite, UserError
from swarm.models.base import Completion, Example, Message, Model, Request
from swarm.pool.pool import ExpertPool, Pool

if TYPE_CHECKING:
    from swarm.engine.gradient import TokenizedExample
    from swarm.engine.lora import Factors
    from swarm.pool.learned import LearnedAdapter

BATCH_CPU, BATCH_GPU = 4096, 65536
"""Padded tokens per batch if `engine.max_tokens` is not set."""

log = logging.getLogger(__name__)

LOGITS_DIVISOR = 16
"""Logits are held for at most one in this many of a batch's tokens when choices are scored."""

LEARNED_LIMIT = 8
"""Learned adapters that are kept in memory beside those in use."""

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

    embeds = True
    differentiable = exchanges = True

    fixed_weights = True
    """Whether the weights of the base remain as loaded."""

    def __init__(
        self,
        plan: Literal["auto", "merged", "stacked"] = "auto",
        max_tokens: Positive | None = None,
        checkpointing: bool = False,
    ) -> None:
        self.plan, self.max_tokens, self.checkpointing = plan, max_tokens, checkpointing
        self._logged: set[str] = set()
        self._mixer: Any = None
        self._learns = False
        self._loaded: dict[str, LearnedAdapter] = {}

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """See `swarm.engine.base.Engine`."""
        import torch

        from swarm.engine.lora import LoraLayers

        pool = as_pool(pool, Pool, "hf")
        model, tokenizer = base.load_without_weights()
        basis = {
            name: [
                torch.empty(shape, device="meta")
                for shape in ((rank, inputs), (outputs, rank), (rank,))
            ]
            for name, (inputs, outputs, rank) in pool.modules.items()
        }
        LoraLayers(model, basis, f"pool.folder={pool.folder} on {base.path}")
        self.context = context_length_of(model.config)
        return tokenizer

    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """See `swarm.engine.base.Engine`."""
        self.load_base(base, device)
        self.set_pool(pool)

    def set_pool(self, pool: ExpertPool) -> None:
        """See `swarm.engine.base.Engine`."""
        pool = as_pool(pool, Pool, "hf")
        self._learns = isinstance(pool.new_adapter, int)
        self._loaded.clear()
        if self._mixer is not None:
            self.set_adapters({})  # the experts held go before others come
        self.set_adapters({name: pool.expert_factors(name) for name in pool.modules}, pool.folder)

    def load_base(self, base: BaseModel, device: str) -> None:
        """Load the base; it answers unchanged after `set_adapters({})`, at positions [P, 0]."""
        import torch

        model, tokenizer = base.load(device)
        if model.device.type == "cuda":
            # cuBLAS may otherwise add parts of a sum in 16 bits.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        else:
            from swarm.engine.cpu_forward import install_cpu_forward

            # An eighth: other workers may load at the same time.
            install_cpu_forward(model, available_memory_bytes() // 8 if self.fixed_weights else 0)
        self.use_model(model, tokenizer, str(base.path))

    def use_model(self, model: Any, tokenizer: Any, path: str) -> None:
        """Use a frozen model that is loaded, as `load_base` does; `path` names it in errors."""
        from swarm.engine.decode import supports_slots

        self._path = path
        # Both take a mask for each pair of tokens, and any positions.
        self._packs_choices = supports_slots(model)
        ends = end_token_ids(model.generation_config, tokenizer)
        self._hold_model(model, tokenizer, ends, context_length_of(model.config))

    def _hold_model(self, model: Any, tokenizer: Any, ends: frozenset[int], context: float) -> None:
        self._model, self._tokenizer, self._ends, self._context = model, tokenizer, ends, context
        default = BATCH_CPU if model.device.type == "cpu" else BATCH_GPU
        self._budget = self.max_tokens or default
        self._prompt_ids = CachedEncoder(partial(encode_prompt, tokenizer))
        self._encode_choice = CachedEncoder(partial(encode_choice, tokenizer))

    def set_adapters(self, basis: Mapping[str, "Factors"], folder: str | Path = "") -> None:
        """Set or replace the experts in the loaded base's layers."""
        from swarm.engine.lora import LoraLayers

        if self._mixer is not None:
            self._mixer.remove()
        where = f"pool.folder={folder} on {self._path}"
        self._set_mixer(LoraLayers(self._model, basis, where, self._learns))
        self._cost = self._mixer.update_cost
        size = self._mixer.adapted_weights * self._model.dtype.itemsize
        self._room = size <= self._free_bytes

    def _set_mixer(self, mixer: Mixer) -> None:
        import torch

        from swarm.engine.decode import Decoder, Reader

        self._mixer = mixer
        self._reader = Reader(self._model, mixer, self._tokenizer.pad_token_id)
        self._decoder = Decoder(self._reader, self._ends, self._context)
        if self._model.device.type == "cpu":
            self._free_bytes = available_memory_bytes()
        else:
            torch.cuda.empty_cache()
            self._free_bytes = torch.cuda.mem_get_info(self._model.device)[0]
        self._slot_tokens = math.inf  # in all slots, after more did not fit into memory

    def generate(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """See `swarm.engine.base.Engine`."""
        import torch

        plan = self._choose_plan(requests)
        size = 1 if plan == "merged" else max(1, len(positions))
        answers: list[list[Completion]] = []
        for first in range(0, len(positions), size):
            part = slice(first, first + size)
            chosen = torch.from_numpy(np.ascontiguousarray(positions[part]))
            self._mixer.set_learned(self._load_learned(positions[part]))
            self._mixer.set_positions(chosen, merge=plan == "merged")
            asked = [(p, one) for p, row in enumerate(requests[part]) for one in row]
            try:
                texts = iter(self._write_texts([one for one in asked if not one[1].choices]))
                scores = iter(self._score_choices([one for one in asked if one[1].choices]))
            except NotFinite as error:
                raise NotFinite(first + error.position, error.quantity) from None
            found = (next(scores if request.choices else texts) for _, request in asked)
            answers += [list(islice(found, len(row))) for row in requests[part]]
        return answers

    def _load_learned(self, positions: np.ndarray) -> "list[LearnedAdapter | None]":
        """Return the learned adapter of each of the positions, or nothing if none has one."""
        from swarm.pool.learned import LearnedAdapter

        files = [self.learned.get(tuple(row), "") for row in positions.tolist()]
        for file in set(files) - {"", *self._loaded}:
            self._loaded[file] = LearnedAdapter.load(file, self._model.device)
        for old in list(self._loaded)[:-LEARNED_LIMIT]:
            if old not in files:
                del self._loaded[old]
        return [self._loaded.get(file) for file in files] if any(files) else []

    def open_adapter(self, file: str | None, rank: int, seed: int) -> "LearnedAdapter":
        """See `swarm.engine.base.Engine`."""
        from swarm.pool.learned import LearnedAdapter

        if file:
            return LearnedAdapter.load(file, self._model.device, moments=True)
        return LearnedAdapter.draw(self._mixer.linear_shapes, rank, seed, self._model.device)

    def _choose_plan(self, requests: Sequence[Sequence[Request]]) -> str:
        if self.plan != "auto":
            return self.plan
        gpu, exact = self._model.device.type == "cuda", self._model.dtype.itemsize == 4
        asked = list(chain(*requests))
        tokens = sum(len(self._prompt_ids(one.prompt)) for one in asked) / len(requests)
        steps = max((one.token_limit for one in asked if not one.choices), default=0)
        plan, reason = choose_plan(len(requests), tokens, steps, self._cost, gpu, exact, self._room)
        if reason not in self._logged:
            self._logged.add(reason)
            log.info("plan %s: %s", plan, reason)
        return plan

    def _write_texts(self, asked: Sequence[Asked]) -> list[Completion]:
        """Answer requests for texts of the positions that are set."""
        import torch

        from swarm.engine.decode import cache_tokens

        def begin(particle: int, request: Request) -> Any:
            prompt = self._prompt_ids(request.prompt)
            return build_row(self._tokenizer, request, prompt, particle)

        rows = [begin(*one) for one in asked]
        while waiting := [row for row in rows if row.live]:
            most = cache_tokens(self._model, self._budget, self._free_bytes)
            try:
                self._decoder.generate(waiting, int(min(most, self._slot_tokens)))
            except torch.OutOfMemoryError:
                slots, length = self._decoder.limit, self._decoder.row_length
                torch.cuda.empty_cache()
                if slots == 1:
                    raise self._out_of_memory(1, length) from None
                self._slot_tokens = slots * length // 2
                log.warning("out of memory: slots now hold at most %d tokens", self._slot_tokens)
                # Those that have not ended are written again from their beginning.
                rows = [begin(*one) if r.live else r for one, r in zip(asked, rows, strict=True)]
        return [
            build_completion(self._tokenizer, request, row)
            for (_, request), row in zip(asked, rows, strict=True)
        ]

    def _score_choices(self, asked: Sequence[Asked]) -> list[Completion]:
        """Answer requests with choices of the positions that are set."""
        import torch

        from swarm.engine.decode import score_choices

        prompts = [self._prompt_ids(request.prompt) for _, request in asked]
        choices = [self._choice_ids(request) for _, request in asked]
        cost = [
            len(prompt) + max(request.token_limit, max(map(len, mine)) - 1)
            for (_, request), prompt, mine in zip(asked, prompts, choices, strict=True)
        ]
        # The longest come first, so that a batch that is too large fails at once.
        left = sorted(range(len(asked)), key=lambda i: -cost[i])
        found: dict[int, Completion] = {}
        while left:
            some = left[: max(1, self._budget // cost[left[0]])]
            try:
                scores = score_choices(
                    self._reader,
                    [prompts[i] for i in some],
                    [choices[i] for i in some],
                    [asked[i][0] for i in some],
                    self._budget // LOGITS_DIVISOR,
                )
            except torch.OutOfMemoryError:
                self._reduce_batch(len(some), cost[left[0]])
                continue
            for i, row in zip(some, scores, strict=True):
                if any(math.isnan(logprob) for logprob, _ in row):
                    raise NotFinite(asked[i][0], "activations")
                found[i] = build_scored_completion(len(prompts[i]), choices[i], row)
            left = left[len(some) :]
        return [found[i] for i in range(len(asked))]

    def _reduce_batch(self, rows: int, tokens: int) -> None:
        import torch

        held = self._decoder.slots > 0
        self._decoder.release()
        torch.cuda.empty_cache()
        if held:
            return  # the slots' cache may be all that was too much
        if self._budget <= tokens:
            raise self._out_of_memory(rows, tokens)
        self._budget = max(tokens, min(self._budget, rows * tokens) // 2)
        log.warning("out of memory: batches now hold at most %d tokens", self._budget)

    def _out_of_memory(self, rows: int, tokens: int) -> UserError:
        return UserError(
            f"out of memory on {self._model.device} with plan={self.plan}, {rows} rows of {tokens} "
            "tokens; lower job.particles, max_new_tokens or the model's size"
        )

    def clip_to_context(self, request: Request) -> Request:
        """Return the request with no more new tokens than the model has positions for.

        `generate` does not check this: a search's items have been checked before.

        Raises:
            UserError: A value is not allowed, turns cannot be formatted, or there are more tokens
                than positions.
        """
        prompt = self._prompt_ids(request.prompt)
        build_row(self._tokenizer, request, prompt)
        longest = max(map(len, self._choice_ids(request)), default=0)
        return clip_new_tokens(self._context, request, len(prompt), longest)

    def _choice_ids(self, request: Request) -> list[list[int]]:
        return [self._encode_choice(request.prompt, choice) for choice in request.choices]

    def embed_prompts(
        self, prompts: Sequence[str | tuple[Message, ...]], layers: Sequence[int] | None = None
    ) -> dict[int, np.ndarray]:
        """See `swarm.engine.base.Engine`."""
        import torch

        from swarm.engine.embedding import embed_tokens

        ids = [self._prompt_ids(prompt) for prompt in prompts]
        self._mixer.clear_positions()
        # The longest come first, so that a batch that is too large fails at once.
        left = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        found: dict[int, dict[int, np.ndarray]] = {}
        while left:
            some = left[: max(1, self._budget // len(ids[left[0]]))]
            try:
                states = embed_tokens(self._model, [ids[i] for i in some], layers)
            except torch.OutOfMemoryError:
                self._reduce_batch(len(some), len(ids[left[0]]))
                continue
            for layer, rows in states.items():
                found.setdefault(layer, {}).update(zip(some, rows, strict=True))
            left = left[len(some) :]
        return {
            layer: np.stack([rows[i] for i in range(len(ids))]) for layer, rows in found.items()
        }

    def compute_gradient(
        self,
        positions: np.ndarray,
        examples: Sequence[Example],
        slope: bool = True,
        routes: Sequence[int] = (),
        learned: "LearnedAdapter | None" = None,
    ) -> Gradient:
        """See `swarm.engine.base.Engine`."""
        import torch

        from swarm.engine.gradient import OVERFLOW, batch_examples, compute_loss_and_gradient

        rows = [self._tokenize_example(one) for one in examples]
        for row, route in zip(rows, routes, strict=bool(routes)):
            row.route = route
        pad = self._tokenizer.pad_token_id
        positions = np.atleast_2d(positions)
        while True:
            batches = batch_examples(rows, pad, self._budget, self._packs_choices)
            try:
                found = compute_loss_and_gradient(
                    self._model, self._mixer, positions, batches, slope, self.checkpointing, learned
                )
            except torch.OutOfMemoryError:
                for factor in chain(*learned.factors.values()) if learned else ():
                    factor.grad = None  # the first batches are read again
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
        choices = self._choice_ids(Request(one.prompt, 0, one.choices))
        ends = one.ends or [one.final] * len(choices)
        choices = [
            # A text of as many tokens as were allowed did not end, it was cut.
            [*ids, *end * (final and len(ids) < one.limit)]
            for ids, final in zip(choices, ends, strict=True)
        ]
        return TokenizedExample(prompt, choices, one)


class HFModel(Model):
    """Answers with a transformers model, turns through its chat template; greedy by default.

    For models by name that share memory see `swarm.registry.local_models`.

    Args:
        base: The model; its weights are read from safetensors only.
        device: "cpu", "cuda" or "cuda:1"; `None` is the device of the worker's own model.
        max_tokens: See `swarm.engine.hf.HFEngine`.
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
        """Load the model; see `swarm.models.base.Model.open`."""
        self._engine.load_base(self.base, self.device or device)
        self._engine.set_adapters({})

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer all requests; see `swarm.models.base.Model.generate`.

        Raises:
            UserError: A request is too long for the model, or has a value that is not allowed.
        """
        clipped = [self._engine.clip_to_context(request) for request in requests]
        return self._engine.generate(np.zeros((1, 0)), [clipped])[0] if clipped else []
