"""The engine on vLLM: its batches and its paged cache, one position in the weights at a time.

Nothing is imported from vLLM before it is started; code that depends on its internals is in
`swarm.engine.vllm_extension`.
"""

import itertools
import logging
import os
import pickle
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import Field

from swarm._util.files import parse_json
from swarm._util.settings import Positive, checked
from swarm.engine.base import Engine, as_pool, available_memory_bytes
from swarm.engine.base_model import BaseModel
from swarm.engine.full import FullModelPool, FullWeightsEngine
from swarm.engine.hf import HFEngine
from swarm.engine.tokenization import (
    CachedEncoder,
    DecodingRow,
    build_completion,
    build_row,
    build_scored_completion,
    clip_new_tokens,
    encode_choice,
    encode_prompt,
    end_token_ids,
)
from swarm.errors import NotFinite, UserError, install_command
from swarm.models.base import Completion, Request
from swarm.pool.pool import ExpertPool, Pool

TESTED_VERSION, SUPPORTED_VERSIONS = "0.32.0", ">=0.32,<0.34"
"""Versions of vLLM."""

FALLBACK_HINT = "engine=hf works without vLLM"

DEFAULT_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a worker that dies leaves no process behind
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers would be bound to the same cores
    "PYTHONWARNINGS": "ignore::FutureWarning",  # in vLLM's own processes
}
"""Environment variables set unless the user has set them."""

# fmt: off
RESERVED_OPTIONS = (
    "tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "model", "dtype",
    "load_format", "trust_remote_code", "enable_lora", "max_logprobs", "generation_config",
    "worker_extension_cls", "enable_sleep_mode", "logprobs_mode", "pipeline_parallel_size",
    "data_parallel_size",
)
# fmt: on
"""Arguments refused in `engine.options`: the first three have keys of the engine, the others are
set by it."""

MAX_LISTED_TOKENS = 128
"""Maximum number of token ids with log probabilities per request (vllm/sampling_params.py)."""


