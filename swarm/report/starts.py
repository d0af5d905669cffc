"""The starts of a search, as its log tells them: how long each worked, and on what."""

import re
from dataclasses import dataclass, field
from datetime import datetime

from swarm.report.folder import RunFolder

LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ \w+ (.*)")
VERSIONS_LINE = re.compile(r"versions: (.*)")
SEARCH_START_LINE = re.compile(r"search (begins|goes on)")
TOKENS_LINE = re.compile(r"iteration (\d+): .*, tokens (\d+)")
METRICS_LINE = re.compile(r"ending_best_validation_utility: ")


@dataclass(slots=True)
class RunStart:
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


def read_starts(run: RunFolder) -> list[RunStart]:
    """Every start that worked on the search; one that only showed a finished one again did not."""
    try:
        text = (run.path / "log.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found: list[RunStart] = []
    for line in text.split("\n"):
        if told := LOG_LINE.match(line):
            _add_log_line(found, datetime.fromisoformat(told[1]), told[2])
    over = next((n for n, one in enumerate(found) if one.measured), len(found))
    return [one for n, one in enumerate(found) if n <= over or one.measured]


def _add_log_line(found: list[RunStart], now: datetime, words: str) -> None:
    """Put a line of the log to the start that it belongs to."""
    versions, begins = VERSIONS_LINE.match(words), SEARCH_START_LINE.match(words)
    # Logs of older versions have no line of versions, so that `search begins` is their first.
    if versions or (begins and (not found or found[-1].searching)):
        found.append(RunStart(now, now, versions[1] if versions else ""))
    if not found:
        return
    last = found[-1]
    last.ended = now
    last.searching |= bool(begins)
    last.measured |= bool(METRICS_LINE.match(words))
    if tokens := TOKENS_LINE.match(words):
        last.tokens[tokens[1]] = int(tokens[2])
