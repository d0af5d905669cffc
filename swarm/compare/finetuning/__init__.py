"""Fine-tuned models of OpenAI-compatible servers: jobs, their models, and training files."""

from swarm.compare.finetuning.dataset import Finding, ValidationResult, count_training_tokens
from swarm.compare.finetuning.manager import FinetuningManager, OpenaiTrainingParams

__all__ = [
    "Finding",
    "FinetuningManager",
    "OpenaiTrainingParams",
    "ValidationResult",
    "count_training_tokens",
]
