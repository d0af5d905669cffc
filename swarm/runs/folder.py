"""The run folder: one append-only record, and files whose checksums are in it.

`rounds.jsonl` is the only record. A line has its own checksum and states facts (identity, verdict),
an iteration, or SHA-256 of files. Of the optimizer's state a line has only what changed, so that an
iteration writes the same number of bytes regardless of the number of earlier ones. Everything else
is derived again from the lines and the answers: run.json (the facts, for people), the scratchpad of
the original implementation, and the adapters of the bests.

An iteration writes its answers, then its line with their SHA-256. The checksum of a file is removed
before the file is replaced. A kill therefore leaves answers without a line, a torn last line, which
is dropped, or a file without a checksum, and never a wrong one: any other bad line, and a file that
differs from its checksum or is missing, was damaged. run.json has the number of lines when it was
written, by which a lost end is noticed.
"""

import contextlib
import gzip
import hashlib
import json
import logging
import marshal
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from swarm._util.files import (
    append,
    as_path,
    encode_json,
    hash_file,
    make_folder,
    parse_json,
    read_bytes,
    read_gzip_json,
    remove,
    write_atomic,
    write_json,
)
from swarm._util.secrets import clean, identity_values, read_config
from swarm.errors import UserError
from swarm.merging.positions import position_label
from swarm.runs.lock import STUDY_LOCK_FILE
from swarm.runs.pareto_front import ParetoFront, ParticleIndex
from swarm.runs.verdict import read_verdict

RECORD_FILE = "rounds.jsonl"
SUMMARY_FILE = "run.json"
CHECKSUMS_FILE = "checksums.jsonl"  # of a fine-tuning
SCRATCHPAD_FILE = "utility_scratchpad.json"
COMMAND_FILE = "command.json"
CONFIG_FILE = "config.json"

RUNS_FOLDER = "search"
"""Default parent folder of runs (conf/search.yaml)."""

MAX_RUNS_SHOWN = 4
"""Maximum number of runs that an error lists."""

SEAL = b', "checksum": "%s"}'
"""End of a line; the checksum is of the line without it."""

LEARNED_FOLDER = "adapters"
"""Folder of the adapters that positions have learned."""

SELECTED = "selected {}"
"""Fact of a record with the value of an expert, until the selection has ended."""

RETRY_S = 0.05
"""Seconds after which a reader retries what a search may be writing."""

REPAIR_HINT = "rerun the search's command to repair it"

COUNTED = (
    "prompts_scored",
    "prompts_saved",
    "losses_computed",
    "gradients_computed",
    "prompts_embedded",
)
"""Facts of an iteration that are summed."""

log = logging.getLogger(__name__)


