"""Parameters of fine-tunings, and estimates of their cost in tokens and money."""

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

from swarm._util.files import parse_json
from swarm._util.terminal import align_columns
from swarm.compare.finetuning.dataset import iter_lines, read_training_file
from swarm.errors import InvalidArgument
from swarm.models.transport import validate_url

TOKENS_PER_MESSAGE, TOKENS_PER_EXAMPLE = 4, 2
"""Tokens that OpenAI's chat format adds to a message, and to an example."""

CHARS_PER_TOKEN = 4
"""Approximate characters per token of English."""

ENCODING = "o200k_base"
VOCABULARY_URL = f"https://openaipublic.blob.core.windows.net/encodings/{ENCODING}.tiktoken"

NO_PRICE_NOTE = "  no price known: give the price per million tokens, --price MODEL=PRICE"


class TrainingCost(NamedTuple):
    """Cost of a training.

    Attributes:
        tokens: Tokens per epoch.
        exact: Whether a tokenizer was used; else a token is counted as 4 characters.
        epochs: Number of epochs.
        prices: Price of a million tokens by model.
    """

    tokens: int
    exact: bool
    epochs: int
    prices: Mapping[str, float]

    def price_for(self, model: str) -> float:
        """Return the cost of all epochs."""
        return self.tokens * self.epochs * self.prices[model] / 1e6

    def __str__(self) -> str:
        method = (
            f"by {ENCODING}" if self.exact else f"an estimate, {CHARS_PER_TOKEN} characters a token"
        )
        lines = [f"{self.tokens:,} tokens an epoch ({method}); epochs: {self.epochs}"]
        lines += align_columns(
            [
                (f"  {model}", f"{price:g} a million tokens: {self.price_for(model):,.2f}")
                for model, price in self.prices.items()
            ]
        )
        return "\n".join(lines if self.prices else [*lines, NO_PRICE_NOTE])


