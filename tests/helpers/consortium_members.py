"""Functions that sit in consortia of the tests: members who agree or not, and an arbiter."""

import sys
import threading
from collections.abc import Sequence

from swarm.models.base import Message

heard: list[tuple[str, str]] = []
"""Who was asked what, as one text."""

BLUE, GREEN, DEAD, JUDGE, RANKER, SLOW = (
    f"function/consortium_members:{name}"
    for name in ("blue", "green", "dead", "judge", "ranker", "slow")
)


def _hears(name: str, prompt: str | Sequence[Message]) -> str:
    text = prompt if isinstance(prompt, str) else "\n".join(f"{r}: {c}" for r, c in prompt)
    heard.append((name, text))
    return text


def blue(prompt: Sequence[Message]) -> str:
    """One opinion, and a character that would move the cursor."""
    _hears("blue", prompt)
    return "It is blue.\x1b[2J\nConfidence: 0.9"


def green(prompt: Sequence[Message]) -> str:
    """The other opinion."""
    _hears("green", prompt)
    return "It is green.\nConfidence: 0.4"


def dead(prompt: Sequence[Message]) -> str:
    """Nothing."""
    raise ValueError("no power")


def slow(prompt: Sequence[Message]) -> str:
    """Says that it was asked, and answers much too late."""
    print("asked", file=sys.stderr, flush=True)
    threading.Event().wait(20)
    return "at last"


def judge(prompt: Sequence[Message]) -> str:
    """Whoever judges: chooses nobody, and gets surer with every call."""
    _hears("judge", prompt)
    calls = sum(name == "judge" for name, _ in heard)
    return (
        f"<analysis>blue was said</analysis><dissent>one says green</dissent>"
        f"<synthesis>answer {calls}</synthesis><confidence>{min(0.95, 0.5 + calls / 10):.2f}"
        "</confidence><needs_iteration>false</needs_iteration>"
        "<refinement_areas><area>more light</area></refinement_areas>"
    )


def ranker(prompt: Sequence[Message]) -> str:
    """Puts the second answer that it is shown first."""
    _hears("ranker", prompt)
    return "2 > 1"
