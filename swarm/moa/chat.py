"""Interactive chat with a mixture of agents: progress display, input, session and commands."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from swarm._util.files import write_json
from swarm._util.terminal import WarningCollector, escape_control_chars, is_tty, pluralize
from swarm.errors import UserError
from swarm.moa import transcript_format
from swarm.moa.transcript_format import ChatTurn, build_conversation, format_layer, turn_to_json
from swarm.models.base import Request
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.scheduler import STOPPED
from swarm.multi_agent.types import AgentAnswer, AnswerDelta, CallStarted, Transcript


class MixtureProgress:
    """Shows the progress of one question; a `swarm.multi_agent.types.OnEvent`.

    A terminal has a live line; other streams get one line per layer.

    Args:
        notes: Stream for the progress.
        quiet: Show nothing.
        show: Receives the final answer's text in pieces; `None` waits for the complete answer.

    Attributes:
        answers: Finished calls, in order of completion.
    """

    def __init__(self, notes: TextIO, quiet: bool, show: Callable[[str], None] | None) -> None:
        self.answers: list[AgentAnswer] = []
        self._notes, self._quiet, self._show = notes, quiet, show
        self._layer = self._layers = 0
        self._calls: list[CallStarted] = []
        self._started_at = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> "MixtureProgress":
        if not self._quiet and is_tty(self._notes):
            # Standard output must stay unchanged for pipes.
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
        """Handle an event."""
        if isinstance(event, CallStarted):
            self._start_call(event)
        elif isinstance(event, AgentAnswer):
            self.answers.append(event)
        elif self._show and event.delta.text:
            self.stop_live()
            self._show(event.delta.text)

    @property
    def answers_by_layer(self) -> list[AgentAnswer]:
        """The answers, ordered by layer."""
        return sorted(self.answers, key=lambda answer: answer.layer)

    def _start_call(self, event: CallStarted) -> None:
        if event.layer != self._layer:
            self._print_layer()
            self._layer, self._layers = event.layer, event.layers
            self._calls, self._started_at = [], time.monotonic()
        self._calls.append(event)

    def stop_live(self) -> None:
        """Stop the live display, before anything else is written to the terminal."""
        if self._live:
            self._live.stop()
            self._live = None

    def _print_layer(self) -> None:
        """Print the result of the finished layer."""
        if self._quiet or not self._calls:
            return
        line = escape_control_chars(
            format_layer(self._layer, self._layers, len(self._calls), self._current_answers())
        )
        if self._live:
            self._live.console.print(Text(line), soft_wrap=True)
        else:
            print(line, file=self._notes, flush=True)
        self._calls = []

    def _current_answers(self) -> list[AgentAnswer]:
        return [answer for answer in self.answers if answer.layer == self._layer]

    def _render_live(self) -> Text:
        """Render the live line; called by rich's refresh thread."""
        answers, calls = self._current_answers(), list(self._calls)
        pending = [event.name for event in calls]
        for answer in answers:
            if answer.name in pending:
                pending.remove(answer.name)
        line = (
            f"layer {self._layer} of {self._layers}: {len(answers)} of {len(calls)} done, "
            f"{time.monotonic() - self._started_at:.0f} s"
            + (f"; waiting for {', '.join(pending)}" if pending else "")
        )
        return Text(
            escape_control_chars(line) if calls else "...", no_wrap=True, overflow="ellipsis"
        )


PROMPT, CONTINUATION_PROMPT = ">>> ", "... "
FENCE = '"""'


class UserInput(NamedTuple):
    """One input; `verbatim` if it was quoted and cannot be a command."""

    text: str
    verbatim: bool = False


