"""Requests as vLLM takes them: put to it all together, and stepped until each has its answer."""

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from swarm.engine.decode import Row
from swarm.engine.sampling import drawing
from swarm.engine.tokens import (
    KeptTokens,
    answered,
    choice_ids,
    ending,
    prompt_ids,
    text_of,
    within,
)
from swarm.engine.vllm.parts import Choices, Place, Scores, Text
from swarm.models import Completion, Request

LIMITS = "engine.max_model_len, and max_position_embeddings of the base"

LISTED = 128
"""Token ids whose log probabilities vLLM gives at once (vllm/sampling_params.py)."""


class Asker:
    """Asks vLLM.

    Args:
        llm: vLLM's `LLM`.
        tokenizer: It writes the prompts and reads the answers, as for every engine.
        folder: Of the base.
    """

    def __init__(self, llm: Any, tokenizer: Any, folder: Path) -> None:
        self._engine, self._tokenizer = llm.llm_engine, tokenizer
        self._tokens = KeptTokens()
        self._ends = ends_of(folder, tokenizer)
        self._context = llm.model_config.max_model_len
        self._words = llm.model_config.get_vocab_size()
        self._names = map(str, itertools.count())

    def ask(
        self, named: Sequence[Any], requests: Sequence[Sequence[Request]]
    ) -> list[list[Completion]]:
        """Answer each position's requests with its adapter; order kept.

        Args:
            named: vLLM's name of each position's adapter.

        Raises:
            UserError: A request does not fit into the context, or asks for what is not allowed.
        """
        asked = {(p, i): one for p, row in enumerate(requests) for i, one in enumerate(row)}
        parts = [part for place, one in asked.items() for part in self._parts(place, one)]
        # vLLM tells no likeliest tokens while anything in the batch has its own ids to be told of.
        telling = {id(part) for part in parts if part.params.logprobs}
        self._run([part for part in parts if id(part) not in telling], named)
        self._run([part for part in parts if id(part) in telling], named)
        found: dict[Place, Text | Choices] = {part.place: part for part in parts}
        done: list[list[Completion]] = [[] for _ in requests]
        for place, request in asked.items():
            part = found[place]
            if isinstance(part, Text):
                said = answered(self._tokenizer, request, part.row)
            else:
                said = part.scores.completion(part.prompt)
            done[place[0]].append(said)
        return done

    def _parts(self, place: Place, request: Request) -> Iterator[Text | Choices]:
        """What vLLM is asked for one request, one thing at least."""
        prompt = self._ids(request.prompt)
        tokens = [self._choice(request.prompt, choice) for choice in request.choices]
        longest = max(map(len, tokens), default=0)
        request = within(self._context, request, len(prompt), longest, LIMITS)
        if not tokens:
            yield self._text(place, request, prompt)
            return
        scores = Scores(tokens)
        longer = [i for i, choice in enumerate(tokens) if len(choice) > 1]
        single = [i for i, choice in enumerate(tokens) if len(choice) == 1]
        for first in range(0, len(single), LISTED):
            some = single[first : first + LISTED]
            params = _params(1, logprob_token_ids=sorted({tokens[i][0] for i in some}))
            yield Choices(place, params, prompt, some, scores, len(prompt))
        for i in longer:
            *before, last = tokens[i]
            params = _params(1, logprob_token_ids=[last], prompt_logprobs=0)
            yield Choices(place, params, [*prompt, *before], [i], scores, len(prompt))
        if not (single or longer):
            yield Choices(place, _params(1), prompt, [], scores, len(prompt))

    def _text(self, place: Place, request: Request, prompt: list[int]) -> Text:
        from vllm.sampling_params import RequestOutputKind

        draw, most = drawing(request, prompt), max(1, request.max_new_tokens)
        row = Row(prompt, most, None, draw)
        more: dict[str, Any] = {"stop_token_ids": sorted(self._ends)}
        if draw and draw.temperature:
            seed = int.from_bytes(draw.key[:8], "big") >> 1
            more |= {"temperature": draw.temperature, "seed": seed}
        if request.top_logprobs:
            more["logprobs"] = min(max(0, request.top_logprobs), self._words)
        if request.decided is None:
            if request.stop:
                more |= {"stop": list(request.stop), "detokenize": True}
            return Text(place, _params(most, **more), row, self._ends, None)
        # vLLM cannot ask whether a text is enough, so it shows it as it grows.
        ended = ending(request)
        params = _params(most, **more, output_kind=RequestOutputKind.DELTA)
        decided = lambda new: bool(ended and ended(text_of(self._tokenizer, new)))  # noqa: E731
        return Text(place, params, row, self._ends, decided)

    def _run(self, parts: Sequence[Text | Choices], named: Sequence[Any]) -> None:
        """Step vLLM until all parts are done; what is under way when it fails is taken back."""
        waiting: dict[str, Text | Choices] = {}
        try:
            for part in parts:
                name = next(self._names)
                prompt = {"prompt_token_ids": part.ids}
                self._engine.add_request(name, prompt, part.params,
                                         lora_request=named[part.place[0]])  # fmt: skip
                waiting[name] = part
            while waiting:
                for output in self._engine.step():
                    # One that was taken back may still have been under way.
                    known = waiting.get(output.request_id)
                    if known is not None and known.hear(output):
                        del waiting[output.request_id]
                        if not output.finished:
                            self._engine.abort_request([output.request_id])
        finally:
            if waiting:
                self._engine.abort_request(list(waiting))

    def _choice(self, prompt: Any, choice: str) -> list[int]:
        """The token ids of a choice."""
        prepare = partial(choice_ids, self._tokenizer, prompt, choice)
        return self._tokens.of((prompt, choice), prepare)

    def _ids(self, prompt: object) -> list[int]:
        """The prompt's token ids."""
        return self._tokens.of(prompt, partial(prompt_ids, self._tokenizer, prompt))


def _params(most: int, **more: Any) -> Any:
    """vLLM's settings of a greedy answer of at most so many tokens, with more."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    settings = {"temperature": 0.0, "detokenize": False,
                "output_kind": RequestOutputKind.FINAL_ONLY, **more}  # fmt: skip
    return SamplingParams(max_tokens=most, **settings)


def ends_of(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Every token id that ends a text, as `swarm.engine.tokens.end_tokens` has it of a model."""
    files = [folder / name for name in ("generation_config.json", "config.json")]
    first = next(file for file in files if file.is_file())
    stated = json.loads(first.read_text(encoding="utf-8")).get("eos_token_id")
    ends = stated if isinstance(stated, list) else [stated]
    return frozenset(end for end in [*ends, tokenizer.eos_token_id] if end is not None)
