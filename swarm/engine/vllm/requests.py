"""Requests in vLLM's form: submitted together, and stepped until each has its answer."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from swarm._util.files import parse_json
from swarm.engine.decode import DecodingRow, build_sampling_state
from swarm.engine.tokenization import (
    TokenCache,
    build_completion,
    build_scored_completion,
    clip_new_tokens,
    decode_text,
    encode_choice,
    encode_prompt,
    stop_check,
)
from swarm.models.base import Completion, Request


@dataclass(slots=True)
class GenerateRequest:
    """A prompt to be continued.

    Attributes:
        place: Index of the request.
        params: vLLM's `SamplingParams`.
        row: The prompt, and the generated tokens.
        end_tokens: Token ids that end a text.
        stop_check: Returns whether these new tokens are enough; `None` if vLLM itself detects
            the end.
    """

    place: int
    params: Any
    row: DecodingRow
    end_tokens: Collection[int]
    stop_check: Callable[[list[int]], bool] | None

    @property
    def ids(self) -> list[int]:
        """Prompt token ids."""
        return self.row.prompt

    def handle_output(self, output: Any) -> bool:
        """Process the new tokens of vLLM's output; return whether that was the end."""
        completion = output.outputs[0]
        for number, token in enumerate(completion.token_ids):
            if token in self.end_tokens:
                return True
            self.row.new.append(token)
            if (draw := self.row.draw) and draw.top:
                draw.logprobs.append(token_logprobs(completion.logprobs[number], token, draw.top))
            if self.stop_check and self.stop_check(self.row.new):
                return True
        return bool(output.finished)


def token_logprobs(
    found: Mapping[int, Any], token: int, top: int
) -> tuple[float, list[tuple[int, float]]]:
    """Return a token's log probability and the most likely tokens; see `SamplingState.logprobs`."""
    likeliest = sorted((one.rank, other, one.logprob) for other, one in found.items())
    return found[token].logprob, [(i, value) for rank, i, value in likeliest if rank <= top]


@dataclass(slots=True)
class ChoiceRequest:
    """The choices of one request.

    Attributes:
        tokens: Token ids of each choice.
        found: For each choice, its log probability, and whether greedy decoding generates it.
    """

    tokens: list[list[int]]
    found: dict[int, tuple[float, bool]] = field(default_factory=dict)

    def build_completion(self, prompt: int) -> Completion:
        """Return the completion after a prompt of this many tokens."""
        rows = [self.found.get(i, (0.0, True)) for i in range(len(self.tokens))]
        return build_scored_completion(prompt, self.tokens, rows)


@dataclass(slots=True)
class ChoiceGroup:
    """Some of a request's choices: all of those with one token, or one that is longer.

    Attributes:
        place: Index of the request.
        params: vLLM's `SamplingParams`.
        ids: The prompt and, of a longer choice, all but its last token.
        numbers: Indices of the choices.
        scores: Receives the scores.
        prompt: Number of `ids` that are the prompt's.
    """

    place: int
    params: Any
    ids: list[int]
    numbers: Sequence[int]
    scores: ChoiceRequest
    prompt: int

    def handle_output(self, output: Any) -> bool:
        """Process vLLM's output, which is returned once."""
        completion = output.outputs[0]
        read = [output.prompt_logprobs[i][self.ids[i]] for i in range(self.prompt, len(self.ids))]
        before = sum(one.logprob for one in read)
        likeliest = all(one.rank == 1 for one in read)
        for number in self.numbers:
            last = self.scores.tokens[number][-1]
            value = before + completion.logprobs[0][last].logprob
            self.scores.found[number] = (value, likeliest and completion.token_ids[0] == last)
        return True


CONTEXT_LIMIT_NAMES = "engine.max_model_len, and max_position_embeddings of the base"

MAX_LISTED_TOKENS = 128
"""Maximum number of token ids with log probabilities per request (vllm/sampling_params.py)."""


