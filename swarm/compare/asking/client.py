"""An endpoint with a key, as discovery finds it: what `Config.client_for_model` gives."""

from functools import cached_property
from typing import Any

from swarm.errors import UserError
from swarm.models import http
from swarm.models.chat import chat_url
from swarm.models.pace import Limits


class EndpointClient:
    """Where a model is asked.

    Whatever else the `openai` package's client has, such as `chat`, this one has too where that
    package is installed.

    Args:
        base_url: Up to and without /chat/completions.
        api_key: Of that endpoint; no text of this object shows it.
        variable: The name of the environment variable that the key is from.
        kept_at: The endpoint whose answers those of this one continue, after it has failed;
            `None`: its own.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        variable: str | None = None,
        kept_at: str | None = None,
    ) -> None:
        self.base_url, self.api_key, self.variable = str(base_url), api_key, variable
        self.kept_at = kept_at or self.base_url

    def __repr__(self) -> str:
        return f"Client({self.base_url!r}, key of {self.variable})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sdk, name)

    @cached_property
    def _sdk(self) -> Any:
        try:
            from openai import OpenAI
        except ImportError:
            raise UserError("what the openai package does needs it: pip install openai") from None
        return OpenAI(base_url=self.base_url, api_key=self.api_key)


class KeyedClient(http.HttpClient):
    """Posts chats with a key that it was given, not one that it reads from the environment."""

    def __init__(self, name: str, client: Any, limits: Limits) -> None:
        super().__init__(name, chat_url(client.base_url), None, limits)
        variable = getattr(client, "variable", None)
        # For what messages say; it need not be a variable's name.
        self.api_key_env = variable or None
        self._key: str | None = client.api_key or None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a client with a key in memory is not written anywhere")

    def read_api_key(self) -> str | None:
        """The key that was given."""
        return self._key
