"""Instructions with the skills they call for, answers to them, and the skills' scales.

The formats are those of FLASK (Ye et al. 2023, 2307.10928); its earlier field names are read too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from swarm.errors import UserError
from swarm.judge.files import FieldTypes, JsonRow, read_json_rows
from swarm.judge.merging import rows_by_key

QuestionId = int | str

FIELD_ALIASES = {
    "idx": ("idx", "question_id"),
    "instruction": ("instruction", "text"),
    "skill": ("skill", "metrics"),
    "domain": ("domain", "domain_labeled"),
    "difficulty": ("difficulty", "difficulty_labeled"),
}
"""Fields by the name that they have now and the one that they had."""

SKILL_FIELDS: FieldTypes = {"Skill": str, "Criteria": str, "Scoring": dict}

SCORE_LEVELS = ("1", "2", "3", "4", "5")

UNLABELLED_CODE = "-1"
"""What the original writes where nobody said the domain or the difficulty."""


class Skill(NamedTuple):
    """One skill: what is asked about a response, and what each score means."""

    name: str
    criteria: str
    scoring: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FlaskItem:
    """One instruction.

    Attributes:
        id: By which answers and reviews are joined to it.
        instruction: What a model is asked.
        answer: A reference answer; empty where there is none.
        skills: By which its answers are scored; names of `Skill`s.
        domains: What it is about.
        difficulty: What one has to know for it.
    """

    id: QuestionId
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
    for row in read_json_rows(path, SKILL_FIELDS):
        if not all(isinstance(row["Scoring"].get(level), str) for level in SCORE_LEVELS):
            raise UserError(f'{path}: {row["Skill"]}: its "Scoring" has no text for each of 1 to 5')
        found[row["Skill"]] = Skill(row["Skill"], row["Criteria"], row["Scoring"])
    return found


def read_items(path: str | Path, skills: Mapping[str, Skill]) -> list[FlaskItem]:
    """The items of a file, in its order; of rows with the same id the last.

    Args:
        path: One {idx, instruction, answer, task, skill, domain, difficulty} a line.
        skills: Those that there are.

    Raises:
        UserError: The file cannot be read or holds something else.
    """
    rows = [_normalize_fields(row) for row in read_json_rows(path)]
    return [_parse_item(path, row, skills) for row in rows_by_key(("idx",), rows).values()]


def _normalize_fields(row: JsonRow) -> JsonRow:
    found = dict(row)
    for now, names in FIELD_ALIASES.items():
        found[now] = next((row[name] for name in names if name in row), None)
    return found


def _parse_item(path: str | Path, row: JsonRow, skills: Mapping[str, Skill]) -> FlaskItem:
    id_, instruction = row["idx"], row["instruction"]
    if not isinstance(id_, (int, str)) or isinstance(id_, bool):
        raise UserError(f'{path}: an item has no "idx" (or "question_id"), a number or a text')
    if not isinstance(instruction, str) or not instruction.strip():
        raise UserError(f'{path}: item {id_}: it has no "instruction" (or "text")')
    named = row["skill"]
    if not isinstance(named, list) or not named:
        raise UserError(f'{path}: item {id_}: its "skill" (or "metrics") is no list of skills')
    return FlaskItem(
        id_,
        instruction,
        row["answer"] if isinstance(row.get("answer"), str) else "",
        tuple(dict.fromkeys(_resolve_skill(path, id_, str(name), skills) for name in named)),
        tuple(_parse_labels(row["domain"])),
        _parse_labels(row["difficulty"])[0],
    )


def _parse_labels(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return ["unlabelled" if one in (None, UNLABELLED_CODE, int(UNLABELLED_CODE)) else str(one)
            for one in values] or ["unlabelled"]  # fmt: skip


def _resolve_skill(path: str | Path, id_: QuestionId, name: str, skills: Mapping[str, Skill]) -> str:
    """The skill of a name; case and underscores do not matter, nor a part that is unmistakable."""
    asked = _normalize_name(name)
    whole = [skill for skill in skills if _normalize_name(skill) == asked]
    parts = whole or [skill for skill in skills if asked and asked in _normalize_name(skill)]
    if len(parts) != 1:
        raise UserError(f"{path}: item {id_}: skill {name!r} is not one of {', '.join(skills)}")
    return parts[0]


def _normalize_name(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


def read_answers(paths: Iterable[str | Path]) -> dict[str, dict[QuestionId, str]]:
    """Each model's texts by question; of rows with the same id the last.

    A row is {question_id, text}, and may say its model; else the file's name does.

    Raises:
        UserError: A file cannot be read or holds something else.
    """
    found: dict[str, dict[QuestionId, str]] = {}
    for path in map(Path, paths):
        for row in read_json_rows(path, {"text": str}):
            id_ = row.get("question_id", row.get("idx"))
            if not isinstance(id_, (int, str)):
                raise UserError(f'{path}: an answer has no "question_id", a number or a text')
            found.setdefault(str(row.get("model") or path.stem), {})[id_] = row["text"]
    return found
