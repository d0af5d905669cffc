"""The starts of a search, as its log tells them: how long each worked, and on what."""

import re
from dataclasses import dataclass, field
from datetime import datetime

from swarm.report.folder import RunFolder

LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ \w+ (.*)")
VERSIONS = re.compile(r"versions: (.*)")
BEGINS = re.compile(r"search (begins|goes on)")
TOKENS = re.compile(r"iteration (\d+): .*, tokens (\d+)")
METRICS = re.compile(r"ending_best_validation_utility: ")


@dataclass(slots=True)
class Start:
    """From one start of the search to the last line before the next.

    Attributes:
        versions: Of Python and the packages; empty where the log does not tell them.
        searching: Whether it came so far as to say that the search begins or goes on.
        measured: Whether it came to the metrics.
        tokens: Read and written on dev, by iteration.
    """

    began: datetime
    ended: datetime
    versions: str = ""
    searching: bool = False
    measured: bool = False
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.ended - self.began).total_seconds()


def starts(run: RunFolder) -> list[Start]:
    """Every start that worked on the search; one that only showed a finished one again did not."""
    try:
        text = (run.path / "log.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found: list[Start] = []
    for line in text.split("\n"):
        if told := LINE.match(line):
            _add(found, datetime.fromisoformat(told[1]), told[2])
    over = next((n for n, one in enumerate(found) if one.measured), len(found))
    return [one for n, one in enumerate(found) if n <= over or one.measured]


def _add(found: list[Start], now: datetime, words: str) -> None:
    """Put a line of the log to the start that it belongs to."""
    versions, begins = VERSIONS.match(words), BEGINS.match(words)
    # Logs of older versions have no line of versions, so that `search begins` is their first.
    if versions or (begins and (not found or found[-1].searching)):
        found.append(Start(now, now, versions[1] if versions else ""))
    if not found:
        return
    last = found[-1]
    last.ended = now
    last.searching |= bool(begins)
    last.measured |= bool(METRICS.match(words))
    if tokens := TOKENS.match(words):
        last.tokens[tokens[1]] = int(tokens[2])
