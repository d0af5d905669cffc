"""The way of one request through a mixture of agents: its layers, and how the last one ends it."""

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from swarm.collab import Answer, Slot, Stages
from swarm.collab.history import Turns, fitted, told, turns_of
from swarm.collab.rounds import Call, Script
from swarm.errors import UserError
from swarm.models import Completion, Request

if TYPE_CHECKING:
    from swarm.collab.moa import MixtureOfAgents

log = logging.getLogger(__name__)

PICK = re.compile(r"\W*(?:answer|number)?\W*(\d+)(?=\D)", re.IGNORECASE)
"""The number with which a ranker's reply begins, once it is written to its end."""

PICK_TOKENS = 16
"""A ranker may write as many, even if the answer to the request has to be shorter."""

Answering = Generator[list[Call], list[Answer], Completion]


class Course:
    """One request on its way; `script` is run by `swarm.collab.rounds`.

    Args:
        mixture: Whose.
        request: To be answered.
        logged: Warnings that the log has already, of requests that are on their way together.
    """

    def __init__(self, mixture: "MixtureOfAgents", request: Request, logged: set[str]) -> None:
        self.mixture, self.request, self._logged = mixture, request, logged
        self._left_out = 0  # the most exchanges that a prompt had no room for
        self.stages = Stages()
        self.started = time.monotonic()

    def script(self) -> Script:
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
        if self._left_out:
            many = f"up to {self._left_out} of the oldest exchanges are"
            many = "the oldest exchange is" if self._left_out == 1 else many
            self._warn(f"context={self.mixture.context}: {many} left out")
        self.stages.final = self._all_in_all(final)
        return self.stages

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
            self._warn(f"layer {layer}: {reason}")
        return answered

    def _proposals(self, layer: int, texts: Sequence[str]) -> list[Call]:
        """A call for each sample of each proposer; a model's are numbered where asked alike."""
        asked = []
        for slot in self.mixture.proposers:
            request = self._request(slot, layer, texts)
            alike = (id(slot.model), request.prompt, request.temperature, request.max_new_tokens)
            asked += [(alike, slot, number, request) for number in range(slot.count)]
        total = Counter(alike for alike, *_ in asked)
        seen: Counter[object] = Counter()
        calls = []
        for alike, slot, number, request in asked:
            sample = self.request.sample * total[alike] + seen[alike]
            seen[alike] += 1
            numbered = replace(request, sample=sample)
            calls.append(Call(slot, number, numbered, layer, self.mixture.depth, "proposer"))
        return calls

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
            self._warn(f"layer {layer}: {words} {said.text[:80]!r}; the first is taken")
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
            self._warn(f"layer {layer}: {reason}{instead}")
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
            timeout=self._time_left(slot),
        )

    def _prompt(self, slot: Slot, layer: int, texts: Sequence[str], choose: bool) -> str | Turns:
        prompt, context = self.request.prompt, self.mixture.context

        def write(turns: Turns) -> Turns:
            key = self._key(layer)
            return self.mixture.prompt.write(told(turns, slot.system), texts, key, choose)

        written, left_out = fitted(turns_of(prompt), context, write)
        self._left_out = max(self._left_out, left_out)
        return prompt if isinstance(prompt, str) and written == turns_of(prompt) else written

    def _time_left(self, slot: Slot) -> float | None:
        """Seconds for a call: the slot's, and no more than what is left of the request's."""
        if self.request.timeout is None:
            return slot.timeout
        # A call with no time left fails by itself, as every late one does.
        left = max(0.001, self.started + self.request.timeout - time.monotonic())
        return left if slot.timeout is None else min(left, slot.timeout)

    def _key(self, layer: int) -> str:
        """What chance in one layer's prompts follows from."""
        asked = self.request
        return json.dumps([self.mixture.seed, layer, asked.sample, asked.prompt])

    def _order(self, layer: int, count: int, kept: int = 0) -> list[int]:
        return self.mixture.prompt.order(count, self._key(layer), kept)

    def _warn(self, words: str) -> None:
        if words not in self.stages.warnings:
            self.stages.warnings.append(words)
        if words not in self._logged:
            self._logged.add(words)
            log.warning("%s", words)

    def _all_in_all(self, final: Completion) -> Completion:
        """The last answer, with what all of them took."""
        calls = [answer.completion for answer in self.stages.answers if answer.completion]
        return replace(
            final,
            prompt_tokens=sum(call.prompt_tokens for call in calls),
            new_tokens=sum(call.new_tokens for call in calls),
            cost=sum(call.cost for call in calls),
            seconds=time.monotonic() - self.started,
            cached=all(call.cached for call in calls),
        )


def reasons(came: Iterable[Answer]) -> list[str]:
    """Who gave no answer and why, each reason once."""
    counted = Counter(f"{answer.name}: {answer.error}" for answer in came if answer.error)
    return [why if n == 1 else f"{why} ({n} times)" for why, n in counted.items()]


def pick(text: str, count: int) -> int | None:
    """Which of the answers 1 to `count` a ranker's reply names; `None` where that is unclear.

    It is the number with which the reply begins, or else the only possible one in it.
    """
    begins = PICK.match(f"{text} ")
    named = {int(begins[1])} if begins else {int(found) for found in re.findall(r"\d+", text)}
    possible = {number for number in named if 1 <= number <= count}
    return possible.pop() if len(possible) == 1 else None


def picked(text: str) -> bool:
    """Whether a ranker's reply begins with a number; see `Request.decided`."""
    return PICK.match(text) is not None