@checked("engine")
class VLLMEngine(Engine):
    """Answers with vLLM, in this process (with tensor parallelism: in its processes as well).

    A position is added to the base weights in place, so that answers come at the speed of the plain
    model, whatever the rank. In 16 bits this rounds the update, as every merged model does. Sampled
    texts are drawn by vLLM's generators, so they differ from those of `engine=hf`.

    Args:
        tensor_parallel_size: GPUs that share one model; this many of `gpus` form one worker.
        gpu_memory_utilization: The share of a GPU's memory that vLLM takes.
        max_model_len: Maximum number of tokens of a prompt and its answer; `None` is the model's
            context.
        options: More arguments of vLLM's `EngineArgs`, by name.
    """

    first_devices = True

    def __init__(
        self,
        tensor_parallel_size: Positive = 1,
        gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9,
        max_model_len: Positive | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        for name in sorted(set(options or {}) & set(RESERVED_OPTIONS)):
            own = name in RESERVED_OPTIONS[:3]
            instead = f"set engine.{name}" if own else "it is set by the engine"
            raise UserError(f"engine.options: {name} is not allowed; {instead}")
        self.devices = tensor_parallel_size
        self.settings: dict[str, Any] = {
            "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": float(gpu_memory_utilization),
            **({"max_model_len": max_model_len} if max_model_len else {}),
        }
        self.options = dict(options or {})
        self._llm: Any = None
        self._held: np.ndarray | None = None
        self._scheduler: VLLMScheduler | None = None

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """See `swarm.engine.base.Engine`; vLLM's own checks run only when it starts."""
        full = isinstance(pool, FullModelPool)
        plain = FullWeightsEngine() if full else HFEngine()
        tokenizer = plain.check(base, as_pool(pool, FullModelPool if full else Pool, "vllm"))
        self.context = self.settings.get("max_model_len") or plain.context
        check_installed()
        return tokenizer

    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """See `swarm.engine.base.Engine`; starts vLLM.

        Args:
            device: "cpu", or "cuda:0": vLLM takes the first devices that the process sees.
        """
        check_installed()
        folder = Path(base.resolve())
        self._llm = start_vllm(base, folder, device, {**self.settings, **self.options})
        try:
            self._scheduler = VLLMScheduler(self._llm, base.load_tokenizer(folder), folder)
            with wrap_start_errors():
                self._call("swarm_hold", pickle.dumps((base, pool)))
                self._call("swarm_watch")
                self._check_updates(pool)
        except BaseException:
            self.close()
            raise

    def _check_updates(self, pool: ExpertPool) -> None:
        """Check that other weights give other answers; the loader of some builds has no effect."""
        asked = [Request("", 0, ("a", "b", "c", "1"))]
        rows = np.zeros((2, len(pool.names) * len(pool.groups)))
        rows[1] = 1.0 / len(pool.names)
        first, second = (row[0].logprobs for row in self.generate(rows, [asked] * 2))
        if first == second:
            raise UserError("engine=vllm: vLLM does not update its weights; use engine=hf")

    def generate(
        self, positions: np.ndarray, requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """See `swarm.engine.base.Engine`."""
        assert self._scheduler is not None, "the engine is not open"
        answers: list[list[Completion]] = []
        for i, (position, asked) in enumerate(zip(positions, requests, strict=True)):
            if self._held is None or not np.array_equal(position, self._held):
                self._held = None
                if not all(self._call("swarm_set", position.tolist())):
                    raise NotFinite(i, "weights")
                # What is cached of a prompt was computed with other weights.
                self._forget_prompts()
                self._held = position.copy()
            answers.append(self._scheduler.generate(asked))
            if not all(self._call("swarm_finite")):
                self._forget_prompts()
                self._call("swarm_clear")
                raise NotFinite(i, "activations")
        return answers

    def _forget_prompts(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise UserError(
                "engine=vllm: the cache of prompts cannot be cleared; rerun the same command to "
                "resume with a new engine"
            )

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `swarm.engine.vllm_extension.WorkerExtension` in all workers."""
        found: list[Any] = self._llm.collective_rpc(method, args=args)
        return found

    def close(self) -> None:
        """Shut vLLM down and release its memory; it may be opened again."""
        if self._llm is not None:
            stop_vllm(self._llm)
        self._llm = self._held = self._scheduler = None


@dataclass(slots=True)
class TextPart:
    """A prompt to be continued, in vLLM's form.

    Attributes:
        ids: Prompt token ids.
        params: vLLM's `SamplingParams`.
        row: The generated tokens; its `stop_check` is `None` where vLLM itself detects the end.
        ends: Token ids that end a text.
    """

    ids: list[int]
    params: Any
    row: DecodingRow
    ends: frozenset[int]

    def handle_output(self, output: Any) -> bool:
        """Process the new tokens of vLLM's output; return whether that was the end."""
        completion = output.outputs[0]
        for number, token in enumerate(completion.token_ids):
            found: dict[str, Any] = {"tokens": token}
            if self.row.top:
                by_token = completion.logprobs[number]
                ranked = sorted((one.rank, other, one.logprob) for other, one in by_token.items())
                _, ids, values = zip(*ranked, strict=True)
                found |= {"logprobs": by_token[token].logprob, "ids": ids, "values": values}
            self.row.add_token(found, self.ends)
            if not self.row.live:
                return True
        return bool(output.finished)


@dataclass(slots=True)
class ChoicePart:
    """Some of a request's choices, in vLLM's form: those of one token, or one that is longer.

    Attributes:
        ids: The prompt and, of a longer choice, all but its last token.
        params: vLLM's `SamplingParams`.
        prompt: Number of `ids` that are the prompt's.
        choices: Last token of each choice, by the index of the choice.
        found: Receives for each choice its log probability, and whether greedy decoding generates
            it.
    """

    ids: list[int]
    params: Any
    prompt: int
    choices: dict[int, int]
    found: dict[int, tuple[float, bool]]

    def handle_output(self, output: Any) -> bool:
        """Process vLLM's output, which is returned once."""
        completion = output.outputs[0]
        read = [output.prompt_logprobs[i][self.ids[i]] for i in range(self.prompt, len(self.ids))]
        before = sum(one.logprob for one in read)
        likeliest = all(one.rank == 1 for one in read)
        for number, last in self.choices.items():
            value = before + completion.logprobs[0][last].logprob
            self.found[number] = (value, likeliest and completion.token_ids[0] == last)
        return True


Part = TextPart | ChoicePart


class VLLMScheduler:
    """Submits requests to vLLM together, and steps it until each has its completion.

    Args:
        llm: vLLM's `LLM`.
        tokenizer: Encodes the prompts and decodes the answers, as for every engine.
        folder: Folder of the base.
    """

    def __init__(self, llm: Any, tokenizer: Any, folder: Path) -> None:
        self._engine, self._tokenizer = llm.llm_engine, tokenizer
        self._prompt_ids = CachedEncoder(partial(encode_prompt, tokenizer))
        self._choice_ids = CachedEncoder(partial(encode_choice, tokenizer))
        generation, config = folder / "generation_config.json", folder / "config.json"
        stated = (generation if generation.is_file() else config).read_text(encoding="utf-8")
        self._ends = end_token_ids(SimpleNamespace(**parse_json(stated)), tokenizer)
        self._context = llm.model_config.max_model_len
        self._words = llm.model_config.get_vocab_size()
        self._names = map(str, itertools.count())

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer requests, in order.

        Raises:
            UserError: A request does not fit into the context, or has a value that is not allowed.
        """
        split = [self._split_request(request) for request in requests]
        parts = [part for mine, _ in split for part in mine]
        # vLLM returns no top log probabilities while any request in the batch has
        # `logprob_token_ids`, so the two kinds run separately.
        self._run_parts([part for part in parts if not part.params.logprobs])
        self._run_parts([part for part in parts if part.params.logprobs])
        return [complete() for _, complete in split]

    def _split_request(self, request: Request) -> tuple[list[Part], Callable[[], Completion]]:
        """Return the parts of one request, at least one, and what builds its completion then."""
        prompt = self._prompt_ids(request.prompt)
        tokens = [self._choice_ids(request.prompt, choice) for choice in request.choices]
        longest = max(map(len, tokens), default=0)
        limit = "engine.max_model_len, and max_position_embeddings of the base"
        request = clip_new_tokens(self._context, request, len(prompt), longest, limit)
        if not tokens:
            part = self._build_text_part(request, prompt)
            return [part], lambda: build_completion(self._tokenizer, request, part.row)
        found = dict.fromkeys(range(len(tokens)), (0.0, True))
        single = [i for i, choice in enumerate(tokens) if len(choice) == 1]
        parts: list[Part] = []
        for first in range(0, len(single), MAX_LISTED_TOKENS):
            some = {i: tokens[i][0] for i in single[first : first + MAX_LISTED_TOKENS]}
            params = _sampling_params(1, logprob_token_ids=sorted(set(some.values())))
            parts.append(ChoicePart(prompt, params, len(prompt), some, found))
        for i, choice in enumerate(tokens):
            if len(choice) > 1:
                params = _sampling_params(1, logprob_token_ids=choice[-1:], prompt_logprobs=0)
                ids = [*prompt, *choice[:-1]]
                parts.append(ChoicePart(ids, params, len(prompt), {i: choice[-1]}, found))
        parts = parts or [ChoicePart(prompt, _sampling_params(1), len(prompt), {}, found)]
        return parts, lambda: build_scored_completion(len(prompt), tokens, list(found.values()))

    def _build_text_part(self, request: Request, prompt: list[int]) -> TextPart:
        from vllm.sampling_params import RequestOutputKind

        row = build_row(self._tokenizer, request, prompt)
        row.limit = max(1, row.limit)
        more: dict[str, Any] = {"stop_token_ids": sorted(self._ends)}
        if row.temperature:
            seed = int.from_bytes(row.key[:8], "big") >> 1
            more |= {"temperature": row.temperature, "seed": seed}
        if row.top:
            more["logprobs"] = min(max(0, row.top), self._words)
        if request.stop_check is not None:
            # vLLM cannot call it, so it streams the text as it grows.
            more["output_kind"] = RequestOutputKind.DELTA
        elif request.stop:
            row.stop_check = None
            more |= {"stop": list(request.stop), "detokenize": True}
        return TextPart(prompt, _sampling_params(row.limit, **more), row, self._ends)

    def _run_parts(self, parts: Sequence[Part]) -> None:
        """Step vLLM until all parts are done; unfinished requests are aborted on failure."""
        waiting: dict[str, Part] = {}
        try:
            for part in parts:
                name = next(self._names)
                self._engine.add_request(name, {"prompt_token_ids": part.ids}, part.params)
                waiting[name] = part
            while waiting:
                for output in self._engine.step():
                    # An aborted request may still have been in progress.
                    known = waiting.get(output.request_id)
                    if known is not None and known.handle_output(output):
                        del waiting[output.request_id]
                        if not output.finished:
                            self._engine.abort_request([output.request_id])
        finally:
            if waiting:
                self._engine.abort_request(list(waiting))


def _sampling_params(limit: int, **more: Any) -> Any:
    """Return vLLM's settings of a greedy answer of at most `limit` tokens, with `more`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY
    settings = {"temperature": 0.0, "detokenize": False, "output_kind": kind, **more}
    return SamplingParams(max_tokens=limit, **settings)


def installed_version() -> str | None:
    """Return the installed version of vLLM."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_installed() -> None:
    """Check that a supported vLLM is installed."""
    found = installed_version()
    if found is None:
        raise UserError(
            f"engine=vllm needs vLLM: {install_command('vllm')} (without a GPU: "
            f"docs/vllm.md); {FALLBACK_HINT}"
        )
    # Without what names a build, such as 0.32.0+cpu.
    if Version(found).base_version not in SpecifierSet(SUPPORTED_VERSIONS):
        raise UserError(
            f"engine=vllm: vLLM {found} is installed; {SUPPORTED_VERSIONS} is required "
            f"({TESTED_VERSION} is tested); {FALLBACK_HINT}"
        )


def start_vllm(base: BaseModel, folder: Path, device: str, options: Mapping[str, Any]) -> Any:
    """Return vLLM's `LLM` with the base.

    Args:
        folder: Folder of the base's weights.
        options: More arguments.
    """
    if device not in ("cpu", "cuda", "cuda:0"):
        number = device.partition(":")[2]
        raise UserError(
            f"engine=vllm uses the first visible device, not {device}: set "
            f"CUDA_VISIBLE_DEVICES={number} and use device 0"
        )
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    dtype = base.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    arguments = {
        "model": str(folder),
        "dtype": dtype,
        "load_format": "safetensors",
        "trust_remote_code": base.trust_remote_code,
        "use_tqdm_on_load": False,
        "max_logprobs": -1,
        "generation_config": "vllm",
        "worker_extension_cls": "swarm.engine.vllm_extension.WorkerExtension",
    }
    if device == "cpu":
        cache_bytes = min(4 * 2**30, available_memory_bytes() // 4)
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": cache_bytes}
    with wrap_start_errors(f" (with engine.options={dict(options)})" if options else ""):
        logging.disable(logging.WARNING)  # vLLM warns of missing hardware at import
        try:
            from vllm import LLM
            from vllm.platforms import current_platform
        finally:
            logging.disable(logging.NOTSET)
        if current_platform.is_cpu() != (device == "cpu"):
            built = "the CPU" if current_platform.is_cpu() else "a GPU"
            raise UserError(
                f"engine=vllm: the installed vLLM runs on {built}, not on {device}: install the "
                "package vllm for a GPU and vllm-cpu for a CPU (docs/vllm.md), or set gpus=0 or "
                f"gpus=[]; {FALLBACK_HINT}"
            )
        llm = LLM(**{**arguments, **options})
    _running_engines.append(llm)
    return llm


_running_engines: list[Any] = []
_ended_engines: list[Any] = []
"""This process's `LLM`s in use, and those to be shut down with the last of them.

Shutting down the first one destroys state that all of them share.
"""


def stop_vllm(llm: Any) -> None:
    """Shut vLLM down in this process, once no other engine uses it.

    Its memory is free then, and it can be started again.
    """
    from vllm.distributed import cleanup_dist_env_and_memory

    _running_engines[:] = [one for one in _running_engines if one is not llm]
    _ended_engines.append(llm)
    if not _running_engines:
        while _ended_engines:
            _ended_engines.pop().llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


@contextmanager
def wrap_start_errors(more: str = "") -> Iterator[None]:
    """Convert any error during the start into one line followed by `more`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UserError:
        raise
    except Exception as error:  # vLLM, torch, CUDA and pydantic have no common base.
        cause: BaseException = error
        while True:
            context = None if cause.__suppress_context__ else cause.__context__
            if (earlier := cause.__cause__ or context) is None:
                break
            cause = earlier
        words = " ".join(str(cause).split()) or type(cause).__name__
        # Strip pydantic's framing of a message, and a list of a hundred architectures.
        words = re.sub(r"^\d+ validation errors? for \w+ (Value error, )?", "", words)
        words = re.sub(r"( \[type=| Supported architectures:).*", "", words)
        message = textwrap.shorten(words, 300, placeholder=" ...").rstrip(" .")
        raise UserError(f"engine=vllm could not start: {message}{more}; {FALLBACK_HINT}") from None
