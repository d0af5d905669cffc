"""What an action says at its end, and what it says will be left out."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from swarm.judge.asking import Replies, spent, spent_line


def closed(replies: Replies, what: str, who: str, output: Path) -> int:
    """Print how many replies there are, what they took and where they lie; give the exit code."""
    lines = [*replies.report(what), spent_line(who, spent(replies.answers.values()))]
    print("\n".join([*lines, f"wrote {output}"]))
    return replies.code


def without_answer(
    questions: Collection[Any], answers: Mapping[str, Mapping[Any, Any]]
) -> list[str]:
    """A line for each model that did not answer all of the questions.

    Args:
        questions: Their ids.
        answers: By model and question's id.
    """
    lines = []
    for model, mine in answers.items():
        if none := [str(id_) for id_ in questions if id_ not in mine]:
            some = ", ".join(none[:5]) + (", …" if len(none) > 5 else "")
            lines.append(f"{model}: no answer to {len(none)} of {len(questions)} questions: {some}")
    return lines
