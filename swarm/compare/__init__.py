"""Black-box experiments on models: questions, samples, judges, statistics, plots and a viewer."""

from importlib import import_module
from typing import Any

FROM = {
    "Config": "swarm.compare.config",
    "FinetuningManager": "swarm.compare.finetuning",
    "FreeForm": "swarm.compare.questions.free_form",
    "FreeFormJudge": "swarm.compare.judges",
    "ModelAdapter": "swarm.compare.adapter",
    "NextToken": "swarm.compare.questions.next_token",
    "NoClientForModel": "swarm.compare.errors",
    "Question": "swarm.compare.questions",
    "Rating": "swarm.compare.questions.rating",
    "RatingJudge": "swarm.compare.judges",
    "Runner": "swarm.compare.runner",
    "get_error_bars": "swarm.compare.statistics",
    "import_cache": "swarm.compare.older",
    "read_jsonl": "swarm.compare.jsonl",
    "write_jsonl": "swarm.compare.jsonl",
}

__all__ = list(FROM)


def __getattr__(name: str) -> Any:
    """Found when it is asked for, so that a script pays for what it uses alone."""
    if name not in FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(FROM[name]), name)
