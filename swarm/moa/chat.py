"""The chat: what a person types is a question or a command, until the person leaves."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from swarm._util.files import write_json
from swarm._util.terminal import WarningCollector, escape_control_chars, is_tty
from swarm.errors import UserError
from swarm.moa import format
from swarm.moa.format import ChatTurn, build_conversation, format_layer, turn_to_json
from swarm.models.base import Request
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.scheduler import STOPPED
from swarm.multi_agent.types import AgentAnswer, AnswerDelta, CallStarted, Transcript

# What a mixture is doing, told while it does it: live in a terminal, a line a layer elsewhere.


class MixtureProgress:
    """Watches one question being answered; a `swarm.multi_agent.types.OnEvent`.

    Args:
        notes: Where to tell; a terminal shows who is being waited for.
        quiet: Nothing is told.
        show: Is handed the last answer's text, piece by piece; `None` waits for the whole.

    Attributes:
        answers: Every call that came to an end, as they came.
    """

    def __init__(self, notes: TextIO, quiet: bool, show: Callable[[str], None] | None) -> None:
        self.answers: list[AgentAnswer] = []
        self._notes, self._quiet, self._show = notes, quiet, show
        self._layer = self._layers = 0
        self._asked: list[CallStarted] = []
        self._began = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> "MixtureProgress":
        if not self._quiet and is_tty(self._notes):
            # What goes to standard output is written there as it is.
            self._live = Live(
                get_renderable=self._render_live,
                refresh_per_second=8,
                transient=True,
                console=Console(file=self._notes),
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_live()
        self._print_layer()

    def __call__(self, number: int, event: CallStarted | AgentAnswer | AnswerDelta) -> None:
        """Take notice of an event."""
        if isinstance(event, CallStarted):
            self._start_call(event)
        elif isinstance(event, AgentAnswer):
            self.answers.append(event)
        elif self._show and event.delta.text:
            self.stop_live()
            self._show(event.delta.text)

    @property
    def answers_by_layer(self) -> list[AgentAnswer]:
        """The answers, layer by layer."""
        return sorted(self.answers, key=lambda answer: answer.layer)

    def _start_call(self, event: CallStarted) -> None:
        if event.layer != self._layer:
            self._print_layer()
            self._layer, self._layers = event.layer, event.layers
            self._asked, self._began = [], time.monotonic()
        self._asked.append(event)

    def stop_live(self) -> None:
        """Give the terminal back, before anything else is written to it."""
        if self._live:
            self._live.stop()
            self._live = None

    def _print_layer(self) -> None:
        """Say what the layer came to that is over."""
        if self._quiet or not self._asked:
            return
        line = escape_control_chars(
            format_layer(self._layer, self._layers, len(self._asked), self._current_answers())
        )
        if self._live:
            self._live.console.print(Text(line), soft_wrap=True)
        else:
            print(line, file=self._notes, flush=True)
        self._asked = []

    def _current_answers(self) -> list[AgentAnswer]:
        return [answer for answer in self.answers if answer.layer == self._layer]

    def _render_live(self) -> Text:
        """The live line; asked for by a thread of the display's own."""
        here, asked = self._current_answers(), list(self._asked)
        waiting = [event.name for event in asked]
        for answer in here:
            if answer.name in waiting:
                waiting.remove(answer.name)
        line = (
            f"layer {self._layer} of {self._layers}: {len(here)} of {len(asked)} are done, "
            f"{time.monotonic() - self._began:.0f} s"
            + (f"; waiting for {', '.join(waiting)}" if waiting else "")
        )
        return Text(
            escape_control_chars(line) if asked else "...", no_wrap=True, overflow="ellipsis"
        )


# What a person types: a line, or several that belong together.

PROMPT, CONTINUATION_PROMPT = ">>> ", "... "
FENCE = '"""'


class UserInput(NamedTuple):
    """One thing that was said; `verbatim` where it stood in quotes and can be no command."""

    text: str
    verbatim: bool = False


def read_input(ask: Callable[[str], str]) -> UserInput:
    """Read until something is whole.

    A line that begins with three double quotes goes on to where three come again; a line that ends
    with a backslash goes on in the next.

    Args:
        ask: Shows a prompt and gives a line, as `input` does.

    Raises:
        EOFError: There is no more.
    """
    line = ask(PROMPT)
    if line.lstrip().startswith(FENCE):
        return UserInput(_read_fenced(line.lstrip()[len(FENCE) :], ask), True)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(ask(CONTINUATION_PROMPT))
    return UserInput("\n".join(lines).strip())


