"""Writes data/hellaswag_mini.json and data/truthfulqa_mini.json: seeded subsets of fetched files.

    python -m swarm.fetch_data hellaswag truthfulqa
    python scripts/make_choice_subsets.py data/eval/hellaswag.json data/eval/truthfulqa.json

Dev items come from the fetched file's dev items and test items from its test items; a question of
the drawn dev items is not drawn for test. HellaSwag's dev items are all of activities that its
training set has ("indomain"), so only such test items are drawn; the "domain" of an item becomes
where its text is from, ActivityNet or WikiHow. Questions and choices stay as they are. Each file
names the source, the authors and the licence of its data. The input must be the file whose SHA-256
is in data/SHA256SUMS, so the output is the same on every machine.
"""

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from swarm.fetch_data import digest, pinned

SEED = 1
SIZES = {"dev": 200, "test": 400}
DATA = Path(__file__).resolve().parent.parent / "data"
ORIGINS = {
    "hellaswag": {
        "source": "HellaSwag, validation split (https://rowanzellers.com/hellaswag), as Model "
        "Swarms divides it",
        "authors": "Zellers, Holtzman, Bisk, Farhadi, Choi (ACL 2019), arXiv 1905.07830",
        "licence": "MIT",
    },
    "truthfulqa": {
        "source": "TruthfulQA, mc1 (https://github.com/sylinrl/TruthfulQA), as Model Swarms "
        "divides it",
        "authors": "Lin, Hilton, Evans (ACL 2022), arXiv 2109.07958",
        "licence": "Apache-2.0",
    },
}
"""Where the data are from, by the name of the fetched file."""


def build(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The subset of a fetched file: 200 dev and up to 400 test items, no question twice.

    Args:
        name: A key of `ORIGINS`.
        given: The content of the fetched file.
    """
    seen: set[str] = set()
    domains = {item.get("domain") for item in given["dev"]}
    splits = {}
    for split, size in SIZES.items():
        places = list(range(len(given[split])))
        random.Random(f"{SEED}/{name}/{split}").shuffle(places)
        found: list[dict[str, Any]] = []
        for place in places:
            item = given[split][place]
            question = " ".join(item["question"].split())
            if question not in seen and item.get("domain") in domains and len(found) < size:
                seen.add(question)
                found.append({**item, "id": place})
        splits[split] = found
    if name == "hellaswag":
        for item in (*splits["dev"], *splits["test"]):
            item["domain"] = "wikihow" if item["question"].startswith("[header]") else "activitynet"
    return {"dataset": f"{name}_mini", **ORIGINS[name], **splits}


def written(data: dict[str, Any]) -> str:
    """The content of a file, one item a line."""
    head = [f"{json.dumps(key)}: {json.dumps(data[key])}" for key in data if key not in SIZES]
    parts = [
        f'"{split}": [\n' + ",\n".join(" " + json.dumps(item) for item in data[split]) + "\n]"
        for split in SIZES
    ]
    return "{" + ",\n".join(head + parts) + "}\n"


def main() -> None:
    """Write the subset of each named file and report what is in it."""
    parser = argparse.ArgumentParser(description="Write small subsets of fetched choice files.")
    parser.add_argument("files", nargs="+", type=Path, help="hellaswag.json, truthfulqa.json")
    for path in parser.parse_args().files:
        if path.stem not in ORIGINS:
            sys.exit(f"error: {path}: the name must be one of {', '.join(ORIGINS)}, with .json")
        if not path.is_file():
            sys.exit(f"error: {path} is missing: python -m swarm.fetch_data {path.stem}")
        content = path.read_bytes()
        if digest(content) != pinned()[path.stem]:
            sys.exit(f"error: {path} is not the file fetched by python -m swarm.fetch_data")
        data = build(path.stem, json.loads(content))
        target = DATA / f"{data['dataset']}.json"
        target.write_text(written(data), encoding="utf-8")
        for split in SIZES:
            counts = Counter(item["answer"] for item in data[split])
            spread = ", ".join(f"{letter}: {count}" for letter, count in sorted(counts.items()))
            print(f"{target.name} {split}: {len(data[split])} items ({spread})")


if __name__ == "__main__":
    main()
