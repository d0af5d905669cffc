"""What a fine-tuning is to be: of which model, on which file, and how."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.compare.errors import InvalidArgument
from swarm.models.address import validate_url

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
            raise InvalidArgument(f"suffix={suffix!r}: must be None or 1 to {MAX_SUFFIX_CHARS} characters")
        if self.seed is not None and (type(self.seed) is not int or self.seed < 0):
            raise InvalidArgument(f"seed={self.seed!r}: must be None or a whole number, 0 or more")

    @property
    def label(self) -> str:
        """The suffix, or the file's name with - for _ where none is given."""
        return self.suffix or Path(self.file_name).stem.replace("_", "-")[:MAX_SUFFIX_CHARS]

    def to_row(self) -> dict[str, Any]:
        """What a database keeps of it; never a key."""
        return {
            "file_name": self.file_name, "base_model": self.base_model, "suffix": self.label,
            "epochs": self.epochs, "seed": self.seed,
        }  # fmt: skip


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
            "kind": "openai", "batch_size": self.batch_size, "base_url": self.base_url,
            "learning_rate_multiplier": self.lr_multiplier,
            "validation_file_name": self.validation_file_name,
        }  # fmt: skip


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
            "kind": "local", "seed": 42 if self.seed is None else self.seed,
            "batch_size": self.batch_size, "learning_rate": self.learning_rate,
            "lora_rank": self.lora_rank, "lora_alpha": self.lora_alpha, "device": self.device,
            "target_modules": list(self.target_modules), "expert_folder": self.expert_folder,
        }  # fmt: skip


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
            raise InvalidArgument(f'lr_schedule={self.lr_schedule!r}: must be "linear" or "constant"')

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