def read_input(ask: Callable[[str], str]) -> UserInput:
    """Read one complete input.

    An input that begins with three double quotes extends to the next three; a line that ends with a
    backslash continues on the next.

    Args:
        ask: Shows a prompt and returns a line, like `input`.

    Raises:
        EOFError: The input has ended.
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
    """Return a function that reads lines from a terminal.

    Args:
        answers: Stream that a line editor may write to; `None`, and anything but a terminal, gets
            no prompts.
        notes: Stream for the prompts otherwise.
    """
    if not is_tty(answers):

        def read_line(prompt: str) -> str:
            print(prompt, end="", file=notes, flush=True)
            return input()

        return read_line
    with contextlib.suppress(ImportError):  # then without line editing and history
        import readline  # noqa: F401
    return input


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Request settings and output format of a chat.

    Attributes:
        temperature, max_tokens: Defaults of calls of agents without such a setting.
        seed: Sampling seed, for models that support one.
        system: System prompt.
        multi_turn: Include previous turns in a question.
        json: Print one JSON object per line instead of text.
        streamed: Print the text as it arrives.
        quiet: Print no progress.
        prompt_form: See `swarm.models.base.with_prompt_form`.
    """

    temperature: float
    max_tokens: int
    seed: int | None = None
    system: str | None = None
    multi_turn: bool = True
    json: bool = False
    streamed: bool = True
    quiet: bool = False
    prompt_form: str | None = None


