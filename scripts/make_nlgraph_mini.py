"""Writes data/nlgraph_mini.json: NLGraph-style yes/no and shortest-path questions on tiny graphs.

Everything follows from (SEED, domain, counter): item number n of a domain is drawn by its own
generator, so the file is the same on every machine. Run it from anywhere: it takes no arguments.
"""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

SEED = 1
SIZES = {"dev": 200, "test": 400}
LETTERS = "ABCDEFGHJKLMNPRSTUVWXYZ"
TARGET = Path(__file__).resolve().parent.parent / "data" / "nlgraph_mini.json"

Edge = tuple[str, str, int]


def distance(edges: list[Edge], start: str, goal: str) -> int | None:
    """The total weight of the shortest way (Bellman-Ford), or None where no way leads there."""
    best = {start: 0}
    for _ in edges:
        for left, right, weight in edges:
            for near, far in ((left, right), (right, left)):
                if near in best:
                    best[far] = min(best.get(far, best[near] + weight), best[near] + weight)
    return best.get(goal)


def random_edges(
    generator: random.Random, names: list[str], links: int, heaviest: int
) -> list[Edge]:
    """`links` different edges between the named nodes, weights from 1 to `heaviest`."""
    pairs = [(left, right) for left in names for right in names if left < right]
    chosen = [generator.sample(pair, 2) for pair in generator.sample(pairs, links)]
    return [(left, right, generator.randint(1, heaviest)) for left, right in chosen]


def connectivity(generator: random.Random, counter: int) -> tuple[str, str]:
    """Yes or No by the counter's parity, on a random graph of seven nodes and three to seven edges.

    As in any random graph, a No often has a node without edges, and more edges make a Yes likelier.
    """
    wanted = counter % 2 == 0
    while True:
        names = generator.sample(LETTERS, 7)
        edges = random_edges(generator, names, links=generator.randint(3, 7), heaviest=1)
        start, goal = generator.sample(names, 2)
        if (distance(edges, start, goal) is not None) == wanted:
            break
    graph = ", ".join(f"{left} {right}" for left, right, _ in edges)
    question = f"Edges: {graph}. Is there a path between {start} and {goal}? Answer:"
    return question, "Yes" if wanted else "No"


def shortest_path(generator: random.Random, counter: int) -> tuple[str, str]:
    """A total weight from 1 to 9, in turn; three in five are one edge's, the others a sum."""
    wanted = 1 + counter % 9
    alone = wanted == 1 or (counter // 9) % 5 < 3
    while True:
        names = generator.sample(LETTERS, 5)
        edges = random_edges(generator, names, links=generator.randint(3, 4), heaviest=9)
        start, goal = generator.sample(names, 2)
        if distance(edges, start, goal) != wanted:
            continue
        if alone == any({start, goal} == {*edge[:2]} and edge[2] == wanted for edge in edges):
            break
    graph = ", ".join(f"{left} {right} {weight}" for left, right, weight in edges)
    question = f"Edges with weights: {graph}. Shortest path weight from {start} to {goal}? Answer:"
    return question, str(wanted)


def build() -> dict[str, Any]:
    """The whole file; no question occurs twice, and both domains fill half of each split."""
    seen: set[str] = set()
    splits: dict[str, list[dict[str, Any]]] = {}
    for split, size in SIZES.items():
        splits[split] = items = []
        for number in range(size):
            make = (connectivity, shortest_path)[number % 2]
            generator = random.Random(f"{SEED}/{make.__name__}/{split}/{number}")
            question, answer = make(generator, number // 2)
            while question in seen:
                question, answer = make(generator, number // 2)
            seen.add(question)
            items.append(
                {"question": question, "answer": answer, "id": number, "domain": make.__name__}
            )
    return {"dataset": "nlgraph_mini", **splits}


def main() -> None:
    """Write the file and say what is in it."""
    data = build()
    parts = [f'{{"dataset": {json.dumps(data["dataset"])}']
    for split in SIZES:
        rows = ",\n".join(" " + json.dumps(item) for item in data[split])
        parts.append(f'"{split}": [\n{rows}\n]')
    text = ",\n".join(parts) + "}\n"
    TARGET.write_text(text, encoding="utf-8")
    for split in SIZES:
        counts = Counter(item["answer"] for item in data[split])
        spread = ", ".join(f"{answer}: {count}" for answer, count in sorted(counts.items()))
        print(f"{TARGET.name} {split}: {len(data[split])} items ({spread})")


if __name__ == "__main__":
    main()
