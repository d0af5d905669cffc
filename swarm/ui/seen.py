"""What the page of a run shows, read from its folder; no widgets here."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.manifest import state_stamp
from swarm.report.blocks import Table
from swarm.report.compared import Compared
from swarm.report.folder import RunFolder
from swarm.report.front import front_table
from swarm.report.numbers import duration, number
from swarm.report.result import ends, figures, verdict
from swarm.running import command, underway
from swarm.ui import charts
from swarm.ui.home import Home
from swarm.ui.launching import failure, output, tail, words
from swarm.ui.shelf import BROKEN, Line, how_far
from swarm.words import caveats, sentence


@dataclass
class Course:
    """What a run came to so far; it changes with its state alone.

    Attributes:
        why_not: Why there is nothing yet; empty where there is.
        kind: "better", "worse", "unclear" or "open".
        told: Sentences.
        figures: Short facts, as what and how much.
        front, points: Of a task of several parts, the front as a chart and as a table.
    """

    why_not: str = ""
    kind: str = "open"
    verdict: str = ""
    told: list[str] = field(default_factory=list)
    figures: list[tuple[str, str]] = field(default_factory=list)
    models: Table | None = None
    domains: list[Table] = field(default_factory=list)
    particles: dict[str, Any] = field(default_factory=dict)
    coefficients: dict[str, Any] = field(default_factory=dict)
    front: dict[str, Any] = field(default_factory=dict)
    points: Table | None = None


@dataclass
class Seen:
    """A run at one moment.

    Attributes:
        line: `None` where there is no state yet.
        beginning: A process was started for it that does not hold the folder yet.
        note: Of the search at work (`swarm.running.underway`).
        stamp: Changes with the run's state.
        said: The end of its log, and what the search that the page started has said.
        error: What that ended with.
        command: As a person types it; empty where the folder does not keep it.
    """

    line: Line | None
    beginning: bool
    note: dict[str, Any] | None
    stamp: tuple[int, int]
    said: str
    error: str
    command: str


def see(home: Home, name: str) -> Seen:
    """Look at a run.

    Raises:
        UserError: The name is no folder's name.
    """
    path = home.run(name)
    stamp = state_stamp(path) or (0, 0)
    kept, line = command(path), home.shelf.line(name)
    error = "" if line and line.state != "failed" else failure(output(path), stamp[0] / 1e9)
    log, told = tail(path / "log.txt", 6_000), tail(output(path), 6_000)
    return Seen(
        line=line,
        beginning=home.launcher.beginning(path),
        note=underway(path),
        stamp=stamp,
        said=told if error or not log else log,
        error=error,
        command=words(kept["arguments"]) if kept else "",
    )


def course(path: Path) -> Course:
    """What a run came to so far."""
    try:
        return _course(RunFolder(path))
    except UserError as error:
        return Course(why_not=str(error).removeprefix(f"{path}: "))
    except BROKEN as error:
        return Course(why_not=unreadable(error))


def unreadable(error: Exception) -> str:
    """That a run's files are not what a search writes, as a person reads it."""
    said = f"{type(error).__name__}: {error}"
    return f"the files of this run are not as a search writes them ({said:.200})"


def _course(run: RunFolder) -> Course:
    models = Compared(run)
    kind, short, told = verdict(models)
    # Whether it runs is told beside its name: a report cannot know, and says so of a stopped one.
    short = short if run.finished else "Not over yet"
    also = [words for words in caveats(run.metrics) if words not in told]
    position = run.positions[models.places["ending"]]
    best = f"Best found: {sentence(run.experts, position, run.groups)}."
    table, *more = (block for block in ends(models).blocks if isinstance(block, Table))
    return Course(
        kind=kind, verdict=short, told=[told, best, *also],
        figures=figures(models), models=table, domains=more, particles=charts.particles(run),
        coefficients=charts.coefficients(run), **_front(run),
    )  # fmt: skip


def _front(run: RunFolder) -> dict[str, Any]:
    """The picture and the table of the front, where the task has parts."""
    found = run.front
    if found is None or len(found.names) < 2:
        return {}
    return {"front": charts.front(run, found), "points": front_table(run, found)}


def progress(note: dict[str, Any]) -> tuple[str, float]:
    """How far a search at work is, in words and as a share of its iterations."""
    told = [how_far(note)]
    if isinstance(speed := note.get("prompts_per_second"), int | float):
        told.append(f"{speed:.3g} prompts/s")
    if isinstance(left := note.get("seconds_left"), int | float):
        told.append(f"at most {duration(left)} left")
    if isinstance(best := note.get("best"), int | float):
        told.append(f"best {number(best)}")
    done, total = note.get("done") or 0, note.get("total") or 0
    within = done / total if total else 0.0
    return ", ".join(told), _share(note.get("iteration"), note.get("most"), within)


def _share(iteration: Any, most: Any, within: float) -> float:
    """Of the start and all iterations that may come."""
    if not isinstance(iteration, int) or not isinstance(most, int):
        return 0.0
    return max(0.0, min(1.0, (iteration + within) / (most + 1)))
