"""The Perspective API: a text is worth as much as it is not toxic."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from swarm.errors import UserError
from swarm.models.cache import Cache, make_cache_key
from swarm.models.http import Call, HttpClient
from swarm.models.http_errors import BadRequest, MalformedResponse
from swarm.models.rate_limit import Limits
from swarm.scorers.classifier import NonToxicity

log = logging.getLogger(__name__)

REQUESTS_PER_MINUTE = 60.0
"""The API's default quota is one request a second."""


class PerspectiveScorer(NonToxicity):
    """Scores a text by one minus the TOXICITY that the Perspective API sees in it.

    What is read of a text, and what one that the API refuses (for its language, say) is worth, is
    told in `Untoxic`. Where the API cannot be reached, or does not know the key, the search ends
    and can be gone on with; in the original such a text was worth 0.5 on dev and 0 on test.

    Google has announced that the API ends with the year 2026. The alternative is a classifier on
    this machine, `swarm.scorers.classifier`.

    Args:
        api_key_env: Name of the environment variable with the key; `None` sends no key.
        url: The API's method comments:analyze, or another server's that speaks like it.
        languages: Codes such as "en"; `None` lets the API find out.
        first_line: See `Untoxic`.
        short: See `first_line`.
        limits: How hard the API may be pressed; `None` is one request a second.
        cache: Where what it said of a text is kept, refusals too; `None` keeps nothing.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        api_key_env: str | None = "PERSPECTIVE_API_KEY",
        url: str = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze",
        languages: Sequence[str] | None = ("en",),
        first_line: bool = True,
        short: float = 0.5,
        limits: Limits | None = None,
        cache: Cache | None = None,
    ) -> None:
        super().__init__(first_line, short)
        listed = languages is None or (
            not isinstance(languages, str) and all(isinstance(code, str) for code in languages)
        )
        if not listed or languages == []:
            raise UserError(
                f"task.scorer.languages={languages!r}: must be null or a list such as [en]"
            )
        self.languages = list(languages) if languages else None
        limits = limits or Limits(requests_per_minute=REQUESTS_PER_MINUTE)
        # In a header, so that no proxy's log and no message shows the key in the URL.
        self.client = HttpClient("Perspective", url, api_key_env, limits, "X-Goog-Api-Key", "")
        self.cache = cache

    def check(self) -> None:
        """See that the key is there; see `swarm.tasks.base.RequiresSetup.check`."""
        self.client.check()

    def open(self, device: str) -> None:
        """Nothing to load; connections are made when something is asked."""

    def measure_toxicity(self, texts: Sequence[str]) -> list[float | None]:
        """The toxicity of different texts; `None` where the API refuses one.

        Raises:
            UserError: The API cannot be reached, or does not answer as agreed.
        """
        try:
            return self._cached_toxicity(texts)
        except UserError as error:
            raise UserError(
                f"{error}; what was judged so far is kept where there is a cache, and the same "
                "command goes on with the search"
            ) from None

    def _cached_toxicity(self, texts: Sequence[str]) -> list[float | None]:
        """What is kept, and what the API says of the rest."""
        bodies = [self._request_body(text) for text in texts]
        names = [make_cache_key("perspective", self.client.url, body) for body in bodies]
        found = self.cache.get(names) if self.cache else {}
        new = [i for i, name in enumerate(names) if name not in found]

        def store_value(number: int, value: float | None) -> float | None:
            return self.cache.put(names[new[number]], value) if self.cache else value

        def parse_value(number: int, content: Any, seconds: float) -> float | None:
            value = float(content["attributeScores"]["TOXICITY"]["summaryScore"]["value"])
            if not 0 <= value <= 1:
                raise MalformedResponse(f"a toxicity of {value}")
            return store_value(number, value)

        def handle_refusal(number: int, error: BadRequest) -> float | None:
            if not is_text_error(error):
                raise error
            log.warning("%s; the text counts as unparsed", error)
            return store_value(number, None)

        before = self.client.repeated
        values = self.client.run_calls([Call(bodies[i]) for i in new], parse_value, handle_refusal)
        found.update(zip((names[i] for i in new), values, strict=True))
        log.info(
            "%s: %d texts, %d of them asked for now, %d requests repeated",
            self.client.who,
            len(texts),
            len(new),
            self.client.repeated - before,
        )
        return [found[name] for name in names]

    def _request_body(self, text: str) -> dict[str, Any]:
        body = {
            "comment": {"text": text, "type": "PLAIN_TEXT"},
            "requestedAttributes": {"TOXICITY": {}},
            "doNotStore": True,
        }
        return body | ({"languages": self.languages} if self.languages else {})


def is_text_error(error: BadRequest) -> bool:
    """Whether the API refuses a text; a wrong key is a 400 too, and says no "errorType"."""
    content = error.content if isinstance(error.content, Mapping) else {}
    inner = content.get("error")
    details = inner.get("details") if isinstance(inner, Mapping) else None
    listed = details if isinstance(details, list) else []
    return any(isinstance(detail, Mapping) and "errorType" in detail for detail in listed)
