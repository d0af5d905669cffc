"""The way of one request through a mixture of agents: its layers, and how the last one ends it."""

import json
import re
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from swarm.collab import Answer, Slot, Stages
from swarm.collab.collaboration import Way, reasons, sampled
from swarm.collab.history import Turns, told, turns_of
from swarm.collab.rounds import Call, Script
from swarm.errors import UserError
from swarm.models import Completion, Request

if TYPE_CHECKING:
    from swarm.collab.moa import MixtureOfAgents

PICK = re.compile(r"[\W_]*(?:(?:answer|number)[\W_]*)?(\d{1,9})(?=[\W_])(?![.,]\d)", re.IGNORECASE)
"""The number with which a ranker's reply begins, once it is written to its end."""

FREE = r"(?<![\w.,])\d{1,9}(?![.,]?\w)"
"""A number that is no part of a word or of another number."""

NAMED = re.compile(
    r"\b(?:answer|number|response|option|candidate|choice|choose|pick|prefer|select|best|it is)"
    rf"(?: is)?[\W_]{{1,9}}({FREE})", re.IGNORECASE,
)  # fmt: skip
"""A number that is said to be that of an answer."""

PICK_TOKENS = 16
"""A ranker may write as many, even if the answer to the request has to be shorter."""

Answering = Generator[list[Call], list[Answer], Completion]


