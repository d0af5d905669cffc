"""Where a server is, how it is reached, and which environment variable holds its key."""

import os
import re
import urllib.request
from urllib.parse import SplitResult, urlsplit

from swarm.errors import UserError


def validate_url(url: object) -> str:
    """`url` if it can be posted to and holds no secret.

    Raises:
        UserError: It is not; the message leaves a password out.
    """
    parts = split_url(url)
    if not isinstance(url, str) or parts is None:
        raise UserError(
            "base_url or url: has to begin with http:// or https:// and name a host, and a port "
            "from 1 to 65535 if any, as in http://localhost:8000/v1"
        )
    if "@" in parts.netloc or parts.query:
        raise UserError(
            f"the URL of {parts.hostname}: no user, password or key may be in it; name the "
            "environment variable that holds the key in api_key_env"
        )
    return url


def split_url(url: object) -> SplitResult | None:
    """What an http or https URL consists of; `None` if it has no possible host or port."""
    if not isinstance(url, str) or not re.fullmatch(r"https?://[^\s/?#]+(/\S*)?", url):
        return None
    try:
        parts = urlsplit(url)
        return parts if parts.hostname and parts.port != 0 else None
    except ValueError:
        return None


def validate_env_name(name: object) -> str | None:
    """`name` if it is `None` or may be an environment variable's.

    Raises:
        UserError: It is neither. The message does not repeat it: it may be the key itself.
    """
    if name is None or (isinstance(name, str) and re.fullmatch(r"[A-Z_][A-Z0-9_]*", name)):
        return name
    raise UserError(
        "api_key_env: has to be the name of an environment variable (capital letters, digits "
        "and _), not the key itself; null where no key is needed"
    )


def read_key(who: str, variable: str | None) -> str | None:
    """The key in an environment variable; `None` without one.

    Raises:
        UserError: The variable is not there, or holds no key.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(
            f"{who}: the environment variable {variable} is not set; put the key there, or set "
            "api_key_env=null if none is needed"
        )
    if not key.isascii() or not key.isprintable():
        raise UserError(f"{who}: what the environment variable {variable} holds cannot be a key")
    return key


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for a URL (HTTPS_PROXY, NO_PROXY and their like).

    Raises:
        UserError: It is none; the message does not repeat it: a password may be in it.
    """
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy is not None and split_url(proxy) is None:
        raise UserError(
            f"the environment variable {parts.scheme}_proxy: has to begin with http:// or "
            "https:// and name a host, and a port from 1 to 65535 if any"
        )
    return proxy
