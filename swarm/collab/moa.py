"""Mixture of Agents: layers of models that read each other's answers, and are used as one model."""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

from swarm.collab import AnswerDelta, AgentSpec, Transcript, OnEvent
from swarm.collab.collaboration import Collaboration
from swarm.collab.course import MoARun
from swarm.collab.prompts import AnswersPrompt
from swarm.collab.rounds import Script, stream_final_answer
from swarm.errors import UserError
from swarm.models import Request, Stream
from swarm.models.trace import Trace

STRATEGIES = ("aggregate", "rank", "sequential")


class MixtureOfAgents(Collaboration[Transcript]):
    """A model made of models (Wang et al., arXiv 2406.04692).

    Each proposer of the first layer gets the conversation as it is; those of a later one, and the
    aggregator, get the answers of the layer before too, all of them, verbatim. Each distinct model
    of a layer is asked in a thread of its own, and the whole batch at once. A request takes
    exactly `calls` calls.

    What a slot does not say is as the request has it. `stop`, `seed`, `decided` and `top_logprobs`
    hold for all slots, so that a proposer of the first layer is asked just as it would be alone; a
    ranker's number is not subject to them. `timeout` is for the whole.

    Args:
        proposers: Who answers in every layer but the last.
        aggregator: Who has the last word.
        layers: The proposers' and the aggregator's; 1 is the aggregator alone.
        strategy: "aggregate": the last answer is made of all answers (the paper). "rank": the
            aggregator chooses one of them, which is given verbatim. "sequential": Self-MoA-Seq
            (arXiv 2502.00674) for many samples in two layers: the aggregator reads `window` answers
            at a time, of which from the second time on the first `reserve` are what it has made.
        prompt: How answers are shown: "safe", "paper" or a `Prompt`.
        quorum: How many proposers of a layer have to answer, each sample counted; an empty answer
            is none. 0: where nobody does, the next layer gets the conversation alone.
        fallback: Who is asked where the aggregator fails; `None`: that is an error.
        seed: Of the order in which answers are shown.
        context: The most tokens of a prompt, at four characters a token; the oldest exchanges of a
            longer conversation are left out. Answers never are: that is an error. `None` leaves
            nothing out.
        window: See "sequential".
        reserve: See `window`.
        trace: Where every call is recorded; `None` records none.

    Attributes:
        depth: Layers, each window of "sequential" counted, if all proposers answer.
        calls: Calls a request: proposals (layers - 1) + 1; sequential: proposals + windows.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        proposers: Sequence[AgentSpec],
        aggregator: AgentSpec,
        layers: int = 2,
        strategy: str = "aggregate",
        prompt: str | AnswersPrompt = "safe",
        quorum: int = 1,
        fallback: AgentSpec | None = None,
        seed: int = 0,
        context: int | None = None,
        window: int = 6,
        reserve: int = 3,
        trace: Trace | None = None,
    ) -> None:
        self.proposers, self.aggregator, self.fallback = tuple(proposers), aggregator, fallback
        self.layers, self.strategy, self.quorum = layers, strategy, quorum
        self.prompt = prompt if isinstance(prompt, AnswersPrompt) else AnswersPrompt(prompt)
        self.seed, self.context, self.window, self.reserve = seed, context, window, reserve
        self.trace = trace
        self._check_numbers()
        self._check_shape()
        proposals = sum(slot.count for slot in self.proposers)
        if layers > 1 and quorum > proposals:
            raise UserError(f"quorum={quorum}: there are only {proposals} answers a layer")
        ends = self.count_windows(proposals) if strategy == "sequential" else 1
        self.depth = layers - 1 + ends
        self.calls = proposals * (layers - 1) + ends

    def _check_numbers(self) -> None:
        for key, least in (
            ("layers", 1),
            ("quorum", 0),
            ("window", 2),
            ("reserve", 1),
            ("seed", 0),
        ):
            value = getattr(self, key)
            if type(value) is not int or value < least:
                raise UserError(f"{key}={value!r}: must be a whole number from {least} on")
        if self.context is not None and (type(self.context) is not int or self.context < 1):
            raise UserError(f"context={self.context!r}: must be null or a number of tokens")

    def _check_shape(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UserError(f"strategy={self.strategy!r} is not one of {', '.join(STRATEGIES)}")
        for slot in (self.aggregator, self.fallback):
            if slot is not None and slot.count != 1:
                raise UserError(f"{slot.name}: count={slot.count}: there is one last answer")
        if self.layers > 1 and not self.proposers:
            raise UserError(f"proposers: none is given, and layers={self.layers} needs one")
        if self.strategy == "rank" and self.layers < 2:
            raise UserError("layers=1: strategy=rank needs proposers to choose from, so 2 at least")
        if self.strategy == "sequential" and self.layers != 2:
            raise UserError(f"layers={self.layers}: strategy=sequential has 2")
        if self.strategy == "sequential" and self.reserve >= self.window:
            raise UserError(f"reserve={self.reserve}: must be below window={self.window}")

    def count_windows(self, answers: int) -> int:
        """How often the aggregator is asked about so many answers, with "sequential"."""
        return 1 + max(0, ceil((answers - self.window) / (self.window - self.reserve)))

    @property
    def agent_specs(self) -> list[AgentSpec]:
        """Who may be asked."""
        slots = [*(self.proposers if self.layers > 1 else ()), self.aggregator]
        return [*slots, self.fallback] if self.fallback else slots

    def stream(self, request: Request) -> Stream:
        """The last answer piece by piece, once the proposers are done; see `swarm.models.stream`.

        What is chosen by rank comes in one piece.

        Raises:
            UserError: It came to nothing; or it broke off when part of it had been given, which no
                fallback mends.
        """
        (script,) = self._build_scripts([request])
        stages = yield from stream_final_answer(script, trace=self.trace)
        return stages.final

    def run(
        self, requests: Sequence[Request], watch: OnEvent | None = None, pieces: bool = True
    ) -> list[Transcript | UserError]:
        """What each request came to, with all that was said on the way; order kept.

        Args:
            requests: To be answered.
            watch: Is told of each call and answer; of a single request's last answer also piece by
                piece.
            pieces: Without them the last answer is asked for as a whole: where it breaks off, it is
                asked for again or left to the fallback, as nothing of it was shown.
        """
        if watch and pieces and len(requests) == 1:
            return [self._run_streaming(self._build_scripts(requests)[0], watch)]
        return super().run(requests, watch)

    def _run_streaming(self, script: Script[Transcript], watch: OnEvent) -> Transcript | UserError:
        pieces = stream_final_answer(script, watch, self.trace)
        try:
            while True:
                watch(0, AnswerDelta(next(pieces)))
        except StopIteration as end:
            stages: Transcript = end.value
            return stages
        except UserError as error:
            return error
        finally:
            pieces.close()

    def _iterate_rounds(
        self, request: Request, logged: set[str], tell: Callable[[Any], None]
    ) -> Script[Transcript]:
        return MoARun(self, request, logged).iterate_rounds()
