"""Completions as OpenAI writes them: whole, or as the chunks of a stream."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from swarm.models import Completion, Delta, Token
from swarm.serve.refusals import HttpError

MIN_LOGPROB = -9999.0
"""The log probability that OpenAI writes for a token that cannot be; JSON has no infinity."""

LENGTH_ERROR_CODES = ("context_length_exceeded", "string_above_max_length")
FILTER_ERROR_CODES = ("content_filter", "content_policy_violation")
"""Words of endpoints for why a text ended, see `Completion.finish`."""


class ChatResponseBuilder:
    """The answer to one request: its samples, and what they are called.

    Args:
        model: The served model's name.
        logprobs: Whether the log probabilities of tokens are wanted.
        usage: Whether a stream tells what it used.
    """

    def __init__(self, model: str, logprobs: bool, usage: bool) -> None:
        self.id, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.model, self.logprobs, self.usage = model, logprobs, usage

    def build_response(self, samples: Sequence[Completion]) -> dict[str, Any]:
        """All samples at once.

        Raises:
            Refused: One of them is none, or has no log probabilities though they are wanted.
        """
        choices = [self._build_choice(number, one) for number, one in enumerate(samples)]
        return {**self._response_head("chat.completion"), "choices": choices, "usage": sum_usage(samples)}

    def _build_choice(self, number: int, sample: Completion) -> dict[str, Any]:
        message = {"role": "assistant", "content": sample.text, "refusal": None}
        if sample.reasoning:
            message["reasoning_content"] = sample.reasoning
        return {"index": number, "message": message, **self._finish_fields(sample)}

    def open_sample(self, number: int) -> bytes:
        """The event that opens a sample."""
        return self._encode_chunk(number, {"role": "assistant", "content": ""})

    def encode_delta(self, number: int, delta: Delta) -> bytes:
        """The event of a piece; of one without any text, nothing."""
        told = {"reasoning_content": delta.reasoning, "content": delta.text}
        told = {key: text for key, text in told.items() if text}
        return self._encode_chunk(number, told) if told else b""

    def close_sample(self, number: int, sample: Completion) -> bytes:
        """The event that closes a sample; log probabilities come with it.

        Raises:
            Refused: As `whole`.
        """
        return self._encode_chunk(number, {}, **self._finish_fields(sample))

    def close_stream(self, samples: Sequence[Completion]) -> bytes:
        """The events that close the stream."""
        done = b"data: [DONE]\n\n"
        if not self.usage:
            return done
        head = self._response_head("chat.completion.chunk")
        return encode_event({**head, "choices": [], "usage": sum_usage(samples)}) + done

    def _encode_chunk(self, number: int, delta: dict[str, str], **end: Any) -> bytes:
        ended = end or {"finish_reason": None, "logprobs": None}
        choice = {"index": number, "delta": delta, **ended}
        later = {"usage": None} if self.usage else {}
        return encode_event({**self._response_head("chat.completion.chunk"), "choices": [choice], **later})

    def _response_head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _finish_fields(self, sample: Completion) -> dict[str, Any]:
        if sample.finish in LENGTH_ERROR_CODES:
            raise HttpError(f"{self.model}: the messages are too long for it", 400, "messages",
                          sample.finish)  # fmt: skip
        if self.logprobs and sample.text and not sample.tokens:
            raise HttpError(f"logprobs: {self.model} does not tell them", 400, "logprobs")
        told = {"content": [_token_to_json(one) for one in sample.tokens]} if self.logprobs else None
        return {"finish_reason": finish_reason(sample.finish), "logprobs": told}


class TextReply(ChatResponseBuilder):
    """The answer of `/v1/completions`: texts instead of messages."""

    def __init__(self, model: str, logprobs: bool, usage: bool) -> None:
        super().__init__(model, logprobs, usage)
        self.id = f"cmpl-{uuid.uuid4().hex}"

    def whole(self, samples: Sequence[Completion]) -> dict[str, Any]:
        """See `Reply.whole`."""
        choices = [self._text(number, one.text, one) for number, one in enumerate(samples)]
        return {**self._response_head("text_completion"), "choices": choices, "usage": sum_usage(samples)}

    def begin(self, number: int) -> bytes:
        """Nothing: a text has no role."""
        return b""

    def piece(self, number: int, delta: Delta) -> bytes:
        """The event of a piece; of one without any text, nothing."""
        return self._event(self._text(number, delta.text)) if delta.text else b""

    def end(self, number: int, sample: Completion) -> bytes:
        """See `Reply.end`."""
        return self._event(self._text(number, "", sample))

    def close(self, samples: Sequence[Completion]) -> bytes:
        """See `Reply.close`."""
        done = b"data: [DONE]\n\n"
        if not self.usage:
            return done
        head = self._response_head("text_completion")
        return encode_event({**head, "choices": [], "usage": sum_usage(samples)}) + done

    def _event(self, choice: dict[str, Any]) -> bytes:
        return encode_event({**self._response_head("text_completion"), "choices": [choice]})

    def _text(self, number: int, text: str, sample: Completion | None = None) -> dict[str, Any]:
        choice = {"index": number, "text": text, "finish_reason": None, "logprobs": None}
        if sample is None:
            return choice
        end = self._finish_fields(sample)
        if end["logprobs"]:
            texts = [one.text for one in sample.tokens]
            end["logprobs"] = {
                "tokens": texts,
                "token_logprobs": [max(one.logprob, MIN_LOGPROB) for one in sample.tokens],
                "top_logprobs": [
                    {token: max(logprob, MIN_LOGPROB) for token, logprob in one.top}
                    for one in sample.tokens
                ],
                "text_offset": [len("".join(texts[:n])) for n in range(len(texts))],
            }
        return {**choice, **end}


def finish_reason(word: str) -> str:
    """Why a text ended, as OpenAI says it; a model that does not say has come to its end."""
    return "content_filter" if word in FILTER_ERROR_CODES else "length" if word == "length" else "stop"


def sum_usage(samples: Sequence[Completion]) -> dict[str, Any]:
    """Tokens of all calls that the samples took, and their cost where it is known."""
    prompt = sum(one.prompt_tokens for one in samples)
    new = sum(one.new_tokens for one in samples)
    told = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    cost = sum(one.cost for one in samples)
    return {**told, "cost": cost} if any(one.known_cost is not None for one in samples) else told


def encode_event(content: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + encode_json(content) + b"\n\n"


def encode_json(content: Any) -> bytes:
    """JSON; half a character, which a model or a client may write, becomes a question mark."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")


def _token_to_json(token: Token) -> dict[str, Any]:
    return {**_logprob_entry(token.text, token.logprob), "top_logprobs": [_logprob_entry(*t) for t in token.top]}


def _logprob_entry(text: str, logprob: float) -> dict[str, Any]:
    told = list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": told}
