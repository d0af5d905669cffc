"""Interactive chat with a mixture of agents: session, input and commands."""

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from swarm._util.files import write_json
from swarm._util.terminal import WarningCollector, escape_control_chars, is_tty, pluralize, suggest
from swarm.errors import UserError
from swarm.moa.turns import ChatTurn, build_conversation, format_answer_cost, turn_to_json
from swarm.models.base import Delta, Request
from swarm.multi_agent.moa import MixtureOfAgents
from swarm.multi_agent.progress import CallProgress
from swarm.multi_agent.scheduler import STOPPED, sum_usage
from swarm.multi_agent.types import AgentAnswer, Transcript, format_call


def print_notes(lines: Iterable[str]) -> None:
    """Print lines to standard error."""
    for line in lines:
        print(escape_control_chars(line), file=sys.stderr, flush=True)


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

    Answers are written to standard output; progress and warnings to standard error.

    Args:
        mixture: The model.
        options: Settings.
        warnings: Collects logged warnings.

    Attributes:
        turns: All turns, including those without an answer.
        history: Answered turns included in the next question.
    """

    def __init__(
        self, mixture: MixtureOfAgents, options: ChatOptions, warnings: WarningCollector
    ) -> None:
        self.mixture, self.options, self._warnings = mixture, options, warnings
        self.turns: list[ChatTurn] = []
        self.history: list[ChatTurn] = []

    def answer_question(self, question: str) -> None:
        """Answer a question, print the answer and remember both."""
        turn = ChatTurn(question)
        self.turns.append(turn)

        def describe(event: object) -> str:
            return format_call(event) if isinstance(event, AgentAnswer) else ""

        with CallProgress(describe, self.options.quiet) as progress:
            try:
                turn.stages = self._run_mixture(question, progress)
            except (UserError, KeyboardInterrupt) as error:
                turn.error = str(error) or STOPPED
                raise
            finally:
                ordered = sorted(progress.answers, key=lambda answer: answer.layer)
                turn.answers = turn.stages.answers if turn.stages else ordered
                progress.stop()
                self._print_warnings(turn)
        # Endpoints may refuse conversations with empty turns.
        if self.options.multi_turn and turn.text.strip():
            self.history.append(turn)
        if self.options.json:
            print(json.dumps(turn_to_json(turn)), flush=True)

    def _run_mixture(self, question: str, progress: CallProgress) -> Transcript:
        """Run the mixture and print the text, ending with a newline."""
        options = self.options
        streamed = options.streamed and not options.json
        stopped = threading.Event()
        request = Request(
            build_conversation(self.history, question, options.system),
            options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
            # Models still running in background threads after an interrupt may stop.
            stop_check=lambda text: stopped.is_set(),
        )
        shown = ""

        def write(text: str) -> None:
            nonlocal shown
            progress.stop()
            shown = text or shown
            print(escape_control_chars(text), end="", flush=True)

        def end_line() -> None:
            if shown and not shown.endswith("\n"):
                write("\n")

        def watch(number: int, event: object) -> None:
            if not isinstance(event, Delta):
                end_line()
                progress(number, event)
            elif streamed and event.text:
                write(event.text)

        try:
            outcome = self.mixture.run([request], watch, pieces=streamed)[0]
            if isinstance(outcome, UserError):
                raise outcome
            if not options.json and not options.streamed:
                write(outcome.final.text)
            return outcome
        finally:
            stopped.set()
            end_line()

    def _print_warnings(self, turn: ChatTurn) -> None:
        """Print the warnings of a turn, each once."""
        warnings = [*(turn.stages.warnings if turn.stages else []), *self._warnings.pop_messages()]
        if turn.error == STOPPED:
            names = [one.name for one in turn.answers if one.error == STOPPED]
            warnings += [f"{name}: interrupted; its token counts are estimates" for name in names]
        turn.warnings = list(dict.fromkeys(warnings))
        print_notes(f"warning: {warning}" for warning in turn.warnings)


COMMANDS = {
    "/stages": "[N]   all answers of the last turn; with a number, it and its prompt",
    "/cost": "        calls, tokens and cost of each model, for the last turn and in total",
    "/clear": "       start a new conversation",
    "/save": "FILE    write all turns with their stages, as JSON",
    "/help": "        show this list",
    "/exit": "        leave; also exit, quit and Ctrl-D",
}

HELP_FOOTER = """\
A line that begins with // is a question that begins with /. Lines between \"\"\" and \"\"\" belong
together. Ctrl-C stops an answer."""

FENCE = '"""'


