"""Instructions with the skills they call for, answers to them, and the skills' scales.

The formats are those of FLASK (Ye et al. 2023, 2307.10928); its earlier field names are read too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from swarm.errors import UserError
from swarm.judge.files import Kinds, Row, read_rows
from swarm.judge.merging import by_key

Id = int | str

NAMES = {
    "idx": ("idx", "question_id"),
    "instruction": ("instruction", "text"),
    "skill": ("skill", "metrics"),
    "domain": ("domain", "domain_labeled"),
    "difficulty": ("difficulty", "difficulty_labeled"),
}
"""Fields by the name that they have now and the one that they had."""

SKILL: Kinds = {"Skill": str, "Criteria": str, "Scoring": dict}

LEVELS = ("1", "2", "3", "4", "5")

UNLABELLED = "-1"
"""What the original writes where nobody said the domain or the difficulty."""


class Skill(NamedTuple):
    """One skill: what is asked about a response, and what each score means."""

    name: str
    criteria: str
    scoring: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Item:
    """One instruction.

    Attributes:
        id: By which answers and reviews are joined to it.
        instruction: What a model is asked.
        answer: A reference answer; empty where there is none.
        skills: By which its answers are scored; names of `Skill`s.
        domains: What it is about.
        difficulty: What one has to know for it.
    """

    id: Id
    instruction: str
    answer: str
    skills: tuple[str, ...]
    domains: tuple[str, ...]
    difficulty: str


def read_skills(path: str | Path) -> dict[str, Skill]:
    """The skills by name, from a list of {Skill, Criteria, Scoring: {"1": ..., "5": ...}}.

    Raises:
        UserError: The file cannot be read or holds something else.
    """
    found = {}
    for row in read_rows(path, SKILL):
        if not all(isinstance(row["Scoring"].get(level), str) for level in LEVELS):
            raise UserError(f'{path}: {row["Skill"]}: its "Scoring" has no text for each of 1 to 5')
        found[row["Skill"]] = Skill(row["Skill"], row["Criteria"], row["Scoring"])
    return found


def read_items(path: str | Path, skills: Mapping[str, Skill]) -> list[Item]:
    """The items of a file, in its order; of rows with the same id the last.

    Args:
        path: One {idx, instruction, answer, task, skill, domain, difficulty} a line.
        skills: Those that there are.

    Raises:
        UserError: The file cannot be read or holds something else.
    """
    rows = [_renamed(row) for row in read_rows(path)]
    return [_item(path, row, skills) for row in by_key(("idx",), rows).values()]


def _renamed(row: Row) -> Row:
    found = dict(row)
    for now, names in NAMES.items():
        found[now] = next((row[name] for name in names if name in row), None)
    return found


def _item(path: str | Path, row: Row, skills: Mapping[str, Skill]) -> Item:
    id_, instruction = row["idx"], row["instruction"]
    if not isinstance(id_, (int, str)) or isinstance(id_, bool):
        raise UserError(f'{path}: an item has no "idx" (or "question_id"), a number or a text')
    if not isinstance(instruction, str) or not instruction.strip():
        raise UserError(f'{path}: item {id_}: it has no "instruction" (or "text")')
    named = row["skill"]
    if not isinstance(named, list) or not named:
        raise UserError(f'{path}: item {id_}: its "skill" (or "metrics") is no list of skills')
    return Item(
        id_,
        instruction,
        row["answer"] if isinstance(row.get("answer"), str) else "",
        tuple(dict.fromkeys(_known(path, id_, str(name), skills) for name in named)),
        tuple(_labels(row["domain"])),
        _labels(row["difficulty"])[0],
    )


def _labels(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return ["unlabelled" if one in (None, UNLABELLED, int(UNLABELLED)) else str(one)
            for one in values] or ["unlabelled"]  # fmt: skip


def _known(path: str | Path, id_: Id, name: str, skills: Mapping[str, Skill]) -> str:
    """The skill of a name; case and underscores do not matter, nor a part that is unmistakable."""
    asked = _plain(name)
    whole = [skill for skill in skills if _plain(skill) == asked]
    parts = whole or [skill for skill in skills if asked and asked in _plain(skill)]
    if len(parts) != 1:
        raise UserError(f"{path}: item {id_}: skill {name!r} is not one of {', '.join(skills)}")
    return parts[0]


def _plain(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


def read_answers(paths: Iterable[str | Path]) -> dict[str, dict[Id, str]]:
    """Each model's texts by question; of rows with the same id the last.

    A row is {question_id, text}, and may say its model; else the file's name does.

    Raises:
        UserError: A file cannot be read or holds something else.
    """
    found: dict[str, dict[Id, str]] = {}
    for path in map(Path, paths):
        for row in read_rows(path, {"text": str}):
            id_ = row.get("question_id", row.get("idx"))
            if not isinstance(id_, (int, str)):
                raise UserError(f'{path}: an answer has no "question_id", a number or a text')
            found.setdefault(str(row.get("model") or path.stem), {})[id_] = row["text"]
    return found
