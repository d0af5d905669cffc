"""Writes data/composed.json: digits to sort downwards, which no expert that ships was trained on.

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
TARGET = ROOT / "data" / "composed.json"


def build() -> dict[str, Any]:
    """The whole file; no two items have the same digits in any order."""
    generator = random.Random(f"{SEED}/composed")
    found: dict[str, str] = {}
    while len(found) < sum(SIZES.values()):
        digits = [str(generator.randint(0, 9)) for _ in range(generator.choice((3, 4, 5)))]
        found.setdefault(" ".join(sorted(digits, reverse=True)), " ".join(digits))
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
