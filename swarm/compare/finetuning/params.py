"""What a fine-tuning is to be: of which model, on which file, and how."""

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from swarm.compare.finetuning.dataset import iter_lines, read_training_file
from swarm.errors import InvalidArgument
from swarm.models.transport import validate_url

# What a training file comes to in tokens and money; the network is never asked.

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
        how = (
            f"by {ENCODING}" if self.exact else f"an estimate, {CHARS_PER_TOKEN} characters a token"
        )
        lines = [f"{self.tokens:,} tokens an epoch ({how}); epochs: {self.epochs}"]
        width = max(map(len, self.prices), default=0)
        lines += [
            f"  {model:<{width}}  {price:g} a million tokens: {self.price_for(model):,.2f}"
            for model, price in self.prices.items()
        ]
        return "\n".join(lines if self.prices else [*lines, NO_PRICE_NOTE])


def estimate_cost(
    file_name: str,
    prices: Mapping[str, float] | None = None,
    epochs: int = 1,
    count: Callable[[str], int] | None = None,
) -> TrainingCost:
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
            total += TOKENS_PER_EXAMPLE + sum(
                _count_message_tokens(message, counted) for message in messages
            )
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


OPENAI_BASE_URL = "https://api.openai.com/v1"

MAX_SUFFIX_CHARS = 64
"""Characters that a suffix may have at OpenAI."""


@dataclass(kw_only=True)
class TrainingParams:
    """What both kinds share; see `OpenaiTrainingParams` and `LocalTrainingParams`."""

    file_name: str
    base_model: str
    suffix: str | None = None
    epochs: int | str = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        for key in ("file_name", "base_model"):
            if not isinstance(value := getattr(self, key), str) or not value.strip():
                raise InvalidArgument(f"{key}={value!r}: must be a text, and not an empty one")
        suffix = self.suffix
        if suffix is not None and not (
            isinstance(suffix, str) and suffix.strip() and len(suffix) <= MAX_SUFFIX_CHARS
        ):
            raise InvalidArgument(
                f"suffix={suffix!r}: must be None or 1 to {MAX_SUFFIX_CHARS} characters"
            )
        if self.seed is not None and (type(self.seed) is not int or self.seed < 0):
            raise InvalidArgument(f"seed={self.seed!r}: must be None or a whole number, 0 or more")

    @property
    def label(self) -> str:
        """The suffix, or the file's name with - for _ where none is given."""
        return self.suffix or Path(self.file_name).stem.replace("_", "-")[:MAX_SUFFIX_CHARS]

    def to_row(self) -> dict[str, Any]:
        """What a database keeps of it; never a key."""
        return {
            "file_name": self.file_name,
            "base_model": self.base_model,
            "suffix": self.label,
            "epochs": self.epochs,
            "seed": self.seed,
        }


@dataclass(kw_only=True)
class OpenaiTrainingParams(TrainingParams):
    """A job at a server that has OpenAI's fine-tuning API.

    Args:
        api_key: The key; in no text that is made of this object, and never kept.
        file_name: JSONL of chats.
        base_model: The server's name of the model.
        suffix: A part of the new model's name; `None` is the file's name.
        epochs, batch_size: Whole numbers, or "auto".
        seed: `None` leaves it to the server.
        lr_multiplier: A number above 0, or "auto".
        validation_file_name: JSONL of chats whose loss the server follows.
        base_url: Where the API is.

    Raises:
        WrongValue: A value is not allowed.
    """

    api_key: str = field(repr=False)
    batch_size: int | str = "auto"
    lr_multiplier: float | str = "auto"
    validation_file_name: str | None = None
    base_url: str = OPENAI_BASE_URL

    def __post_init__(self) -> None:
        super().__post_init__()
        key = self.api_key
        if not (isinstance(key, str) and key.strip() and key.isascii() and key.isprintable()):
            raise InvalidArgument("api_key: is empty, or what it holds cannot be a key")
        self.api_key = key.strip()
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if value != "auto":
                _check_positive_int(name, value, ' or "auto"')
        if self.lr_multiplier != "auto":
            _check_positive_number("lr_multiplier", self.lr_multiplier, ' or "auto"')
        self.base_url = validate_url(self.base_url).rstrip("/")

    def to_row(self) -> dict[str, Any]:
        """See `TrainingParams.told`."""
        return super().to_row() | {
            "kind": "openai",
            "batch_size": self.batch_size,
            "base_url": self.base_url,
            "learning_rate_multiplier": self.lr_multiplier,
            "validation_file_name": self.validation_file_name,
        }


