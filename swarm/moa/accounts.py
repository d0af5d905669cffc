"""What was spent: calls, tokens and cost of each model, and nothing guessed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.collab import AgentAnswer
from swarm.printing import align_columns

NO_PRICE = "no price known"


@dataclass(slots=True)
class ModelUsage:
    """One model's part, or the sum of several.

    Attributes:
        calls: All, those that failed or were kept too.
        cached, failed: Of those, the kept answers and the calls without an answer.
        prompt_tokens, new_tokens: Of what was asked now, as the models count them.
        cost: Of what was asked now, in the currency of the prices.
        priced, unpriced: Calls asked now whose price is known, and those of which it is not.
    """

    calls: int = 0
    cached: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    cost: float = 0.0
    priced: int = 0
    unpriced: int = 0

    def add(self, answer: AgentAnswer) -> None:
        """Count one call."""
        self.calls += 1
        self.failed += bool(answer.error)
        if answer.completion is None:
            return
        if answer.completion.cached:
            self.cached += 1
            return
        self.prompt_tokens += answer.completion.prompt_tokens
        self.new_tokens += answer.completion.new_tokens
        self.cost += answer.completion.cost
        known = answer.completion.known_cost is not None
        self.priced += known
        self.unpriced += not known

    @property
    def known_cost(self) -> float | None:
        """The cost; `None` where no call asked now came with a price."""
        return None if self.unpriced and not self.priced else self.cost

    def format_cost(self) -> str:
        """The cost in words."""
        if self.known_cost is None:
            return NO_PRICE
        rest = f" and {self.unpriced} calls, {NO_PRICE}" if self.unpriced else ""
        return f"{self.cost:.6f}{rest}"


def sum_usage(answers: Iterable[AgentAnswer]) -> ModelUsage:
    """The account of all answers together."""
    found = ModelUsage()
    for answer in answers:
        found.add(answer)
    return found


def format_usage_table(answers: Sequence[AgentAnswer]) -> list[str]:
    """Each model's account and their sum, in columns."""
    names = list(dict.fromkeys(answer.name for answer in answers))
    accounts = [sum_usage(answer for answer in answers if answer.name == name) for name in names]
    rows = [("model", "calls", "cached", "failed", "tokens read", "tokens new", "cost")]
    for name, one in zip([*names, "total"], [*accounts, sum_usage(answers)], strict=True):
        counts = (one.calls, one.cached, one.failed, one.prompt_tokens, one.new_tokens)
        rows.append((name, *map(str, counts), one.format_cost()))  # type: ignore[arg-type]
    return align_columns(rows)
