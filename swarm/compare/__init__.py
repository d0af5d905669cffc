"""Black-box experiments on models: questions, samples, judges, statistics, plots and a viewer."""

from importlib import import_module
from typing import Any

FROM = {
    "Config": "swarm.compare.config",
    "FinetuningManager": "swarm.compare.finetuning",
    "FreeForm": "swarm.compare.question_types",
    "FreeFormJudge": "swarm.compare.question_types",
    "ModelAdapter": "swarm.compare.sampling",
    "NextToken": "swarm.compare.question_types",
    "NoClientForModel": "swarm.errors",
    "Question": "swarm.compare.question",
    "Rating": "swarm.compare.question_types",
    "RatingJudge": "swarm.compare.question_types",
    "Runner": "swarm.compare.runner",
    "get_error_bars": "swarm.compare.statistics",
    "read_jsonl": "swarm._util.jsonl",
    "write_jsonl": "swarm._util.jsonl",
}

__all__ = list(FROM)


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that a script only loads what it uses."""
    if name not in FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(FROM[name]), name)
