"""Worker that queries one model in a thread, with progress and partial text for a page."""

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from swarm.errors import UserError
from swarm.moa.chat import ChatOptions
from swarm.moa.format import ChatTurn, build_conversation
from swarm.models.base import Model, Request, stream
from swarm.multi_agent.collaboration import Cancelled, Collaboration
from swarm.multi_agent.consortium.results import Iteration
from swarm.multi_agent.types import AgentAnswer, AnswerDelta, CallStarted, Transcript

STATES = ("loading", "answering", "done")

EMPTY_ANSWER = "an empty answer"


class ChatWorker:
    """A question in progress; its attributes can be read from any thread.

    Args:
        name: Display name of the model.
        find: Returns the model, or raises a `UserError`.
        question: The question.
        before: Previous turns of the conversation; each has an answer.
        manner: Sampling options.

    Attributes:
        state: One of `STATES`.
        text: The answer received so far.
        waiting: Members of a collaboration that have not answered yet.
        notes: Summaries of a consortium's iterations.
        turn: The question, and its final answer or error.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], Model],
        question: str,
        before: Sequence[ChatTurn],
        manner: ChatOptions,
    ) -> None:
        self.name, self._find, self._chat_settings = name, find, manner
        self._prompt = build_conversation(before, question, manner.system)
        self._over = threading.Event()
        self.turn = ChatTurn(question)
        self.state, self.text = STATES[0], ""
        self.waiting: list[str] = []
        self.notes: list[str] = []

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run_worker, name="swarm-page", daemon=True).start()

    def stop(self) -> None:
        """Stop waiting; generation ends with the next streamed piece."""
        if self.state != "done":
            self._over.set()
            self._finish_turn(error="stopped")

    def _finish_turn(self, stages: Transcript | None = None, error: str = "") -> None:
        if self.state == "done":
            return
        self.turn.stages, self.turn.error = stages, error
        if stages:
            self.turn.answers, self.turn.warnings = stages.answers, stages.warnings
            self.text = stages.final.text
        self.state = "done"

    def _run_worker(self) -> None:
        try:
            model = self._find()
            for prepare, args in (("check", ()), ("open", (None,))):
                getattr(model, prepare, lambda *_: None)(*args)
            if self._over.is_set():
                return
            self.state = "answering"
            self._finish_turn(self._collect_transcript(model))
        except Cancelled:
            self._finish_turn(error="stopped")
        except UserError as error:
            self._finish_turn(error=str(error))
        except Exception as error:  # shown on the page instead of a traceback
            self._finish_turn(error=f"{self.name}: failed with {type(error).__name__}: {error}")

    def _build_request(self) -> Request:
        settings = self._chat_settings
        return Request(
            self._prompt,
            settings.max_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
            decided=lambda text: self._over.is_set(),
        )

    def _collect_transcript(self, model: Model) -> Transcript:
        """Run the model and return its transcript.

        Raises:
            UserError: The model gave no answer.
        """
        if not isinstance(model, Collaboration):
            return self._stream_answer(model)
        (outcome,) = model.run(
            [self._build_request()], lambda number, event: self._handle_event(model, event)
        )
        if isinstance(outcome, UserError):
            raise outcome
        stages: Transcript = outcome
        return stages

    def _stream_answer(self, model: Model) -> Transcript:
        with closing(stream(model, self._build_request())) as pieces:
            while True:
                try:
                    delta = next(pieces)
                except StopIteration as end:
                    final = end.value
                    break
                self._check_running()
                self.text += delta.text
        error = "" if final.text.strip() else EMPTY_ANSWER
        return Transcript(
            [[AgentAnswer(1, "model", self.name, 0, self._prompt, final, error)]], final
        )

    def _handle_event(self, model: Any, event: Any) -> None:
        """Process an event of a collaboration."""
        self._check_running()
        if isinstance(event, CallStarted):
            self.waiting.append(event.name)
        elif isinstance(event, AgentAnswer):
            self.turn.answers.append(event)
            if event.name in self.waiting:
                self.waiting.remove(event.name)
        elif isinstance(event, AnswerDelta):
            self.text += event.delta.text
        elif isinstance(event, Iteration):
            from swarm.multi_agent.consortium.consortium import format_event

            self.notes.append(format_event(model, event))

    def _check_running(self) -> None:
        """Check that the answer is still wanted.

        Raises:
            Cancelled: It is not.
        """
        if self._over.is_set():
            raise Cancelled
