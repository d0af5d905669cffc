"""The way of one request through a mixture of agents: its layers, and how the last one ends it."""

import json
import re
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from swarm.collab import AgentAnswer, AgentSpec, Transcript
from swarm.collab.collaboration import RequestContext, failure_reasons, number_samples
from swarm.collab.history import Messages, add_system_text, prompt_to_messages
from swarm.collab.rounds import AgentCall, Script
from swarm.errors import UserError
from swarm.models import Completion, Request

if TYPE_CHECKING:
    from swarm.collab.moa import MixtureOfAgents

LEADING_NUMBER = re.compile(r"[\W_]*(?:(?:answer|number)[\W_]*)?(\d{1,9})(?=[\W_])(?![.,]\d)", re.IGNORECASE)
"""The number with which a ranker's reply begins, once it is written to its end."""

STANDALONE_NUMBER = r"(?<![\w.,])\d{1,9}(?![.,]?\w)"
"""A number that is no part of a word or of another number."""

NAMED_NUMBER = re.compile(
    r"\b(?:answer|number|response|option|candidate|choice|choose|pick|prefer|select|best|it is)"
    rf"(?: is)?[\W_]{{1,9}}({STANDALONE_NUMBER})", re.IGNORECASE,
)  # fmt: skip
"""A number that is said to be that of an answer."""

PICK_TOKENS = 16
"""A ranker may write as many, even if the answer to the request has to be shorter."""

FinalAnswerScript = Generator[list[AgentCall], list[AgentAnswer], Completion]


