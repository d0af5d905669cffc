"""Writes data/worked_examples.jsonl: short texts of questions and answers of the nine domains.

Each text is four questions of one domain of skill_domains.py with their answers, drawn by
a generator of its own, so the file is the same on every machine. Run it from anywhere: it takes no
arguments. The task `perplexity` divides the texts into dev and test.
"""

import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "data" / "worked_examples.jsonl"
SEED, TEXTS, PAIRS = 7, 40, 4

sys.path.insert(0, str(ROOT))


def build() -> list[dict[str, str]]:
    """The texts, domain by domain; none occurs twice."""
    from skill_domains import DOMAINS

    found: dict[str, str] = {}
    for name, make in DOMAINS.items():
        for number in range(TEXTS):
            generator = random.Random(f"{SEED}/{name}/{number}")
            text = ""
            while not text or text in found:
                pairs = [make(generator) for _ in range(PAIRS)]
                text = "\n".join(f"{prompt}\n{response}" for prompt, response in pairs)
            found[text] = name
    return [{"domain": name, "text": text} for text, name in found.items()]


def main() -> None:
    """Write the file and say what is in it."""
    texts = build()
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    TARGET.write_text(lines, encoding="utf-8")
    print(f"{TARGET.name}: {len(texts)} texts, {len(lines)} bytes")


if __name__ == "__main__":
    main()
