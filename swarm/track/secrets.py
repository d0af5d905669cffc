"""What no tracker may be told: keys, passwords and whoever an address names."""

import os
import re
from collections.abc import Mapping
from typing import Any

SECRET = re.compile(r"((^|_)key|apikey|token|secret|password|passwd|credentials?)$", re.I)
"""Names whose values are secrets: OPENAI_API_KEY, token; not api_key_env, which names one."""

HIDDEN = "(hidden)"

SHORT = 8
"""Values of fewer letters are no keys, and would be found in any text."""


def clean(value: Any) -> Any:
    """A value without secrets: those under a secret's name, those of the environment, logins."""
    known = [v for k, v in os.environ.items() if SECRET.search(k) and len(v) >= SHORT]
    return _clean(value, sorted(known, key=len, reverse=True))


def _clean(value: Any, known: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if one and isinstance(one, str) and SECRET.search(str(name)) else
            _clean(one, known)
            for name, one in value.items()
        }  # fmt: skip
    if isinstance(value, list | tuple):
        return [_clean(one, known) for one in value]
    if not isinstance(value, str):
        return value
    for secret in known:
        value = value.replace(secret, HIDDEN)
    return re.sub(r"(\w+://)[^/?#\s]*@", r"\1", value)
