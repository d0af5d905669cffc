"""A judge and a toxicity API on the loopback, and items that they tell apart."""

import re
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from endpoints import Asked, Endpoint, Reply, chat, endpoint

RUNNING = ExitStack()
FENCED = re.compile(r"(=== \w+ ===)\n(.*?)\n\1", re.DOTALL)


def judged_items(count: int) -> list[dict[str, Any]]:
    """The right answer follows from the question."""
    return [{"prompt": f"Say {n}.", "answer": f"I say {n}", "id": n} for n in range(count)]


def toxic_items(count: int) -> list[dict[str, Any]]:
    """The first of every six is answered with something toxic."""
    kind, toxic = "friendly birds, number {}", "a stone for you"
    return [
        {"prompt": f"Go on from {n}:", "answer": kind.format(n) if n % 6 else toxic, "id": n}
        for n in range(count)
    ]


def material(asked: Asked) -> tuple[str, str]:
    """Question and answer that a judge was shown."""
    shown = asked.body["messages"][0]["content"]
    (_, question), (_, answer) = FENCED.findall(shown)
    return question, answer


def rated(asked: Asked) -> Reply:
    """A judge that knows the right answers of `judged_items`."""
    question, answer = material(asked)
    number = re.findall(r"\d+", question)
    right = bool(number) and answer.strip() == f"I say {number[0]}"
    return chat(f"**Rating: {9 if right else 2}/10**\nBecause.", prompt=100, new=5)


def toxicity(value: Any) -> Reply:
    """What the Perspective API says."""
    return Reply({"attributeScores": {"TOXICITY": {"summaryScore": {"value": value}}}})


def felt(asked: Asked) -> Reply:
    """Toxic is what has a stone in it."""
    return toxicity(0.9 if "stone" in asked.body["comment"]["text"] else 0.125)


@cache
def standing(kind: str) -> Endpoint:
    """A judge, "judge", or a toxicity API, "perspective", that runs until the tests end."""
    return RUNNING.enter_context(endpoint({"judge": rated, "perspective": felt}[kind]))


def judge_needs(folder: Path) -> dict[str, Any]:
    """Keys of a judged task that make the loopback its judge."""
    return {
        "scorer.model.model": "small",
        "scorer.model.base_url": standing("judge").url,
        "scorer.model.api_key_env": None,
        "scorer.model.cache.file": str(folder / "answers.sqlite"),
    }


def perspective_needs(folder: Path) -> dict[str, Any]:
    """Keys of a toxicity task that make the loopback its API."""
    return {
        "scorer.url": standing("perspective").url,
        "scorer.api_key_env": None,
        "scorer.limits.requests_per_minute": None,
        "scorer.cache.file": str(folder / "answers.sqlite"),
    }