class MoARun(RequestContext[Transcript]):
    """One request on its way; `script` is run by `swarm.collab.rounds`.

    Args:
        mixture: Whose.
        request: To be answered.
        logged: Warnings that the log has already, of requests that are on their way together.
    """

    def __init__(self, mixture: "MixtureOfAgents", request: Request, logged: set[str]) -> None:
        super().__init__(mixture, request, Transcript(), logged)
        self.mixture = mixture

    def iterate_rounds(self) -> Script[Transcript]:
        """Ask layer by layer.

        Raises:
            UserError: Choices are to be scored, too few answered, or what they said is too long.
        """
        if self.request.choices:
            raise UserError(
                "a mixture of agents writes text and cannot score choices; have the task read the "
                "text instead (task.scoring=generate)"
            )
        answers: list[AgentAnswer] = []
        for layer in range(1, self.mixture.layers):
            answers = yield from self._run_layer(layer, answers)
        end = {"rank": self._rank_answers, "sequential": self._aggregate_in_windows}
        final = yield from end.get(self.mixture.strategy, self._aggregate_answers)(answers)
        return self.build_transcript(final)

    def _run_layer(
        self, layer: int, before: Sequence[AgentAnswer]
    ) -> Generator[list[AgentCall], list[AgentAnswer], list[AgentAnswer]]:
        """The answers of the proposers that gave one."""
        order = self._answer_order(layer, len(before))
        texts = [before[place].text for place in order]
        came = yield self._build_proposer_calls(layer, texts)
        self.stages.layers.append(came)
        answered = [answer for answer in came if not answer.error]
        missing = failure_reasons(came)
        if len(answered) < self.mixture.quorum:
            raise UserError(
                f"layer {layer}: {len(answered)} of {len(came)} proposers answered and quorum is "
                f"{self.mixture.quorum}: {'; '.join(missing)}"
            )
        for reason in missing:
            self.add_warning(f"layer {layer}: {reason}")
        return answered

    def _build_proposer_calls(self, layer: int, texts: Sequence[str]) -> list[AgentCall]:
        """A call for each sample of each proposer; a model's are numbered where asked alike."""
        asked = []
        for slot in self.mixture.proposers:
            request = self._build_request(slot, layer, texts)
            asked += [(slot, number, request) for number in range(slot.count)]
        numbered = number_samples([(slot.model, request) for slot, _, request in asked],
                           self.request.sample)  # fmt: skip
        return [
            AgentCall(slot, number, request, layer, self.mixture.depth, "proposer")
            for (slot, number, _), request in zip(asked, numbered, strict=True)
        ]

    def _aggregate_answers(self, answers: Sequence[AgentAnswer]) -> FinalAnswerScript:
        """One answer made of all answers."""
        layer = self.mixture.layers
        texts = [answers[place].text for place in self._answer_order(layer, len(answers))]
        return (yield from self._request_final_answer(layer, layer, texts))

    def _aggregate_in_windows(self, answers: Sequence[AgentAnswer]) -> FinalAnswerScript:
        """Self-MoA-Seq (arXiv 2502.00674): as many answers at a time as a window holds.

        From the second window on the best answer so far takes the first places, several times. An
        empty answer is not better than the one before it.
        """
        window, reserve = self.mixture.window, self.mixture.reserve
        texts = [answer.text for answer in answers]
        layers = 1 + self.mixture.count_windows(len(texts))
        rest = texts[window:]
        kept, shown, best = 0, texts[:window], Completion("")
        for layer in range(2, layers + 1):
            order = self._answer_order(layer, len(shown), kept)
            said = yield from self._request_final_answer(layer, layers, [shown[place] for place in order])
            if said.text.strip() or not kept:
                best = said
            kept = reserve if best.text.strip() else 0
            shown = [best.text] * kept + rest[: window - reserve]
            rest = rest[window - reserve :]
        return best

    def _rank_answers(self, answers: Sequence[AgentAnswer]) -> FinalAnswerScript:
        """One of the answers, as a ranker chooses; see LLM ranker in arXiv 2406.04692."""
        layer = self.mixture.layers
        order = self._answer_order(layer, len(answers))
        texts = [answers[place].text for place in order]
        said = yield from self._request_final_answer(layer, layer, texts, choose=True)
        if not answers:
            return said
        chosen = parse_pick(said.text, len(answers))
        if chosen is None:
            words = f"{self.mixture.aggregator.name} chose none of the answers, but said"
            self.add_warning(f"layer {layer}: {words} {said.text[:80]!r}; the first is taken")
        taken = answers[0 if chosen is None else order[chosen - 1]].completion
        assert taken is not None
        return taken

    def _request_final_answer(
        self, layer: int, layers: int, texts: Sequence[str], choose: bool = False
    ) -> FinalAnswerScript:
        """The aggregator's answer, or the fallback's; an empty one if there is no better."""
        came: list[AgentAnswer] = []
        self.stages.layers.append(came)
        last = layer == layers and not choose
        role = "ranker" if choose else "aggregator"
        for slot, as_what in ((self.mixture.aggregator, role), (self.mixture.fallback, "fallback")):
            if slot is None:
                break
            request = self._build_request(slot, layer, texts, choose)
            came += yield [AgentCall(slot, 0, request, layer, layers, as_what, last)]
            if not came[-1].error and came[-1].completion:
                break
        said = [answer.completion for answer in came if answer.completion]
        if not said:
            raise UserError(f"layer {layer}: {'; '.join(failure_reasons(came))}")
        for reason in failure_reasons(came):
            instead = "" if came[-1].error else f"; {came[-1].name} answered instead"
            self.add_warning(f"layer {layer}: {reason}{instead}")
        return said[-1]

    def _build_request(
        self, slot: AgentSpec, layer: int, texts: Sequence[str], choose: bool = False
    ) -> Request:
        """What the slot is asked: the conversation, and the answers of the layer before."""
        asked = self.request
        most = slot.max_tokens or asked.max_new_tokens
        if choose and texts:
            most = slot.max_tokens or max(asked.max_new_tokens, PICK_TOKENS)
            asked = replace(asked, stop=(), top_logprobs=0, decided=has_pick)
        return replace(
            asked,
            prompt=self._build_prompt(slot, layer, texts, choose),
            max_new_tokens=most,
            temperature=asked.temperature if slot.temperature is None else slot.temperature,
            timeout=self.time_left(slot),
        )

    def _build_prompt(self, slot: AgentSpec, layer: int, texts: Sequence[str], choose: bool) -> str | Messages:
        prompt = self.request.prompt

        def add_answers(turns: Messages) -> Messages:
            key = self._random_key(layer)
            return self.mixture.prompt.add_answers(add_system_text(turns, slot.system), texts, key, choose)

        written = self.write_within_context(add_answers)
        return prompt if isinstance(prompt, str) and written == prompt_to_messages(prompt) else written

    def _random_key(self, layer: int) -> str:
        """What chance in one layer's prompts follows from."""
        asked = self.request
        return json.dumps([self.mixture.seed, layer, asked.sample, asked.prompt])

    def _answer_order(self, layer: int, count: int, kept: int = 0) -> list[int]:
        return self.mixture.prompt.order_answers(count, self._random_key(layer), kept)


def parse_pick(text: str, count: int) -> int | None:
    """Which of the answers 1 to `count` a ranker's reply names; `None` where that is unclear.

    It is the number with which the reply begins, or else the only possible one in it, if that is
    said to be an answer's: other texts have numbers, too.
    """
    begins = LEADING_NUMBER.match(f"{text} ")
    found = [begins[1]] if begins else re.findall(STANDALONE_NUMBER, text)
    possible = {number for number in map(int, found) if 1 <= number <= count}
    if not begins:
        named = {int(number) for number in NAMED_NUMBER.findall(text)}
        possible = possible if possible <= named else set()
    return possible.pop() if len(possible) == 1 else None


def has_pick(text: str) -> bool:
    """Whether a ranker's reply begins with a number; see `Request.decided`."""
    return LEADING_NUMBER.match(text) is not None
