"""Writes data/skills.json: new items of the nine domains that the shipped experts were trained on.

Every item is drawn by its own generator from (SEED, domain, split, number), so the file is the same
on every machine. No question is one that an expert was trained on, and of the small domains no fact
is: no spelled word, no opposite, no calendar question. Run it from anywhere, without arguments.
"""

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from skill_domains import DOMAINS, KEPT, Pair, fact, kept_for_tests, trained_on  # noqa: E402

from swarm.experts.train import TEMPLATE  # noqa: E402

SEED = 1
SIZES = {"dev": 20, "test": 100}
"""Items of each domain."""
TARGET = ROOT / "data" / "skills.json"


def new_pair(name: str, generator: random.Random, prompts: set[str], facts: set[str]) -> Pair:
    """The first drawn pair with a new prompt and a new fact, kept from training where few are."""
    while True:
        pair = DOMAINS[name](generator)
        new = pair[0] not in prompts and fact(name, pair) not in facts
        if new and (name not in KEPT or kept_for_tests(name, pair)):
            return pair


def build() -> dict[str, Any]:
    """The whole file; each split has the domains in turn, and no question occurs twice."""
    facts = {name: {fact(name, pair) for pair in trained_on(name)} for name in DOMAINS}
    prompts: set[str] = set()
    splits: dict[str, list[dict[str, Any]]] = {}
    for split, size in SIZES.items():
        splits[split] = items = []
        pairs = [(name, number) for number in range(size) for name in DOMAINS]
        for place, (name, number) in enumerate(pairs):
            generator = random.Random(f"{SEED}/{name}/{split}/{number}")
            pair = new_pair(name, generator, prompts, facts[name])
            prompts.add(pair[0])
            question = TEMPLATE.format(prompt=pair[0])
            items.append({"question": question, "answer": pair[1], "id": place, "domain": name})
        for item in items:  # what dev asks for, test asks for in no other words either
            pair = (item["question"].removesuffix(TEMPLATE.format(prompt="")), item["answer"])
            facts[item["domain"]].add(fact(item["domain"], pair))
    return {"dataset": "skills", **splits}


def main() -> None:
    """Write the file and say what is in it."""
    data = build()
    parts = [f'{{"dataset": {json.dumps(data["dataset"])}']
    for split in SIZES:
        rows = ",\n".join(" " + json.dumps(item) for item in data[split])
        parts.append(f'"{split}": [\n{rows}\n]')
    TARGET.write_text(",\n".join(parts) + "}\n", encoding="utf-8")
    for split in SIZES:
        items = data[split]
        commonest = Counter(item["answer"] for item in items).most_common(3)
        print(f"{TARGET.name} {split}: {len(items)} items, most frequent answers {commonest}")


if __name__ == "__main__":
    main()
