"""Which key a job was made with: found again by a salted hash or a variable's name, never kept."""

import hashlib
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from swarm.compare.finetuning.params import OPENAI_BASE_URL

OPENAI_KEY_VARIABLE = re.compile(r"OPENAI_API_KEY(_.*)?")
"""Environment variables that are looked into."""


class ApiKey(NamedTuple):
    """A key, and the environment variable that it is from, if any."""

    secret: str
    variable: str | None

    def __repr__(self) -> str:
        return f"Key({self.variable or 'given'})"


class ApiKeyRing:
    """The keys that this process knows: those that it was given, and those in the environment.

    Args:
        salt: Of the database; see `Store.salt`.
        given: Keys to be tried beside those of the environment.
    """

    def __init__(self, salt: str, given: Sequence[str] = ()) -> None:
        self._salt, self._given = salt, list(given)

    def add_key(self, secret: str) -> ApiKey:
        """Remember a key for as long as this object lives."""
        if secret not in self._given:
            self._given.append(secret)
        return ApiKey(secret, find_variable(secret))

    def hash_key(self, secret: str) -> str:
        """A short hash that tells a key from others and does not give it away."""
        return hashlib.sha256(f"{self._salt}:{secret}".encode()).hexdigest()[:12]

    def creation_keys(self, job: dict[str, Any]) -> list[ApiKey]:
        """The keys with which a job was made or may be made: they pay, so that no other will do.

        The one of the same hash; else what its variable holds now, but for what is OpenAI's by its
        name and would go elsewhere.
        """
        name = job.get("key_variable") or ""
        now = os.environ.get(name, "").strip()
        meant = now and (job.get("base_url", OPENAI_BASE_URL) == OPENAI_BASE_URL or not OPENAI_KEY_VARIABLE.fullmatch(name))
        mine = [key for key in self._list_keys(name)
                if self.hash_key(key.secret) == job.get("key_print")]  # fmt: skip
        return mine or ([ApiKey(now, name)] if meant else [])

    def access_keys(self, job: dict[str, Any]) -> list[ApiKey]:
        """The keys that may see a job, the likeliest first.

        Of a job at OpenAI's all that are known, as another key of its project sees it too. No other
        server is sent a key that was not meant for it.
        """
        others = self._list_keys() if job.get("base_url", OPENAI_BASE_URL) == OPENAI_BASE_URL else []
        return list({key.secret: key for key in (*self.creation_keys(job), *others)}.values())

    def _list_keys(self, name: str = "") -> list[ApiKey]:
        """The keys that were given, and those of the environment, with that of this name."""
        found = [ApiKey(secret, find_variable(secret)) for secret in self._given]
        for variable, value in sorted(os.environ.items()):
            if (OPENAI_KEY_VARIABLE.fullmatch(variable) or variable == name) and value.strip():
                found.append(ApiKey(value.strip(), variable))
        return list({key.secret: key for key in reversed(found)}.values())[::-1]


def find_variable(secret: str) -> str | None:
    """The environment variable that holds a key; one of OpenAI's name first."""
    names = [name for name, value in os.environ.items() if value.strip() == secret]
    return min(names, key=lambda name: (not OPENAI_KEY_VARIABLE.fullmatch(name), name), default=None)
