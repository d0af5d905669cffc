"""Black-box experiments on models: questions, samples, judges, statistics, plots and a viewer."""

from importlib import import_module
from typing import Any

FROM = {
    "Config": "config",
    "FinetuningManager": "finetuning",
    "FreeForm": "questions.free_form",
    "FreeFormJudge": "judges",
    "ModelAdapter": "adapter",
    "NextToken": "questions.next_token",
    "NoClientForModel": "errors",
    "Question": "questions",
    "Rating": "questions.rating",
    "RatingJudge": "judges",
    "Runner": "runner",
    "get_error_bars": "statistics",
    "import_cache": "older",
    "read_jsonl": "jsonl",
    "write_jsonl": "jsonl",
}

__all__ = list(FROM)


def __getattr__(name: str) -> Any:
    """Found when it is asked for, so that a script pays for what it uses alone."""
    if name not in FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{FROM[name]}"), name)