class Record:
    """The lines of a folder's record, applied in order.

    Attributes:
        facts: Everything stated that is no iteration.
        rounds: The iterations: positions, utilities and further facts of each.
        optimizer: The optimizer's state after the last one.
        sums: SHA-256 of the files, by path relative to the folder.
        highest: Highest utility by particle, and the index of its first measurement.
        counts: Sums over the iterations of the facts in `COUNTED`.
        lines: Number of good lines.
        damage: Description of the first bad line, or "".
    """

    def __init__(self, folder: Path, name: str = RECORD_FILE) -> None:
        self.folder, self.path = folder, folder / name
        self.facts: dict[str, Any] = {}
        self.rounds: list[dict[str, Any]] = []
        self.optimizer: dict[str, Any] | None = None
        self.sums: dict[str, str] = {}
        self.highest: dict[int, tuple[float, ParticleIndex]] = {}
        self.counts: Counter[str] = Counter()
        self.lines, self.damage = 0, ""
        self._size = 0  # bytes up to the first bad or torn line
        self._is_clean = False

    def read(self, rounds: int | None = None) -> "Record":
        """Read the file of a new record; return the record itself.

        Args:
            rounds: Number of iterations before which to stop.
        """
        try:
            *lines, torn = read_bytes(self.path).split(b"\n")
        except FileNotFoundError:
            return self
        except OSError as error:
            self.damage = error.strerror or str(error)
            return self
        for number, line in enumerate(lines, 1):
            entry = _decode_line(line)
            if rounds is not None and entry and entry.get("iteration") == rounds:
                return self
            if entry is None or entry.get("iteration", len(self.rounds)) != len(self.rounds):
                self.damage = f"line {number}"
                return self
            self._apply(entry)
            self._size += len(line) + 1
        if torn and not torn.startswith(b"{"[: len(torn)]):
            self.damage = f"line {len(lines) + 1}"
        return self

    def _apply(self, entry: dict[str, Any]) -> None:
        self.lines += 1
        added = [entry["round"]] if "round" in entry else []
        if "keep" in entry:
            added = self.rounds[: entry["keep"]]
            self.rounds, self.highest, self.counts = [], {}, Counter()
        for one in added:
            for i, utility in enumerate(one["utilities"]):
                if utility is not None and utility > self.highest.get(i, (-np.inf,))[0]:
                    self.highest[i] = utility, (len(self.rounds), i)
            for name in COUNTED:
                self.counts[name] += one.get(name, 0)
            self.rounds.append(one)
        if "round" in entry:
            self.optimizer = apply_difference(self.optimizer or {}, entry["optimizer"])
        self.facts |= entry.get("set", {})
        for key in entry.get("unset", ()):
            self.facts.pop(key, None)
        for path, checksum in entry.get("files", {}).items():
            if checksum is None:
                self.sums.pop(path, None)
            else:
                self.sums[path] = checksum

    @property
    def state(self) -> dict[str, Any]:
        """The facts with the iterations and the optimizer's state."""
        return {**self.facts, "rounds": self.rounds, "optimizer": self.optimizer}

    def cut(self) -> bool:
        """Remove what follows the last good line from the file; return whether there was any."""
        self._is_clean = True
        if not self.path.is_file() or self.path.stat().st_size == self._size:
            return False
        write_atomic(self.path, read_bytes(self.path)[: self._size])
        return True

    def write(self, entry: dict[str, Any]) -> None:
        """Append a line, and apply it."""
        if not self._is_clean:
            self.cut()
        text = encode_json(entry)
        line = text[:-1] + SEAL % _hash_bytes(text).encode() + b"\n"
        append(self.path, line)
        self._size += len(line)
        self._apply(parse_json(text))  # copies, as in the file: the caller may mutate its own

    def state_facts(self, facts: Mapping[str, Any]) -> bool:
        """Append the changes from the known facts to `facts`; return whether there are any."""
        wanted = parse_json(encode_json(dict(facts)))
        changed = {k: v for k, v in wanted.items() if k not in self.facts or v != self.facts[k]}
        gone = [key for key in self.facts if key not in wanted]
        if changed or gone:
            self.write({"set": changed, **({"unset": gone} if gone else {})})
        return bool(changed or gone)

    @contextlib.contextmanager
    def replacing(self, *places: str) -> Iterator[None]:
        """Replace files or folders inside the context; their checksums are written after it.

        After an exception the files have none.
        """
        self.forget(self.paths_under(*places))
        yield
        self.add_checksums(*places)

    def write_file(self, name: str, data: bytes | None) -> None:
        """Replace a file that differs, or remove it if `data` is `None`."""
        if data is None:
            self.forget([name])
            remove(self.folder / name)
        elif self.sums.get(name) != _hash_bytes(data) or not (self.folder / name).is_file():
            with self.replacing(name):
                write_atomic(self.folder / name, data)

    def add_checksums(self, *places: str) -> None:
        """Write the checksums of files, or of all files in folders, that exist."""
        full = [self.folder / place for place in places]
        files = [file for one in full for file in (sorted(one.rglob("*")) or [one])]
        found = {
            file.relative_to(self.folder).as_posix(): hash_file(file)
            for file in files
            if file.is_file()
        }
        if found:
            self.write({"files": found})

    def forget(self, paths: Iterable[str]) -> None:
        """Remove checksums."""
        if known := {path: None for path in paths if path in self.sums}:
            self.write({"files": known})

    def paths_under(self, *places: str) -> list[str]:
        """Return the paths with a checksum that are one of the places or below it."""
        wanted = tuple(f"{place}/" for place in places)
        return [path for path in self.sums if f"{path}/".startswith(wanted)]

    def find_damaged(self, place: str = "") -> list[str]:
        """Return the files, all or those of a place, that are missing or have changed.

        Raises:
            UserError: One cannot be read for now; it may be intact.
        """
        paths = self.paths_under(place) if place else self.sums
        return sorted(path for path in paths if not self._is_intact(path))

    def _is_intact(self, path: str) -> bool:
        try:
            file = self.folder / path
            # is_file() first: reading a pipe would block forever.
            return file.is_file() and hash_file(file) == self.sums[path]
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return False
        except OSError as error:
            raise UserError(f"{self.folder / path} cannot be read: {error.strerror}") from None


def _decode_line(line: bytes) -> dict[str, Any] | None:
    """Return the entry of a line; `None` if its checksum differs."""
    length = len(SEAL % bytes(64))
    text, seal = line[:-length] + b"}", line[-length:]
    return parse_json(text) if seal == SEAL % _hash_bytes(text).encode() else None