def estimate_cost(
    file_name: str,
    prices: Mapping[str, float] | None = None,
    epochs: int = 1,
    count: Callable[[str], int] | None = None,
) -> TrainingCost:
    """Estimate the cost of training on a file, without network access.

    Args:
        file_name: JSONL file of chats; malformed lines are skipped.
        prices: Price of a million trained tokens by model; there are no built-in prices, as they
            change.
        epochs: Number of epochs.
        count: Counts the tokens of a text; `None` is tiktoken's o200k_base if it is installed with
            its vocabulary on this disk, else a quarter of the characters.

    Raises:
        InvalidArgument: The file cannot be read, or a number is invalid.
    """
    if type(epochs) is not int or epochs < 1:
        raise InvalidArgument(f"epochs={epochs!r}: must be an integer, 1 or more")
    for model, price in (prices or {}).items():
        if type(price) not in (int, float) or not 0 <= price < math.inf:
            raise InvalidArgument(f"prices: {model} costs {price!r}; must be a number, 0 or more")
    exact = count or _load_tiktoken()
    counted = exact or (lambda text: -(-len(text) // CHARS_PER_TOKEN))
    total = 0
    for _, line in iter_lines(read_training_file(file_name)):
        try:
            messages = parse_json(line)["messages"]
            total += TOKENS_PER_EXAMPLE + sum(
                _count_message_tokens(message, counted) for message in messages
            )
        except (ValueError, TypeError, LookupError, AttributeError):
            continue
    return TrainingCost(total, exact is not None, epochs, prices or {})


def _count_message_tokens(message: dict[str, Any], count: Callable[[str], int]) -> int:
    texts = [value for value in message.values() if isinstance(value, str)]
    if isinstance(parts := message.get("content"), list):
        texts += [part["text"] for part in parts if isinstance(part.get("text"), str)]
    if isinstance(calls := message.get("tool_calls"), list):
        texts += [json.dumps(call.get("function")) for call in calls]
    # A name replaces the role in the format.
    return TOKENS_PER_MESSAGE + sum(map(count, texts)) - ("name" in message)


def _load_tiktoken() -> Callable[[str], int] | None:
    """Return tiktoken's token counter, if it is installed and needs no download."""
    try:
        import tiktoken
    except ImportError:
        return None
    # tiktoken's download cache; without a file there it would access the network.
    configured = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    folder = Path(configured or Path(tempfile.gettempdir()) / "data-gym-cache")
    if not (folder / hashlib.sha1(VOCABULARY_URL.encode()).hexdigest()).is_file():
        return None
    try:
        encoding = tiktoken.get_encoding(ENCODING)
    except Exception:
        # The file is not the vocabulary, and a download is not allowed or has failed.
        return None
    return lambda text: len(encoding.encode(text, disallowed_special=()))


OPENAI_BASE_URL = "https://api.openai.com/v1"

MAX_SUFFIX_CHARS = 64
"""Maximum characters of a suffix at OpenAI."""


@dataclass(kw_only=True)
class TrainingParams:
    """Common parameters; see `OpenaiTrainingParams` and `LocalTrainingParams`."""

    file_name: str
    base_model: str
    suffix: str | None = None
    epochs: int | str = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        for key in ("file_name", "base_model"):
            if not isinstance(value := getattr(self, key), str) or not value.strip():
                raise InvalidArgument(f"{key}={value!r}: must be a non-empty string")
        suffix = self.suffix
        if suffix is not None and not (
            isinstance(suffix, str) and suffix.strip() and len(suffix) <= MAX_SUFFIX_CHARS
        ):
            raise InvalidArgument(
                f"suffix={suffix!r}: must be None or 1 to {MAX_SUFFIX_CHARS} characters"
            )
        if self.seed is not None and (type(self.seed) is not int or self.seed < 0):
            raise InvalidArgument(f"seed={self.seed!r}: must be None or an integer, 0 or more")

    @property
    def label(self) -> str:
        """The suffix; by default the file's name with - for _."""
        return self.suffix or Path(self.file_name).stem.replace("_", "-")[:MAX_SUFFIX_CHARS]

    def to_row(self) -> dict[str, Any]:
        """Return the fields stored in the database, never including a key."""
        return {
            "file_name": self.file_name,
            "base_model": self.base_model,
            "suffix": self.label,
            "epochs": self.epochs,
            "seed": self.seed,
        }


@dataclass(kw_only=True)
class OpenaiTrainingParams(TrainingParams):
    """A job at a server with OpenAI's fine-tuning API.

    Args:
        api_key: API key; not part of `repr`, and never stored.
        file_name: JSONL file of chats.
        base_model: The server's name of the model.
        suffix: Part of the new model's name; `None` is the file's name.
        epochs, batch_size: Integers, or "auto".
        seed: `None` leaves it to the server.
        lr_multiplier: A number above 0, or "auto".
        validation_file_name: JSONL file of chats whose loss the server tracks.
        base_url: URL of the API.

    Raises:
        InvalidArgument: A value is invalid.
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
            raise InvalidArgument("api_key: is empty or not a valid key")
        self.api_key = key.strip()
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if value != "auto":
                _check_positive_int(name, value, ' or "auto"')
        if self.lr_multiplier != "auto":
            _check_positive_number("lr_multiplier", self.lr_multiplier, ' or "auto"')
        self.base_url = validate_url(self.base_url).rstrip("/")

    def to_row(self) -> dict[str, Any]:
        """See `TrainingParams.to_row`."""
        return super().to_row() | {
            "kind": "openai",
            "batch_size": self.batch_size,
            "base_url": self.base_url,
            "learning_rate_multiplier": self.lr_multiplier,
            "validation_file_name": self.validation_file_name,
        }


@dataclass(kw_only=True)
class LocalTrainingParams(TrainingParams):
    """A LoRA trained on this machine with PEFT; the result is an expert.

    Args:
        file_name: JSONL file of chats, as for OpenAI; messages with "weight" 0 are not trained on.
        base_model: "base" for the base model of the folder's experts, else the folder or the hub id
            of a transformers model.
        suffix: Name of the expert; `None` is the file's name.
        epochs: Number of epochs.
        batch_size: Answers per step.
        learning_rate: Learning rate of AdamW, with a short warm-up and a decay to zero.
        lora_rank, lora_alpha, target_modules: Parameters of the LoRA.
        seed: Seed of the order and of the initial LoRA; `None` is 42.
        expert_folder: Parent folder of the expert.
        device: "cpu", "cuda" or e.g. "cuda:1"; `None` is the first GPU, or the CPU without one.

    Raises:
        InvalidArgument: A value is invalid.
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
            raise InvalidArgument(f"target_modules={targets!r}: must be a list of layer names")
        if self.suffix and not re.fullmatch(r"\w[\w.-]*", self.suffix):
            raise InvalidArgument(
                f"suffix={self.suffix!r}: must contain only letters, digits, - . and _"
            )

    @property
    def label(self) -> str:
        """As `TrainingParams.label`, valid as a folder's name."""
        return re.sub(r"[^\w.-]+", "-", super().label).lstrip("-.") or "expert"

    def to_row(self) -> dict[str, Any]:
        """See `TrainingParams.to_row`."""
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
    """A LoRA at Tinker, with llmcomp's parameters; `FinetuningManager.create_job` rejects it.

    Tinker's API is available only through its packages, which require torch with CUDA. Models
    trained there can be queried as "tinker://...".

    Args:
        api_key: API key; not part of `repr`, and never stored.
        file_name, base_model, suffix, epochs, seed: See `OpenaiTrainingParams`.
        batch_size, learning_rate, lora_rank: See `LocalTrainingParams`.
        save_every, log_every: Steps between two checkpoints, and between two lines of the log.
        shuffle_on_start: Whether to shuffle the examples.
        renderer_name: Name of the chat format.
        lr_schedule: "linear" or "constant".

    Raises:
        InvalidArgument: A value is invalid.
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
        """Explain that Tinker is not supported, and the local alternative."""
        same = {key: getattr(self, key) for key in SHARED if getattr(self, key) is not None}
        arguments = ", ".join(f"{key}={value!r}" for key, value in same.items())
        return (
            "training at Tinker is not supported: it needs the packages tinker and "
            "tinker-cookbook, "
            "which are not used here (save_every, log_every, shuffle_on_start, renderer_name and "
            "lr_schedule have no counterpart). Models trained there are asked as tinker://...; "
            f"this machine trains LocalTrainingParams({arguments}), with base_model a folder"
        )


SHARED = ("file_name", "suffix", "epochs", "batch_size", "learning_rate", "lora_rank", "seed")
"""Fields of `TinkerTrainingParams` that `LocalTrainingParams` has, too."""


def _check_positive_int(name: str, value: Any, more: str = "") -> None:
    if type(value) is not int or value < 1:
        raise InvalidArgument(f"{name}={value!r}: must be an integer, 1 or more{more}")


def _check_positive_number(name: str, value: Any, more: str = "") -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise InvalidArgument(f"{name}={value!r}: must be a number above 0{more}")
