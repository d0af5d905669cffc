"""In-memory table of a viewer: columns, their kinds, and the texts that are searched."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from swarm.compare.dataframe import DETAIL_COLUMNS
from swarm.compare.view.load import ColumnData

KNOWN_COLUMNS = ("model", "group", "answer", "question", "api_kwargs", "paraphrase_ix", "error")
"""Columns with a dedicated position on the page."""

MAX_CHOICES = 200
"""Maximum distinct values of a column that can be filtered by choice."""


class CategoricalColumn(NamedTuple):
    """A column as integers: the index of each row's label."""

    codes: np.ndarray
    labels: list[str]


class AnswerTable:
    """Rows that can be searched, filtered and sorted.

    Args:
        columns: See `swarm.compare.view.load.ColumnData`.
        name: Name shown on the page.

    Attributes:
        conversation_indices: For each row, its index in `conversations`.
        conversations: Distinct conversations in lower case.
        answers_lower: For each row, its answer in lower case.
        questions: For each row, a number that identifies its question.
    """

    def __init__(self, columns: ColumnData, name: str) -> None:
        self.columns, self.name = columns, name
        self.count = len(columns["answer"])
        self.answers_lower = [extract_text(answer).lower() for answer in columns["answer"]]
        self.conversation_indices, self.conversations = _number_texts(
            extract_text(self.get_messages(row)).lower() for row in range(self.count)
        )
        self.questions = self.conversation_indices
        if "question" in columns:
            self.questions = _number_texts(map(extract_text, columns["question"]))[0]
        self._keys: dict[str, np.ndarray] = {}
        self._coded: dict[str, CategoricalColumn] = {}

    def get_messages(self, row: int) -> Any:
        """Return the messages that were sent or, if unknown, the question."""
        kwargs = self.columns["api_kwargs"][row] if "api_kwargs" in self.columns else None
        messages = kwargs.get("messages") if isinstance(kwargs, dict) else None
        if isinstance(messages, list):
            return [one.get("content") if isinstance(one, dict) else one for one in messages]
        return self.columns["question"][row] if "question" in self.columns else None

    def get_row(self, row: int) -> dict[str, Any]:
        """Return all values of a row."""
        return {name: values[row] for name, values in self.columns.items()}

    @cached_property
    def column_kinds(self) -> dict[str, str]:
        """Kind of each column: "number", "text", "structure" or, without values, "empty"."""
        return {name: _infer_kind(values) for name, values in self.columns.items()}

    @cached_property
    def judge_columns(self) -> list[str]:
        """Columns of judges: those that have a COLUMN_question."""
        return [name for name in self.columns if f"{name}_question" in self.columns]

    @cached_property
    def listed_columns(self) -> list[str]:
        """Columns shown in the list, and beside the answers in a comparison."""
        first = [name for name in ("model", "group") if name in self.columns]
        numbers = [
            name
            for name, kind in self.column_kinds.items()
            if kind == "number"
            and name not in (*KNOWN_COLUMNS, *DETAIL_COLUMNS, *self.judge_columns)
        ]
        return [*first, *self.judge_columns, *numbers[:4]]

    @cached_property
    def filter_choices(self) -> dict[str, list[tuple[str, int]]]:
        """Labels of columns with few distinct values, with the number of rows for each."""
        found = {}
        for name, kind in self.column_kinds.items():
            ordinal = name in ("model", "group", "paraphrase_ix")
            asked_of_judge = name.removesuffix("_question") in self.judge_columns
            if kind in ("structure", "empty") or name == "error" or asked_of_judge:
                continue
            limit = 1000 if ordinal else MAX_CHOICES
            if (kind == "number" and not ordinal) or not 1 < len(set(self.columns[name])) <= limit:
                continue
            coded = self.get_categorical(name)
            if ordinal or max(map(len, coded.labels)) <= 80:
                counts = np.bincount(coded.codes, minlength=len(coded.labels)).tolist()
                found[name] = list(zip(coded.labels, counts, strict=True))
        return found

    @cached_property
    def number_ranges(self) -> dict[str, tuple[float, float]]:
        """Minimum and maximum of each numeric column."""
        return {
            name: (float(np.nanmin(keys)), float(np.nanmax(keys)))
            for name, kind in self.column_kinds.items()
            if kind == "number" and len(keys := self.sort_keys(name))
        }

    def sort_keys(self, name: str) -> np.ndarray:
        """Return numbers that sort a column's values, of shape [rows]; NaN for missing values.

        Numbers precede texts, and case is ignored.
        """
        if name not in self._keys:
            values = self.columns[name]
            if self.column_kinds[name] not in ("number", "empty"):
                values = _rank_values(values)
            self._keys[name] = np.array(values, dtype=np.float64)
        return self._keys[name]

    def get_categorical(self, name: str) -> CategoricalColumn:
        """Return a column as labels in order of first occurrence, and each row's label index."""
        if name not in self._coded:
            numbers, labels = _number_texts(map(format_label, self.columns[name]))
            self._coded[name] = CategoricalColumn(np.array(numbers, dtype=np.int64), labels)
        return self._coded[name]


def format_label(value: Any) -> str:
    """Return the label of a value in filters; empty for a missing value."""
    return "" if value is None else extract_text(value)


def extract_text(value: Any) -> str:
    """Extract all text of a message's content, an answer or a structure."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, Mapping):
        if isinstance(text := value.get("text"), str):
            return text
        return "\n".join(f"{key} {extract_text(one)}" for key, one in value.items())
    if isinstance(value, list):
        return "\n".join(map(extract_text, value))
    return str(value)


def _number_texts(texts: Iterable[str]) -> tuple[list[int], list[str]]:
    known: dict[str, int] = {}
    numbers = [known.setdefault(text, len(known)) for text in texts]
    return numbers, list(known)


def _infer_kind(values: list[Any]) -> str:
    kinds = {type(value) for value in values} - {type(None)}
    if not kinds:
        return "empty"
    if kinds <= {int, float}:
        return "number"
    return "structure" if kinds & {dict, list} else "text"


def _rank_values(values: list[Any]) -> list[int | None]:
    """Return the rank of each value."""
    known: list[Any] = [one for one in values if one is not None]
    if all(isinstance(one, str) for one in known):
        order = {one: rank for rank, one in enumerate(sorted(dict.fromkeys(known), key=str.lower))}
        return [None if one is None else order[one] for one in values]
    keys = [None if one is None else _rank_key(one) for one in values]
    among = {key: rank for rank, key in enumerate(sorted({key for key in keys if key is not None}))}
    return [None if key is None else among[key] for key in keys]


def _rank_key(value: Any) -> tuple[int, float, str]:
    is_number = isinstance(value, int | float)
    return (0, float(value), "") if is_number else (1, 0.0, extract_text(value).lower())
