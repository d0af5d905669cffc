"""FastAPI application: OpenAI's paths for models by name."""

import logging
import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from swarm._util.terminal import escape_control_chars
from swarm.errors import UserError
from swarm.models import base
from swarm.models.base import Completion, Delta, Model, Stream, with_prompt_form
from swarm.models.openai import OpenAI
from swarm.models.trace import Trace
from swarm.multi_agent.collaboration import Collaboration
from swarm.serve.api_errors import (
    ApiKeyGuard,
    HttpError,
    http_error_from,
    read_json_body,
    resolve_name,
)
from swarm.serve.chat_request import ChatBody
from swarm.serve.streaming import (
    ChatResponseBuilder,
    ClientDisconnected,
    RequestQueue,
    encode_event,
    encode_json,
    stream_samples,
)

log = logging.getLogger(__name__)

SampleEvents = AsyncGenerator[tuple[int, Delta | Completion], None]

NO_STORE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers against caching of answers and buffering of streams by proxies."""

IGNORED = "X-Ignored-Parameters"
"""Header that lists parameters without effect on an answer."""

MAX_NAMES, MAX_NAME_LENGTH = 32, 64
"""Maximum number of names in `IGNORED`, and of their characters."""

CLIENT_CLOSED_STATUS = 499
"""Status for clients that disconnected (as in nginx)."""


class ChatService:
    """Serves requests to the models.

    Args:
        models: Models by served name.
        guard: Checks API keys.
        line: Limits concurrent requests.
        longest: Default maximum number of new tokens; `None`: see `Request.max_new_tokens`.
        trace: Trace of all calls of models, of a collaboration those of its members.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        guard: ApiKeyGuard,
        line: RequestQueue,
        longest: int | None,
        trace: Trace | None = None,
    ) -> None:
        self.models, self.line, self.longest, self.trace = models, line, longest, trace
        self.began = int(time.time())
        for model in models.values():
            if trace and isinstance(model, Collaboration):
                model.trace = trace
        handlers: Any = dict.fromkeys((HttpError, HTTPException, Exception), handle_error)
        # Disabled documentation pages: they would load a script from a third-party server.
        self.app = FastAPI(
            title="model-swarms",
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            exception_handlers=handlers,
        )
        router = APIRouter(prefix="/v1", dependencies=[Depends(guard)])
        router.get("/models")(self.list_models)
        router.get("/models/{name:path}")(self.get_model)
        router.post("/chat/completions", response_model=None)(self.create_chat_completion)
        self.app.include_router(router)
        self.app.get("/health")(self.report_health)

    async def report_health(self) -> dict[str, str]:
        """Return the server's status; requires no key."""
        return {"status": "ok"}

    async def list_models(self) -> dict[str, Any]:
        """List all models."""
        return {"object": "list", "data": [await self.get_model(name) for name in self.models]}

    async def get_model(self, name: str) -> dict[str, Any]:
        """Return one model."""
        metadata = {"created": self.began, "owned_by": "model-swarms"}
        return {"id": resolve_name(name, self.models), "object": "model", **metadata}

    async def create_chat_completion(self, request: Request) -> Response:
        """Answer a conversation, streamed or not."""
        chat = ChatBody.parse(await read_json_body(request))
        name = resolve_name(chat.model, self.models)
        model = self.models[name]
        if chat.logprobs and isinstance(model, Collaboration):
            message = f"logprobs: {name} is a combination of several models and returns none"
            raise HttpError(message, 400, "logprobs")
        put, ignored = chat.to_request(isinstance(model, OpenAI), self.longest)
        try:
            put = with_prompt_form(model, put, chat.prompt_form)
        except UserError as error:
            raise HttpError(str(error), 400, "prompt_form") from None
        headers = {**NO_STORE, **({IGNORED: format_names(ignored)} if ignored else {})}
        left = partial(_wait_for_disconnect, request)
        usage = chat.stream_options.get("include_usage") is True
        reply = ChatResponseBuilder(name, chat.logprobs, usage)
        try:
            answer = partial(self._stream_answer, name)
            events = stream_samples(self.line, answer, put, chat.n, left)
            if chat.stream:
                # Wait for the first event: a failure before it can still have its own status code.
                stream = _stream_response(await anext(events), events, reply)
                return StreamingResponse(stream, headers=headers, media_type="text/event-stream")
            async with aclosing(events):
                samples = {n: event async for n, event in events if isinstance(event, Completion)}
            content = reply.build_response([samples[number] for number in range(chat.n)])
            return _json_response(content, headers=headers)
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_STATUS)
        except Exception as error:
            raise _log_error(error, name) from error

    def _stream_answer(self, name: str, request: base.Request) -> Stream:
        model = self.models[name]
        stream = model.stream(request)
        if self.trace is None or isinstance(model, Collaboration):
            return stream
        return self.trace.record_stream({"name": name}, request, stream)


def format_names(names: list[str]) -> str:
    """Format clients' names for a header, without characters that it cannot have."""
    shown = [re.sub(r"[^\w.-]", "?", name[:MAX_NAME_LENGTH], flags=re.ASCII) for name in names]
    return ", ".join(shown[:MAX_NAMES])


def _json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(encode_json(content), status, headers, "application/json")


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream_response(
    first: tuple[int, Delta | Completion], events: SampleEvents, reply: ChatResponseBuilder
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream; one that fails ends with an error instead of [DONE]."""
    async with aclosing(events):
        try:
            yield reply.encode_event(*first)
            async for one in events:
                yield reply.encode_event(*one)
            yield reply.encode_end()
        except ClientDisconnected:
            return
        except Exception as error:
            yield encode_event(_log_error(error, reply.model).body)


def _log_error(error: Exception, name: str) -> HttpError:
    """Return the error for the client; log those not caused by the client."""
    http_error = http_error_from(error, name)
    if http_error.status >= 500:
        log.warning("request for %s: %s", name, escape_control_chars(str(http_error)))
    return http_error


async def handle_error(request: Request, error: Exception) -> Response:
    """Return any error, also of an unknown path or method, in OpenAI's format."""
    headers = {}
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        found, headers = HttpError(message, error.status_code), dict(error.headers or {})
    else:
        found = http_error_from(error, "the server")
    return _json_response(found.body, found.status, {**found.headers, **headers})
