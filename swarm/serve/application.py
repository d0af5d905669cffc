"""The application: OpenAI's paths over models by name."""

import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from swarm.collab.collaboration import Collaboration
from swarm.models import Completion, Delta, Model
from swarm.printing import harmless
from swarm.serve.guard import Guard, body_of
from swarm.serve.parameters import Asked, read
from swarm.serve.refusals import Refused, refusal
from swarm.serve.replies import Reply, event, written
from swarm.serve.served import named
from swarm.serve.underway import ClientLeft, Line, answers

log = logging.getLogger(__name__)

Events = AsyncGenerator[tuple[int, Delta | Completion], None]

NO_STORE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""No proxy keeps an answer, or holds its pieces back."""

LEFT = 499
"""What a client that has left would have been told."""


class Service:
    """Answers what is asked of the models.

    Args:
        models: By the names that clients see.
        guard: Who may ask.
        line: How many are answered at once.
        longest: The most new tokens of a request that does not say.
    """

    def __init__(self, models: Mapping[str, Model], guard: Guard, line: Line, longest: int) -> None:
        self.models, self.line, self.longest = models, line, longest
        self.began = int(time.time())
        handlers: Any = {Refused: refused, HTTPException: no_path, Exception: broken}
        # The pages of documentation would load a script from somebody else's server.
        self.app = FastAPI(
            title="model-swarms", openapi_url=None, docs_url=None, redoc_url=None,
            exception_handlers=handlers,
        )  # fmt: skip
        router = APIRouter(prefix="/v1", dependencies=[Depends(guard)])
        router.add_api_route("/models", self.list, methods=["GET"])
        router.add_api_route("/models/{name:path}", self.one, methods=["GET"])
        router.add_api_route("/chat/completions", self.chat, methods=["POST"], response_model=None)
        self.app.include_router(router)
        self.app.add_api_route("/health", self.health, methods=["GET"])

    async def health(self) -> dict[str, str]:
        """That the server is there; anybody may ask."""
        return {"status": "ok"}

    async def list(self) -> dict[str, Any]:
        """All models."""
        return {"object": "list", "data": [self._told(name) for name in self.models]}

    async def one(self, name: str) -> dict[str, Any]:
        """One model."""
        return self._told(named(name, self.models))

    def _told(self, name: str) -> dict[str, Any]:
        made = {"created": self.began, "owned_by": "model-swarms"}
        return {"id": name, "object": "model", **made}

    async def chat(self, request: Request) -> Response:
        """Answer a conversation, at once or piece by piece."""
        asked = read(await body_of(request), self.longest)
        name = named(asked.model, self.models)
        if asked.request.top_logprobs and isinstance(self.models[name], Collaboration):
            raise Refused(f"logprobs: {name} is several models and tells none", 400, "logprobs")

        async def left() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        events = answers(self.line, self.models[name], asked.request, asked.count, left)
        reply = Reply(name, asked.request.top_logprobs != 0, asked.usage)
        try:
            if not asked.streamed:
                return _json(await _whole(events, asked, reply), headers=NO_STORE)
            # An answer that fails before it begins still has a status of its own.
            first = await anext(events)
        except ClientLeft:
            return Response(status_code=LEFT)
        except Exception as error:
            raise _noted(error, name) from error
        told = _streamed(first, events, asked, reply)
        return StreamingResponse(told, headers=NO_STORE, media_type="text/event-stream")


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(written(content), status, headers, "application/json")


async def _whole(events: Events, asked: Asked, reply: Reply) -> dict[str, Any]:
    samples: dict[int, Completion] = {}
    async with aclosing(events):
        async for number, what in events:
            if isinstance(what, Completion):
                samples[number] = what
    return reply.whole([samples[number] for number in range(asked.count)])


async def _streamed(
    first: tuple[int, Delta | Completion], events: Events, asked: Asked, reply: Reply
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; one that breaks off ends with an error instead of [DONE]."""
    samples: dict[int, Completion] = {}
    begun: set[int] = set()

    def told(number: int, what: Delta | Completion) -> bytes:
        head = b"" if number in begun else reply.begin(number)
        begun.add(number)
        if isinstance(what, Delta):
            return head + reply.piece(number, what)
        samples[number] = what
        return head + reply.end(number, what)

    async with aclosing(events):
        try:
            yield told(*first)
            async for one in events:
                yield told(*one)
            yield reply.close([samples[number] for number in range(asked.count)])
        except ClientLeft:
            return
        except Exception as error:
            yield event(_noted(error, reply.model).body)


def _noted(error: Exception, name: str) -> Refused:
    """What the client is told; what is not the client's doing is told here, too."""
    told = refusal(error, name)
    if told.status >= 500:
        log.warning("asked for %s: %s", name, harmless(str(told)))
    return told


async def refused(request: Request, error: Refused) -> Response:
    """An error in OpenAI's shape."""
    return _json(error.body, error.status, error.headers)


async def no_path(request: Request, error: HTTPException) -> Response:
    """A path or a method that is not here."""
    what = f"{request.method} {request.url.path}: {error.detail}"
    told = Refused(what, error.status_code)
    return _json(told.body, told.status, {**told.headers, **(error.headers or {})})


async def broken(request: Request, error: Exception) -> Response:
    """Whatever nobody has foreseen."""
    return await refused(request, refusal(error, "the server"))
