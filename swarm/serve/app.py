"""The application: OpenAI's paths over models by name."""

import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from swarm._util.terminal import escape_control_chars
from swarm.models.base import Completion, Delta, Model
from swarm.models.openai import OpenAI
from swarm.models.trace import TracingModel
from swarm.multi_agent.collaboration import Collaboration
from swarm.serve.errors import ApiKeyGuard, HttpError, http_error_from, read_json_body
from swarm.serve.request_params import (
    ChatRequest,
    parse_chat_request,
    read_completion,
    resolve_name,
)
from swarm.serve.streaming import (
    ChatResponseBuilder,
    ClientDisconnected,
    RequestQueue,
    TextReply,
    encode_event,
    encode_json,
    stream_samples,
)

log = logging.getLogger(__name__)

SampleEvents = AsyncGenerator[tuple[int, Delta | Completion], None]

NO_STORE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""No proxy keeps an answer, or holds its pieces back."""

IGNORED = "X-Ignored-Parameters"
"""The header that names what had no effect on an answer."""

CLIENT_CLOSED_STATUS = 499
"""What a client that has left would have been told."""


class ChatService:
    """Answers what is asked of the models.

    Args:
        models: By the names that clients see.
        guard: Who may ask.
        line: How many are answered at once.
        longest: The most new tokens of a request that does not say.
    """

    def __init__(
        self, models: Mapping[str, Model], guard: ApiKeyGuard, line: RequestQueue, longest: int
    ) -> None:
        self.models, self.line, self.longest = models, line, longest
        self.began = int(time.time())
        handlers: Any = {
            HttpError: handle_http_error,
            HTTPException: handle_unknown_path,
            Exception: handle_unexpected_error,
        }
        # The pages of documentation would load a script from somebody else's server.
        self.app = FastAPI(
            title="model-swarms",
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            exception_handlers=handlers,
        )
        router = APIRouter(prefix="/v1", dependencies=[Depends(guard)])
        router.add_api_route("/models", self.list_models, methods=["GET"])
        router.add_api_route("/models/{name:path}", self.get_model, methods=["GET"])
        for path, answer in (
            ("/chat/completions", self.create_chat_completion),
            ("/completions", self.complete),
        ):
            router.add_api_route(path, answer, methods=["POST"], response_model=None)
        router.add_api_route("/embeddings", self.embed, methods=["POST"])
        self.app.include_router(router)
        self.app.add_api_route("/health", self.report_health, methods=["GET"])

    async def report_health(self) -> dict[str, str]:
        """That the server is there; anybody may ask."""
        return {"status": "ok"}

    async def list_models(self) -> dict[str, Any]:
        """All models."""
        return {"object": "list", "data": [self._model_entry(name) for name in self.models]}

    async def get_model(self, name: str) -> dict[str, Any]:
        """One model."""
        return self._model_entry(resolve_name(name, self.models))

    def _model_entry(self, name: str) -> dict[str, Any]:
        made = {"created": self.began, "owned_by": "model-swarms"}
        return {"id": name, "object": "model", **made}

    async def create_chat_completion(self, request: Request) -> Response:
        """Answer a conversation, at once or piece by piece."""
        return await self._answer(
            request,
            [parse_chat_request(await read_json_body(request), self.longest)],
            ChatResponseBuilder,
        )

    async def complete(self, request: Request) -> Response:
        """Continue texts, as OpenAI's older completions do; an endpoint gets them as user turns."""
        return await self._answer(
            request, read_completion(await read_json_body(request)), TextReply
        )

    async def embed(self) -> None:
        """Refuse: no model here makes embeddings."""
        raise HttpError("/v1/embeddings: the models served here make no embeddings", 404, "model")

    async def _answer(
        self, request: Request, asked: Sequence[ChatRequest], kind: type[ChatResponseBuilder]
    ) -> Response:
        """Answer what a body asks for; one request, or several that differ in their prompts."""
        first, name = asked[0], resolve_name(asked[0].model, self.models)
        model = self.models[name]
        if first.request.top_logprobs and isinstance(model, Collaboration):
            raise HttpError(f"logprobs: {name} is several models and tells none", 400, "logprobs")
        ready = [one.of_endpoint() if is_endpoint(model) else one.of_others() for one in asked]
        headers = {**NO_STORE, **({IGNORED: ", ".join(ready[0][1])} if ready[0][1] else {})}

        async def left() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        reply = kind(name, first.request.top_logprobs != 0, first.usage)
        samples: list[Completion] = []
        try:
            for put, _ in ready:
                events = stream_samples(self.line, model, put, first.count, left)
                if first.streamed:
                    # An answer that fails before it begins still has a status of its own.
                    begun = await anext(events)
                    told = _stream_response(begun, events, first, reply)
                    return StreamingResponse(told, headers=headers, media_type="text/event-stream")
                samples += await _collect_response(events, first.count)
            return _json_response(reply.build_response(samples), headers=headers)
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_STATUS)
        except Exception as error:
            raise _log_error(error, name) from error


def _json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(encode_json(content), status, headers, "application/json")


def is_endpoint(model: Model) -> bool:
    """Whether a model is behind a chat endpoint, to which parameters can be passed on."""
    while isinstance(model, TracingModel):
        model = model.model
    return isinstance(model, OpenAI)


async def _collect_response(events: SampleEvents, count: int) -> list[Completion]:
    samples: dict[int, Completion] = {}
    async with aclosing(events):
        async for number, what in events:
            if isinstance(what, Completion):
                samples[number] = what
    return [samples[number] for number in range(count)]


async def _stream_response(
    first: tuple[int, Delta | Completion],
    events: SampleEvents,
    asked: ChatRequest,
    reply: ChatResponseBuilder,
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; one that breaks off ends with an error instead of [DONE]."""
    samples: dict[int, Completion] = {}
    begun: set[int] = set()

    def encode_sample_event(number: int, what: Delta | Completion) -> bytes:
        head = b"" if number in begun else reply.open_sample(number)
        begun.add(number)
        if isinstance(what, Delta):
            return head + reply.encode_delta(number, what)
        samples[number] = what
        return head + reply.close_sample(number, what)

    async with aclosing(events):
        try:
            yield encode_sample_event(*first)
            async for one in events:
                yield encode_sample_event(*one)
            yield reply.close_stream([samples[number] for number in range(asked.count)])
        except ClientDisconnected:
            return
        except Exception as error:
            yield encode_event(_log_error(error, reply.model).body)


def _log_error(error: Exception, name: str) -> HttpError:
    """What the client is told; what is not the client's doing is told here, too."""
    told = http_error_from(error, name)
    if told.status >= 500:
        log.warning("asked for %s: %s", name, escape_control_chars(str(told)))
    return told


async def handle_http_error(request: Request, error: HttpError) -> Response:
    """An error in OpenAI's shape."""
    return _json_response(error.body, error.status, error.headers)


async def handle_unknown_path(request: Request, error: HTTPException) -> Response:
    """A path or a method that is not here."""
    what = f"{request.method} {request.url.path}: {error.detail}"
    told = HttpError(what, error.status_code)
    return _json_response(told.body, told.status, {**told.headers, **(error.headers or {})})


async def handle_unexpected_error(request: Request, error: Exception) -> Response:
    """Whatever nobody has foreseen."""
    return await handle_http_error(request, http_error_from(error, "the server"))