def _hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def difference(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the change from `old` to `new`, both JSON data; small if lists only grew.

    Values are compared by marshal, so that 0.0 and -0.0 differ.

    Returns:
        `gone` (keys), `set` (values by key), `added` (new items at the end of a list, by key) and
            `inside` (differences of objects, by key), each only if not empty.
    """
    parts: dict[str, Any] = {"gone": [key for key in old if key not in new]}
    parts |= {"set": {}, "added": {}, "inside": {}}
    for key, value in new.items():
        before: Any = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := difference(before, value):
                parts["inside"][key] = inner
            continue
        grows = isinstance(value, list) and isinstance(before, list)
        start = value[: len(before)] if grows else value
        try:
            same = key in old and marshal.dumps(start, 2) == marshal.dumps(before, 2)
        except ValueError:
            same = False
        if not same:
            parts["set"][key] = value
        elif grows and len(value) > len(before):
            parts["added"][key] = value[len(before) :]
    return {name: part for name, part in parts.items() if part}


def apply_difference(state: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Apply a change returned by `difference` in place; return the state."""
    for key in change.get("gone", ()):
        state.pop(key, None)
    state.update(change.get("set", {}))
    for key, tail in change.get("added", {}).items():
        state[key] += tail
    for key, inner in change.get("inside", {}).items():
        apply_difference(state[key], inner)
    return state


def read_record(folder: Path, name: str = RECORD_FILE, strict: bool = True) -> Record:
    """Read the record of a run, also of a running one.

    Args:
        strict: Whether damage is an error; otherwise the record ends before it.

    Raises:
        UserError: The record is damaged.
    """
    for attempt in range(2):
        # In the reverse of the order of writing: what run.json counts is in the record by then.
        summary = _read_summary(folder) or {"lines": 0}
        record = Record(folder, name).read()
        # The answers of the iteration after the next are written after the next one's line; if a
        # running search has written both since the record was read, the second attempt finds it.
        later = folder / answers_path(len(record.rounds) + 1)
        if not record.damage and (record.lines < summary["lines"] or later.exists()):
            record.damage = "its end is missing"
        if not record.damage or attempt:
            break
        time.sleep(RETRY_S)
    if record.damage and strict:
        raise UserError(f"{record.path} is damaged ({record.damage}); {REPAIR_HINT}")
    return record


def _read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the facts of run.json, and the number of lines; `None` if missing or damaged."""
    try:
        found = parse_json(read_bytes(folder / SUMMARY_FILE))
        checksum = found.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return found if _hash_bytes(encode_json(found)) == checksum else None


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the state of a run, also of a running one; `None` if the folder has no run.

    Raises:
        UserError: The record is damaged.
    """
    record = read_record(folder)
    return record.state if "identity" in record.facts else None


def state_stamp(folder: Path) -> tuple[int, int] | None:
    """Return a stamp that changes with the record of a run, (ns, bytes); `None` without one."""
    try:
        about = (folder / RECORD_FILE).stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder has the record of a run."""
    return (folder / RECORD_FILE).is_file()


def verify_run_file(file: Path) -> None:
    """Check that a file or a folder of a run is unchanged; files outside of runs are not checked.

    Raises:
        UserError: It has changed, or the run's record is damaged.
    """
    full_path = file.absolute()
    # As deep as particle_0/personal_best/ROUTE/adapter_model.safetensors.
    for run in full_path.parents[:4]:
        name = next((n for n in (RECORD_FILE, CHECKSUMS_FILE) if (run / n).is_file()), None)
        if name:
            relative = full_path.relative_to(run).as_posix()
            # A running search may replace the file in between: read the record again.
            if read_record(run, name).find_damaged(relative) and (
                damaged := read_record(run, name).find_damaged(relative)
            ):
                raise UserError(f"{run / damaged[0]} is damaged or missing; {REPAIR_HINT}")
            return


def answers_path(iteration: int) -> str:
    """Return the path of an iteration's answers, relative to the run folder."""
    return f"answers/iteration_{iteration:04d}.json.gz"


def _learned_path(iteration: int, particle: int) -> str:
    """Return the path of the adapter that a particle learned before an iteration."""
    return f"{LEARNED_FOLDER}/{iteration:04d}_{particle:04d}.safetensors"


def _iteration_of(path: str) -> int | None:
    """Return the iteration that a file belongs to: one of answers or a learned adapter."""
    found = re.match(rf"(?:answers/iteration_|{LEARNED_FOLDER}/)([0-9]+)", path)
    return int(found[1]) if found else None


def _extra_answers_path(kind: str, position: Iterable[float], items: str) -> str:
    """Return the path of a position's answers outside of the search, relative to the folder."""
    exact = " ".join([float(c).hex() for c in position])
    name = hashlib.sha256(f"{items} {exact}".encode()).hexdigest()[:16]
    return f"answers/{kind}_{name}.json.gz"


def prompt_cost(counts: Mapping[str, Any]) -> int:
    """Return the prompt-equivalents of what is computed besides scores.

    A forward pass is one, a forward and backward pass are three.
    """
    extra = counts.get("losses_computed", 0) + counts.get("prompts_embedded", 0)
    return int(extra + 3 * counts.get("gradients_computed", 0))


class RunState:
    """The state of a run, and what follows from it; the base of its writer and its reader.

    Attributes:
        state: `identity`, `experts`, the number `own` of the user's experts among them, `groups`,
            `selection` (if the experts were chosen among more), `rounds` (positions and utilities
            of every iteration), `optimizer` and, at the end, `finished`, `minutes` (if that limit
            ended it), `chosen` (if the bests were not chosen by these utilities) and `verdict`;
            `versions`, the packages that computed the answers, by first iteration.
    """

    state: dict[str, Any]
    _record: Record

    @property
    def iterations(self) -> list[dict[str, Any]]:
        """Positions and utilities of every iteration, the initial ones first."""
        return self._record.rounds

    def find_best(self, particle: int | None = None) -> ParticleIndex:
        """Return the index of the first highest utility, of one particle or of all."""
        if particle is None and (chosen := self.state.get("chosen")):
            return tuple(chosen["ending"])
        highest = self._record.highest
        chosen = highest if particle is None else {particle} & highest.keys()
        known = [highest[i] for i in chosen]
        return min(known, key=lambda one: (-one[0], one[1]), default=(0, (0, particle or 0)))[1]

    def best_expert(self) -> ParticleIndex:
        """Return the index of the first best expert in the start."""
        if chosen := self.state.get("chosen"):
            return tuple(chosen["starting"])
        known = self.iterations[0]["utilities"][: self.state["own"]]
        return 0, int(np.argmax([-np.inf if utility is None else utility for utility in known]))

    def personal_bests(self, limit: int) -> list[ParticleIndex]:
        """Return the personal bests of the `limit` best particles, the best first."""
        # Ties are resolved to the first one found, as in `find_best`.
        known = sorted(self._record.highest.values(), key=lambda one: (-one[0], one[1]))
        return [index for _, index in known[:limit]]

    def utility_at(self, index: ParticleIndex) -> float | None:
        """Return the utility at (iteration, particle)."""
        value: float | None = self.iterations[index[0]]["utilities"][index[1]]
        return value

    def position_at(self, index: ParticleIndex) -> list[float]:
        """Return the coefficients at (iteration, particle)."""
        found: list[float] = self.iterations[index[0]]["positions"][index[1]]
        return found

    def learned_files(self) -> dict[tuple[float, ...], str]:
        """Return the file of the adapter learned with each position, of each of its routes."""
        found = {}
        for entry in self.iterations:
            for i, files in entry.get("learned", {}).items():
                position = entry["positions"][int(i)]
                size = len(position) // len(files)
                for route, file in enumerate(files):
                    if file:
                        part = tuple(position[route * size : (route + 1) * size])
                        found[part] = str((self._record.folder / file).resolve())
        return found

    def load_iteration_answers(self, number: int) -> dict[int, list[dict[str, Any]]]:
        """Return all answers of an iteration: by particle, and N more the texts drawn by one."""
        stored = self.load_packed(self._record.folder / answers_path(number))
        return {int(i): rows for i, rows in stored.items()}

    def count_prompts(self) -> dict[str, int]:
        """Return the number of prompts on dev and those saved by racing, over all iterations.

        If there are any, also the number of examples with a loss and with a gradient, of embedded
        prompts, and the total in prompt-equivalents (`prompt_cost`).
        """
        found = {name: self._record.counts[name] for name in COUNTED}
        if extra := prompt_cost(found):
            return {**found, "prompt_equivalents": found["prompts_scored"] + extra}
        return {name: found[name] for name in ("prompts_scored", "prompts_saved")}

    def prompts_spent(self) -> int:
        """Return the cost on dev so far, in prompt-equivalents."""
        counts = self._record.counts
        return counts["prompts_scored"] + prompt_cost(counts)

    def load_packed(self, path: Path) -> Any:
        """Return the content of a file of answers.

        Raises:
            UserError: It is damaged or missing.
        """
        try:
            return read_gzip_json(path)
        except (OSError, ValueError, EOFError, zlib.error):
            raise UserError(f"{path} is damaged or missing; {REPAIR_HINT}") from None

    def load_answers(self, index: ParticleIndex) -> list[dict[str, Any]]:
        """Return a particle's answers to the dev items it was scored on in an iteration."""
        path = self._record.folder / answers_path(index[0])
        try:
            found: list[dict[str, Any]] = self.load_packed(path)[str(index[1])]
        except (KeyError, TypeError):
            raise UserError(f"{path} has no answers of particle {index[1]}") from None
        return found

    def load_extra_answers(
        self, kind: str, position: Iterable[float], items: str
    ) -> list[dict[str, Any]] | None:
        """Return a position's answers outside of the search, see `RunRecord.save_answers`."""
        path = _extra_answers_path(kind, position, items)
        full = self._record.folder / path
        return self.load_packed(full) if path in self._record.sums or full.is_file() else None


class RunRecord(RunState):
    """The writer of a run folder.

    Attributes:
        folder: The run folder.
        note: Added to the description (swarm.json) of each saved best.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = {}
        self.note: dict[str, Any] = {}
        self._record = Record(folder)
        self._cut = ""
        self._damaged: list[str] = []
        self._checked: dict[str, str] | None = None
        self._learned: dict[str, str] = {}  # digests of adapters of the iteration to come

    def open_or_resume(
        self,
        identity: Mapping[str, Any],
        experts: Sequence[str],
        groups: Sequence[str] = ("all",),
        own: int | None = None,
        selection: Mapping[str, Any] | None = None,
    ) -> bool:
        """Start a new record, or resume the folder's one; return True if it was resumed.

        Args:
            selection: How the experts were chosen, in this record; empty if they were not.

        Raises:
            UserError: The folder contains another search; the message names the differing keys.
        """
        resumed = self.load_state(identity)
        for draft in self.folder.rglob(".*.tmp"):  # of a killed process
            draft.unlink(missing_ok=True)
        if resumed or self._cut:
            if self._cut:
                first = f"iterations from {len(self.iterations)} on are evaluated again"
                log.warning("%s/%s: %s", self.folder, self._cut, first)
            self._repair()
            return resumed
        make_folder(self.folder, private=True)
        if not selection:
            self._begin_record()
        self.state = {
            **({"selection": dict(selection)} if selection else {}),
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
        return False

    def _begin_record(self) -> None:
        for name in (SUMMARY_FILE, RECORD_FILE):
            remove(self.folder / name)
        self._record = Record(self.folder)

    def load_selection(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the folder's record knows of a selection of experts, without writing.

        Returns:
            `values` by expert; at its end also what was chosen (`Selection.choose`).

        Raises:
            UserError: The folder contains another search.
        """
        self._record = record = read_record(self.folder, strict=False)
        facts = record.facts
        known = facts.get("selection", {"identity": facts.get("identity", {}), "values": {}})
        if record.rounds:
            self.state = {"identity": known["identity"]}
            self._check_identity(identity)
        elif known["identity"] != json.loads(json.dumps(identity)):
            return {"values": {}}
        prefix = SELECTED.format("")
        parts = {k.removeprefix(prefix): v for k, v in facts.items() if k.startswith(prefix)}
        return {**known, "values": {**known["values"], **parts}}

    def begin_selection(self, identity: Mapping[str, Any]) -> dict[str, float]:
        """Begin a record with a selection of experts, or go on; return the values by expert."""
        values: dict[str, float] = self.load_selection(identity)["values"]
        if not values:
            make_folder(self.folder, private=True)
            self._begin_record()
            self._record.write({"set": {"selection": {"identity": identity, "values": {}}}})
        return values

    def save_selected(self, expert: str, value: float) -> None:
        """Append the measured value of an expert."""
        self._record.write({"set": {SELECTED.format(expert): value}})

    def load_state(self, identity: Mapping[str, Any]) -> bool:
        """Read the folder's state without writing; return whether it has an iteration.

        Raises:
            UserError: As for `open_or_resume`.
        """
        backup = "restore it from a backup, or choose another name="
        has_answers = (self.folder / "answers").exists()
        if not is_run_folder(self.folder):
            for other, what in {
                STUDY_LOCK_FILE: "several searches",
                "tuning.json": "a fine-tuning",
            }.items():
                if (self.folder / other).exists():
                    raise UserError(f"{self.folder} is the folder of {what}; choose another name=")
            if has_answers:
                raise UserError(f"{self._record.path} is missing, with all progress; {backup}")
            return False
        self._record = record = read_record(self.folder, strict=False)
        self._cut = f"{RECORD_FILE} is damaged ({record.damage})" if record.damage else ""
        self.state = record.state
        if "identity" not in record.facts:
            if not record.damage and not has_answers:
                return False  # killed at its first write
            raise UserError(f"{record.path} is not the record of a search, or damaged; {backup}")
        # A search without iterations has nothing to lose, and may be replaced by another one.
        if self.iterations or self._cut:
            self._check_identity(identity)
            self._check_integrity()
        return bool(self.iterations)

    def _check_identity(self, identity: Mapping[str, Any]) -> None:
        old, new = self.state["identity"], json.loads(json.dumps(identity_values(dict(identity))))
        differ = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
        if differ:
            changes = "; ".join(f"{k}: {old.get(k)!r} then, {new.get(k)!r} now" for k in differ[:6])
            more = f" and {len(differ) - 6} more" * (len(differ) > 6)
            raise UserError(
                f"name={self.folder.name}: {self.folder} contains another search "
                f"({changes}{more}); use the same values to resume, or another name= to start anew"
            )

    def _check_integrity(self) -> None:
        """Find damaged files, and stop the record before the first iteration with lost answers.

        Raises:
            UserError: The search has ended, so that a cut would lose finished work.
        """
        if self._checked != self._record.sums:  # else nothing has changed since the last check
            self._checked = dict(self._record.sums)
            self._damaged = self._record.find_damaged()
        numbers = {path: number for path in self._damaged
                   if (number := _iteration_of(path)) is not None}  # fmt: skip
        where = min(numbers, key=lambda path: numbers[path], default=RECORD_FILE)
        lost = numbers.get(where)
        summary = _read_summary(self.folder)
        if summary and summary["finished"] and (self._cut or lost is not None):
            raise UserError(
                f"{self.folder / where} is damaged or missing, and the search has ended; restore "
                "it from a backup, or choose another name= to search again"
            )
        if summary is None and SUMMARY_FILE not in self._damaged:
            self._damaged.append(SUMMARY_FILE)
        if lost is not None:
            lost = self._first_without_adapters(lost)
            self._cut = f"{where} is damaged or missing"
            self._record = Record(self.folder).read(lost)
            self.state = self._record.state

    def _first_without_adapters(self, lost: int) -> int:
        """Return the iteration to cut before: this one, if the adapters to go on from are there.

        Those of earlier iterations may have been dropped; then the first that learned any.
        """
        learned = [n for n, entry in enumerate(self.iterations[:lost]) if entry.get("learned")]
        positions = self.iterations[lost - 1]["positions"] if lost else []
        for number in learned:
            entry = self.iterations[number]
            for i, files in entry["learned"].items():
                missing = any(file and not (self.folder / file).is_file() for file in files)
                if missing and entry["positions"][int(i)] in positions:
                    return learned[0]
        return lost

    def _repair(self) -> None:
        """Remove damaged and unfinished files, so that they are written again, and log it."""
        record = self._record
        if record.cut() or SUMMARY_FILE in self._damaged:
            if not (self.folder / SUMMARY_FILE).is_file():
                remove(self.folder / SUMMARY_FILE)  # which may be a folder or a pipe
            self._write_summary()
        damaged = [path for path in self._damaged if _iteration_of(path) is None]
        if damaged:
            log.warning("%s: damaged or missing, now rebuilt: %s", self.folder, ", ".join(damaged))
        units = {_rebuild_unit(path) for path in damaged} - {SUMMARY_FILE}
        stale = record.paths_under(*units)
        for path in stale:
            remove(self.folder / path)
        record.forget(stale)
        reevaluated = any(unit.startswith("answers/") for unit in units)
        # A kill leaves at most one file of answers without a checksum.
        for file in (self.folder / "answers").glob("*.json.gz"):
            path = f"answers/{file.name}"
            if path in record.sums:
                continue
            if _iteration_of(path) is None:
                try:
                    self.load_packed(file)
                except UserError:
                    reevaluated = True
                else:  # intact by gzip's own checksum
                    record.add_checksums(path)
                    continue
            remove(file)
        if reevaluated:
            self.state["verdict"] = None
            self.save_state()

    def record_versions(self, versions: Mapping[str, str]) -> str:
        """Store the package versions from this iteration on; return a description of changes."""
        kept = self.state.setdefault("versions", [])
        before = kept[-1]["packages"] if kept else {}
        if before == dict(versions):
            return ""
        kept.append({"from_iteration": len(self.iterations), "packages": dict(versions)})
        self.save_state()
        return "; ".join(
            f"{name} {before.get(name, 'none')} before, {versions.get(name, 'none')} now"
            for name in sorted({*before, *versions})
            if before and before.get(name) != versions.get(name)
        )

    def save_state(self) -> None:
        """Append what has changed in the state besides the iterations."""
        facts = dict(self.state)
        for key in ("rounds", "optimizer"):
            facts.pop(key, None)
        if self._record.state_facts(facts):
            self._write_summary()

    def _write_summary(self) -> None:
        found = {**self._record.facts, "lines": self._record.lines}
        sealed = {**found, "checksum": _hash_bytes(encode_json(found))}
        write_json(self.folder / SUMMARY_FILE, sealed)

    def reopen(self) -> None:
        """Make a finished search one that has not ended; its answers are kept."""
        for key in ("minutes", "chosen"):
            self.state.pop(key, None)
        self.state |= {"finished": None, "verdict": None}
        self.save_state()
        if self.iterations[-1].get("after_search"):
            last = len(self.iterations) - 1
            self._record.write({"keep": last, "files": {answers_path(last): None}})
            self.state["rounds"] = self._record.rounds
            remove(self.folder / answers_path(last))

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
            facts: Further keys of the entry, such as `items_scored` and `prompts_scored`.
        """
        record, number = self._record, len(self.iterations)
        before = self.folder / answers_path(number - 1)
        if number and not before.is_file():
            raise UserError(f"{before} was removed during the search; {REPAIR_HINT}")
        self.save_state()
        path = answers_path(number)
        packed = gzip.compress(encode_json(dict(answers)), 6, mtime=0)
        write_atomic(self.folder / path, packed)
        line = {
            "iteration": number,
            "round": {
                "positions": np.asarray(positions, dtype=float).tolist(),
                "utilities": [None if np.isnan(u) else u for u in utilities.tolist()],
                **facts,
            },
            "optimizer": difference(record.optimizer or {}, dict(optimizer)),
            "files": {path: _hash_bytes(packed), **self._learned},
        }
        self._learned = {}
        record.write(line)
        self.state |= {"rounds": record.rounds, "optimizer": record.optimizer}

    def write_learned(self, iteration: int, particle: int, data: bytes) -> str:
        """Write an adapter that a particle has learned; return the absolute path of its file."""
        path = _learned_path(iteration, particle)
        make_folder(self.folder / LEARNED_FOLDER)
        write_atomic(self.folder / path, data)
        self._learned[path] = _hash_bytes(data)
        return str((self.folder / path).resolve())

    def drop_learned(self, positions: np.ndarray) -> None:
        """Remove adapters that neither the present positions nor a personal best have."""
        if not any(path.startswith(LEARNED_FOLDER) for path in self._record.sums):
            return
        bests = [self.position_at(at) for _, at in self._record.highest.values()]
        kept = {tuple(row) for row in [*positions.tolist(), *bests]}
        used = {
            file
            for entry in self.iterations
            for i, files in entry.get("learned", {}).items()
            if tuple(entry["positions"][int(i)]) in kept
            for file in files
        }
        gone = [path for path in self._record.sums if path.startswith(LEARNED_FOLDER)]
        gone = [path for path in gone if path not in used]
        if gone:
            self._record.write({"files": dict.fromkeys(gone)})
            for path in gone:
                remove(self.folder / path)

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
        packed = gzip.compress(encode_json(list(answers)), 6, mtime=0)
        self.write_file(_extra_answers_path(kind, position, items), packed)

    def write_json(self, name: str, value: Any) -> None:
        """Write a file of JSON with a checksum; `None` removes it."""
        self.write_file(name, None if value is None else encode_json(value, 1) + b"\n")

    def write_file(self, name: str, data: bytes | None) -> None:
        """Write a file with a checksum; `None` removes it."""
        self._record.write_file(name, data)

    def write_outputs(self, pool: Any) -> None:
        """Update the scratchpad and the saved bests.

        Args:
            pool: Its `save` writes the adapter of some coefficients, with further facts, to a
                folder, atomically; its `save_note` writes the personal ones.
        """
        highest = sorted(self._record.highest.items())
        bests = {f"particle_{i}/personal_best": at for i, (_, at) in highest}
        bests = {"global_best": self.find_best()} | bests if bests else {}
        stale = {name: at for name, at in bests.items() if not self._is_saved(name, at)}
        self.write_json(SCRATCHPAD_FILE, build_scratchpad(self.iterations))
        with self._record.replacing(*stale):
            for name, index in stale.items():
                self._save_best(index, self.folder / name, pool)

    def _is_saved(self, name: str, index: ParticleIndex) -> bool:
        """Return whether a best is saved with checksums, which a start has verified."""
        folder = self.folder / name
        if not self._record.paths_under(name) or not (folder / "answers_dev.jsonl").is_file():
            return False
        try:
            facts = parse_json((folder / "swarm.json").read_text())
        except (OSError, ValueError):
            return False
        return bool(facts.get("coefficients") == self.position_at(index))

    def _save_best(self, index: ParticleIndex, folder: Path, pool: Any) -> None:
        facts = {
            "iteration": index[0],
            "particle": index[1],
            "validation_utility": self.utility_at(index),
            **self.note,
        }
        # Remove old answers first: a kill must not leave those of an earlier best beside this one.
        (folder / "answers_dev.jsonl").unlink(missing_ok=True)
        save = pool.save if folder.name == "global_best" else pool.save_note
        save(self.position_at(index), folder, facts)
        rows = b"".join(encode_json(row) + b"\n" for row in self.load_answers(index))
        write_atomic(folder / "answers_dev.jsonl", rows)


def _rebuild_unit(path: str) -> str:
    """Return the path to rebuild if a file is damaged: the folder of a saved best."""
    first, *rest = path.split("/")
    if first == "answers" or not rest:
        return path
    # A saved best may have a folder for each route below it.
    return f"{first}/{rest[0]}" if first.startswith("particle_") else first


def build_scratchpad(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the utilities of a run under the key names of the original implementation.

    A particle without a utility in an iteration (not evaluated, or stopped early) repeats its last
    one in its history.
    """
    histories: list[list[float | None]] = [[] for _ in (rounds[0]["utilities"] if rounds else ())]
    best_so_far: list[float | None] = []
    measured, highest = list[float](), list[float]()
    for entry in rounds:
        for history, utility in zip(histories, entry["utilities"], strict=True):
            history.append(utility if utility is not None or not history else history[-1])
        measured += [utility for utility in entry["utilities"] if utility is not None]
        best_so_far.append(max([*measured[-len(histories) :], *highest], default=None))
        highest = [one for one in best_so_far[-1:] if one is not None]
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


class RunFolder(RunState):
    """A finished or running search, read for analysis.

    Attributes:
        path: The run folder.
        experts: The pool's K names.
        expert_count: Number of first rows that are experts, not rows made by the pool.
        groups: Names of the G groups of modules, each with its own coefficients.
        rounds: The entry of each iteration; 0 is the start.
        positions: [T, N, G * K] mixing coefficients.
        utilities: [T, N] on dev, NaN where none was measured.
        means: [T, N, K] means of the coefficients over the groups of modules.
        particles: Number of particles N.
        finished: Reason why the search ended; `None` while it runs.
        verdict: The verdict; `None` while it runs.
        test_items: Digest of the test items; `None` if nothing was tested.
        optimizer: The optimizer's state after the last iteration.
        identity: The settings and digests that identify the search.
        scale: Score scale of a task that calibrates one on the experts; else `None`.
        front: The Pareto front of a task of several parts; else `None`.

    Raises:
        UserError: The folder is not a run's, or no iteration is finished.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path(path)
        self._record, self._verified = read_record(self.path), set[str]()
        self.state = state = self._record.state
        if "identity" not in state:
            raise UserError(f"{self.path} {_describe_folder(self.path)}")
        self._verify(CONFIG_FILE)
        if not self.iterations:
            raise UserError(f"{self.path}: no iteration has finished yet; wait for the first")
        self.experts: list[str] = state["experts"]
        self.expert_count: int = state["own"]
        self.groups: list[str] = state["groups"]
        self.rounds = self.iterations
        self.finished: str | None = state["finished"]
        self.verdict = read_verdict(state)
        self.test_items: str | None = (
            self.verdict.settings.get("test_items") if self.verdict else None
        )
        self.identity: dict[str, Any] = clean(state["identity"])
        self.scale: dict[str, Any] | None = state.get("scale")
        self.optimizer: dict[str, Any] = state["optimizer"] or {}
        self.front = ParetoFront.from_state(state)
        self.positions = np.array([entry["positions"] for entry in self.rounds], dtype=float)
        self.utilities = np.array([entry["utilities"] for entry in self.rounds], dtype=float)
        iterations, self.particles = self.utilities.shape
        shape = (iterations, self.particles, len(self.groups), len(self.experts))
        self.means: np.ndarray = self.positions.reshape(shape).mean(axis=2)

    @property
    def name(self) -> str:
        """Name of the run, "STUDY/part" for one of a study."""
        path = self.path.resolve()
        home = path.parent
        nested = home.parent.name == RUNS_FOLDER != home.name
        return f"{home.name}/{path.name}" if nested else path.name

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the start, with environment variables resolved.

        Raises:
            UserError: The folder has none (a run created in Python).
        """
        path = self.path / CONFIG_FILE
        if not path.is_file():
            raise UserError(
                f"{path} is missing: this run was not started by python -m swarm.search"
            )
        self._verify(CONFIG_FILE)
        try:
            found: dict[str, Any] = read_config(dict(parse_json(path.read_text())))
        except (OSError, ValueError, TypeError):
            raise UserError(f"{path} is not the configuration of a search") from None
        return found

    def position_label(self, index: ParticleIndex) -> str | None:
        """Return the optimizer's name for a position, such as "mean of all", or `None`."""
        return position_label(self.optimizer, self.position_at(index))

    def best_so_far(self) -> np.ndarray:
        """Return the highest utility up to each iteration, [T], NaN before the first."""
        highest = np.where(np.isnan(self.utilities), -np.inf, self.utilities).max(axis=1)
        found: np.ndarray = np.maximum.accumulate(highest)
        return np.where(np.isinf(found), np.nan, found)

    def _verify(self, path: str) -> None:
        """Raise a `UserError` if a file has changed."""
        if path in self._verified:
            return
        if path in self._record.sums and self._record.find_damaged(path):
            # A running search may have replaced it since the record was read.
            verify_run_file(self.path / path)
        self._verified.add(path)

    def load_packed(self, path: Path) -> Any:
        """See `RunState.load_packed`; the file is also compared with its checksum."""
        self._verify(path.relative_to(self.path).as_posix())
        return super().load_packed(path)

    def load_answer_values(self, index: ParticleIndex) -> np.ndarray:
        """Return the values of a particle's answers, [items]."""
        return np.array([row["value"] for row in self.load_answers(index)], dtype=float)

    def load_test_answers(self, index: ParticleIndex) -> list[dict[str, Any]] | None:
        """Return a position's answers to the test items; `None` if it was not scored on test."""
        return self.load_answers_at(self.position_at(index))

    def load_answers_at(
        self, position: Iterable[float], items: str | None = None
    ) -> list[dict[str, Any]] | None:
        """Return the answers to test items of a position, possibly new to the search.

        Args:
            position: [G * K] coefficients.
            items: Digest of the items; all test items by default.

        Returns:
            The answers; `None` if the position was not scored on these items.
        """
        items = items or self.test_items
        return self.load_extra_answers("test", position, items) if items else None


def _describe_folder(folder: Path) -> str:
    """Describe a folder that is not a run's, with advice."""
    if (folder / "tuning.json").is_file():
        adapter = f", its adapter is {folder}/tuned" * (folder / "tuned").is_dir()
        results = f"its results are in {folder}/tuning.json{adapter}"
        return f"contains no search, but a fine-tuning: {results}"
    if runs := find_run_folders(folder):
        kind = "is a study" if (folder / STUDY_LOCK_FILE).exists() else "contains no search"
        more = ", ..." * (len(runs) > MAX_RUNS_SHOWN)
        names = ", ".join(map(str, runs[:MAX_RUNS_SHOWN]))
        return f"{kind}: its runs are {names}{more}; name one of them"
    if is_run_folder(folder):
        return f"has a {RECORD_FILE} that is not the record of a search; name another folder"
    if is_run_folder(folder.parent):
        return f"contains no search; did you mean {folder.parent}?"
    parents = (Path(RUNS_FOLDER), folder.parent)
    known = {run.name: run for parent in parents for run in reversed(find_run_folders(parent))}
    if close := get_close_matches(folder.name, known, 1):
        return f"contains no search; did you mean {known[close[0]]}?"
    return f"contains no search; allowed: a folder of {RUNS_FOLDER}/ with a {RECORD_FILE}"


def find_run_folders(folder: Path) -> list[Path]:
    """Return the run folders in a folder, sorted, those of studies, two levels down, last."""
    folders = _visible_folders(folder)
    own = [one for one in folders if is_run_folder(one)]
    nested = [two for one in folders if one not in own for two in _visible_folders(one)]
    return [*own, *(one for one in nested if is_run_folder(one))]


def _visible_folders(folder: Path) -> list[Path]:
    try:
        return sorted(one for one in folder.iterdir() if one.name[0] != "." and one.is_dir())
    except OSError:
        return []


def load_command(folder: Path) -> dict[str, Any] | None:
    """Return `arguments` and `directory` of the search in a folder; `None` if not stored."""
    try:
        found = parse_json((folder / COMMAND_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("arguments"), list) else None
