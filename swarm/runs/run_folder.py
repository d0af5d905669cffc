"""The run folder: the state, and everything that follows from it.

state.json and the lines of rounds.jsonl after it (`swarm.runs.manifest`) say what is done. The
scratchpad and the saved bests are made from them and from the answers of the rounds, so that
whatever a kill left behind is put right by the next start. Every other file has a checksum, by
which a start finds what was damaged.
"""

import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from swarm._util.files import (
    append,
    encode_json,
    read_gzip_json,
    remove,
    write_atomic,
    write_gzip_json,
    write_json,
)
from swarm._util.secrets import clean, identity_values
from swarm.errors import UserError
from swarm.runs.manifest import (
    JOURNAL,
    MANIFEST_FILE,
    STATE_FILE,
    Manifest,
    answers_place,
    apply_difference,
    difference,
    encode_state,
    journal_line,
    replay,
)

# What a run folder tells of its rounds in forms for others: the original's scratchpad, a vote.

EXACT_ERROR = 1e-6
"""A relative error of saved weights up to here is float32's rounding."""


def reconstruction_error(folder: Path) -> dict[str, float]:
    """How far a run's saved best is from what was measured, if it was cut to be saved."""
    try:
        facts = json.loads((folder / "global_best" / "swarm.json").read_text())
    except (OSError, ValueError):
        return {}
    error = facts.get("reconstruction_error", {}).get("overall", 0.0)
    return {"reconstruction_error": error} if error > EXACT_ERROR else {}


def write_ensemble_yaml(folder: Path, metrics: Mapping[str, Any]) -> None:
    """Write ensemble.yaml, which `python -m swarm.evaluate` runs as a model; without a vote, none.

    Args:
        folder: The run's.
        metrics: As `swarm.loop.final_metrics.final_metrics` makes them.
    """
    import yaml

    if "ensemble_members" not in metrics:
        (folder / "ensemble.yaml").unlink(missing_ok=True)
        return
    members = [
        {"folder": f"particle_{one['particle']}/personal_best", "utility": one["utility"]}
        for one in metrics["ensemble_members"]
    ]
    content = {"rule": "majority", "members": members}
    head = "# The vote of the best personal bests; how many was chosen on dev.\n"
    text = head + yaml.safe_dump(content, sort_keys=False)
    write_atomic(folder / "ensemble.yaml", text.encode())