def _read_fenced(line: str, ask: Callable[[str], str]) -> str:
    lines = [line]
    while not lines[-1].rstrip().endswith(FENCE):
        lines.append(ask(CONTINUATION_PROMPT))
    lines[-1] = lines[-1].rstrip()[: -len(FENCE)]
    return "\n".join(lines).strip("\n")


def make_line_reader(answers: TextIO | None, notes: TextIO) -> Callable[[str], str]:
    """Asks a person at a terminal.

    Args:
        answers: Where a line editor may write; `None`, and whatever is no terminal, is left alone.
        notes: Where else the prompt goes.
    """
    if not is_tty(answers):

        def read_line(prompt: str) -> str:
            print(prompt, end="", file=notes, flush=True)
            return input()

        return read_line
    with contextlib.suppress(ImportError):  # what was typed is then not there to be taken again
        import readline  # noqa: F401
    return input


# Questions put to a mixture one after the other: shown while they are answered, and remembered.


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How questions are put and answers shown.

    Attributes:
        temperature, max_tokens: Of every call of a slot that says nothing of its own.
        seed: Of sampling, for models that take one.
        system: What the system's turn says.
        multi_turn: Whether a question comes with the turns before it.
        json: An object a line in place of the text.
        streamed: Whether the text is shown as it comes.
        quiet: No progress.
    """

    temperature: float
    max_tokens: int
    seed: int | None = None
    system: str | None = None
    multi_turn: bool = True
    json: bool = False
    streamed: bool = True
    quiet: bool = False


class ChatSession:
    """Asks a mixture.

    Args:
        mixture: Who answers.
        manner: How.
        answers: Where answers go, and nothing else.
        notes: Where progress and warnings go.
        remarks: Hears what is logged meanwhile.
        told: Is given each question with all that came of it, as JSON values.

    Attributes:
        turns: All questions, those without an answer too.
        remembered: The turns that the next question comes with; each has an answer.
    """

    def __init__(
        self,
        mixture: MixtureOfAgents,
        manner: ChatOptions,
        answers: TextIO,
        notes: TextIO,
        remarks: WarningCollector,
        told: Callable[[dict[str, Any]], None] = lambda turn: None,
    ) -> None:
        self.mixture, self.manner, self.remarks, self.told = mixture, manner, remarks, told
        self.answers, self.notes = answers, notes
        self.turns: list[ChatTurn] = []
        self.remembered: list[ChatTurn] = []

    def answer_question(self, question: str) -> None:
        """Put a question, show its answer and remember both.

        Raises:
            UserError: There is no answer.
            KeyboardInterrupt: It was stopped; what had come by then is in `turns`.
        """
        turn = ChatTurn(question)
        self.turns.append(turn)
        whole = self.manner.json or not self.manner.streamed
        progress = MixtureProgress(
            self.notes, self.manner.quiet, None if whole else self._write_text
        )
        self._shown = ""
        try:
            with progress:
                turn.stages = self._run_mixture(question, progress)
        except (UserError, KeyboardInterrupt) as error:
            turn.error = str(error) or STOPPED
            raise
        finally:
            turn.answers = turn.stages.answers if turn.stages else progress.answers_by_layer
            self._print_warnings(turn)
            self.told(turn_to_json(turn))
        # An endpoint may refuse a conversation with an empty turn in it.
        if self.manner.multi_turn and turn.text.strip():
            self.remembered.append(turn)
        if self.manner.json:
            print(json.dumps(turn_to_json(turn)), file=self.answers, flush=True)

    def _run_mixture(self, question: str, progress: MixtureProgress) -> Transcript:
        """Ask, and show the text; it ends with its line."""
        prompt = build_conversation(self.remembered, question, self.manner.system)
        over = threading.Event()
        request = Request(
            prompt,
            self.manner.max_tokens,
            temperature=self.manner.temperature,
            seed=self.manner.seed,
            # Who is stopped leaves threads behind, whose models need not write on.
            decided=lambda text: over.is_set(),
        )
        try:
            shown = self.manner.streamed and not self.manner.json
            came = self.mixture.run([request], progress, pieces=shown)[0]
            if isinstance(came, UserError):
                raise came
            if not self.manner.json and not self.manner.streamed:
                progress.stop_live()
                self._write_text(came.final.text)
            return came
        finally:
            over.set()
            if self._shown and not self._shown.endswith("\n"):
                self._write_text("\n")

    def _write_text(self, text: str) -> None:
        self._shown = text
        self.answers.write(escape_control_chars(text))
        self.answers.flush()

    def _print_warnings(self, turn: ChatTurn) -> None:
        """Tell what should be known beside the answer, each thing once."""
        told = [*(turn.stages.warnings if turn.stages else []), *self.remarks.pop_messages()]
        if turn.error == STOPPED:
            names = [one.name for one in turn.answers if one.error == STOPPED]
            told += [f"{name}: stopped; its tokens are an estimate" for name in names]
        turn.warnings = list(dict.fromkeys(told))
        for warning in turn.warnings:
            print(f"warning: {escape_control_chars(warning)}", file=self.notes, flush=True)


COMMANDS = {
    "/stages": "[N]   every answer of the last turn; with a number, that one and its whole prompt",
    "/cost": "        calls, tokens and cost of each model, of the last turn and of all",
    "/models": "      who proposes and who answers",
    "/history": "     the turns that the next question comes with",
    "/undo": "        take the last turn out of them",
    "/clear": "       take all of them out",
    "/save": "FILE    write all turns with their stages, as JSON",
    "/help": "        this list",
    "/exit": "        leave, as exit, quit and Ctrl-D do",
}

HELP_FOOTER = """\
A line that begins with // is a question that begins with /. Lines between \"\"\" and \"\"\", and
lines that end with a backslash, belong together. Ctrl-C stops an answer."""

EXIT_HINT = "exit or Ctrl-D leaves the chat, and so does Ctrl-C once more"


class TerminalChat:
    """Talks with one person.

    Args:
        session: Answers the questions.
        ask: Shows a prompt and gives a line, as `input` does.
        models: What /models tells.
    """

    def __init__(
        self, session: ChatSession, ask: Callable[[str], str], models: Iterable[str]
    ) -> None:
        self.session, self._ask, self._models = session, ask, list(models)
        self._saved: set[Path] = set()

    def run_loop(self) -> int:
        """Until the person leaves; gives the exit code."""
        interrupted = False
        while True:
            try:
                said = read_input(self._ask)
            except EOFError:
                self._print_lines([""])
                return 0
            except KeyboardInterrupt:
                self._print_lines([""] if interrupted else ["", EXIT_HINT])
                if interrupted:
                    return 130
                interrupted = True
                continue
            interrupted = False
            try:
                if self._handle_input(said):
                    return 0
            except UserError as error:
                self._print_lines([f"error: {error}"])
            except KeyboardInterrupt:
                self._print_lines(["stopped"])

    def _handle_input(self, said: UserInput) -> bool:
        """Do what was said; true where it was to leave."""
        if not said.text.strip():
            return False
        if said.verbatim or not said.text.startswith("/"):
            if not said.verbatim and said.text in ("exit", "quit"):
                return True
            self.session.answer_question(said.text)
        elif said.text.startswith("//"):
            self.session.answer_question(said.text[1:])
        else:
            word, _, rest = said.text.partition(" ")
            if word == "/exit":
                return True
            self._print_lines(self._run_command(word, rest.strip()))
        return False

    def _run_command(self, word: str, rest: str) -> Iterable[str]:
        """What a command has to say.

        Raises:
            UserError: There is no such command, or it cannot be done.
        """
        session = self.session
        if word not in COMMANDS:
            near = get_close_matches(word, COMMANDS, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"{word}: there is no such command; {meant}/help lists them, and a "
                "question that begins with / is written with //"
            )
        if rest and word not in ("/stages", "/save"):
            raise UserError(f"{word} takes nothing more; {rest!r} is too much")
        match word:
            case "/help":
                return [*(f"{name} {about}" for name, about in COMMANDS.items()), HELP_FOOTER]
            case "/models":
                return self._models
            case "/history":
                return list(format.format_history(session.remembered)) or ["nothing yet"]
            case "/save":
                return self._save_session(rest)
            case "/clear":
                session.remembered.clear()
                return ["the next question begins a new conversation"]
        if word == "/undo":
            if not session.remembered:
                raise UserError("/undo: there is no turn to take out")
            return [f"taken out: {session.remembered.pop().question}"]
        if not session.turns:
            raise UserError(f"{word}: nothing was asked yet")
        if word == "/cost":
            return format.format_costs(session.turns)
        return format.format_stages(session.turns[-1], rest)

    def _save_session(self, name: str) -> list[str]:
        """Write the session; a file that was not written by it stays as it is."""
        if not name:
            raise UserError("/save: name a file, as in /save talk.json")
        path = Path(name).expanduser().resolve()
        if path.exists() and path not in self._saved:
            raise UserError(f"/save: {name} is there already; choose another name")
        turns = [turn_to_json(turn) for turn in self.session.turns]
        write_json(path, {"models": self._models, "turns": turns})
        self._saved.add(path)
        return [f"wrote {name}: {format.pluralize(len(turns), 'turn')}"]

    def _print_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(escape_control_chars(line), file=self.session.notes, flush=True)
