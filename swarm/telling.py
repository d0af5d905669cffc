"""Tells what a search does: in the terminal, in its log, and to a tracker."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from swarm.live import View
from swarm.record import Record
from swarm.track import Tracker

log = logging.getLogger(__name__)


class Teller:
    """Hears what a search does, and tells it on.

    Args:
        record: The run's folder.
        tracker: Where it is shown besides.
        most: The most iterations that may come.
    """

    def __init__(self, record: Record, tracker: Tracker, most: int) -> None:
        self.record, self.tracker = record, tracker
        self.view = View(most)

    def opened(self, resumed: bool, facts: Mapping[str, Any]) -> None:
        """The folder is open.

        Args:
            resumed: Whether it had been searched in before.
            facts: `task`, `dev` (items searched on), `kept` (items that confirm), `base` (what
                stands in for the base model, if something does).
        """
        done = len(self.record.rounds)
        how = f"goes on after {done} evaluated rounds" if resumed and done else "begins"
        kept = f", {facts['kept']} more kept to confirm" if facts["kept"] else ""
        line = (
            f"search {how}: task {facts['task']} ({facts['dev']} dev items{kept}), "
            f"{len(self.record.state['experts'])} experts, folder {self.record.folder}"
        )
        for words in [line, *([f"base: {facts['base']}"] if facts["base"] else [])]:
            log.info(words)
            self.view.say(words)

    def iteration(self, number: int, seconds: float) -> None:
        """An iteration is recorded.

        Args:
            number: Which, from 0 on.
            seconds: What it took.
        """
        entry, best = self.record.rounds[-1], self.record.utility(self.record.best())
        measured = {
            "g": best,
            "g_worst": self.record.lowest(),
            "prompts_per_second": self.view.prompts_per_second,
            "seconds": seconds,
            "prompts_saved": entry["prompts_saved"],
            **{f"particle_{i}_now": u for i, u in enumerate(entry["utilities"])},
        }
        self.tracker.log(number, {k: v for k, v in measured.items() if v is not None})
        asked, saved = entry["prompts_asked"], entry["prompts_saved"]
        note = f"saved {saved} of {asked + saved} prompts" if saved else ""
        self.view.end(entry["utilities"], best, note)
        log.info("iteration %d: best %s, utilities %s, prompts asked %d, saved %d, tokens %d",
                 number, best, entry["utilities"], asked, saved, self.view.tokens)  # fmt: skip

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