class Course(Way[Stages]):
    """One request on its way; `script` is run by `swarm.collab.rounds`.

    Args:
        mixture: Whose.
        request: To be answered.
        logged: Warnings that the log has already, of requests that are on their way together.
    """

    def __init__(self, mixture: "MixtureOfAgents", request: Request, logged: set[str]) -> None:
        super().__init__(mixture, request, Stages(), logged)
        self.mixture = mixture

    def script(self) -> Script[Stages]:
        """Ask layer by layer.

        Raises:
            UserError: Choices are to be scored, too few answered, or what they said is too long.
        """
        if self.request.choices:
            raise UserError(
                "a mixture of agents writes text and cannot score choices; have the task read the "
                "text instead (task.scoring=generate)"
            )
        answers: list[Answer] = []
        for layer in range(1, self.mixture.layers):
            answers = yield from self._layer(layer, answers)
        end = {"rank": self._ranked, "sequential": self._in_windows}
        final = yield from end.get(self.mixture.strategy, self._aggregated)(answers)
        return self.ended(final)

    def _layer(
        self, layer: int, before: Sequence[Answer]
    ) -> Generator[list[Call], list[Answer], list[Answer]]:
        """The answers of the proposers that gave one."""
        order = self._order(layer, len(before))
        texts = [before[place].text for place in order]
        came = yield self._proposals(layer, texts)
        self.stages.layers.append(came)
        answered = [answer for answer in came if not answer.error]
        missing = reasons(came)
        if len(answered) < self.mixture.quorum:
            raise UserError(
                f"layer {layer}: {len(answered)} of {len(came)} proposers answered and quorum is "
                f"{self.mixture.quorum}: {'; '.join(missing)}"
            )
        for reason in missing:
            self.warn(f"layer {layer}: {reason}")
        return answered

    def _proposals(self, layer: int, texts: Sequence[str]) -> list[Call]:
        """A call for each sample of each proposer; a model's are numbered where asked alike."""
        asked = []
        for slot in self.mixture.proposers:
            request = self._request(slot, layer, texts)
            asked += [(slot, number, request) for number in range(slot.count)]
        numbered = sampled([(slot.model, request) for slot, _, request in asked],
                           self.request.sample)  # fmt: skip
        return [
            Call(slot, number, request, layer, self.mixture.depth, "proposer")
            for (slot, number, _), request in zip(asked, numbered, strict=True)
        ]

    def _aggregated(self, answers: Sequence[Answer]) -> Answering:
        """One answer made of all answers."""
        layer = self.mixture.layers
        texts = [answers[place].text for place in self._order(layer, len(answers))]
        return (yield from self._last(layer, layer, texts))

    def _in_windows(self, answers: Sequence[Answer]) -> Answering:
        """Self-MoA-Seq (arXiv 2502.00674): as many answers at a time as a window holds.

        From the second window on the best answer so far takes the first places, several times. An
        empty answer is not better than the one before it.
        """
        window, reserve = self.mixture.window, self.mixture.reserve
        texts = [answer.text for answer in answers]
        layers = 1 + self.mixture.windows(len(texts))
        rest = texts[window:]
        kept, shown, best = 0, texts[:window], Completion("")
        for layer in range(2, layers + 1):
            order = self._order(layer, len(shown), kept)
            said = yield from self._last(layer, layers, [shown[place] for place in order])
            if said.text.strip() or not kept:
                best = said
            kept = reserve if best.text.strip() else 0
            shown = [best.text] * kept + rest[: window - reserve]
            rest = rest[window - reserve :]
        return best

    def _ranked(self, answers: Sequence[Answer]) -> Answering:
        """One of the answers, as a ranker chooses; see LLM ranker in arXiv 2406.04692."""
        layer = self.mixture.layers
        order = self._order(layer, len(answers))
        texts = [answers[place].text for place in order]
        said = yield from self._last(layer, layer, texts, choose=True)
        if not answers:
            return said
        chosen = pick(said.text, len(answers))
        if chosen is None:
            words = f"{self.mixture.aggregator.name} chose none of the answers, but said"
            self.warn(f"layer {layer}: {words} {said.text[:80]!r}; the first is taken")
        taken = answers[0 if chosen is None else order[chosen - 1]].completion
        assert taken is not None
        return taken

    def _last(
        self, layer: int, layers: int, texts: Sequence[str], choose: bool = False
    ) -> Answering:
        """The aggregator's answer, or the fallback's; an empty one if there is no better."""
        came: list[Answer] = []
        self.stages.layers.append(came)
        last = layer == layers and not choose
        role = "ranker" if choose else "aggregator"
        for slot, as_what in ((self.mixture.aggregator, role), (self.mixture.fallback, "fallback")):
            if slot is None:
                break
            request = self._request(slot, layer, texts, choose)
            came += yield [Call(slot, 0, request, layer, layers, as_what, last)]
            if not came[-1].error and came[-1].completion:
                break
        said = [answer.completion for answer in came if answer.completion]
        if not said:
            raise UserError(f"layer {layer}: {'; '.join(reasons(came))}")
        for reason in reasons(came):
            instead = "" if came[-1].error else f"; {came[-1].name} answered instead"
            self.warn(f"layer {layer}: {reason}{instead}")
        return said[-1]

    def _request(
        self, slot: Slot, layer: int, texts: Sequence[str], choose: bool = False
    ) -> Request:
        """What the slot is asked: the conversation, and the answers of the layer before."""
        asked = self.request
        most = slot.max_tokens or asked.max_new_tokens
        if choose and texts:
            most = slot.max_tokens or max(asked.max_new_tokens, PICK_TOKENS)
            asked = replace(asked, stop=(), top_logprobs=0, decided=picked)
        return replace(
            asked,
            prompt=self._prompt(slot, layer, texts, choose),
            max_new_tokens=most,
            temperature=asked.temperature if slot.temperature is None else slot.temperature,
            timeout=self.time_left(slot),
        )

    def _prompt(self, slot: Slot, layer: int, texts: Sequence[str], choose: bool) -> str | Turns:
        prompt = self.request.prompt

        def write(turns: Turns) -> Turns:
            key = self._key(layer)
            return self.mixture.prompt.write(told(turns, slot.system), texts, key, choose)

        written = self.written(write)
        return prompt if isinstance(prompt, str) and written == turns_of(prompt) else written

    def _key(self, layer: int) -> str:
        """What chance in one layer's prompts follows from."""
        asked = self.request
        return json.dumps([self.mixture.seed, layer, asked.sample, asked.prompt])

    def _order(self, layer: int, count: int, kept: int = 0) -> list[int]:
        return self.mixture.prompt.order(count, self._key(layer), kept)


def pick(text: str, count: int) -> int | None:
    """Which of the answers 1 to `count` a ranker's reply names; `None` where that is unclear.

    It is the number with which the reply begins, or else the only possible one in it, if that is
    said to be an answer's: other texts have numbers, too.
    """
    begins = PICK.match(f"{text} ")
    found = [begins[1]] if begins else re.findall(FREE, text)
    possible = {number for number in map(int, found) if 1 <= number <= count}
    if not begins:
        named = {int(number) for number in NAMED.findall(text)}
        possible = possible if possible <= named else set()
    return possible.pop() if len(possible) == 1 else None


def picked(text: str) -> bool:
    """Whether a ranker's reply begins with a number; see `Request.decided`."""
    return PICK.match(text) is not None
