"""What was asked of a model in this process, and what it cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm.errors import UserError


@dataclass(slots=True)
class UsageTotals:
    """What a model was asked for in this process.

    Attributes:
        requests: Answers that the endpoint gave.
        cached: Answers that were not asked for again.
        refused: Texts that the endpoint would not answer; theirs are empty.
        prompt_tokens, new_tokens: As the endpoint counts them.
        cost: Of the tokens, by the model's prices.
    """

    requests: int = 0
    cached: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    cost: float = 0.0

    def add(self, answer: Mapping[str, Any], cost: float) -> None:
        """Count an answer that the endpoint gave."""
        self.requests += 1
        self.prompt_tokens += answer["prompt_tokens"]
        self.new_tokens += answer["new_tokens"]
        self.cost += cost


def compute_cost(answer: Mapping[str, Any], prices: Mapping[str, float]) -> float:
    """What an answer's tokens cost."""
    if not prices:
        return 0.0
    prompt, new = prices.get("prompt", 0.0), prices.get("new", 0.0)
    return float(prompt * answer["prompt_tokens"] + new * answer["new_tokens"]) / 1e6


def validate_prices(prices: object) -> dict[str, float]:
    """Prices of a million prompt and new tokens.

    Raises:
        UserError: They are something else.
    """
    if prices is None:
        return {}
    if isinstance(prices, Mapping) and set(prices) <= {"prompt", "new"}:
        found = {str(kind): price for kind, price in prices.items()}
        if all(isinstance(p, (int, float)) and 0 <= p < float("inf") for p in found.values()):
            return found
    raise UserError(f"prices={prices!r}: must be null or a mapping such as {{prompt: 0.1, new: 1}}")
