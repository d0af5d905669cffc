"""The application: OpenAI's paths over models by name."""

import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from swarm.collab.collaboration import Collaboration
from swarm.models import Completion, Delta, Model
from swarm.models.openai import OpenAI
from swarm.models.trace import Traced
from swarm.printing import harmless
from swarm.serve.guard import Guard, body_of
from swarm.serve.parameters import Asked, read, read_completion
from swarm.serve.refusals import Refused, refusal
from swarm.serve.replies import Reply, TextReply, event, written
from swarm.serve.served import named
from swarm.serve.underway import ClientLeft, Line, answers

log = logging.getLogger(__name__)

Events = AsyncGenerator[tuple[int, Delta | Completion], None]

NO_STORE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""No proxy keeps an answer, or holds its pieces back."""

IGNORED = "X-Ignored-Parameters"
"""The header that names what had no effect on an answer."""

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
        for path, answer in (("/chat/completions", self.chat), ("/completions", self.complete)):
            router.add_api_route(path, answer, methods=["POST"], response_model=None)
        router.add_api_route("/embeddings", self.embed, methods=["POST"])
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
        return await self._answer(request, [read(await body_of(request), self.longest)], Reply)

    async def complete(self, request: Request) -> Response:
        """Continue texts, as OpenAI's older completions do; an endpoint gets them as user turns."""
        return await self._answer(request, read_completion(await body_of(request)), TextReply)

    async def embed(self) -> None:
        """Refuse: no model here makes embeddings."""
        raise Refused("/v1/embeddings: the models served here make no embeddings", 404, "model")

    async def _answer(
        self, request: Request, asked: Sequence[Asked], kind: type[Reply]
    ) -> Response:
        """Answer what a body asks for; one request, or several that differ in their prompts."""
        first, name = asked[0], named(asked[0].model, self.models)
        model = self.models[name]
        if first.request.top_logprobs and isinstance(model, Collaboration):
            raise Refused(f"logprobs: {name} is several models and tells none", 400, "logprobs")
        ready = [one.of_endpoint() if is_endpoint(model) else one.of_others() for one in asked]
        headers = {**NO_STORE, **({IGNORED: ", ".join(ready[0][1])} if ready[0][1] else {})}

        async def left() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        reply = kind(name, first.request.top_logprobs != 0, first.usage)
        samples: list[Completion] = []
        try:
            for put, _ in ready:
                events = answers(self.line, model, put, first.count, left)
                if first.streamed:
                    # An answer that fails before it begins still has a status of its own.
                    begun = await anext(events)
                    told = _streamed(begun, events, first, reply)
                    return StreamingResponse(told, headers=headers, media_type="text/event-stream")
                samples += await _whole(events, first.count)
            return _json(reply.whole(samples), headers=headers)
        except ClientLeft:
            return Response(status_code=LEFT)
        except Exception as error:
            raise _noted(error, name) from error


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(written(content), status, headers, "application/json")


def is_endpoint(model: Model) -> bool:
    """Whether a model is behind a chat endpoint, to which parameters can be passed on."""
    while isinstance(model, Traced):
        model = model.model
    return isinstance(model, OpenAI)


async def _whole(events: Events, count: int) -> list[Completion]:
    samples: dict[int, Completion] = {}
    async with aclosing(events):
        async for number, what in events:
            if isinstance(what, Completion):
                samples[number] = what
    return [samples[number] for number in range(count)]


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
