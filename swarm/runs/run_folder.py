"""The run folder: the state, and the files derived from it.

state.json and the lines of rounds.jsonl after it (`swarm.runs.manifest`) are the record of
completed work. The scratchpad and the saved bests are derived from them and from the stored
answers, so that the next start repairs whatever a kill left behind. Every other file has a
checksum, by which a start detects damage. Exports for other programs: the original's scratchpad,
and ensemble.yaml.
"""

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from swarm._util.files import (
    append,
    encode_json,
    parse_json,
    read_gzip_json,
    remove,
    write_atomic,
    write_gzip_json,
    write_json,
)
from swarm._util.secrets import clean, clean_words, identity_values
from swarm.errors import UserError
from swarm.runs.lock import STUDY_LOCK_FILE
from swarm.runs.manifest import (
    JOURNAL,
    MANIFEST_FILE,
    STATE_FILE,
    Manifest,
    answers_path,
    apply_difference,
    difference,
    encode_state,
    journal_line,
    replay,
)


def build_scratchpad(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the utilities of a run under the key names of the original implementation.

    A particle without a utility in an iteration (not evaluated, or stopped early) repeats its last
    one in its history.
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
COMMAND_FILE = "command.json"

SaveFn = Callable[[Sequence[float], Path, dict[str, Any]], None]
"""Writes the adapter of some coefficients, with further facts, to a folder, atomically."""

ParticleIndex = tuple[int, int]
"""(iteration, particle)."""

STATE_FORMAT = 2
"""Version of a state's keys; the first had no number, and cannot be resumed."""

STATE_KEYS = {"identity", "experts", "rounds", "optimizer", "finished", "verdict"}


def position_key(position: Sequence[float] | np.ndarray) -> str:
    """Return an exact text representation of a position."""
    return " ".join(float(c).hex() for c in position)


class RunRecord:
    """The record of a run, stored in its folder.

    Attributes:
        folder: The run folder.
        state: Completed work: `identity`, `experts`, the number `own` of the user's experts among
            them, `groups`, `rounds` (positions and utilities of every iteration), `optimizer` and,
            at the end, `finished`, `minutes` (if that limit ended it), `chosen` (if the bests were
            not chosen by these utilities) and `verdict`; `versions`, the packages that computed the
            answers, by first iteration.
        note: Added to the description (swarm.json) of each saved best.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state: dict[str, Any] = {}
        self.manifest = Manifest(folder)
        self.note: dict[str, Any] = {}
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
        """Start a new record, or resume the folder's one; return True if it was resumed.

        Raises:
            UserError: The folder contains another search; the message names the differing keys.
        """
        goes_on = self.load_state(identity)
        self._remove_drafts()
        if self._cut:
            log.warning(
                "%s/%s: iterations from %d on are evaluated again",
                self.folder,
                self._cut,
                len(self.iterations),
            )
        if goes_on or self._cut:
            self._remove_damaged()
            return goes_on
        self.manifest = Manifest(self.folder)
        self.state = {
            "format": STATE_FORMAT,
            "identity": dict(identity),
            "experts": list(experts),
            "own": len(experts) if own is None else own,
            "groups": list(groups),
            "rounds": [],
            "optimizer": None,
            "finished": None,
            "verdict": None,
        }
        self.save_state()
        # Before the first iteration, so that a missing file is always damage.
        self.manifest.save()
        return False

    def load_state(self, identity: Mapping[str, Any]) -> bool:
        """Read the folder's state without writing; return whether it has an iteration.

        Raises:
            UserError: As for `open_or_resume`.
        """
        path = self.folder / STATE_FILE
        if not path.is_file():
            for other in (STUDY_LOCK_FILE, "tuning.json"):
                if (self.folder / other).exists():
                    what = "several searches" if other == STUDY_LOCK_FILE else "a fine-tuning"
                    raise UserError(f"{self.folder} is the folder of {what}; choose another name=")
            if (self.folder / MANIFEST_FILE).exists() or (self.folder / "answers").exists():
                raise UserError(
                    f"{path} is missing, the only record of this search's progress; restore it "
                    "from a backup, or choose another name="
                )
            return False
        state, damage = replay(self.folder)
        self._cut = f"{JOURNAL} is damaged or missing ({damage})" if damage else ""
        self.state = state or {}
        if not set(self.state) >= STATE_KEYS:
            raise UserError(
                f"{path} is not the state of a search, or is damaged; restore it from a backup, or "
                "choose another name="
            )
        # A search without iterations has nothing to lose, and may be replaced by another one.
        if self.iterations or self._cut:
            if self.state.get("format") != STATE_FORMAT:
                raise UserError(
                    f"{self.folder} was written by another version of model-swarms, whose state "
                    "cannot be resumed; choose another name="
                )
            self._check_identity(identity)
            self._check_integrity()
        return bool(self.iterations)

    def _check_integrity(self) -> None:
        """Find damaged files, and cut the journal before the first iteration with lost answers.

        The files are only read again if the folder has changed since the last check.

        Raises:
            UserError: state.json contains that iteration, so that nothing can be cut.
        """
        rounds = [answers_path(number) for number in range(len(self.iterations))]
        self.manifest.read()
        if self._inspected != (rounds, self.manifest.sums):
            self._inspected = rounds, dict(self.manifest.sums)
            unsealed = [path for path in rounds if path not in self.manifest.sums]
            self._damaged = self.manifest.find_damaged()
            self._damaged += [path for path in unsealed if not self._is_readable(path)]
        lost = next((n for n, path in enumerate(rounds) if path in self._damaged), None)
        if lost is None:
            return
        state, _ = replay(self.folder, lost)
        if state is None or len(state["rounds"]) > lost:
            raise UserError(
                f"{self.folder / rounds[lost]} is damaged or missing, and {STATE_FILE} has later "
                "results; restore it from a backup, or choose another name= to search again"
            )
        self._cut = f"{rounds[lost]} is damaged or missing"
        self.state |= {"rounds": state["rounds"], "optimizer": state["optimizer"]}

    def _is_readable(self, path: str) -> bool:
        """Return whether a file of answers is intact by gzip's own checksum."""
        try:
            read_gzip_json(self.folder / path)
        except (OSError, ValueError, EOFError, zlib.error):
            return False
        return True

    def _remove_damaged(self) -> None:
        """Remove damaged files, so that they are written again, and log it.

        Answers of iterations that are evaluated again are removed without a warning.
        """
        self._damaged = [path for path in self._damaged if not _is_iteration_file(path)]
        # The state of a version without checksums gets one before checksums.txt is written.
        if self._cut or (self.folder / JOURNAL).exists() or "versions" not in self.state:
            self.save_state()
        if self.manifest.lost:
            log.warning(
                "%s is damaged or missing: rebuilt, as are scratchpad and saved bests",
                self.folder / MANIFEST_FILE,
            )
        elif self._damaged:
            log.warning(
                "%s: damaged or missing, now rebuilt: %s", self.folder, ", ".join(self._damaged)
            )
        units = {_rebuild_unit(path) for path in self._damaged}
        for path in self.manifest.paths_under_any(units):
            remove(self.folder / path)
        self.manifest.remove_paths(*units)
        reevaluated = any(unit.startswith("answers/") for unit in units)
        rounds = {answers_path(number) for number in range(len(self.iterations))}
        lost = [p for p in self.manifest.sums if _is_iteration_file(p) and p not in rounds]
        self.manifest.remove_paths(*lost)
        # A kill leaves at most one file of answers without a checksum.
        for file in (self.folder / "answers").glob("*.json.gz"):
            path = file.relative_to(self.folder).as_posix()
            if _is_iteration_file(path) and path not in rounds:
                remove(file)
            elif path not in self.manifest.sums and self._is_readable(path):
                self.manifest.add_checksums(path)
            elif path not in self.manifest.sums:
                reevaluated = True
                remove(file)
        if reevaluated:
            self.state["verdict"] = None
        self.manifest.save()

    def updating_checksums(self, *prefixes: str) -> AbstractContextManager[None]:
        """See `swarm.runs.manifest.Manifest.updating_checksums`."""
        return self.manifest.updating_checksums(*prefixes)

    def _check_identity(self, identity: Mapping[str, Any]) -> None:
        # States of earlier versions may contain secrets; remove them.
        old = self.state["identity"] = identity_values(self.state["identity"])
        new = json.loads(json.dumps(dict(identity)))
        differ = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
        if differ:
            changes = "; ".join(f"{k}: {old.get(k)!r} then, {new.get(k)!r} now" for k in differ[:6])
            more = f" and {len(differ) - 6} more" if len(differ) > 6 else ""
            raise UserError(
                f"name={self.folder.name}: {self.folder} contains another search "
                f"({changes}{more}); "
                "use the same values to resume, or another name= to start a new search"
            )

    def _remove_drafts(self) -> None:
        """Remove the temporary files of a killed process."""
        for draft in self.folder.rglob(".*.tmp"):
            draft.unlink(missing_ok=True)

    def record_versions(self, versions: Mapping[str, str]) -> str:
        """Store the package versions from this iteration on; return a description of changes."""
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
        """Replace state.json and remove the journal, whose lines it now contains."""
        write_atomic(self.folder / STATE_FILE, encode_state(self.state))
        self._saved = set(self.state)
        remove(self.folder / JOURNAL)

    def reopen(self) -> None:
        """Make a finished search one that has not ended; its answers are kept."""
        for key in ("minutes", "chosen", "kept_start"):
            self.state.pop(key, None)
        if self.iterations[-1].get("after_search"):
            self.iterations.pop()
            path = answers_path(len(self.iterations))
            self.manifest.remove_paths(path)
            self.manifest.save()
            remove(self.folder / path)
            self._summary = Summary()
        self.state |= {"finished": None, "verdict": None}
        self.save_state()

    def add_iteration(
        self,
        positions: np.ndarray,
        utilities: np.ndarray,
        answers: Mapping[int, Sequence[Mapping[str, Any]]],
        optimizer: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        """Add one iteration; apart from the answers, the cost is independent of earlier ones.

        Args:
            positions: [N, K] mixing coefficients.
            utilities: [N]; NaN for a particle that was not evaluated, or not on all items.
            answers: Answers of each evaluated particle to the dev items it was scored on, in file
                order; all items unless it was stopped.
            optimizer: The optimizer's state after `tell`.
            facts: Further keys of the entry (`swarm.loop.racing.RaceResult.to_record`).
        """
        number = len(self.iterations)
        # A snapshot, since a line of the journal cannot express other changes of the state.
        if not number or set(self.state) != self._saved:
            self.save_state()
        self.state["optimizer"] = self.state["optimizer"] or {}
        change = difference(self.state["optimizer"], dict(optimizer))
        entry = {
            "positions": [[float(c) for c in row] for row in positions],
            "utilities": [None if np.isnan(u) else float(u) for u in utilities],
            **facts,
        }
        # Answers first, their checksum last: an iteration listed in the state always has its
        # answers, and one with a checksum is always listed (see `swarm.runs.manifest`).
        self._write_answers(number, answers)
        append(self.folder / JOURNAL, journal_line(number, entry, change))
        self.iterations.append(entry)
        # Store a copy of the optimizer's state, as in the file, since the optimizer may mutate its
        # own.
        apply_difference(self.state["optimizer"], json.loads(encode_json(change)))
        self.manifest.append(answers_path(number))

    @property
    def iterations(self) -> list[dict[str, Any]]:
        """Positions and utilities of every iteration, the initial ones first."""
        found: list[dict[str, Any]] = self.state["rounds"]
        return found

    def _answers_file(self, number: int) -> Path:
        return self.folder / answers_path(number)

    def _write_answers(
        self, number: int, answers: Mapping[int, Sequence[Mapping[str, Any]]]
    ) -> None:
        if number and not self._answers_file(number - 1).is_file():
            raise UserError(self._vanished(number - 1))
        write_gzip_json(
            self._answers_file(number), {str(i): list(rows) for i, rows in answers.items()}
        )

    def count_prompts(self) -> dict[str, int]:
        """Return the number of prompts on dev and those saved by racing, over all iterations.

        With gradients, also the number of examples with a loss and with a gradient, and the total
        in prompt-equivalents: a forward pass is one, a forward and backward pass are three.
        """
        counts = self._summed().counts
        found = {name: counts[name] for name in ("prompts_scored", "prompts_saved")}
        losses, gradients = counts["losses_computed"], counts["gradients_computed"]
        if losses or gradients:
            found |= {"losses_computed": losses, "gradients_computed": gradients}
            found["prompt_equivalents"] = found["prompts_scored"] + losses + 3 * gradients
        return found

    def prompts_spent(self) -> int:
        """Return the cost on dev so far, in prompt-equivalents."""
        found = self.count_prompts()
        return found.get("prompt_equivalents", found["prompts_scored"])

    def load_iteration_answers(self, number: int, particle: int) -> list[dict[str, Any]]:
        """Return a particle's answers to the dev items it was scored on in an iteration."""
        try:
            found: list[dict[str, Any]] = read_gzip_json(self._answers_file(number))[str(particle)]
        except FileNotFoundError:
            raise UserError(self._vanished(number)) from None
        return found

    def _vanished(self, number: int) -> str:
        return (
            f"{self._answers_file(number)} was removed during the search; restore it from a "
            "backup, or choose another name="
        )

    def save_answers(
        self,
        kind: str,
        position: Sequence[float],
        items: str,
        answers: Sequence[Mapping[str, Any]],
    ) -> None:
        """Store a position's answers outside of the search.

        Args:
            kind: "test", or another kind of scoring.
            items: Digest of the scored items.
        """
        path = self._extra_answers_file(kind, position, items)
        with self.updating_checksums(path.relative_to(self.folder).as_posix()):
            write_gzip_json(path, list(answers))

    def load_answers(
        self, kind: str, position: Sequence[float], items: str
    ) -> list[dict[str, Any]] | None:
        """Return the answers stored by `save_answers`, or `None`."""
        path = self._extra_answers_file(kind, position, items)
        return read_gzip_json(path) if path.is_file() else None

    def _extra_answers_file(self, kind: str, position: Sequence[float], items: str) -> Path:
        name = hashlib.sha256(f"{items} {position_key(position)}".encode()).hexdigest()[:16]
        return self.folder / "answers" / f"{kind}_{name}.json.gz"

    def save_command(self, arguments: Sequence[str]) -> None:
        """Write the arguments of a search beside its state, so that it can be started again.

        Args:
            arguments: Arguments of `python -m swarm.search`, including its name; secrets are
                removed.
        """
        facts = {"arguments": clean_words(arguments), "directory": os.getcwd()}
        with self.updating_checksums(COMMAND_FILE):
            write_json(self.folder / COMMAND_FILE, facts)

    def save_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration beside the state, without secrets."""
        with self.updating_checksums("config.json"):
            write_json(self.folder / "config.json", clean(config))

    def best_index(self, particle: int | None = None, rows: int | None = None) -> ParticleIndex:
        """Return (iteration, particle) of the first highest utility: of one particle, or of all.

        Args:
            particle: Restrict to this particle.
            rows: Restrict to this many first particles of the first iteration (the experts).
        """
        if particle is None and (chosen := self.state.get("chosen")):
            iteration, row = chosen["starting" if rows else "ending"]
            return iteration, row
        if rows:
            return Summary().of(self.iterations[:1]).best(range(rows))
        summary = self._summed()
        return summary.best() if particle is None else summary.best([particle])

    def personal_bests(self, limit: int) -> list[ParticleIndex]:
        """Return the personal bests of the `limit` best particles, the best first."""
        indices = [self.best_index(i) for i in range(len(self.iterations[0]["positions"]))]
        measured = [index for index in indices if self.utility_at(index) is not None]
        # Ties are resolved to the first one found, as in `best_index`.
        return sorted(measured, key=lambda index: (-(self.utility_at(index) or 0.0), index))[:limit]

    def utility_at(self, index: ParticleIndex) -> float | None:
        """Return the utility at (iteration, particle)."""
        value: float | None = self.iterations[index[0]]["utilities"][index[1]]
        return value

    def position_at(self, index: ParticleIndex) -> list[float]:
        """Return the coefficients at (iteration, particle)."""
        found: list[float] = self.iterations[index[0]]["positions"][index[1]]
        return found

    def write_outputs(self, pool: Any) -> None:
        """Update the scratchpad and the saved bests from the state.

        Args:
            pool: Its `save` (`SaveFn`) writes missing bests; if it has a `save_note`, that writes
                the personal ones.
        """
        save: SaveFn = pool.save
        note: SaveFn = getattr(pool, "save_note", save)
        stale = [
            (name, at) for name, at in self._list_saved_bests() if not self._is_saved(name, at)
        ]
        with self.updating_checksums(SCRATCHPAD_FILE, *(name for name, _ in stale)):
            write_json(self.folder / SCRATCHPAD_FILE, build_scratchpad(self.iterations))
            for name, index in stale:
                self._save_best(index, self.folder / name, note if "/" in name else save)

    def _list_saved_bests(self) -> list[tuple[str, ParticleIndex]]:
        """Return the folders of the saved bests, the global one first, with their indices."""
        highest = sorted(self._summed().highest.items())
        personal = [(f"particle_{i}/personal_best", at) for i, (_, at) in highest]
        return [("global_best", self.best_index()), *personal] if personal else []

    def _summed(self) -> "Summary":
        self._summary = self._summary.of(self.iterations)
        return self._summary

    def _is_saved(self, name: str, index: ParticleIndex) -> bool:
        """Return whether a best is saved with checksums, which a start has verified."""
        known = bool(self.manifest.paths_under(name))
        return known and _is_saved_position(self.folder / name, self.position_at(index))

    def _save_best(self, index: ParticleIndex, folder: Path, save: SaveFn) -> None:
        position, utility = self.position_at(index), self.utility_at(index)
        facts = {"iteration": index[0], "particle": index[1], "validation_utility": utility}
        facts |= self.note
        # Remove old answers first: a kill must not leave those of an earlier best beside this one.
        (folder / "answers_dev.jsonl").unlink(missing_ok=True)
        save(position, folder, facts)
        rows = b"".join(encode_json(row) + b"\n" for row in self.load_iteration_answers(*index))
        write_atomic(folder / "answers_dev.jsonl", rows)


class Summary:
    """Incremental summary of the iterations, which reads only new ones.

    Attributes:
        highest: Highest utility by particle, and the index of its first measurement.
        counts: Sums over the iterations by name.
    """

    COUNTS = ("prompts_scored", "prompts_saved", "losses_computed", "gradients_computed")

    def __init__(self) -> None:
        self.highest: dict[int, tuple[float, ParticleIndex]] = {}
        self.counts = dict.fromkeys(self.COUNTS, 0)
        self._rounds: Sequence[Mapping[str, Any]] = ()
        self._done = 0

    def of(self, rounds: Sequence[Mapping[str, Any]]) -> "Summary":
        """Return the summary of `rounds`: this one, updated, if it has the same list."""
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
        for name in self.COUNTS:
            self.counts[name] += entry.get(name, 0)

    def best(self, particles: Iterable[int] | None = None) -> ParticleIndex:
        """Return the index of the first highest utility of some particles, or of all."""
        chosen = list(self.highest if particles is None else particles)
        known = [self.highest[i] for i in chosen if i in self.highest]
        if not known:
            return 0, chosen[0] if chosen else 0
        return min(known, key=lambda one: (-one[0], one[1]))[1]


def _is_iteration_file(path: str) -> bool:
    """Return whether a path is that of an iteration's answers."""
    return path.startswith("answers/iteration_")


def _rebuild_unit(path: str) -> str:
    """Return the path to rebuild if a file is damaged: the folder of a saved best."""
    first, *rest = path.split("/")
    if first == "answers" or not rest:
        return path
    # A saved best may have a folder for each route below it.
    return f"{first}/{rest[0]}" if first.startswith("particle_") else first


def _is_saved_position(folder: Path, position: Sequence[float]) -> bool:
    """Return whether a folder was completely written for these coefficients."""
    try:
        facts = parse_json((folder / "swarm.json").read_text())
    except (OSError, ValueError):
        return False
    return facts.get("coefficients") == list(position) and (folder / "answers_dev.jsonl").is_file()


def load_command(folder: Path) -> dict[str, Any] | None:
    """Return `arguments` and `directory` of the search in a folder; `None` if not stored."""
    try:
        found = parse_json((folder / COMMAND_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("arguments"), list) else None
