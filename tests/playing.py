"""Small items, models that know or are silent, and a task played with a model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.models import Completion, Model, Request
from swarm.tasks import Item, Score, Task


def choice_items(count: int) -> list[dict[str, Any]]:
    return [
        {
            "question": f"What comes after {n}?",
            "choices": {"A": f"{n}{n}", "B": f"{n + 1}", "C": "a stone", "D": "nothing"},
            "answer": "ABCD"[n % 4],
            "id": f"item-{n}",
            "domain": "even" if n % 2 == 0 else "odd",
        }
        for n in range(10, 10 + count)
    ]


def match_items(count: int) -> list[dict[str, Any]]:
    golds = ["Yes", "No", "7", "1,234", "-3", "Paris"]
    return [{"question": f"Question {n}?", "answer": golds[n % 6], "id": n} for n in range(count)]


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


class Knowing:
    """Answers with the gold answer of the item whose question the prompt holds."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.golds = {item["question"]: str(item["answer"]) for item in items}

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Request) -> Completion:
        shown = request.prompt if isinstance(request.prompt, str) else request.prompt[-1].content
        gold = next(gold for question, gold in self.golds.items() if question in shown)
        if request.choices:
            likely = (0.0 if choice.strip() == gold else -5.0 for choice in request.choices)
            return Completion("", tuple(likely))
        return Completion(f" {gold}\n")


class Silent:
    """Never says anything."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [Completion("") for _ in requests]


def played(task: Task, items: Sequence[Item], model: Model) -> list[Score]:
    game = task.play(items)
    requests = next(game)
    while True:
        try:
            requests = game.send(model.generate(requests))
        except StopIteration as end:
            return list(end.value)
