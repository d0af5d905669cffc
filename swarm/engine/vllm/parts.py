"""What vLLM is asked on behalf of one request, and what is made of what it says."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.engine.decode import DecodingRow
from swarm.engine.tokens import count_choice_tokens
from swarm.models import Completion

RequestIndex = tuple[int, int]
"""A position's, and a request's among those of the position."""


@dataclass(slots=True)
class GenerateRequest:
    """A prompt to be continued.

    Attributes:
        place: Of the request.
        params: vLLM's `SamplingParams`.
        row: The prompt, and what is said.
        ends: Token ids that end a text.
        decided: Whether these new tokens are enough; `None`: vLLM knows itself when to stop.
    """

    place: RequestIndex
    params: Any
    row: DecodingRow
    ends: Collection[int]
    decided: Callable[[list[int]], bool] | None

    @property
    def ids(self) -> list[int]:
        """What is to be read."""
        return self.row.prompt

    def handle_output(self, output: Any) -> bool:
        """Take what is new in vLLM's output; whether that was the end."""
        said = output.outputs[0]
        for number, token in enumerate(said.token_ids):
            if token in self.ends:
                return True
            self.row.new.append(token)
            if (draw := self.row.draw) and draw.top:
                draw.told.append(token_logprobs(said.logprobs[number], token, draw.top))
            if self.decided and self.decided(self.row.new):
                return True
        return bool(output.finished)


def token_logprobs(found: Mapping[int, Any], token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """A token's log probability and the likeliest tokens with theirs; see `Draw.told`."""
    likeliest = sorted((one.rank, other, one.logprob) for other, one in found.items())
    return found[token].logprob, [(i, value) for rank, i, value in likeliest if rank <= top]


@dataclass(slots=True)
class ChoiceRequest:
    """The choices of one request.

    Attributes:
        tokens: Of each choice.
        found: Of each choice, its log probability, and whether greedy decoding says just that.
    """

    tokens: list[list[int]]
    found: dict[int, tuple[float, bool]] = field(default_factory=dict)

    def build_completion(self, prompt: int) -> Completion:
        """What they come to after a prompt of so many tokens."""
        rows = [self.found.get(i, (0.0, True)) for i in range(len(self.tokens))]
        logprobs, greedy = zip(*rows, strict=True)
        counts = tuple(map(len, self.tokens))
        return Completion("", logprobs, prompt, count_choice_tokens(self.tokens), greedy, counts)


@dataclass(slots=True)
class ChoiceGroup:
    """Some of a request's choices: all of those that are one token, or one that is longer.

    Attributes:
        place: Of the request.
        params: vLLM's `SamplingParams`.
        ids: The prompt and, of a longer one, all but the last token.
        numbers: Which of the choices.
        scores: Where they go.
        prompt: How many of `ids` are the prompt's.
    """

    place: RequestIndex
    params: Any
    ids: list[int]
    numbers: Sequence[int]
    scores: ChoiceRequest
    prompt: int

    def handle_output(self, output: Any) -> bool:
        """Take vLLM's output, which comes once."""
        said = output.outputs[0]
        read = [output.prompt_logprobs[i][self.ids[i]] for i in range(self.prompt, len(self.ids))]
        before = sum(one.logprob for one in read)
        likeliest = all(one.rank == 1 for one in read)
        for number in self.numbers:
            last = self.scores.tokens[number][-1]
            value = before + said.logprobs[0][last].logprob
            self.scores.found[number] = (value, likeliest and said.token_ids[0] == last)
        return True
