"""An endpoint's model asked for one answer after another, on the event loop where it is asked."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from swarm.models import Completion, Request
from swarm.models.asking import Call
from swarm.models.chat import PendingSample, build_body, build_call
from swarm.models.keeping import CacheWriter
from swarm.models.openai import OpenAI

GenerateSamples = Callable[[Sequence[str], Request, int], Awaitable[list[Completion]]]
"""Keeps by keys what is answered to a request: one sample a key, the first of this number."""


@asynccontextmanager
async def open_sampler(model: OpenAI) -> AsyncIterator[GenerateSamples]:
    """Ask on the event loop of `swarm.models.background.line`; answers are kept as they come.

    What it gives answers one request, even if its answer is kept already, and raises what it fails
    for. Of a request with a seed the k-th sample is asked for with the seed plus k, and alone. For
    several samples (`n`) an endpoint may give fewer answers than keys.

    Raises:
        UserError: There is no key.
    """
    keeping = CacheWriter(model.cache, model.model)
    under_way: dict[int, list[PendingSample]] = {}
    calls: dict[int, Call] = {}
    numbers = itertools.count()
    read, refused = model.response_handlers(under_way, calls, keeping)
    async with model.client.open_caller(read, refused) as asked:

        async def generate_samples(keys: Sequence[str], request: Request, sample: int) -> list[Completion]:
            number, body = next(numbers), build_body(request, model.tokens_field, model.fixed)
            if "seed" in body:
                body["seed"] += sample
            some = [PendingSample(key, key, body, request.timeout) for key in keys]
            under_way[number], calls[number] = some, build_call(some, model.tokens_field)
            try:
                answers = await asked(number, calls[number])
            finally:
                del under_way[number], calls[number]
            # What came in this turn of the loop is written before the next.
            await asyncio.sleep(0)
            said = zip(keys, answers, strict=False)
            return [model.build_completion(keeping.get_stored(key, one), cached=False) for key, one in said]

        yield generate_samples