def build_scratchpad(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The utilities of a run under the names that the original's users know.

    A particle without a utility in a round (not evaluated, or stopped before the last item) keeps
    its last one in its history.
    """
    count = len(rounds[0]["utilities"]) if rounds else 0
    histories: list[list[float | None]] = [[] for _ in range(count)]
    best_so_far: list[float | None] = []
    measured: list[float] = []
    for entry in rounds:
        for history, utility in zip(histories, entry["utilities"], strict=True):
            history.append(utility if utility is not None or not history else history[-1])
            if utility is not None:
                measured.append(utility)
        best_so_far.append(max(measured, default=None))
    pad: dict[str, Any] = {
        "g": best_so_far[-1] if rounds else None,
        "g_worst": min(measured, default=None),
        "g_history": best_so_far,
    }
    for i, history in enumerate(histories):
        pad[f"particle_{i}_now"] = history[-1]
        pad[f"particle_{i}_best"] = max((u for u in history if u is not None), default=None)
        pad[f"particle_{i}_history"] = history
    return pad


log = logging.getLogger(__name__)

SCRATCHPAD_FILE = "utility_scratchpad.json"

SaveFn = Callable[[Sequence[float], Path, dict[str, Any]], None]
"""Writes the adapter of some coefficients to a folder, with more facts about it, whole or not."""

ParticleIndex = tuple[int, int]
"""(round, particle)."""

STATE_KEYS = {"identity", "experts", "rounds", "optimizer", "finished", "metrics"}


def position_key(position: Sequence[float] | np.ndarray) -> str:
    """A position as text, exactly."""
    return " ".join(float(c).hex() for c in position)


class RunRecord:
    """A run's folder.

    Attributes:
        folder: Where it is.
        state: What is done: `identity`, `experts`, how many of them are the user's `own`, `groups`,
            `rounds` (positions and utilities of every iteration), `optimizer` and, at the end,
            `finished`, `chosen` (where the best were chosen by something else than these
            utilities) and `metrics`; and `versions`, the packages that answered from which
            iteration on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state: dict[str, Any] = {}
        self.manifest = Manifest(folder)
        self._saved: set[str] = set()  # the keys of the state in state.json
        self._cut = ""
        self._summary = Summary()
        self._damaged: list[str] = []
        self._inspected: tuple[list[str], dict[str, str]] | None = None

    def open_or_resume(
        self,
        identity: Mapping[str, Any],
        experts: Sequence[str],
        groups: Sequence[str] = ("all",),
        own: int | None = None,
    ) -> bool:
        """Begin, or go on where the folder's state says; True if it went on.

        Raises:
            UserError: The folder holds another search: its differing keys are named.
        """
        goes_on = self.load_state(identity)
        self._remove_drafts()
        if goes_on:
            self._remove_damaged()
            return True
        self.manifest = Manifest(self.folder)
        self.state = {
            "identity": dict(identity),
            "experts": list(experts),
            "own": len(experts) if own is None else own,
            "groups": list(groups),
            "rounds": [],
            "optimizer": None,
            "finished": None,
            "metrics": None,
        }
        self.save_state()
        return False

    def load_state(self, identity: Mapping[str, Any]) -> bool:
        """Read the folder's state, if it has a round; as `open`, but nothing is ever written."""
        path = self.folder / STATE_FILE
        if not path.is_file():
            for other in (".lock", "tuning.json"):
                if (self.folder / other).exists():
                    what = "several searches" if other == ".lock" else "a fine-tuning"
                    raise UserError(f"{self.folder} is the folder of {what}; choose another name=")
            if (self.folder / MANIFEST_FILE).exists() or (self.folder / "answers").exists():
                raise UserError(
                    f"{path} is missing, which alone says what this search has done; put it back "
                    "from a copy, or choose another name="
                )
            return False
        state, self._cut = replay(self.folder)
        self.state = state or {}
        if not set(self.state) >= STATE_KEYS:
            raise UserError(
                f"{path} is not the state of a search, or is damaged; put it back from a copy, or "
                "choose another name="
            )
        # Before its first round a search has nothing to lose: it may begin as another one.
        if self.iterations:
            self._check_identity(identity)
            self._check_integrity()
        return bool(self.iterations)

    def _check_integrity(self) -> None:
        """Find what was damaged; once, for a folder that has not changed since.

        Raises:
            UserError: Answers of a round were, which nothing else holds.
        """
        rounds = [answers_place(number) for number in range(len(self.iterations))]
        self.manifest.read()
        if self._inspected == (rounds, self.manifest.sums):
            return
        self._inspected = rounds, dict(self.manifest.sums)
        self._damaged = [
            place
            for place in self.manifest.find_damaged()
            if place in rounds or not _is_iteration_file(place)  # else the round is asked anew
        ]
        lost = [
            place
            for place in rounds
            if place in self._damaged
            or (place not in self.manifest.sums and not self._is_readable(place))
        ]
        if lost:
            more = f" and {len(lost) - 1} more are" if len(lost) > 1 else " is"
            raise UserError(
                f"{self.folder / lost[0]}{more} damaged or missing, and nothing else holds these "
                "answers; put it back from a copy, or choose another name="
            )

    def _is_readable(self, place: str) -> bool:
        """Whether a file of answers is whole by gzip's own checksum."""
        try:
            read_gzip_json(self.folder / place)
        except (OSError, ValueError, EOFError, zlib.error):
            return False
        return True

    def _remove_damaged(self) -> None:
        """Remove what was damaged, so that it is made anew, and say so."""
        if self._cut:
            log.warning(
                "%s is damaged or missing (%s): iterations from %d on are evaluated again",
                self.folder / JOURNAL,
                self._cut,
                len(self.iterations),
            )
        if self._cut or (self.folder / JOURNAL).exists():
            self.save_state()
        if self.manifest.lost:
            log.warning(
                "%s is damaged or missing: made anew, as are scratchpad and saved bests",
                self.folder / MANIFEST_FILE,
            )
        elif self._damaged:
            log.warning(
                "%s: damaged or missing, now made anew: %s", self.folder, ", ".join(self._damaged)
            )
        places = {_rebuild_unit(path) for path in self._damaged}
        for path in self.manifest.paths_under_any(places):
            remove(self.folder / path)
        self.manifest.remove_paths(*places)
        asked_again = any(place.startswith("answers/") for place in places)
        rounds = {answers_place(number) for number in range(len(self.iterations))}
        # A kill leaves answers without a checksum at most for one file.
        for file in (self.folder / "answers").glob("*.json.gz"):
            place = file.relative_to(self.folder).as_posix()
            if _is_iteration_file(place) and place not in rounds:
                self.manifest.remove_paths(place)
                remove(file)
            elif place not in self.manifest.sums and self._is_readable(place):
                self.manifest.add_checksums(place)
            elif place not in self.manifest.sums:
                asked_again = True
                remove(file)
        if asked_again:
            self.state["metrics"] = None
        self.manifest.save()

    def updating_checksums(self, *places: str) -> AbstractContextManager[None]:
        """See `swarm.runs.manifest.Manifest.updating_checksums`."""
        return self.manifest.updating_checksums(*places)

    def _check_identity(self, identity: Mapping[str, Any]) -> None:
        # States of earlier versions have secrets in them.
        old = self.state["identity"] = identity_values(self.state["identity"])
        new = json.loads(json.dumps(dict(identity)))
        differ = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
        if differ:
            changes = "; ".join(f"{k}: {old.get(k)!r} then, {new.get(k)!r} now" for k in differ[:6])
            more = f" and {len(differ) - 6} more" if len(differ) > 6 else ""
            raise UserError(
                f"name={self.folder.name}: {self.folder} holds another search ({changes}{more}); "
                "give the same values to go on, or another name= to begin anew"
            )

    def _remove_drafts(self) -> None:
        """Remove the drafts that a killed process left."""
        for draft in self.folder.rglob(".*.tmp"):
            draft.unlink(missing_ok=True)

    def record_versions(self, versions: Mapping[str, str]) -> str:
        """Keep under which versions of packages the search goes on; says what is another now."""
        kept = self.state.setdefault("versions", [])
        if kept and kept[-1]["packages"] == dict(versions):
            return ""
        before = kept[-1]["packages"] if kept else {}
        kept.append({"from_iteration": len(self.iterations), "packages": dict(versions)})
        self.save_state()
        changes = [
            f"{name} {before.get(name, 'none')} before, {versions.get(name, 'none')} now"
            for name in sorted({*before, *versions})
            if before and before.get(name) != versions.get(name)
        ]
        return "; ".join(changes)

    def save_state(self) -> None:
        """Replace state.json; the journal, whose lines it then has, goes."""
        write_atomic(self.folder / STATE_FILE, encode_state(self.state))
        self._saved = set(self.state)
        remove(self.folder / JOURNAL)

    def add_iteration(
        self,
        positions: np.ndarray,
        utilities: np.ndarray,
        answers: Mapping[int, Sequence[Mapping[str, Any]]],
        optimizer: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        """Take one iteration; beside the answers, the cost does not depend on those before it.

        Args:
            positions: [N, K] mixing coefficients.
            utilities: [N]; NaN for a particle that was not evaluated, or not on all items.
            answers: For each particle evaluated, its answers to the dev items it was asked, in the
                file's order: all of them unless it was stopped.
            optimizer: The optimizer's state after it was told.
            facts: Further keys of the round (`swarm.loop.racing.RaceResult.to_record`).
        """
        number, change = (
            len(self.iterations),
            difference(self.state["optimizer"] or {}, dict(optimizer)),
        )
        entry = {
            "positions": [[float(c) for c in row] for row in positions],
            "utilities": [None if np.isnan(u) else float(u) for u in utilities],
            **facts,
        }
        # The answers first: a round that the state names has them, and their checksum.
        self._write_answers(number, answers)
        self.manifest.append(answers_place(number))
        journaled = number > 0 and set(self.state) == self._saved
        if journaled:
            append(self.folder / JOURNAL, journal_line(number, entry, change))
        self.iterations.append(entry)
        # Of the optimizer's state a copy, as the file has it: the optimizer may change its own.
        self.state["optimizer"] = self.state["optimizer"] or {}
        apply_difference(self.state["optimizer"], json.loads(encode_json(change)))
        if not journaled:
            self.save_state()

    @property
    def iterations(self) -> list[dict[str, Any]]:
        """Positions and utilities of every iteration, the initial ones first."""
        found: list[dict[str, Any]] = self.state["rounds"]
        return found

    def _answers_file(self, number: int) -> Path:
        return self.folder / answers_place(number)

    def _write_answers(
        self, number: int, answers: Mapping[int, Sequence[Mapping[str, Any]]]
    ) -> None:
        if number and not self._answers_file(number - 1).is_file():
            raise UserError(self._vanished(number - 1))
        write_gzip_json(
            self._answers_file(number), {str(i): list(rows) for i, rows in answers.items()}
        )

    def count_prompts(self) -> dict[str, int]:
        """Prompts put on dev and prompts that racing saved, over all rounds.

        Where gradients were taken, also the examples of which a loss was taken, those with its
        derivative, and what all came to in prompt-equivalents: a forward pass is one, a forward
        and backward pass are three.
        """
        counts = self._summed().counts
        found = {name: counts[name] for name in ("prompts_asked", "prompts_saved")}
        losses, gradients = counts["losses_asked"], counts["gradients_asked"]
        if losses or gradients:
            found |= {"losses_asked": losses, "gradients_asked": gradients}
            found["prompt_equivalents"] = found["prompts_asked"] + losses + 3 * gradients
        return found

    def prompts_spent(self) -> int:
        """What was asked of dev so far, in prompt-equivalents."""
        found = self.count_prompts()
        return found.get("prompt_equivalents", found["prompts_asked"])

    def load_iteration_answers(self, number: int, particle: int) -> list[dict[str, Any]]:
        """What a particle answered to the dev items it was asked in a round."""
        try:
            found: list[dict[str, Any]] = read_gzip_json(self._answers_file(number))[str(particle)]
        except FileNotFoundError:
            raise UserError(self._vanished(number)) from None
        return found

    def _vanished(self, number: int) -> str:
        return (
            f"{self._answers_file(number)} was removed while the search was at work; put it back "
            "from a copy, or choose another name="
        )

    def save_answers(
        self,
        kind: str,
        position: Sequence[float],
        items: str,
        answers: Sequence[Mapping[str, Any]],
    ) -> None:
        """Keep what a position answered outside of the search, to items of which this is a digest.

        Args:
            kind: "test", or another word for what was asked.
        """
        path = self._extra_answers_file(kind, position, items)
        with self.updating_checksums(path.relative_to(self.folder).as_posix()):
            write_gzip_json(path, list(answers))

    def load_answers(
        self, kind: str, position: Sequence[float], items: str
    ) -> list[dict[str, Any]] | None:
        """What `keep_answers` was given; `None` before."""
        path = self._extra_answers_file(kind, position, items)
        return read_gzip_json(path) if path.is_file() else None

    def _extra_answers_file(self, kind: str, position: Sequence[float], items: str) -> Path:
        name = hashlib.sha256(f"{items} {position_key(position)}".encode()).hexdigest()[:16]
        return self.folder / "answers" / f"{kind}_{name}.json.gz"

    def save_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration beside the state, without secrets."""
        with self.updating_checksums("config.json"):
            write_json(self.folder / "config.json", clean(config))

    def best_index(self, particle: int | None = None, rows: int | None = None) -> ParticleIndex:
        """(round, particle) of the first highest utility: of one particle, or of all.

        Args:
            particle: Look at this one alone.
            rows: Look only at the first so many particles of the first round (the experts).
        """
        if particle is None and (chosen := self.state.get("chosen")):
            iteration, row = chosen["starting" if rows else "ending"]
            return iteration, row
        if rows:
            return Summary().of(self.iterations[:1]).best(range(rows))
        summary = self._summed()
        return summary.best() if particle is None else summary.best([particle])

    def personal_bests(self, most: int) -> list[ParticleIndex]:
        """Of the `most` best particles their personal bests, the best first."""
        places = [self.best_index(i) for i in range(len(self.iterations[0]["positions"]))]
        measured = [place for place in places if self.utility_at(place) is not None]
        # Of equal ones the first that was found, as `best` has it.
        return sorted(measured, key=lambda place: (-(self.utility_at(place) or 0.0), place))[:most]

    def utility_at(self, place: ParticleIndex) -> float | None:
        """The utility at (round, particle)."""
        value: float | None = self.iterations[place[0]]["utilities"][place[1]]
        return value

    def lowest_utility(self) -> float | None:
        """The lowest utility there was."""
        return self._summed().lowest

    def position_at(self, place: ParticleIndex) -> list[float]:
        """The coefficients at (round, particle)."""
        found: list[float] = self.iterations[place[0]]["positions"][place[1]]
        return found

    def write_outputs(self, pool: Any) -> None:
        """Bring the scratchpad and the saved bests up to what the state says.

        Args:
            pool: Its `save` (`Save`) writes those that are not there yet; where it has a `note`
                too, that writes the personal ones.
        """
        save: SaveFn = pool.save
        note: SaveFn = getattr(pool, "save_note", save)
        stale = [
            (name, at) for name, at in self._list_saved_bests() if not self._is_saved(name, at)
        ]
        with self.updating_checksums(SCRATCHPAD_FILE, *(name for name, _ in stale)):
            write_json(self.folder / SCRATCHPAD_FILE, build_scratchpad(self.iterations))
            for name, place in stale:
                self._save_best(place, self.folder / name, note if "/" in name else save)

    def _list_saved_bests(self) -> list[tuple[str, ParticleIndex]]:
        """Where the bests are saved, the global one first, and where each was found."""
        highest = sorted(self._summed().highest.items())
        own = [(f"particle_{i}/personal_best", at) for i, (_, at) in highest]
        return [("global_best", self.best_index()), *own] if own else []

    def _summed(self) -> "Summary":
        self._summary = self._summary.of(self.iterations)
        return self._summary

    def _is_saved(self, name: str, place: ParticleIndex) -> bool:
        """Whether a best is saved, with checksums, which a start has checked."""
        known = bool(self.manifest.paths_under(name))
        return known and _is_saved_position(self.folder / name, self.position_at(place))

    def _save_best(self, place: ParticleIndex, folder: Path, save: SaveFn) -> None:
        position, utility = self.position_at(place), self.utility_at(place)
        facts = {"iteration": place[0], "particle": place[1], "validation_utility": utility}
        # Else a kill between the two leaves the answers of an earlier best beside this one.
        (folder / "answers_dev.jsonl").unlink(missing_ok=True)
        save(position, folder, facts)
        rows = b"".join(encode_json(row) + b"\n" for row in self.load_iteration_answers(*place))
        write_atomic(folder / "answers_dev.jsonl", rows)


class Summary:
    """What is asked of all rounds at every iteration, of which only new ones are looked at.

    Attributes:
        highest: By particle its highest utility and where that was first measured.
        lowest: The lowest utility.
        counts: Sums over the rounds by name.
    """

    COUNTS = ("prompts_asked", "prompts_saved", "losses_asked", "gradients_asked")

    def __init__(self) -> None:
        self.highest: dict[int, tuple[float, ParticleIndex]] = {}
        self.lowest: float | None = None
        self.counts = dict.fromkeys(self.COUNTS, 0)
        self._rounds: Sequence[Mapping[str, Any]] = ()
        self._done = 0

    def of(self, rounds: Sequence[Mapping[str, Any]]) -> "Summary":
        """The summary of some rounds: this one where they are the same list, grown or not."""
        if rounds is not self._rounds or len(rounds) < self._done:
            fresh = Summary()
            fresh._rounds = rounds
            return fresh.of(rounds)
        for number in range(self._done, len(rounds)):
            self._add(number, rounds[number])
        self._done = len(rounds)
        return self

    def _add(self, number: int, entry: Mapping[str, Any]) -> None:
        for i, utility in enumerate(entry["utilities"]):
            if utility is None:
                continue
            if i not in self.highest or utility > self.highest[i][0]:
                self.highest[i] = utility, (number, i)
            if self.lowest is None or utility < self.lowest:
                self.lowest = utility
        for name in self.COUNTS:
            self.counts[name] += entry.get(name, 0)

    def best(self, particles: Iterable[int] | None = None) -> ParticleIndex:
        """Where the first highest utility of some particles, or of all, was measured."""
        chosen = list(self.highest if particles is None else particles)
        known = [self.highest[i] for i in chosen if i in self.highest]
        if not known:
            return 0, chosen[0] if chosen else 0
        return min(known, key=lambda one: (-one[0], one[1]))[1]


def _is_iteration_file(place: str) -> bool:
    """Whether a path is that of a round's answers."""
    return place.startswith("answers/iteration_")


def _rebuild_unit(path: str) -> str:
    """What is made anew where a file is damaged: its folder for a saved best."""
    folder, _, _ = path.rpartition("/")
    return folder if folder and folder != "answers" else path


def _is_saved_position(folder: Path, position: Sequence[float]) -> bool:
    """Whether a folder was written to its end for these coefficients."""
    try:
        facts = json.loads((folder / "swarm.json").read_text())
    except (OSError, ValueError):
        return False
    return facts.get("coefficients") == list(position) and (folder / "answers_dev.jsonl").is_file()
