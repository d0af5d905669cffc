"""Tells what a search does: in the terminal, in its folder and log, and to a tracker."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from swarm.executors import Result
from swarm.live import Progress, View
from swarm.record import Record
from swarm.running import Hold
from swarm.track import Tracker
from swarm.track.search import Followed

log = logging.getLogger(__name__)


class Teller:
    """Hears what a search does, and tells it on.

    Args:
        record: The run's folder.
        tracker: Where it is shown besides.
        most: The most iterations that may come.
        show: Whether the terminal shows it.
    """

    def __init__(self, record: Record, tracker: Tracker, most: int, show: bool = True) -> None:
        self.record, self.followed = record, Followed(tracker, record.folder)
        self.progress = Progress(most)
        self.view = View(self.progress, None if show else Console(quiet=True))
        self._hold: Hold | None = None

    def hold(self) -> None:
        """Keep the run's folder for this process, which says in it how far it is.

        Raises:
            UserError: Another process has it, or it cannot be written.
        """
        self._hold = Hold(self.record.folder)

    def close(self) -> None:
        """Let the folder go."""
        if self._hold:
            self._hold.close()

    def begin(self, what: str, iteration: int, positions: int, items: int) -> None:
        """An evaluation of so many positions on so many items begins."""
        self.progress.begin(what, iteration, positions, items)
        self._note()

    def watch(self, result: Result) -> None:
        """A job of the evaluation is done."""
        self.progress.watch(result)
        self._note()

    def writes(self, what: str = "") -> None:
        """What is being written from now on; nothing."""
        self.progress.writing = what

    def _note(self) -> None:
        if self._hold:
            self._hold.say(self.progress.facts())

    def opened(self, resumed: bool, facts: Mapping[str, Any]) -> None:
        """The folder is open.

        Args:
            resumed: Whether it had been searched in before.
            facts: `task`, `dev` (items searched on), `kept` (items that confirm), `base` (what
                stands in for the base model, if something does), `notes` (further lines).
        """
        done = len(self.record.rounds)
        how = f"goes on after {done} evaluated rounds" if resumed and done else "begins"
        kept = f", {facts['kept']} more kept to confirm" if facts["kept"] else ""
        line = (
            f"search {how}: task {facts['task']} ({facts['dev']} dev items{kept}), "
            f"{len(self.record.state['experts'])} experts, folder {self.record.folder}"
        )
        base = [f"base: {facts['base']}"] if facts["base"] else []
        for words in [line, *base, *facts.get("notes", [])]:
            log.info(words)
            self.view.say(words)
        for entry in self.record.rounds:
            self.progress.add(entry)

    def iteration(self, number: int, seconds: float) -> None:
        """An iteration is recorded.

        Args:
            number: Which, from 0 on.
            seconds: What it took.
        """
        entry, best = self.record.rounds[-1], self.record.utility(self.record.best())
        speed = self.progress.prompts_per_second
        self.followed.iteration(number, entry, seconds=seconds, prompts_per_second=speed)
        asked, saved = entry["prompts_asked"], entry["prompts_saved"]
        self.writes()
        self.progress.end(entry)
        self.view.end()
        self._note()
        log.info("iteration %d: best %s, utilities %s, prompts asked %d, saved %d, tokens %d",
                 number, best, entry["utilities"], asked, saved, self.progress.tokens)  # fmt: skip

    def ended(self, reason: str) -> None:
        """No iteration follows."""
        log.info("search ends: %s", reason)
        self.view.say(f"search ends: {reason}")

    def verdict(self, metrics: dict[str, Any], groups: Sequence[str], saved: str) -> None:
        """The search is judged.

        Args:
            metrics: As `swarm.verdict.judge` returns them.
            groups: The pool's names of groups.
            saved: What the best found lies in the folder as.
        """
        self.view.verdict(metrics, self.record.state["experts"], groups)
        self.view.say(f"best {saved}: {self.record.folder / 'global_best'}")
