"""How models are named: KIND/NAME, PROVIDER/MODEL or a model alone."""

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches

from swarm.errors import UserError
from swarm.models.providers import Provider, Providers

MODEL_KINDS = ("local", "llm", "function", "moa", "consortium")
"""What a name may begin with beside a provider."""


def suggest_prefix(name: str, known: Iterable[str]) -> str | None:
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
    near = suggest_prefix(name, (*MODEL_KINDS, *providers))
    likely = ("together", "openai") if "/" in name else ("openai", "together")
    there = [providers[one] for one in likely if one in providers]
    moved = [one for one in there if one.is_url_overridden]
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
