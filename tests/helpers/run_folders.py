"""Run folders made by code, of any size, for the report's tests."""

from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from swarm._util.files import short_digest, write_json
from swarm.report.document import Report
from swarm.runs.folder import RECORD_FILE, Record, RunRecord
from swarm.runs.verdict import EXPERT, FOUND, Compared, Verdict
from swarm.stats.significance import mean_interval, paired_test
from swarm.tasks.metrics import Measured

HOSTILE = "</style></script><script>alert('x')</script><img src=x onerror=alert(1)>\x00\ud800"
VOID = {"meta", "link", "img", "br", "input"}


def folder(
    path: Path,
    particles: int = 6,
    iterations: int = 4,
    experts: int = 4,
    items: int = 30,
    *,
    groups: Sequence[str] = ("all",),
    parts: Sequence[str] = (),
    lowest: float | None = None,
    test: int | None = 40,
    finished: bool = True,
    text: str = "so it is",
    more: Callable[[Verdict], Verdict] | None = None,
) -> Path:
    """A run folder whose particles move towards the first expert and get better on the way.

    Args:
        groups: The names of groups of modules.
        parts: Of a mixture.
        lowest: Answers are rated from here to 1; `None`: they are right or wrong.
        test: Test items; `None`: no test.
        text: What every model writes.
        more: Changes the verdict.
    """
    draw = np.random.default_rng(7)
    record = RunRecord(path)
    record.open_or_resume(
        {"seed": 7, "task.name": "made", "task items": "x"}, _names(experts), groups
    )
    now = np.tile(np.eye(experts)[np.arange(particles) % experts], (1, len(groups)))
    goal = np.tile(np.eye(experts)[0], len(groups))

    def answers(position: np.ndarray, count: int) -> list[dict[str, Any]]:
        chance = 0.7 - 0.15 * float(np.linalg.norm(position - 0.7 * goal)) / len(groups)
        values = (draw.random(count) < chance).astype(float)
        if lowest is not None:
            values = lowest + (1 - lowest) * draw.beta(1 + 4 * chance, 3, count)
        rows = [
            {"id": j, "value": float(v), "answer": f"{v:g}" if v or j % 5 else None, "text": text}
            for j, v in enumerate(values)
        ]
        return [{**row, "part": parts[row["id"] % len(parts)]} for row in rows] if parts else rows

    for _ in range(iterations + 1):
        rows = {i: answers(now[i], items) for i in range(particles)}
        utilities = np.array([np.mean([r["value"] for r in mine]) for mine in rows.values()])
        facts = {
            "items_scored": [items] * particles,
            "prompts_scored": items * particles,
            "prompts_saved": 0,
        }
        record.add_iteration(now, utilities, rows, {}, facts)
        now = now + 0.2 * (goal - now) + draw.normal(0, 0.03, now.shape)
    if finished:
        record.state["finished"] = f"{iterations} iterations done"
        verdict = _verdict(record, experts, test, answers, parts)
        record.state["verdict"] = (more(verdict) if more else verdict).to_dict()
        record.save_state()
    return path


def data_file(path: Path, text: str, items: int) -> None:
    """Write the data file of a folder's test items into its configuration."""
    content = _items(text, items)
    file = path / "data.json"
    write_json(
        file,
        {
            "dev": [{**one, "question": f"dev {n}"} for n, one in enumerate(content)],
            "test": content,
        },
    )
    write_json(path / "config.json", {"task": {"name": "made", "file": str(file)}, "seed": 7})


def digest_of_items(text: str, items: int) -> str:
    """The digest of those test items."""
    return short_digest(_items(text, items))


def _items(text: str, items: int) -> list[dict[str, Any]]:
    """Items of two domains."""
    return [
        {
            "question": f"{text} number {n}?",
            "answer": f"right {n}",
            "id": n,
            "domain": ("even", "odd")[n % 2],
        }
        for n in range(items)
    ]


def _names(count: int) -> list[str]:
    words = ("arithmetic", "calendar", "counting", "logic", "opposites", "roads", "rooms")
    return [words[n] if n < len(words) else f"expert_{n}" for n in range(count)]


def _verdict(
    record: RunRecord, experts: int, test: int | None, answers: Any, parts: Sequence[str]
) -> Verdict:
    places = record.best_expert(), record.find_best()
    expert = record.state["experts"][places[0][1]]
    dev = [measured(record.load_answers(place), parts) for place in places]
    tested: list[Measured | None] = [None, None]
    gain = None
    name = digest_of_items("What", test) if test else None
    if test:
        given = {place: answers(np.array(record.position_at(place)), test) for place in places}
        for place in places:
            record.save_answers("test", record.position_at(place), str(name), given[place])
        tested = [measured(given[place], parts) for place in places]
        before, after = ([row["value"] for row in given[place]] for place in places)
        gain = paired_test(after, before)
    position = record.position_at(places[1])
    return Verdict(
        Compared(FOUND, "best found", dev[1], tested[1], position=position),
        expert,
        [Compared(EXPERT, f"best expert ({expert})", dev[0], tested[0], gain)],
        places=places,
        settings={"ensemble": 0, "test_items": name},
    )


def measured(rows: Sequence[dict[str, Any]], parts: Sequence[str] = ()) -> Measured:
    """The result of these answers."""
    interval = mean_interval([row["value"] for row in rows])
    unparsed = sum(row["answer"] is None for row in rows) / len(rows)
    of = {part: [row["value"] for row in rows if row["part"] == part] for part in parts}
    return Measured(*interval, unparsed, {part: float(np.mean(v)) for part, v in of.items()})


class Document(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} closes another element"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def section(found: Report, key: str) -> Any:
    """The section of a report with this key."""
    return next(one for one in found.sections if one.key == key)


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Replace the record of a run folder by one with this state and the same checksums."""
    sums = Record(folder).read().sums
    for name in (RECORD_FILE, "run.json"):
        (folder / name).unlink(missing_ok=True)
    record = RunRecord(folder)
    record.state = {**state, "rounds": [], "optimizer": None}
    lines = record._record
    for number, entry in enumerate(state["rounds"]):
        change = {} if number else {"set": state.get("optimizer") or {}}
        lines.write({"iteration": number, "round": entry, "optimizer": change})
    lines.write({"files": sums})
    record.save_state()
