"""How models are named: KIND/NAME, PROVIDER/MODEL or a model alone, and how often each is asked."""

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches

from swarm.errors import UserError
from swarm.models.providers import Provider, Providers

KINDS = ("local", "llm", "function", "moa")
"""What a name may begin with beside a provider."""

MOST = 99
"""Samples that a name may ask for."""


def counted(name: str) -> tuple[str, int]:
    """A name, and how often its model is asked: "qwen2:7b:3" is ("qwen2:7b", 3).

    A last part of digits alone is a number of samples; other tags belong to the name, and
    "name:8:1" says that 8 is one too.

    Raises:
        UserError: The number is not from 1 to `MOST`.
    """
    head, colon, tail = name.rpartition(":")
    if not colon or not (tail.isascii() and tail.isdigit()):
        return name, 1
    if not head or not 1 <= int(tail) <= MOST:
        raise UserError(
            f"{name}: a model is asked from 1 to {MOST} times; if :{tail} belongs to its name, "
            f"write {name}:1"
        )
    return head, int(tail)


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """The known first segment that a name's is nearly, or `None`.

    What a vendor is called on a hub, mistralai or deepseek-ai, is no misspelling of its endpoint's
    name.
    """
    first, slash, _ = name.partition("/")
    if not slash or first in known or re.sub("-?ai$", "", first) in known:
        return None
    near = get_close_matches(first.lower(), known, 1, 0.75)
    return near[0] if near else None


def default_provider(name: str, providers: Providers) -> Provider:
    """The provider of a name that names none; see docs/models.md.

    Raises:
        UserError: The environment does not say which, or the name is nearly another one's.
    """
    near = misspelt(name, (*KINDS, *providers))
    likely = ("together", "openai") if "/" in name else ("openai", "together")
    there = [providers[one] for one in likely if one in providers]
    moved = [one for one in there if one.moved]
    with_key = [one for one in there if os.environ.get(one.api_key_env or "", "").strip()]
    found = next(iter(moved + with_key), None)
    if near is not None:
        meant = f"{name}: did you mean {near}/{name.partition('/')[2]}?"
        if found is not None:
            meant += f" If {found.name} has a model of this name, write {found.name}/{name}"
        raise UserError(meant)
    if found is None:
        raise UserError(
            f"{name}: nothing says where this model is: set OPENAI_API_KEY, TOGETHER_API_KEY for "
            "Together's models, or OPENAI_BASE_URL for a server of your own; or name the place, as "
            f"in local/base, ollama/NAME or PROVIDER/MODEL ({', '.join(providers)})"
        )
    return found
