"""What a training file comes to in tokens and money; the network is never asked."""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from swarm.compare.errors import InvalidArgument
from swarm.compare.finetuning.validation import read_training_file, iter_lines

TOKENS_PER_MESSAGE, TOKENS_PER_EXAMPLE = 4, 2
"""Tokens that OpenAI's chat format adds to a message, and to an example."""

CHARS_PER_TOKEN = 4
"""Characters in a token, roughly, of English."""

ENCODING = "o200k_base"
VOCABULARY_URL = f"https://openaipublic.blob.core.windows.net/encodings/{ENCODING}.tiktoken"

NO_PRICE_NOTE = "  no price known: give that of a million tokens, --price MODEL=PRICE"


class TrainingCost(NamedTuple):
    """What an epoch costs.

    Attributes:
        tokens: Of one epoch.
        exact: Whether a tokeniser has counted; else a token is taken for 4 characters.
        epochs: How often all of them are trained on.
        prices: Model -> price of a million tokens.
    """

    tokens: int
    exact: bool
    epochs: int
    prices: Mapping[str, float]

    def price_for(self, model: str) -> float:
        """What all epochs cost."""
        return self.tokens * self.epochs * self.prices[model] / 1e6

    def __str__(self) -> str:
        how = f"by {ENCODING}" if self.exact else f"an estimate, {CHARS_PER_TOKEN} characters a token"
        lines = [f"{self.tokens:,} tokens an epoch ({how}); epochs: {self.epochs}"]
        width = max(map(len, self.prices), default=0)
        lines += [f"  {model:<{width}}  {price:g} a million tokens: {self.price_for(model):,.2f}"
                  for model, price in self.prices.items()]  # fmt: skip
        return "\n".join(lines if self.prices else [*lines, NO_PRICE_NOTE])


def estimate_cost(
    file_name: str, prices: Mapping[str, float] | None = None, epochs: int = 1,
    count: Callable[[str], int] | None = None,
) -> TrainingCost:  # fmt: skip
    """What a training on a file costs.

    Args:
        file_name: JSONL of chats; lines that are none are left out.
        prices: Model -> price of a million trained tokens; they change, so none are here.
        epochs: How often all of it is trained on.
        count: How many tokens a text has; `None` is tiktoken's o200k_base where it is installed
            and has its vocabulary on this disk, else the characters by 4.

    Raises:
        WrongValue: The file cannot be read, or a number is not allowed.
    """
    if type(epochs) is not int or epochs < 1:
        raise InvalidArgument(f"epochs={epochs!r}: must be a whole number, 1 or more")
    for model, price in (prices or {}).items():
        if type(price) not in (int, float) or not 0 <= price < math.inf:
            raise InvalidArgument(f"prices: {model} costs {price!r}; must be a number, 0 or more")
    exact = count or _load_tiktoken()
    counted = exact or (lambda text: -(-len(text) // CHARS_PER_TOKEN))
    total = 0
    for _, line in iter_lines(read_training_file(file_name)):
        try:
            messages = json.loads(line)["messages"]
            total += TOKENS_PER_EXAMPLE + sum(_count_message_tokens(message, counted) for message in messages)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            continue
    return TrainingCost(total, exact is not None, epochs, prices or {})


def _count_message_tokens(message: dict[str, Any], count: Callable[[str], int]) -> int:
    texts = [value for value in message.values() if isinstance(value, str)]
    if isinstance(parts := message.get("content"), list):
        texts += [part["text"] for part in parts if isinstance(part.get("text"), str)]
    if isinstance(calls := message.get("tool_calls"), list):
        texts += [json.dumps(call.get("function")) for call in calls]
    # A name takes the role's place in the format.
    return TOKENS_PER_MESSAGE + sum(map(count, texts)) - ("name" in message)


def _load_tiktoken() -> Callable[[str], int] | None:
    """The tokeniser, if it is installed and need not download anything."""
    try:
        import tiktoken
    except ImportError:
        return None
    # Where tiktoken keeps what it has downloaded; without a file there it would ask the network.
    own = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    folder = Path(own or Path(tempfile.gettempdir()) / "data-gym-cache")
    if not (folder / hashlib.sha1(VOCABULARY_URL.encode()).hexdigest()).is_file():
        return None
    try:
        encoding = tiktoken.get_encoding(ENCODING)
    except Exception:
        # The file is not the vocabulary, and to download it is not allowed or has failed.
        return None
    return lambda text: len(encoding.encode(text, disallowed_special=()))
