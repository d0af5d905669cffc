"""Savings and losses of racing, replayed on the recorded answers of a finished search.

    python benchmarks/racing.py [search/NAME] [--chunk 25]

Each seed draws the dev items anew from the recorded ones, with replacement and for all particles
alike, and repeats the iterations: every particle races against its own best so far. Positions stay
the recorded ones, so the effect of a lost improvement on later positions is not included. Prints
the table of docs/benchmarks.md; some seconds on one core.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swarm._util.files import read_gzip_json
from swarm.loop.racing import Incumbent, Racing
from swarm.runs.run_folder import position_key
from swarm.tasks.base import Score

SEEDS = 20


class Shuffled(Racing):
    """The exact rule with the items in an order drawn each iteration."""

    def item_order(
        self, marks: Sequence[Incumbent | None], items: int, seed: int, iteration: int
    ) -> list[int]:
        return Racing("z").item_order(marks, items, seed, iteration)


@dataclass
class Table:
    """Recorded values [N, items] of one iteration; a position is a particle's number."""

    values: np.ndarray

    def __call__(
        self, positions: Sequence[Sequence[float]], *, items: Sequence[int]
    ) -> list[list[Score]]:
        return [[Score(self.values[int(p[0]), item], None) for item in items] for p in positions]


def rules(chunk: int) -> dict[str, Racing]:
    """The rules that are compared, by name."""
    return {
        "off": Racing(),
        "exact, random order": Shuffled("exact", chunk=chunk),
        "exact, hardest first": Racing("exact", chunk=chunk),
        "z at .05": Racing("z", 0.05, chunk),
        "z at .01": Racing("z", 0.01, chunk),
    }


def recorded(folder: Path) -> list[dict[int, list[float]]]:
    """For each iteration, the values of the particles that were asked every item anew."""
    found, seen = [], set()
    rounds = json.loads((folder / "state.json").read_text())["rounds"]
    for number, entry in enumerate(rounds):
        rows = read_gzip_json(folder / "answers" / f"iteration_{number:04d}.json.gz")
        values = {}
        for i, (position, utility) in enumerate(
            zip(entry["positions"], entry["utilities"], strict=True)
        ):
            if utility is not None and position_key(position) not in seen:
                values[i] = [row["value"] for row in rows[str(i)]]
                seen.add(position_key(position))
        found.append(values)
    return found


def replay(
    racing: Racing, rounds: list[dict[int, np.ndarray]], seed: int
) -> tuple[float, int, int, bool]:
    """Share of the prompts asked, improvements lost, improvements, and whether the best is kept."""
    count, items = max(map(max, rounds)) + 1, len(next(iter(rounds[0].values())))
    marks: list[Incumbent | None] = [None] * count
    asked = saved = lost = improvements = 0
    highest = 0.0
    for number, values in enumerate(rounds):
        table = np.zeros((count, items))
        for i, row in values.items():
            table[i] = row
        rows = {i: [float(i)] for i in values}
        known = marks if number and racing.rule != "off" else []
        raced = racing.race_particles(Table(table), rows, known, items, seed, number)
        asked, saved = asked + raced.prompts_scored, saved + raced.saved
        for i, row in values.items():
            utility, mark = float(row.mean()), marks[i]
            highest = max(highest, utility)
            if mark is None or utility > mark.utility:
                improvements += number > 0
                lost += i in raced.stopped
                if i not in raced.stopped:
                    marks[i] = Incumbent(utility, tuple(row.tolist()))
    kept = max(mark.utility for mark in marks if mark) == highest
    return asked / (asked + saved), lost, improvements, kept


def newest() -> Path:
    """The run folder below search/ that finished last."""
    states = sorted(Path("search").glob("*/state.json"), key=lambda path: path.stat().st_mtime)
    done = [path.parent for path in states if json.loads(path.read_text())["finished"]]
    if not done:
        raise SystemExit("error: no finished search below search/; give a run folder")
    return done[-1]


def spread(values: Sequence[float]) -> str:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:5.1f} [{low:.1f}, {high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description="Racing rules on a recorded search.")
    parser.add_argument("folder", nargs="?", type=Path, help="a run folder; default: the newest")
    parser.add_argument("--chunk", type=int, default=25, help="items between two decisions")
    options = parser.parse_args()
    folder = options.folder or newest()
    if not (folder / "state.json").is_file():
        raise SystemExit(f"error: {folder} is not a run folder")
    rounds = recorded(folder)
    items = len(next(iter(rounds[0].values())))
    particles = sum(len(values) for values in rounds)
    print(
        f"{len(rounds)} iterations, {particles} evaluations of {items} items, "
        f"chunks of {options.chunk}, {SEEDS} seeds; median [quartiles]"
    )
    print(f"{'rule':22} {'prompts asked, %':20} {'improvements lost, %':22} best kept, seeds")
    for name, racing in rules(options.chunk).items():
        results = []
        for seed in range(SEEDS):
            drawn = np.random.default_rng(seed).integers(items, size=items)
            again = [{i: np.array(v)[drawn] for i, v in values.items()} for values in rounds]
            results.append(replay(racing, [values for values in again if values], seed))
        asked = spread([100 * r[0] for r in results])
        lost = spread([100 * r[1] / max(1, r[2]) for r in results])
        print(f"{name:22} {asked:20} {lost:22} {sum(r[3] for r in results)} of {SEEDS}")


if __name__ == "__main__":
    main()