@dataclass(kw_only=True)
class LocalTrainingParams(TrainingParams):
    """A LoRA that is trained on this machine with PEFT; what comes of it is an expert.

    Args:
        file_name: JSONL of chats, as for OpenAI; a message of "weight" 0 is not learnt.
        base_model: "base" for what the experts of the folder are of, else a folder with a
            transformers model, or a hub's name of one.
        suffix: The expert's name; `None` is the file's name.
        epochs: How often each answer is learnt from.
        batch_size: Answers in a step.
        learning_rate: AdamW's, after a short warm-up, falling to zero at the end.
        lora_rank, lora_alpha, target_modules: Of the LoRA.
        seed: Of the order and of the LoRA's start; `None` is 42.
        expert_folder: Where the expert is put.
        device: "cpu", "cuda" or e.g. "cuda:1"; `None` is the first GPU, or the CPU without one.

    Raises:
        WrongValue: A value is not allowed.
    """

    base_model: str = "base"
    epochs: int = 1
    batch_size: int = 8
    learning_rate: float = 1e-3
    lora_rank: int = 8
    lora_alpha: float = 16
    target_modules: Sequence[str] = ("q_proj", "v_proj")
    expert_folder: str = "initial_experts"
    device: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "batch_size", "lora_rank"):
            _check_positive_int(name, getattr(self, name))
        for name in ("learning_rate", "lora_alpha"):
            _check_positive_number(name, getattr(self, name))
        targets = self.target_modules
        if isinstance(targets, str) or not targets or not all(isinstance(t, str) for t in targets):
            raise InvalidArgument(f"target_modules={targets!r}: must be a list of layers' names")
        if self.suffix and not re.fullmatch(r"\w[\w.-]*", self.suffix):
            raise InvalidArgument(
                f"suffix={self.suffix!r}: names an expert's folder: letters, digits, - . _ alone"
            )

    @property
    def label(self) -> str:
        """As of `TrainingParams`, fit for a folder's name."""
        return re.sub(r"[^\w.-]+", "-", super().label).lstrip("-.") or "expert"

    def to_row(self) -> dict[str, Any]:
        """See `TrainingParams.told`."""
        return super().to_row() | {
            "kind": "local",
            "seed": 42 if self.seed is None else self.seed,
            "batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
            "lora_rank": self.lora_rank,
            "lora_alpha": self.lora_alpha,
            "device": self.device,
            "target_modules": list(self.target_modules),
            "expert_folder": self.expert_folder,
        }


@dataclass(kw_only=True)
class TinkerTrainingParams(TrainingParams):
    """A LoRA at Tinker, as llmcomp takes it; `FinetuningManager.create_job` names what is missing.

    Nothing is trained there: Tinker's API is reached by its own packages alone, which bring torch
    with CUDA. Models that were trained there are asked as "tinker://...".

    Args:
        api_key: The key; in no text that is made of this object, and never kept.
        file_name, base_model, suffix, epochs, seed: As of `OpenaiTrainingParams`.
        batch_size, learning_rate, lora_rank: As of `LocalTrainingParams`.
        save_every, log_every: Steps between two checkpoints, and two lines of the log.
        shuffle_on_start: Whether the examples are shuffled.
        renderer_name: Of the chat's form.
        lr_schedule: "linear" or "constant".

    Raises:
        WrongValue: A value is not allowed.
    """

    api_key: str = field(repr=False)
    epochs: int = 1
    batch_size: int = 32
    learning_rate: float = 2e-4
    lora_rank: int = 32
    save_every: int = 0
    log_every: int = 1
    shuffle_on_start: bool = True
    renderer_name: str | None = None
    lr_schedule: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "batch_size", "lora_rank", "log_every"):
            _check_positive_int(name, getattr(self, name))
        _check_positive_number("learning_rate", self.learning_rate)
        if self.lr_schedule not in ("linear", "constant"):
            raise InvalidArgument(
                f'lr_schedule={self.lr_schedule!r}: must be "linear" or "constant"'
            )

    def missing(self) -> str:
        """What is not here, and what is instead."""
        same = {key: getattr(self, key) for key in SHARED if getattr(self, key) is not None}
        told = ", ".join(f"{key}={value!r}" for key, value in same.items())
        return (
            "training at Tinker is missing: it needs the packages tinker and tinker-cookbook, "
            "which are not used here (save_every, log_every, shuffle_on_start, renderer_name and "
            "lr_schedule have no counterpart). Models trained there are asked as tinker://...; "
            f"this machine trains LocalTrainingParams({told}), with base_model a folder"
        )


SHARED = ("file_name", "suffix", "epochs", "batch_size", "learning_rate", "lora_rank", "seed")
"""Of `TinkerTrainingParams`, what `LocalTrainingParams` has too."""


def _check_positive_int(name: str, value: Any, more: str = "") -> None:
    if type(value) is not int or value < 1:
        raise InvalidArgument(f"{name}={value!r}: must be a whole number, 1 or more{more}")


def _check_positive_number(name: str, value: Any, more: str = "") -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise InvalidArgument(f"{name}={value!r}: must be a number above 0{more}")
