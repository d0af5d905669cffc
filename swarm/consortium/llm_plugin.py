"""Consortia as models of the llm package: for `llm -m NAME` and its Python API."""

from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import llm
from llm.parts import StreamEvent, TextPart
from pydantic import Field, create_model

from swarm._util.settings import Number, Positive, PositiveNumber, field_types
from swarm._util.terminal import WarningCollector
from swarm._util.threads import run_in_thread
from swarm.consortium.api import Orchestrator, check_unused_options
from swarm.errors import UserError
from swarm.models.base import Message
from swarm.multi_agent.collaboration import map_events, stream_events
from swarm.multi_agent.consortium.consortium import format_event
from swarm.multi_agent.consortium.settings import ConsortiumOptions, ConsortiumSettings
from swarm.multi_agent.types import OnEvent
from swarm.registry.registry import Roster

StreamEvents = Generator[StreamEvent, None, None]

REQUEST_FIELDS = ("temperature", "max_tokens", "timeout", "seed")
"""Options that are fields of a request."""


def _build_options() -> Any:
    """Return the options for one question (`-o`), which override the saved settings."""
    found: dict[str, Any] = {}
    for name, annotation in field_types(ConsortiumOptions).items():
        key = "system_prompt" if name == "system" else name
        description = ConsortiumOptions.model_fields[name].description
        found[key] = (annotation | None, Field(None, description=description))
    for name, annotation in (("temperature", Number), ("max_tokens", Positive)):
        found[name] = (annotation | None, Field(None, description="Default of all calls"))
    found["timeout"] = (PositiveNumber | None, Field(None, description="Seconds for all calls"))
    return create_model("Options", __base__=llm.Options, **found)


Options = _build_options()


class _SavedConsortium:
    """Common base of the synchronous and the asynchronous model.

    Args:
        name: Name of the model.
        config: Settings of the consortium.
    """

    can_stream = True
    Options = Options

    def __init__(self, name: str, config: ConsortiumSettings) -> None:
        self.model_id, self.config = name, config

    @cached_property
    def _member_registry(self) -> Roster:
        """Cached, so that a conversation loads the weights of local models once."""
        return Roster(cache=None)

    def __str__(self) -> str:
        return f"Consortium: {self.model_id}"

    def _prepare(self, prompt: llm.Prompt) -> tuple[Orchestrator, tuple[Message, ...]]:
        """Return what answers an llm prompt, and its conversation."""
        given = {key: value for key, value in dict(prompt.options).items() if value is not None}
        changes = {key: given[key] for key in given if key in ConsortiumOptions.model_fields}
        turns, system = _split_prompt(prompt)
        if system := given.get("system_prompt") or system:
            changes["system"] = system
        config = self.config.changed(**changes)
        check_unused_options(given, config.strategy, "-o ")
        request = {key: given[key] for key in REQUEST_FIELDS if key in given}
        made = Orchestrator(
            config, self.model_id, self._member_registry, raw=True, log=True, **request
        )
        made.consortium.check()
        return made, turns

    def _stream_events(self, prompt: llm.Prompt, stream: bool, response: Any) -> StreamEvents:
        """Yield progress as reasoning and then the answer; store details in the response.

        Warnings stand in the reasoning where they came up; without reasoning they are logged.
        """
        shown = not prompt.hide_reasoning
        warnings, printed = WarningCollector(), set[str]()

        def new_warnings() -> list[str]:
            messages = [one for one in dict.fromkeys(warnings.pop_messages()) if one not in printed]
            printed.update(messages)
            return [f"warning: {one}" for one in messages]

        def to_event(lines: list[str]) -> StreamEvent | None:
            text = "".join(f"{line}\n" for line in lines if line)
            return StreamEvent(type="reasoning", chunk=text) if text and shown else None

        def run_question(watch: OnEvent) -> dict[str, Any]:
            def forward(number: int, event: Any) -> None:
                watch(number, [*new_warnings(), format_event(made.consortium, event)])

            return made.orchestrate(turns, forward)

        failure = None
        try:
            made, turns = self._prepare(prompt)
            with warnings if stream and shown else nullcontext():
                found = yield from map_events(stream_events(run_question), to_event)
        except UserError as error:
            failure = llm.ModelError(str(error))
        if last := to_event(new_warnings()):
            yield last
        if failure:
            raise failure
        _set_response_details(response, found)
        yield StreamEvent(type="text", chunk=found["synthesis"]["synthesis"])


class ConsortiumModel(_SavedConsortium, llm.Model):
    """A saved consortium as a synchronous model."""

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: Any
    ) -> Iterator[Any]:
        yield from self._stream_events(prompt, stream, response)


class AsyncConsortiumModel(_SavedConsortium, llm.AsyncModel):
    """A saved consortium as an asynchronous model."""

    async def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.AsyncResponse, conversation: Any
    ) -> AsyncGenerator[Any, None]:
        events = self._stream_events(prompt, stream, response)
        while (event := await run_in_thread(next, events, None)) is not None:
            yield event


def _split_prompt(prompt: llm.Prompt) -> tuple[tuple[Message, ...], str]:
    """Split a prompt into the conversation, ending with the question, and the system prompt."""
    system = [prompt.system] if prompt.system else []
    turns = []
    for message in prompt.messages:
        text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
        if message.role == "system":
            system += [text] if text not in system and not prompt.system else []
        elif text.strip():  # tool messages have no text
            turns.append(Message(message.role, text))
    if not turns or turns[-1].role != "user":
        raise UserError("the prompt is empty")
    return tuple(turns), "\n\n".join(system)


def _set_response_details(response: Any, found: dict[str, Any]) -> None:
    """Set the details that llm logs beside the text."""
    meta = found["metadata"]
    details = {key: meta[key] for key in ("calls", "iteration_count", "cost")}
    response.set_usage(
        input=meta["prompt_tokens"], output=meta["completion_tokens"], details=details
    )
    response.response_json = found
