"""The Perspective API: a text's value is one minus its toxicity."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from swarm._util.settings import checked
from swarm.errors import UserError
from swarm.models.cache import Cache, make_cache_key
from swarm.models.http import Call, HttpClient
from swarm.models.http_errors import BadRequest, MalformedResponse
from swarm.models.rate_limit import Limits
from swarm.scorers.classifier import NonToxicity

log = logging.getLogger(__name__)

REQUESTS_PER_MINUTE = 60.0
"""The API's default quota is one request per second."""


@checked("task.scorer")
@dataclass(eq=False, kw_only=True)
class PerspectiveScorer(NonToxicity):
    """Scores a text by one minus its TOXICITY from the Perspective API.

    For the part of a text that is read, and the value of one that the API refuses (for its
    language, for example), see `NonToxicity`. If the API cannot be reached, or refuses the key, the
    search ends and can be resumed; in the original such a text had the value 0.5 on dev and 0 on
    test.

    Google has announced that the API ends with the year 2026. The alternative is a local
    classifier, `swarm.scorers.classifier`.

    Args:
        api_key_env: Name of the environment variable with the key; `None` sends no key.
        url: The API's method comments:analyze, or a compatible server.
        languages: Codes such as "en"; `None` lets the API detect the language.
        limits: Rate limits; `None` is one request per second.
        cache: Cache of the results, refusals too; `None` is no cache.

    The others are those of `NonToxicity`.
    """

    api_key_env: str | None = "PERSPECTIVE_API_KEY"
    url: str = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze"
    languages: Annotated[Sequence[str], Field(min_length=1)] | None = ("en",)
    limits: Limits | None = None
    cache: Cache | None = None

    def __post_init__(self) -> None:
        limits = self.limits or Limits(requests_per_minute=REQUESTS_PER_MINUTE)
        # In a header: a key in the URL would appear in proxies' logs and in messages.
        self.client = HttpClient(
            "Perspective", self.url, self.api_key_env, limits, "X-Goog-Api-Key", ""
        )

    def check(self) -> None:
        self.client.check()

    def measure_toxicity(self, texts: Sequence[str]) -> list[float | None]:
        """Return the toxicity of different texts; `None` if the API refuses one.

        Raises:
            UserError: The API cannot be reached, or its response is malformed.
        """
        bodies = [self._request_body(text) for text in texts]
        names = [make_cache_key("perspective", self.client.url, body) for body in bodies]
        found = self.cache.get(names, _validate_toxicity) if self.cache else {}
        new = [i for i, name in enumerate(names) if name not in found]

        def store(number: int, content: Any) -> float | None:
            value = None
            if not isinstance(content, BadRequest):
                said = content["attributeScores"]["TOXICITY"]["summaryScore"]["value"]
                value = _validate_toxicity(float(said))
            elif is_text_error(content):
                log.warning("%s; the text counts as unparsed", content)
            else:
                raise content
            if not self.cache:
                return value
            return self.cache.put(names[new[number]], value, None, _validate_toxicity)

        before = self.client.repeated
        try:
            values = self.client.run_calls([Call(bodies[i]) for i in new], store)
        except UserError as error:
            raise UserError(f"""{error}; results so far are stored if there is a cache, and the same
                command resumes the search""") from None
        found.update(zip((names[i] for i in new), values, strict=True))
        log.info(
            "%s: %d texts, %d of them requested, %d retries",
            *(self.client.label, len(texts), len(new), self.client.repeated - before),
        )
        return [found[name] for name in names]

    def _request_body(self, text: str) -> dict[str, Any]:
        body = {
            "comment": {"text": text, "type": "PLAIN_TEXT"},
            "requestedAttributes": {"TOXICITY": {}},
            "doNotStore": True,
        }
        return body | ({"languages": list(self.languages)} if self.languages else {})


def _validate_toxicity(value: Any) -> float | None:
    if value is None or (isinstance(value, float) and 0 <= value <= 1):
        return value
    raise MalformedResponse(f"a toxicity of {value!r}")


def is_text_error(error: BadRequest) -> bool:
    """Return whether the API refuses a text; a wrong key is a 400 too, but without "errorType"."""
    content = error.content if isinstance(error.content, Mapping) else {}
    inner = content.get("error")
    details = inner.get("details") if isinstance(inner, Mapping) else None
    listed = details if isinstance(details, list) else []
    return any(isinstance(detail, Mapping) and "errorType" in detail for detail in listed)
