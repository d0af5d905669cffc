"""A model of the `llm` package (llm.datasette.io), whichever of its plugins brings it."""

import logging
from contextlib import suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from swarm.errors import UserError
from swarm.models import Completion, Delta, Request, Stream
from swarm.models.failures import one_line
from swarm.models.threads import Threaded

if TYPE_CHECKING:
    import llm

log = logging.getLogger(__name__)

AT_ONCE = 8
"""Requests under way at once to a model that wants a key, which is hence behind an endpoint."""

FIELDS = {
    "temperature": ("temperature",),
    "seed": ("seed",),
    "max_new_tokens": ("max_tokens", "max_output_tokens", "max_completion_tokens", "num_predict"),
}
"""What plugins call a request's settings, the first that a model has."""


class LLM(Threaded):
    """Asks a model that `llm` knows; keys and settings are llm's, and nothing is logged there.

    What comes before the last turn goes to the model as llm's own conversations do. A temperature,
    a seed and the most new tokens go to models that have such an option. It is warned once of a
    temperature or a seed that a model does not take; the most new tokens, which every request has,
    are then left to it without a word. Stops are looked for in the text.

    Args:
        model: A model's name or alias, as `llm models` lists them.
        concurrency: Requests under way at once; `None`: `AT_ONCE`, or one where a model wants no
            key and may hence live in this process.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(self, model: str, concurrency: int | None = None) -> None:
        if not isinstance(model, str) or not model.strip():
            raise UserError(f"model={model!r}: must be the name of a model that llm knows")
        super().__init__(f"llm/{model}", concurrency)
        self.model = model
        self._model: Any = None
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_model": None}

    def check(self) -> None:
        """Look for the package, the model and its key; see `swarm.tasks.Prepared.check`.

        Raises:
            UserError: One of them is missing.
        """
        model = self._found()
        if model.needs_key:
            try:
                model.get_key()
            except Exception as error:
                raise UserError(f"{self.who}: {self._words(error)}") from None

    def open(self, device: str) -> None:
        """Nothing to load; a plugin that holds weights loads them when it is asked."""

    def _found(self) -> "llm.Model":
        if self._model is None:
            try:
                import llm
            except ImportError:
                raise UserError(
                    f'{self.who} needs the package llm: pip install "model-swarms[llm]"'
                ) from None
            known = llm.get_model_aliases()
            if self.model not in known:
                near = get_close_matches(self.model, known, 1)
                meant = f"did you mean llm/{near[0]}? " if near else ""
                raise UserError(
                    f"{self.who}: llm knows no such model; {meant}`llm models` lists them, `llm "
                    "install` adds plugins"
                )
            self._model = known[self.model]
        return self._model

    def _speak(self, request: Request, streamed: bool) -> Stream:
        if request.choices:
            raise UserError(f"{self.who}: it does not score choices")
        model = self._found()
        asked = asked_in(request, self.who)
        text: list[str] = []
        reasoning: list[str] = []
        try:
            response = self._response(model, asked, self._options(model, request), streamed)
            for event in response.stream_events():
                if event.chunk and event.type in ("text", "reasoning"):
                    thought = event.type == "reasoning"
                    (reasoning if thought else text).append(event.chunk)
                    yield Delta("", event.chunk) if thought else Delta(event.chunk)
            usage = response.usage()
        except Exception as error:
            raise UserError(f"{self.who}: {self._words(error)}") from None
        return Completion(
            "".join(text),
            prompt_tokens=usage.input or 0,
            new_tokens=usage.output or 0,
            reasoning="".join(reasoning),
            model=response.resolved_model or model.model_id,
            priced=False if model.needs_key else None,
        )

    def _at_once(self) -> int:
        if self.concurrency is None:
            with suppress(UserError):  # each request will say it
                return AT_ONCE if self._found().needs_key else 1
        return super()._at_once()

    def _response(
        self, model: "llm.Model", asked: "Asked", options: dict[str, Any], streamed: bool
    ) -> "llm.Response":
        """Ask in a conversation of llm's that holds the earlier turns."""
        import llm

        conversation = model.conversation()
        messages = [llm.system(asked.system)] if asked.system else []
        for said, answer in asked.earlier:
            messages += [llm.user(said), llm.assistant(answer)]
            # Plugins of before llm 0.32 read the conversation's responses, later ones the messages.
            told: Any = {"model": model.model_id, "messages": [messages[-1].to_dict()]}
            kept = llm.Response.from_dict(told, model=model)
            kept.prompt = llm.Prompt(said, model, system=asked.system or None)
            conversation.responses.append(kept)
        return conversation.prompt(
            asked.text, system=asked.system or None, messages=messages,
            stream=streamed and model.can_stream, options=options,
        )  # fmt: skip

    def _options(self, model: "llm.Model", request: Request) -> dict[str, Any]:
        """The request's settings, as the model's own options call them."""
        has = type(model.Options()).model_fields
        options = {}
        for setting, names in FIELDS.items():
            value = getattr(request, setting)
            if setting == "seed" and value is not None:
                value += request.sample  # or all samples would be the same
            name = next((name for name in names if name in has), None)
            if value is None:
                continue
            if name is not None:
                options[name] = value
            elif setting not in (*self._warned, "max_new_tokens"):
                self._warned.add(setting)
                log.warning("%s: it takes no %s; it answers as it does without", self.who, names[0])
        return options

    def _words(self, error: Exception) -> str:
        """An error's words in one line, without the key that a server may say back."""
        words = str(error)
        with suppress(Exception):
            if key := self._found().get_key():
                words = words.replace(key, "***")
        return one_line(words) or type(error).__name__


class Asked(NamedTuple):
    """A conversation as llm has them: exchanges, and what is said now."""

    system: str
    earlier: list[tuple[str, str]]
    text: str


def asked_in(request: Request, who: str) -> Asked:
    """The request as system's words, earlier exchanges, and the last turn.

    Turns of the user that follow each other are one.

    Raises:
        UserError: The last turn is not the user's.
    """
    if isinstance(request.prompt, str):
        return Asked("", [], request.prompt)
    system: list[str] = []
    earlier: list[tuple[str, str]] = []
    said: list[str] = []
    for turn in request.prompt:
        if turn.role == "system":
            system.append(turn.content)
        elif turn.role == "user":
            said.append(turn.content)
        else:
            earlier.append(("\n\n".join(said), turn.content))
            said = []
    if not said:
        raise UserError(f"{who}: the last turn has to be the user's")
    return Asked("\n\n".join(system), earlier, "\n\n".join(said))