class ChatSession:
    """Answers questions with a mixture, and remembers the conversation.

    Args:
        mixture: The model.
        options: Settings.
        answers: Stream for answers only.
        notes: Stream for progress and warnings.
        remarks: Collects logged warnings.

    Attributes:
        turns: All turns, including those without an answer.
        history: Answered turns included in the next question.
    """

    def __init__(
        self,
        mixture: MixtureOfAgents,
        options: ChatOptions,
        answers: TextIO,
        notes: TextIO,
        remarks: WarningCollector,
    ) -> None:
        self.mixture, self.options, self.remarks = mixture, options, remarks
        self.answers, self.notes = answers, notes
        self.turns: list[ChatTurn] = []
        self.history: list[ChatTurn] = []

    def answer_question(self, question: str) -> None:
        """Answer a question, print the answer and remember both.

        Raises:
            UserError: There is no answer.
            KeyboardInterrupt: It was stopped; the answers received so far are in `turns`.
        """
        turn = ChatTurn(question)
        self.turns.append(turn)
        complete_only = self.options.json or not self.options.streamed
        progress = MixtureProgress(
            self.notes, self.options.quiet, None if complete_only else self._write_text
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
        # Endpoints may refuse conversations with empty turns.
        if self.options.multi_turn and turn.text.strip():
            self.history.append(turn)
        if self.options.json:
            print(json.dumps(turn_to_json(turn)), file=self.answers, flush=True)

    def _run_mixture(self, question: str, progress: MixtureProgress) -> Transcript:
        """Run the mixture and print the text, ending with a newline."""
        prompt = build_conversation(self.history, question, self.options.system)
        stopped = threading.Event()
        request = Request(
            prompt,
            self.options.max_tokens,
            temperature=self.options.temperature,
            seed=self.options.seed,
            # Models still running in background threads after an interrupt may stop.
            stop_check=lambda text: stopped.is_set(),
        )
        try:
            streamed = self.options.streamed and not self.options.json
            outcome = self.mixture.run([request], progress, pieces=streamed)[0]
            if isinstance(outcome, UserError):
                raise outcome
            if not self.options.json and not self.options.streamed:
                progress.stop_live()
                self._write_text(outcome.final.text)
            return outcome
        finally:
            stopped.set()
            if self._shown and not self._shown.endswith("\n"):
                self._write_text("\n")

    def _write_text(self, text: str) -> None:
        self._shown = text
        self.answers.write(escape_control_chars(text))
        self.answers.flush()

    def _print_warnings(self, turn: ChatTurn) -> None:
        """Print the warnings of a turn, each once."""
        warnings = [*(turn.stages.warnings if turn.stages else []), *self.remarks.pop_messages()]
        if turn.error == STOPPED:
            names = [one.name for one in turn.answers if one.error == STOPPED]
            warnings += [f"{name}: interrupted; its token counts are estimates" for name in names]
        turn.warnings = list(dict.fromkeys(warnings))
        for warning in turn.warnings:
            print(f"warning: {escape_control_chars(warning)}", file=self.notes, flush=True)


COMMANDS = {
    "/stages": "[N]   all answers of the last turn; with a number, it and its prompt",
    "/cost": "        calls, tokens and cost of each model, for the last turn and in total",
    "/models": "      the proposers and the aggregator",
    "/history": "     the turns sent with the next question",
    "/undo": "        remove the last turn",
    "/clear": "       remove all turns",
    "/save": "FILE    write all turns with their stages, as JSON",
    "/help": "        show this list",
    "/exit": "        leave; also exit, quit and Ctrl-D",
}

HELP_FOOTER = """\
A line that begins with // is a question that begins with /. Lines between \"\"\" and \"\"\", and
lines that end with a backslash, belong together. Ctrl-C stops an answer."""

EXIT_HINT = "exit, Ctrl-D or another Ctrl-C leaves the chat"


class TerminalChat:
    """Interactive loop with one user.

    Args:
        session: Answers the questions.
        ask: Shows a prompt and returns a line, like `input`.
        models: Output of /models.
    """

    def __init__(
        self, session: ChatSession, ask: Callable[[str], str], models: Iterable[str]
    ) -> None:
        self.session, self._ask, self._models = session, ask, list(models)
        self._saved: set[Path] = set()

    def run_loop(self) -> int:
        """Run until the user exits; return the exit code."""
        interrupted = False
        while True:
            try:
                line = read_input(self._ask)
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
                if self._handle_input(line):
                    return 0
            except UserError as error:
                self._print_lines([f"error: {error}"])
            except KeyboardInterrupt:
                self._print_lines(["stopped"])

    def _handle_input(self, line: UserInput) -> bool:
        """Handle one input; return True if the user exits."""
        if not line.text.strip():
            return False
        if line.verbatim or not line.text.startswith("/"):
            if not line.verbatim and line.text in ("exit", "quit"):
                return True
            self.session.answer_question(line.text)
        elif line.text.startswith("//"):
            self.session.answer_question(line.text[1:])
        else:
            command, _, rest = line.text.partition(" ")
            if command == "/exit":
                return True
            self._print_lines(self._run_command(command, rest.strip()))
        return False

    def _run_command(self, command: str, argument: str) -> Iterable[str]:
        """Run a command and return its output.

        Raises:
            UserError: The command does not exist or fails.
        """
        session = self.session
        if command not in COMMANDS:
            matches = get_close_matches(command, COMMANDS, 1)
            suggestion = f"did you mean {matches[0]}? " if matches else ""
            raise UserError(
                f"{command}: no such command; {suggestion}/help lists them, and a "
                "question that begins with / is written with //"
            )
        if argument and command not in ("/stages", "/save"):
            raise UserError(f"{command} takes no arguments; got {argument!r} is too much")
        match command:
            case "/help":
                return [*(f"{name} {about}" for name, about in COMMANDS.items()), HELP_FOOTER]
            case "/models":
                return self._models
            case "/history":
                return list(transcript_format.format_history(session.history)) or ["nothing yet"]
            case "/save":
                return self._save_session(argument)
            case "/clear":
                session.history.clear()
                return ["the next question starts a new conversation"]
        if command == "/undo":
            if not session.history:
                raise UserError("/undo: there is no turn to remove")
            return [f"taken out: {session.history.pop().question}"]
        if not session.turns:
            raise UserError(f"{command}: there is no turn yet")
        if command == "/cost":
            return transcript_format.format_costs(session.turns)
        return transcript_format.format_stages(session.turns[-1], argument)

    def _save_session(self, name: str) -> list[str]:
        """Save the session; existing files are not overwritten unless saved by this session."""
        if not name:
            raise UserError("/save: name a file, as in /save talk.json")
        path = Path(name).expanduser().resolve()
        if path.exists() and path not in self._saved:
            raise UserError(f"/save: {name} already exists; choose another name")
        turns = [turn_to_json(turn) for turn in self.session.turns]
        write_json(path, {"models": self._models, "turns": turns})
        self._saved.add(path)
        return [f"wrote {name}: {pluralize(len(turns), 'turn')}"]

    def _print_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(escape_control_chars(line), file=self.session.notes, flush=True)
