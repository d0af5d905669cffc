"""Writes data/gym_*.json: items of reasoning-gym, which no expert that ships was trained on.

Needs `pip install reasoning-gym==0.1.25`; another release may draw other items. The categories and
their settings are below. Run it from anywhere, without arguments.
"""

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from swarm.experts.train import TEMPLATE  # noqa: E402

SEED = 1
SIZES = {"dev": 320, "test": 400}
CATEGORIES: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1},
    "needle_haystack": {"min_num_statements": 3, "max_num_statements": 5},
}
"""Of each, what differs from the category's own settings: short enough for a small model."""


def build(category: str) -> dict[str, Any]:
    """The file of one category; no question occurs twice."""
    import reasoning_gym

    settings = CATEGORIES[category]
    total = sum(SIZES.values())
    drawn = reasoning_gym.create_dataset(category, size=4 * total, seed=SEED, **settings)
    found = {task["question"].strip(): str(task["answer"]) for task in drawn}
    if len(found) < total:
        raise SystemExit(f"error: {category} has {len(found)} distinct items, {total} are needed")
    rows = [
        {"question": TEMPLATE.format(prompt=question), "answer": answer, "domain": category}
        for question, answer in found.items()
    ]
    # Short questions repeat sooner, so new ones are found early: in this order dev would be easier.
    random.Random(f"{SEED}/{category}").shuffle(rows)
    rows = rows[:total]
    dev, test = rows[: SIZES["dev"]], rows[SIZES["dev"] :]
    return {
        "dataset": f"gym_{category}",
        "dev": [{**row, "id": place} for place, row in enumerate(dev)],
        "test": [{**row, "id": place} for place, row in enumerate(test)],
    }


def main() -> None:
    """Write the files and say what is in them."""
    for category in CATEGORIES:
        data = build(category)
        target = ROOT / "data" / f"{data['dataset']}.json"
        parts = [f'{{"dataset": {json.dumps(data["dataset"])}']
        for split in SIZES:
            rows = ",\n".join(" " + json.dumps(item) for item in data[split])
            parts.append(f'"{split}": [\n{rows}\n]')
        target.write_text(",\n".join(parts) + "}\n", encoding="utf-8")
        for split in SIZES:
            commonest = Counter(item["answer"] for item in data[split]).most_common(3)
            print(f"{target.name} {split}: {len(data[split])} items, most frequent {commonest}")


if __name__ == "__main__":
    main()
