"""Models of every kind that answer by one rule, so that what they say can be compared."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import endpoints

from swarm.models.base import Message, Request

KEY = "sk-secret-0123456789"
"""A key that nothing may write."""

ODD = "ü 𝄞 [/INST] a[i] <s> {x} 'q' \\n"
"""A text that templates, markup and encodings like to spoil."""


def rule(turns: Sequence[tuple[str, str]]) -> str:
    """What every talker says: the turns, the last one first.

    Raises:
        ValueError: The last one is "fail".
    """
    if turns[-1][1] == "fail":
        raise ValueError("it cannot be done")
    return " / ".join(f"{role}: {text}" for role, text in reversed(turns))


def turns(prompt: str | tuple[Message, ...]) -> list[tuple[str, str]]:
    """A request's prompt as turns."""
    return [("user", prompt)] if isinstance(prompt, str) else [(t.role, t.content) for t in prompt]


def function(prompt: str | tuple[Message, ...]) -> str:
    """The rule as a function."""
    return rule(turns(prompt))


def pieces(prompt: str | tuple[Message, ...]) -> Iterator[str]:
    """The rule as a generator of a few characters each."""
    text = rule(turns(prompt))
    yield from (text[n : n + 3] for n in range(0, len(text), 3))


def answer(asked: endpoints.Asked) -> endpoints.Reply:
    """The rule behind an endpoint that does not stream."""
    try:
        text = rule([(m["role"], m["content"]) for m in asked.body["messages"]])
    except ValueError as error:
        return endpoints.Reply({"error": {"message": str(error)}}, 400)
    return endpoints.chat(text)


@contextmanager
def in_llm(*models: Any) -> Iterator[None]:
    """Register models with the `llm` package, as a plugin of it does."""
    import llm
    from llm.plugins import load_plugins, pm

    class Plugin:
        @llm.hookimpl
        def register_models(self, register: Any) -> None:
            for model in models:
                register(model)

    load_plugins()
    plugin = Plugin()
    pm.register(plugin, "talkers")
    try:
        yield
    finally:
        pm.unregister(plugin)


def llm_model(name: str = "talker") -> Any:
    """The rule as a model of llm's, which streams and counts words as tokens."""
    import llm

    class Talker(llm.Model):
        model_id = name
        can_stream = True

        class Options(llm.Options):
            temperature: float | None = None
            max_tokens: int | None = None
            seed: int | None = None

        def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Any:
            self.asked.append((prompt, stream, conversation))
            said = [(m.role, "".join(part.text for part in m.parts)) for m in prompt.messages]
            text = rule(said)
            response.set_usage(input=len(said), output=len(text.split()))
            if stream:
                yield from (text[n : n + 3] for n in range(0, len(text), 3))
            else:
                yield text

    made = Talker()
    made.asked = []
    return made


def many(count: int = 50) -> list[Request]:
    """Different requests, plain and of several turns."""
    found = []
    for n in range(count):
        plain = (Message("system", "Be brief."), Message("user", f"number {n}"))
        found.append(Request(f"number {n}" if n % 2 else plain, max_new_tokens=40))
    return found
