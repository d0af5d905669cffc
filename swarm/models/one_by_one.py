"""An endpoint's model asked for one answer after another, on the event loop where it is asked."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from swarm.models import Completion, Request
from swarm.models.asking import Call
from swarm.models.chat import Wanted, body_of, call_of
from swarm.models.keeping import Keeping
from swarm.models.openai import OpenAI

Ask = Callable[[str, Request, int], Awaitable[Completion]]
"""Keeps by a key what is answered to a request: the sample of this number."""


@asynccontextmanager
async def asking(model: OpenAI) -> AsyncIterator[Ask]:
    """Ask on the event loop of `swarm.models.background.line`; answers are kept as they come.

    What it gives answers one request, even if its answer is kept already, and raises what it fails
    for. Of a request with a seed the k-th sample is asked for with the seed plus k.

    Raises:
        UserError: There is no key.
    """
    keeping = Keeping(model.cache, model.model)
    under_way: dict[int, list[Wanted]] = {}
    calls: dict[int, Call] = {}
    numbers = itertools.count()
    read, refused = model.reading(under_way, calls, keeping)
    async with model.client.asking(read, refused) as asked:

        async def ask(key: str, request: Request, sample: int) -> Completion:
            number, body = next(numbers), body_of(request, model.tokens_field, model.fixed)
            if "seed" in body:
                body["seed"] += sample
            one = Wanted(key, key, body, request.timeout)
            under_way[number], calls[number] = [one], call_of([one], model.tokens_field)
            try:
                [answer] = await asked(number, calls[number])
            finally:
                del under_way[number], calls[number]
            # What came in this turn of the loop is written before the next.
            await asyncio.sleep(0)
            return model.completion(keeping.kept(one.key, answer), cached=False)

        yield ask
