"""Models of the `llm` package (llm.datasette.io), from any of its plugins."""

import logging
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from swarm._util.settings import Positive, Text, checked
from swarm._util.terminal import suggest
from swarm.errors import UserError, install_command
from swarm.models.base import Completion, Delta, Request, Stream
from swarm.models.cache import Cache
from swarm.models.function import ThreadedModel
from swarm.models.http_errors import RequestError, error_from_response, to_one_line
from swarm.models.openai import parse_finish
from swarm.models.sampling import PreparedRequest

if TYPE_CHECKING:
    import llm

log = logging.getLogger(__name__)

REMOTE_CONCURRENCY = 8
"""Concurrent requests to a model that needs a key and is therefore remote."""

OPTION_NAMES = {
    "temperature": ("temperature",),
    "seed": ("seed",),
    "max_new_tokens": ("max_tokens", "max_output_tokens", "max_completion_tokens", "num_predict"),
}
"""Names of the request's settings in plugins; the first one that a model has is used."""


@checked()
class LLM(ThreadedModel):
    """A model known to `llm`, with llm's keys and settings; nothing is written to llm's log.

    Turns before the last one are passed as an llm conversation. Temperature, seed and the token
    limit are passed to models with such an option. A rate-limited request (429) is retried unless a
    part of its answer has arrived. An unsupported temperature or
    seed is logged once as a warning; an unsupported token limit, which every request has, is
    ignored silently. Stop strings are applied to the text.

    Args:
        model: A model's name or alias, as listed by `llm models`.
        concurrency: Number of concurrent requests; `None`: `REMOTE_CONCURRENCY`, or 1 if the model
            needs no key and may therefore run in this process.
        cache: Cache of the answers; `None` stores none.

    Raises:
        UserError: A value is invalid.
    """

    def __init__(
        self, model: Text, concurrency: Positive | None = None, cache: Cache | None = None
    ) -> None:
        super().__init__(f"llm/{model}", concurrency or 1, cache, ("llm", model))
        self.model, self._concurrency = model, concurrency
        self._model: Any = None
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}

    def check(self) -> None:
        """Check the package, the model and its key.

        Raises:
            UserError: One of them is missing.
        """
        model = self._load_model()
        if model.needs_key:
            try:
                model.get_key()
            except Exception as error:
                raise UserError(f"{self.label}: {self._error_text(error)}") from None

    def prepare(self, request: Request) -> PreparedRequest:
        if request.choices:
            raise UserError(f"{self.label}: cannot score choices")
        self._load_model()
        return super().prepare(request)

    def _load_model(self) -> "llm.Model":
        if self._model is None:
            try:
                import llm
            except ImportError:
                raise UserError(
                    f"{self.label} needs the package llm: {install_command('llm')}"
                ) from None
            known = llm.get_model_aliases()
            if self.model not in known:
                suggestion = suggest(self.model, known, "llm/")
                raise UserError(
                    f"{self.label}: llm has no such model; {suggestion}`llm models` lists them, "
                    "`llm install` adds plugins"
                )
            self._model = known[self.model]
            if self._concurrency is None and self._model.needs_key:
                self._limit_concurrency(REMOTE_CONCURRENCY)
        return self._model

    def _generate_one(self, request: Request, streamed: bool) -> Stream:
        model = self._load_model()
        parts = split_conversation(request, self.label)
        options = self._build_options(model, request)
        texts: dict[str, list[str]] = {"text": [], "reasoning": []}
        try:
            response = _start_response(model, *parts, options, streamed)
            for event in response.stream_events():
                if event.chunk and event.type in texts:
                    texts[event.type].append(event.chunk)
                    yield Delta(**{event.type: event.chunk})
            usage = response.usage()
        except Exception as error:
            words = self._error_text(error)
            limit = find_rate_limit(self.label, error, words)
            raise limit or UserError(f"{self.label}: {words}") from None
        # The plugin's provider reports the finish reason in its response, if at all.
        found: Any = response.response_json or {}
        return Completion(
            "".join(texts["text"]),
            prompt_tokens=usage.input or 0,
            new_tokens=usage.output or 0,
            reasoning="".join(texts["reasoning"]),
            finish=parse_finish(found, *(found.get("choices") or found.get("candidates") or ())),
            model=response.resolved_model or model.model_id,
            priced=False if model.needs_key else None,
        )

    def _build_options(self, model: "llm.Model", request: Request) -> dict[str, Any]:
        """Return the request's settings under the model's option names."""
        has = type(model.Options()).model_fields
        # With the same seed all samples would be the same.
        seed = None if request.seed is None else request.seed + request.sample
        values = {
            "temperature": request.temperature,
            "seed": seed,
            "max_new_tokens": request.max_new_tokens,
        }
        options = {}
        for setting, value in values.items():
            names = OPTION_NAMES[setting]
            name = next((name for name in names if name in has), None)
            if value is not None and name is not None:
                options[name] = value
            elif value is not None and setting not in (*self._warned, "max_new_tokens"):
                self._warned.add(setting)
                log.warning(
                    "%s: the model has no option %s, which is ignored", self.label, names[0]
                )
        return options

    def _error_text(self, error: Exception) -> str:
        """Return an error's message in one line, without the key, which a server may repeat."""
        text = str(error)
        with suppress(Exception):
            if key := self._load_model().get_key():
                text = text.replace(key, "***")
        return to_one_line(text) or type(error).__name__