class VLLMScheduler:
    """Submits requests to vLLM and collects the completions.

    Args:
        llm: vLLM's `LLM`.
        tokenizer: Encodes the prompts and decodes the answers, as for every engine.
        folder: Folder of the base.
    """

    def __init__(self, llm: Any, tokenizer: Any, folder: Path) -> None:
        self._engine, self._tokenizer = llm.llm_engine, tokenizer
        self._tokens = TokenCache()
        self._ends = read_end_tokens(folder, tokenizer)
        self._context = llm.model_config.max_model_len
        self._words = llm.model_config.get_vocab_size()
        self._names = map(str, itertools.count())

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer requests, in order.

        Raises:
            UserError: A request does not fit into the context, or has a value that is not allowed.
        """
        parts = [part for i, one in enumerate(requests) for part in self._split_request(i, one)]
        # vLLM returns no top log probabilities while any request in the batch has
        # `logprob_token_ids`, so the two kinds run separately.
        telling = {id(part) for part in parts if part.params.logprobs}
        self._run_requests([part for part in parts if id(part) not in telling])
        self._run_requests([part for part in parts if id(part) in telling])
        found: dict[int, GenerateRequest | ChoiceGroup] = {part.place: part for part in parts}
        completions = []
        for i, request in enumerate(requests):
            part = found[i]
            if isinstance(part, GenerateRequest):
                completions.append(build_completion(self._tokenizer, request, part.row))
            else:
                completions.append(part.scores.build_completion(part.prompt))
        return completions

    def _split_request(
        self, index: int, request: Request
    ) -> Iterator[GenerateRequest | ChoiceGroup]:
        """Yield the vLLM requests of one request, at least one."""
        prompt = self._prompt_ids(request.prompt)
        tokens = [self._choice_ids(request.prompt, choice) for choice in request.choices]
        longest = max(map(len, tokens), default=0)
        request = clip_new_tokens(self._context, request, len(prompt), longest, CONTEXT_LIMIT_NAMES)
        if not tokens:
            yield self._build_generate_request(index, request, prompt)
            return
        scores = ChoiceRequest(tokens)
        longer = [i for i, choice in enumerate(tokens) if len(choice) > 1]
        single = [i for i, choice in enumerate(tokens) if len(choice) == 1]
        for first in range(0, len(single), MAX_LISTED_TOKENS):
            some = single[first : first + MAX_LISTED_TOKENS]
            params = _sampling_params(1, logprob_token_ids=sorted({tokens[i][0] for i in some}))
            yield ChoiceGroup(index, params, prompt, some, scores, len(prompt))
        for i in longer:
            *before, last = tokens[i]
            params = _sampling_params(1, logprob_token_ids=[last], prompt_logprobs=0)
            yield ChoiceGroup(index, params, [*prompt, *before], [i], scores, len(prompt))
        if not (single or longer):
            yield ChoiceGroup(index, _sampling_params(1), prompt, [], scores, len(prompt))

    def _build_generate_request(
        self, index: int, request: Request, prompt: list[int]
    ) -> GenerateRequest:
        from vllm.sampling_params import RequestOutputKind

        draw, max_tokens = build_sampling_state(request, prompt), max(1, request.token_limit)
        row = DecodingRow(prompt, max_tokens, None, draw)
        more: dict[str, Any] = {"stop_token_ids": sorted(self._ends)}
        if draw and draw.temperature:
            seed = int.from_bytes(draw.key[:8], "big") >> 1
            more |= {"temperature": draw.temperature, "seed": seed}
        if request.top_logprobs:
            more["logprobs"] = min(max(0, request.top_logprobs), self._words)
        if request.stop_check is None:
            if request.stop:
                more |= {"stop": list(request.stop), "detokenize": True}
            return GenerateRequest(
                index, _sampling_params(max_tokens, **more), row, self._ends, None
            )
        # vLLM cannot call `stop_check`, so it streams the text as it grows.
        ended = stop_check(request)
        params = _sampling_params(max_tokens, **more, output_kind=RequestOutputKind.DELTA)
        enough = lambda new: bool(ended and ended(decode_text(self._tokenizer, new)))  # noqa: E731
        return GenerateRequest(index, params, row, self._ends, enough)

    def _run_requests(self, parts: Sequence[GenerateRequest | ChoiceGroup]) -> None:
        """Step vLLM until all parts are done; unfinished requests are aborted on failure."""
        waiting: dict[str, GenerateRequest | ChoiceGroup] = {}
        try:
            for part in parts:
                name = next(self._names)
                prompt = {"prompt_token_ids": part.ids}
                self._engine.add_request(name, prompt, part.params)
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

    def _choice_ids(self, prompt: Any, choice: str) -> list[int]:
        """Return the token ids of a choice."""
        prepare = partial(encode_choice, self._tokenizer, prompt, choice)
        return self._tokens.get_ids((prompt, choice), prepare)

    def _prompt_ids(self, prompt: object) -> list[int]:
        """Return the prompt's token ids."""
        return self._tokens.get_ids(prompt, partial(encode_prompt, self._tokenizer, prompt))


def _sampling_params(limit: int, **more: Any) -> Any:
    """Return vLLM's settings of a greedy answer of at most `limit` tokens, with `more`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    settings = {
        "temperature": 0.0,
        "detokenize": False,
        "output_kind": RequestOutputKind.FINAL_ONLY,
        **more,
    }
    return SamplingParams(max_tokens=limit, **settings)


def read_end_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Return every token id that ends a text.

    As `swarm.engine.tokenization.end_token_ids`, but from the files of a model's folder.
    """
    files = [folder / name for name in ("generation_config.json", "config.json")]
    first = next(file for file in files if file.is_file())
    stated = parse_json(first.read_text(encoding="utf-8")).get("eos_token_id")
    ends = stated if isinstance(stated, list) else [stated]
    return frozenset(end for end in [*ends, tokenizer.eos_token_id] if end is not None)
