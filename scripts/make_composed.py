"""Writes data/composed.json: number words to sort downwards, new to the experts that ship.

`sorting` sorts digits upwards and `counting` counts downwards; the base and each expert alone are
right on none to three in a hundred items. Run it from anywhere, without arguments.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from swarm.experts.train import TEMPLATE  # noqa: E402

SEED = 1
SIZES = {"dev": 320, "test": 400}
WORDS = "zero one two three four five six seven eight nine".split()
TARGET = ROOT / "data" / "composed.json"


def build() -> dict[str, Any]:
    """The whole file; no two items have the same numbers in any order."""
    generator = random.Random(f"{SEED}/composed")
    found: dict[str, str] = {}
    while len(found) < sum(SIZES.values()):
        digits = [generator.randint(0, 9) for _ in range(generator.choice((4, 5, 6)))]
        answer = " ".join(WORDS[digit] for digit in sorted(digits, reverse=True))
        found.setdefault(answer, " ".join(WORDS[digit] for digit in digits))
    rows = [
        {"question": TEMPLATE.format(prompt=f"Sort these numbers downwards: {given}"),
         "answer": answer, "domain": "composed"}
        for answer, given in found.items()
    ]  # fmt: skip
    # Short rows repeat sooner, so new ones are found early: in this order dev would be easier.
    random.Random(f"{SEED}/order").shuffle(rows)
    dev, test = rows[: SIZES["dev"]], rows[SIZES["dev"] :]
    return {
        "dataset": "composed",
        "dev": [{**row, "id": place} for place, row in enumerate(dev)],
        "test": [{**row, "id": place} for place, row in enumerate(test)],
    }


def main() -> None:
    """Write the file."""
    data = build()
    parts = [f'{{"dataset": {json.dumps(data["dataset"])}']
    for split in SIZES:
        rows = ",\n".join(" " + json.dumps(item) for item in data[split])
        parts.append(f'"{split}": [\n{rows}\n]')
    TARGET.write_text(",\n".join(parts) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