def _start_response(
    model: "llm.Model",
    system: str,
    earlier: list[tuple[str, str]],
    text: str,
    options: dict[str, Any],
    streamed: bool,
) -> "llm.Response":
    """Prompt in an llm conversation that contains the earlier turns."""
    import llm

    conversation = model.conversation()
    messages = [llm.system(system)] if system else []
    for question, answer in earlier:
        messages += [llm.user(question), llm.assistant(answer)]
        # Plugins before llm 0.32 read the conversation's responses, later ones the messages.
        fields: Any = {"model": model.model_id, "messages": [messages[-1].to_dict()]}
        response = llm.Response.from_dict(fields, model=model)
        response.prompt = llm.Prompt(question, model, system=system or None)
        conversation.responses.append(response)
    return conversation.prompt(
        text,
        system=system or None,
        messages=messages,
        stream=streamed and model.can_stream,
        options=options,
    )


def find_rate_limit(label: str, error: BaseException, words: str) -> RequestError | None:
    """Return the rate limit error that a plugin's error stands for, or `None`.

    Plugins raise their client's exceptions: the exception or its cause has status 429 as
    `status_code` or `code`, or as the `status_code` of its `response`.

    Args:
        words: The error's message, without a key.
    """
    one: BaseException | None = error
    while one is not None:
        response = getattr(one, "response", None)
        places = ((one, "status_code"), (one, "code"), (response, "status_code"))
        if any(
            getattr(place, name, None) == HTTPStatus.TOO_MANY_REQUESTS for place, name in places
        ):
            headers = getattr(response, "headers", None) or {}
            body = getattr(one, "body", None)
            content = {"error": {**(body if isinstance(body, dict) else {}), "message": words}}
            return error_from_response(label, HTTPStatus.TOO_MANY_REQUESTS, headers, content, None)
        one = one.__cause__ or one.__context__
    return None


def split_conversation(request: Request, label: str) -> tuple[str, list[tuple[str, str]], str]:
    """Split a request into system prompt, earlier exchanges, and the last turn, as llm has them.

    Consecutive user turns are joined.

    Raises:
        UserError: The last turn is not the user's.
    """
    if isinstance(request.prompt, str):
        return "", [], request.prompt
    system: list[str] = []
    earlier: list[tuple[str, str]] = []
    texts: list[str] = []
    for turn in request.prompt:
        if turn.role == "system":
            system.append(turn.content)
        elif turn.role == "user":
            texts.append(turn.content)
        else:
            earlier.append(("\n\n".join(texts), turn.content))
            texts = []
    if not texts:
        raise UserError(f"{label}: the last turn must be the user's")
    return "\n\n".join(system), earlier, "\n\n".join(texts)
