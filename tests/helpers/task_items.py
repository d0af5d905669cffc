"""Small items, models that know or are silent, and a task played with a model."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.models.base import Completion, Model, Request
from swarm.tasks.base import Item, Score, Task
from swarm.tasks.exact_match import ExactMatch


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


def number_items(count: int) -> list[dict[str, Any]]:
    golds = ["7", "1,234", "-3", "0.5", 18, 2.25]
    return [{"prompt": f"Number {n}?", "answer": golds[n % 6], "id": n} for n in range(count)]


def year_items(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"When was {n}?", "answer": str(1900 + n)} for n in range(count)]


def phrase_items(count: int) -> list[dict[str, Any]]:
    golds: list[Any] = ["Paris", "the Red Sea", ["two dogs", "a cat"], "Anna-Maria"]
    return [{"prompt": f"Name {n}?", "answer": golds[n % 4], "id": n} for n in range(count)]


def contrary_items(count: int) -> list[dict[str, Any]]:
    words = "hot cold big small fast slow hard soft high low young old rich poor wet dry full empty"
    told = words.split()[:count]
    asked = (f"The road is {word}. Say the contrary.\nAnswer:" for word in told)
    return [{"prompt": prompt, "answer": told[n ^ 1]} for n, prompt in enumerate(asked)]


def text_items(count: int) -> list[dict[str, Any]]:
    return [
        {"text": f"These are the {n} words that stand at place {n * n}. "} for n in range(count)
    ]


def text_file(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The keys of task=perplexity for one text of all items, of which each is a window."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(item["text"] for item in (*content["dev"], *content["test"])) * 2
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return {"file": str(folder / "text.txt"), "window": 50, "dev_limit": 12, "test_limit": 6}


def exact_match(folder: Path, name: str, dev: Sequence[Any], test: Sequence[Any]) -> ExactMatch:
    """A task with these gold answers; items have no domain of their own."""
    splits = {
        split: [{"id": n, "question": f"{split} {n}", "answer": a} for n, a in enumerate(golds)]
        for split, golds in (("dev", dev), ("test", test))
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(splits))
    return ExactMatch(name, str(path))


def domains_file(path: Path) -> Path:
    """Choices of two domains, 20 items each a split; the right letters take turns."""

    def item(number: int) -> dict[str, Any]:
        domain, letters = (("doors", "AB"), ("paths", "ABC"))[number % 2]
        choices = {letter: f"{letter.lower()}{number}" for letter in letters}
        gold = letters[number // 2 % len(letters)]
        asked = {"question": f"which one {number}", "id": number, "domain": domain}
        return {**asked, "choices": choices, "answer": gold}

    splits = {"dev": [item(n) for n in range(40)], "test": [item(n) for n in range(100, 140)]}
    path.write_text(json.dumps(splits))
    return path


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


class Knowing(Model):
    """Answers with the gold answer of the item whose question or prompt the prompt holds.

    Where texts of choices are scored, the likely one is that of the letter it would say.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.golds = {asked(item): gold(item) for item in items}
        self.texts = {asked(item): item.get("choices", {}) for item in items}

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Request) -> Completion:
        shown = request.prompt if isinstance(request.prompt, str) else request.prompt[-1].content
        question = max((known for known in self.golds if known in shown), key=len)
        said = self.said(question)
        if request.choices:
            right = {said.strip(), self.texts[question].get(said, said).strip()}
            likely = (0.0 if choice.strip() in right else -5.0 for choice in request.choices)
            return Completion("", tuple(likely), choice_tokens=(1,) * len(request.choices))
        return Completion(f" {said}\n")

    def said(self, question: str) -> str:
        return self.golds[question]


class Mistaken(Knowing):
    """Answers with the first gold answer that is not the item's."""

    def said(self, question: str) -> str:
        return next(other for other in self.golds.values() if other != self.golds[question])


def asked(item: Item) -> str:
    """What is sure to be in an item's prompt."""
    return str(item.get("question", item.get("prompt")))


def gold(item: Item) -> str:
    """What a model that knows says; of several answers the last."""
    answer = item["answer"]
    return str(answer[-1] if isinstance(answer, list) else answer)


class Silent(Model):
    """Never says anything, nor how likely anything is."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        counts = [len(request.choices) for request in requests]
        return [Completion("", (math.nan,) * n, choice_tokens=(1,) * n) for n in counts]


class Unscored(Model):
    """Never says anything, and gives no log probabilities."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [Completion("") for _ in requests]


class Saying(Model):
    """Says the texts, one a request, from the first again after the last."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [
            Completion(self.texts[n % len(self.texts)], (math.nan, *[-1.0] * len(r.choices))[1:])
            for n, r in enumerate(requests)
        ]


def played(task: Task, items: Sequence[Item], model: Model) -> list[Score]:
    game = task.run(items)
    requests = next(game)
    while True:
        try:
            requests = game.send(model.generate(requests))
        except StopIteration as end:
            return list(end.value)


STRANGE = [
    *(
        "",
        " ",
        "\n",
        "\t\r\n",
        "\0",
        "\x1b[31mred\x1b[0m",
        "\x7f\x80\x9f",
        "\ufeff",
        "\u200b\u200e",
    ),
    *("\ud800", "a\udfffb", "\U0001f600" * 50, "e\u0301" * 50, "\u202eABC\u202c", "\uffff\ufdd0"),
    *("9" * 5000, "-" * 3000 + "1", "1," * 3000, "1,234" * 1000, "." * 5000),
    *"1e999999999 1e-9999 NaN -inf 0x1e5 1_000 ١٢٣ Ⅷ ½ 1/0 #### null".split(),
    *("#### ", "#### -", "answer is", "[" * 2000, "{" * 2000 + "}" * 2000),
    *('{"answer": ' * 300 + "1" + "}" * 300, '{"answer": "A', "\\boxed{", "    return"),
    *"<b>A</b> <answer> <script>alert(1)</script> &lt;&#0;&amp; </s><|im_end|>".split(),
    *("(" * 3000, "\\" * 999, "%s%n{0}{prompt}", "$(touch x)", "'; DROP TABLE items; --"),
    *("A" * 20_000, "A B C D " * 500, "yes no " * 500, "(A)(B)" * 300, "not A, not B"),
    *("word " * 4000, "\n" * 5000, "```", "```python", "```python\n```", "```\n" * 300),
]


def hostile(count: int = 200, seed: int = 0) -> list[str]:
    """Answers that a model should not give: the strange ones, then draws and mixtures of them."""
    draw = random.Random(seed)
    texts = dict.fromkeys(STRANGE)
    marks = "ABCDabc0123456789.,-+$%#*_`'\"()[]{}<>/\\:;=!? \n\t"
    while len(texts) < count:
        kind = draw.randrange(3)
        if kind == 0:
            parts = [draw.choice(STRANGE)[:200] for _ in range(draw.randint(2, 6))]
            texts[draw.choice(("", " ", "\n")).join(parts)] = None
        elif kind == 1:
            texts["".join(chr(draw.randrange(0x3000)) for _ in range(draw.randint(1, 300)))] = None
        else:
            texts["".join(draw.choice(marks) for _ in range(draw.randint(1, 600)))] = None
    return list(texts)[:count]


def shared_words(prompt: str, answer: str, item: Item) -> float:
    """For tests of a user's function: the share of the gold's words that the answer has."""
    words = gold(item).split()
    return sum(word in answer.split() for word in words) / len(words)
