"""Files of JSON lines."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from swarm.compare.errors import InvalidArgument
from swarm.errors import UserError
from swarm.files import write_atomic


def read_jsonl(path: str | Path) -> list[Any]:
    """The values of a file's lines; empty lines are skipped.

    Raises:
        UserError: The file cannot be read, or a line is no JSON.
    """
    found, number = [], 0
    try:
        with Path(path).expanduser().open(encoding="utf-8-sig") as file:
            for line in file:
                number += 1
                if line.strip():
                    found.append(json.loads(line))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: line {number or 1} is no JSON: {error}") from None
    return found


def write_jsonl(path: str | Path, data: Iterable[Any]) -> None:
    """Write a file with a line for each value, whole or not at all; its folders are made.

    Args:
        path: The file; what was there is replaced.
        data: JSON values, or the rows of a data frame. What is no number is written as null.

    Raises:
        UserError: A value is not JSON, or the file cannot be written.
    """
    if hasattr(data, "to_dict"):
        data = data.to_dict("records")
    lines = []
    for number, value in enumerate(data):
        try:
            lines.append(json.dumps(to_json_value(value), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"write_jsonl: value {number} is not JSON: {error}") from None
    write_atomic(Path(path).expanduser(), "".join(line + "\n" for line in lines).encode())


def to_json_value(value: Any) -> Any:
    """The value as JSON has it: numbers of numpy as Python's, NaN and infinity as null."""
    if isinstance(value, dict):
        return {key: to_json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(one) for one in value]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and value - value != 0:
        return None
    return value
