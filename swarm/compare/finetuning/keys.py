"""Which key a job was made with: found again by a salted hash or a variable's name, never kept."""

import hashlib
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from swarm.compare.finetuning.params import OPENAI

VARIABLE = re.compile(r"OPENAI_API_KEY(_.*)?")
"""Environment variables that are looked into."""


class Key(NamedTuple):
    """A key, and the environment variable that it is from, if any."""

    secret: str
    variable: str | None

    def __repr__(self) -> str:
        return f"Key({self.variable or 'given'})"


class Keys:
    """The keys that this process knows: those that it was given, and those in the environment.

    Args:
        salt: Of the database; see `Store.salt`.
        given: Keys to be tried beside those of the environment.
    """

    def __init__(self, salt: str, given: Sequence[str] = ()) -> None:
        self._salt, self._given = salt, list(given)

    def add(self, secret: str) -> Key:
        """Remember a key for as long as this object lives."""
        if secret not in self._given:
            self._given.append(secret)
        return Key(secret, variable_of(secret))

    def print_of(self, secret: str) -> str:
        """A short hash that tells a key from others and does not give it away."""
        return hashlib.sha256(f"{self._salt}:{secret}".encode()).hexdigest()[:12]

    def made(self, job: dict[str, Any]) -> list[Key]:
        """The keys with which a job was made or may be made: they pay, so that no other will do.

        The one of the same hash; else what its variable holds now, but for what is OpenAI's by its
        name and would go elsewhere.
        """
        name = job.get("key_variable") or ""
        now = os.environ.get(name, "").strip()
        meant = now and (job.get("base_url", OPENAI) == OPENAI or not VARIABLE.fullmatch(name))
        mine = [key for key in self._known(name)
                if self.print_of(key.secret) == job.get("key_print")]  # fmt: skip
        return mine or ([Key(now, name)] if meant else [])

    def of(self, job: dict[str, Any]) -> list[Key]:
        """The keys that may see a job, the likeliest first.

        Of a job at OpenAI's all that are known, as another key of its project sees it too. No other
        server is sent a key that was not meant for it.
        """
        others = self._known() if job.get("base_url", OPENAI) == OPENAI else []
        return list({key.secret: key for key in (*self.made(job), *others)}.values())

    def _known(self, name: str = "") -> list[Key]:
        """The keys that were given, and those of the environment, with that of this name."""
        found = [Key(secret, variable_of(secret)) for secret in self._given]
        for variable, value in sorted(os.environ.items()):
            if (VARIABLE.fullmatch(variable) or variable == name) and value.strip():
                found.append(Key(value.strip(), variable))
        return list({key.secret: key for key in reversed(found)}.values())[::-1]


def variable_of(secret: str) -> str | None:
    """The environment variable that holds a key; one of OpenAI's name first."""
    names = [name for name, value in os.environ.items() if value.strip() == secret]
    return min(names, key=lambda name: (not VARIABLE.fullmatch(name), name), default=None)