def run_chat(session: ChatSession) -> int:
    """Answer the questions of a user until the user exits; return the exit code."""
    if not session.options.quiet:
        print_notes(["/help lists the commands; exit leaves"])
    edited = is_tty(sys.stdout) and not session.options.json
    if edited:
        with contextlib.suppress(ImportError):  # then without line editing and history
            import readline  # noqa: F401
    interrupted = False
    while True:
        try:
            line = read_input(input if edited else _ask)
        except EOFError:
            print_notes([""])
            return 0
        except KeyboardInterrupt:
            if interrupted:
                return 130
            print_notes(["", "exit, Ctrl-D or another Ctrl-C leaves the chat"])
            interrupted = True
            continue
        interrupted = False
        try:
            if line in ("exit", "quit", "/exit"):
                return 0
            if line.startswith("/") and not line.startswith("//"):
                run_command(session, line)
            elif line.strip():
                session.answer_question(line.removeprefix("/"))
        except UserError as error:
            print_notes([f"error: {error}"])
        except KeyboardInterrupt:
            print_notes(["stopped"])


def _ask(prompt: str) -> str:
    """Read a line; a line editor would write prompts to standard output, which has answers only."""
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()


def read_input(ask: Callable[[str], str]) -> str:
    """Read one input; one that begins with three double quotes extends to the next three.

    Args:
        ask: Shows a prompt and returns a line, like `input`.
    """
    line = ask(">>> ").strip()
    if not line.startswith(FENCE):
        return line
    text = line[len(FENCE) :]
    while not text.rstrip().endswith(FENCE):
        text += "\n" + ask("... ")
    text = text.rstrip()[: -len(FENCE)].strip("\n")
    return f"/{text}" if text.startswith("/") else text  # quoted, it is no command


def run_command(session: ChatSession, line: str) -> None:
    """Run a command of the chat and print its output."""
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    if command not in COMMANDS:
        raise UserError(
            f"{command}: no such command; {suggest(command, COMMANDS)}/help lists them, and a "
            "question that begins with / is written with //"
        )
    if argument and command not in ("/stages", "/save"):
        raise UserError(f"{command} takes no arguments; got {argument!r} is too much")
    if command in ("/stages", "/cost") and not session.turns:
        raise UserError(f"{command}: there is no turn yet")
    match command:
        case "/help":
            print_notes([*(f"{name} {about}" for name, about in COMMANDS.items()), HELP_FOOTER])
        case "/clear":
            session.history.clear()
            print_notes(["the next question starts a new conversation"])
        case "/save":
            path = Path(argument).expanduser()
            if not argument or path.exists():
                raise UserError(
                    f"/save {argument}: name a file that does not exist, as in /save talk.json"
                )
            turns = [turn_to_json(turn) for turn in session.turns]
            models = [one.name for one in session.mixture.agent_specs]
            write_json(path.resolve(), {"models": models, "turns": turns})
            print_notes([f"wrote {argument}: {pluralize(len(turns), 'turn')}"])
        case "/stages":
            print_notes(format_stages(session.turns[-1], argument))
        case "/cost":
            print_usage("last turn", session.turns[-1].answers)
            print_usage("session", [one for turn in session.turns for one in turn.answers])


def format_stages(turn: ChatTurn, which: str) -> Iterator[str]:
    """Yield all answers of a turn; with a number, that one and its prompt."""
    if not which:
        for number, answer in enumerate(turn.answers, 1):
            yield from (f"--- {number}: {format_call(answer)}", answer.error or answer.text, "")
        return
    if not which.isdecimal() or not 1 <= int(which) <= len(turn.answers):
        raise UserError(f"/stages {which}: the last turn has answers 1 to {len(turn.answers)}")
    answer = turn.answers[int(which) - 1]
    prompt = answer.prompt
    parts = [("prompt", prompt)] if isinstance(prompt, str) else [tuple(one) for one in prompt]
    if answer.completion and answer.completion.reasoning:
        parts.append(("reasoning", answer.completion.reasoning))
    yield f"--- {which}: {format_call(answer)}"
    for name, text in parts:
        yield from (f"[{name}]", text, "")
    yield from ("[error]" if answer.error else "[answer]", answer.error or answer.text)


def print_usage(title: str, answers: Sequence[AgentAnswer]) -> None:
    """Print the usage of each model and their sum to standard error."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(title, overflow="fold")
    for head in ("calls", "cached", "failed", "tokens read", "tokens new"):
        table.add_column(head, justify="right")
    table.add_column("cost", overflow="fold")
    for name in (*dict.fromkeys(answer.name for answer in answers), None):
        some = [answer for answer in answers if name in (None, answer.name)]
        one = sum_usage(some)
        counts = (one.calls, one.cached, one.failed, one.prompt_tokens, one.new_tokens)
        label = escape_control_chars(name or "total")
        table.add_row(label, *map(str, counts), format_answer_cost(some))
    Console(stderr=True, markup=False, emoji=False, highlight=False).print(table)
