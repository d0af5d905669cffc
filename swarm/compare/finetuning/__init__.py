"""Fine-tuned models: jobs at OpenAI-compatible servers and on this machine, in one database."""

from swarm.compare.finetuning.dataset import Finding, ValidationResult
from swarm.compare.finetuning.manager import FinetuningManager
from swarm.compare.finetuning.params import (
    LocalTrainingParams,
    OpenaiTrainingParams,
    TinkerTrainingParams,
)

__all__ = [
    "Finding",
    "FinetuningManager",
    "LocalTrainingParams",
    "OpenaiTrainingParams",
    "TinkerTrainingParams",
    "ValidationResult",
]
