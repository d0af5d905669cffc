"""Questions put to a mixture one after the other: shown while they are answered, and remembered."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from swarm.collab import Transcript
from swarm.collab.moa import MixtureOfAgents
from swarm.collab.rounds import STOPPED
from swarm.errors import UserError
from swarm.moa.progress import MixtureProgress
from swarm.moa.turns import ChatTurn, turn_to_json, build_conversation
from swarm.models import Request
from swarm.printing import WarningCollector, escape_control_chars


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
        progress = MixtureProgress(self.notes, self.manner.quiet, None if whole else self._write_text)
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
