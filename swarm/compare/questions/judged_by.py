"""The judges of a question, as they are given: objects, their arguments, or names in YAML."""

from collections.abc import Mapping
from typing import Any

from swarm.compare.errors import InvalidArgument
from swarm.compare.questions import Question
from swarm.compare.questions.frames import LEADING_COLUMNS, MIDDLE_COLUMNS

RESERVED_COLUMNS = (*LEADING_COLUMNS, *MIDDLE_COLUMNS, "raw_answer", "probs", "error")
RESERVED_SUFFIXES = ("_question", "_raw_answer", "_probs")
"""What no judge's column may be called, or end with."""


def resolve_judges(judges: Any) -> dict[str, Any] | None:
    """The judges of a question, by their columns.

    Args:
        judges: By column a judge, its arguments, or its name in YAML; or `None`.

    Raises:
        WrongValue: A column is taken, or a value makes no judge.
    """
    if judges is None:
        return None
    if not isinstance(judges, Mapping):
        raise InvalidArgument("judges must be a mapping: the column of each, and the judge")
    for name in judges:
        wrong = name in RESERVED_COLUMNS or not isinstance(name, str) or not name or name.startswith("_")
        if wrong or name.endswith(RESERVED_SUFFIXES):
            raise InvalidArgument(
                f"judges: {name!r} cannot be a judge's column: not {', '.join(RESERVED_COLUMNS)}, and none "
                f"that starts with _ or ends with {', '.join(RESERVED_SUFFIXES)}"
            )
    return {name: resolve_judge(name, said) for name, said in judges.items()}


def resolve_judge(name: str, said: Any) -> Any:
    """One judge; see `judges_of`."""
    made = said
    if isinstance(said, str):
        made = Question.from_yaml(said)
    elif isinstance(said, Mapping):
        try:
            made = Question.create(**said)
        except InvalidArgument as error:
            raise InvalidArgument(f"judge {name}: {error}") from None
    if not getattr(made, "judges_answers", False):
        kind = made.type() if isinstance(made, Question) else type(made).__name__
        raise InvalidArgument(
            f"judge {name}: must be a free_form_judge or a rating_judge, its arguments or its "
            f"name in YAML; it is a {kind}"
        )
    return made
