"""The chat: what a person types is a question or a command, until the person leaves."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path

from swarm.errors import UserError
from swarm.files import write_json
from swarm.moa import describing
from swarm.moa.reading import UserInput, read_input
from swarm.moa.session import ChatSession
from swarm.moa.turns import turn_to_json
from swarm.printing import escape_control_chars

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

    def __init__(self, session: ChatSession, ask: Callable[[str], str], models: Iterable[str]) -> None:
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
            raise UserError(f"{word}: there is no such command; {meant}/help lists them, and a "
                            "question that begins with / is written with //")  # fmt: skip
        if rest and word not in ("/stages", "/save"):
            raise UserError(f"{word} takes nothing more; {rest!r} is too much")
        match word:
            case "/help":
                return [*(f"{name} {about}" for name, about in COMMANDS.items()), HELP_FOOTER]
            case "/models":
                return self._models
            case "/history":
                return list(describing.format_history(session.remembered)) or ["nothing yet"]
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
            return describing.format_costs(session.turns)
        return describing.format_stages(session.turns[-1], rest)

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
        return [f"wrote {name}: {describing.pluralize(len(turns), 'turn')}"]

    def _print_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(escape_control_chars(line), file=self.session.notes, flush=True)
