"""A model that answers by a known distribution, and tells how probable its tokens were."""

import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import endpoints

from swarm.compare.sampling import Outcome, SampleRequest, Script, T
from swarm.errors import UserError
from swarm.models.base import Completion
from swarm.models.openai import parse_answers

END = "<end>"


class Rater:
    """Answers a chat request, greedily or by drawing.

    Args:
        chances: Answer to probability.
        split: Whether each digit is a token; else a number is.
        tells_end: Whether the end of an answer is told of as a token, as some servers do.
        seed: Of what is drawn.
    """

    def __init__(
        self,
        chances: Mapping[str, float],
        split: bool = True,
        tells_end: bool = True,
        seed: int = 0,
    ) -> None:
        token = re.compile(r"\d|[^\d]+" if split else r"\d+|[^\d]+")
        self.ways = {(*token.findall(text), END): p for text, p in chances.items()}
        self.tells_end = tells_end
        self.random = random.Random(seed)
        self.asked: list[dict[str, Any]] = []

    def after(self, path: tuple[str, ...]) -> dict[str, float]:
        """The next token's distribution after these."""
        found: dict[str, float] = defaultdict(float)
        for way, p in self.ways.items():
            if way[: len(path)] == path:
                found[way[len(path)]] += p
        whole = sum(found.values())
        return {t: p / whole for t, p in sorted(found.items(), key=lambda item: -item[1])}

    def body(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """A chat completion, as an endpoint says it."""
        self.asked.append(dict(asked))
        path: tuple[str, ...] = ()
        told: list[dict[str, Any]] = []
        while len(path) < asked["max_tokens"] and path[-1:] != (END,):
            found = self.after(path)
            greedy = asked["temperature"] == 0
            drawn = self.random.choices(list(found), list(found.values()))[0]
            token = next(iter(found)) if greedy else drawn
            if token != END or self.tells_end:
                told.append(likely(found, token, asked.get("top_logprobs", 0)))
            path += (token,)
        ended = path[-1] == END
        choice = {
            "message": {"content": "".join(path).removesuffix(END)},
            "finish_reason": "stop" if ended else "length",
            "logprobs": {"content": told} if asked.get("logprobs") else None,
        }
        return {"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": len(told)}}

    def __call__(self, asked: endpoints.Asked) -> endpoints.Reply:
        """The answer to a request that came over the network."""
        return endpoints.Reply(self.body(asked.body))


def likely(found: Mapping[str, float], token: str, top: int) -> dict[str, Any]:
    """One place of an answer, as an endpoint tells of it."""
    said = [{"token": text, "logprob": math.log(p)} for text, p in list(found.items())[:top]]
    return {"token": token, "logprob": math.log(found[token]), "top_logprobs": said}


def driven(script: Script[T], body: Callable[[Mapping[str, Any]], Any]) -> T:
    """What a script comes to if every want is answered by the function.

    It gives what an endpoint says, or the error that a request comes to.
    """

    def heard(want: SampleRequest) -> Outcome:
        said = body(want.call.api_kwargs)
        return said if isinstance(said, UserError) else completion(said)

    try:
        wants = next(script)
        while True:
            wants = script.send([heard(want) for want in wants])
    except StopIteration as end:
        return end.value


def completion(said: Any) -> Completion:
    """What an endpoint says, read."""
    return Completion.from_fields(parse_answers(said, 1, 0.1)[0])
