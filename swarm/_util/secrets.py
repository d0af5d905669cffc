"""Removal of secrets from everything that is written: run folders, reports, logs and trackers."""

import hashlib
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

SECRET = re.compile(
    r"((^|[_.-])key|apikey|token|secret|password|passwd|credentials?|authorization|(^|[_.-])auth"
    r"|cookie)$",
    re.IGNORECASE,
)
"""Names of secrets: OPENAI_API_KEY, token; not api_key_env, which names a variable."""

HIDDEN = "(hidden)"

SHORT = 8
"""Minimum length of values that are searched for in other texts; shorter ones match by chance."""

SHAPES = re.compile(
    r"\b(?:(?:sk|pk|rk)-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}"
    r"|AIza[\w-]{30,})|(?<=Bearer )[\w.~+/=-]{16,}"
)
"""Patterns of common providers' keys, matched anywhere."""

ASSIGNED = re.compile(
    r"""(?P<name>[\w-]+)(?P<sign>['"]?\s*[:=]\s*)"""
    r"""(?P<value>'[^']*'|"[^"]*"|(?:\$\{[^}]*\}|[^\s,{}\[\]'"])+)"""
)
"""NAME=VALUE or NAME: VALUE in a command-line argument."""

ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*['\"]?([^,}'\"]+)[^}]*\}")
"""An interpolation of the environment, and the variable that it names."""

LENT = "MODEL_SWARMS_SECRET_"
"""Prefix of variables that pass literal secrets to child processes."""

_known: set[str] = set()
"""Literal secrets of this process's configurations."""

_resolving = threading.Lock()


class FromEnvironment(str):
    """A text interpolated from the environment: its value, with its original text as `source`."""

    source: str

    def __new__(cls, value: str, source: str = "") -> "FromEnvironment":
        """Create one; pickle calls it without the source and restores that as an attribute."""
        instance = super().__new__(cls, value)
        instance.source = source
        return instance


def plain_config(config: "DictConfig") -> dict[str, Any]:
    """Resolve a composed configuration to plain values.

    Texts from the environment store their source. Literal secrets are remembered, so that `clean`
    finds them in any text.

    Raises:
        OmegaConfBaseException: An interpolation cannot be resolved.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from omegaconf.resolvers import oc

    resolved: Any = OmegaConf.to_container(config, resolve=True)
    with _resolving:
        OmegaConf.register_new_resolver("oc.env", _as_written, replace=True)
        try:
            written: Any = OmegaConf.to_container(config, resolve=True)
        except (OmegaConfBaseException, ValueError, TypeError):
            # A resolver computes with the value, such as oc.decode, and fails on the source text.
            written = OmegaConf.to_container(config, resolve=False)
        finally:
            OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    found: dict[str, Any] = _paired(resolved, written)
    remember(found)
    return found


def read_config(written: Any) -> Any:
    """Read a configuration written by `clean`, and resolve its environment interpolations.

    Interpolations of unset variables are left unchanged.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def resolved(_: str, text: str) -> str:
        if not ENVIRONMENT.search(text):
            return text
        try:
            return FromEnvironment(str(OmegaConf.create({"value": text}).value), text)
        except OmegaConfBaseException:
            return text

    return _each(written, resolved)


def unresolved(config: Any) -> Any:
    """Return a configuration with texts from the environment as interpolations again."""
    return _each(config, lambda _, text: text.source if isinstance(text, FromEnvironment) else text)


def lent(config: Any) -> Any:
    """Return `unresolved`, with literal secrets moved to variables of this process's environment.

    For a configuration that is written for a child process.
    """

    def moved(name: str, text: str) -> str:
        if isinstance(text, FromEnvironment):
            return text.source
        if not SECRET.search(name) or not text or text == HIDDEN:
            return text
        variable = LENT + hashlib.sha256(text.encode()).hexdigest()[:16].upper()
        os.environ[variable] = text
        return f"${{oc.env:{variable}}}"

    return _each(config, moved)


def check_secrets(config: Any, path: str = "") -> None:
    """Check that no value of a configuration is a secret that was removed on writing.

    Raises:
        UserError: One is; the message names its key.
    """
    if isinstance(config, Mapping | list | tuple):
        pairs = config.items() if isinstance(config, Mapping) else enumerate(config)
        for name, one in pairs:
            check_secrets(one, f"{path}.{name}" if path else str(name))
    elif isinstance(config, str) and HIDDEN in config:
        raise UserError(f"""{path}={config}: a secret, which is not stored; give it again,
            preferably as {path}='${{oc.env:NAME_OF_A_VARIABLE}}', which is stored verbatim""")


def remember(config: Any) -> None:
    """Remember the literal secrets in a configuration, so that `clean` finds them in any text."""

    def take(name: str, text: str) -> str:
        secret = SECRET.search(name) and not isinstance(text, FromEnvironment)
        if secret and len(text) >= SHORT and text != HIDDEN:
            _known.add(text)
        return text

    _each(config, take)


def clean(value: Any) -> Any:
    """Return a value without secrets, for anything that is written or sent.

    Hidden are texts under a secret's name, the values of secrets in the environment and in
    configurations of this process wherever they occur, texts that look like a provider's key, and
    the user of a URL. Interpolations of the environment are written as such.
    """
    known = _secrets()

    def cleaned(name: str, text: str) -> str:
        if isinstance(text, FromEnvironment):
            return HIDDEN if LENT in text.source else text.source
        if text and SECRET.search(name) and not _is_interpolation(text):
            return HIDDEN
        return _without(text, known)

    return _each(value, cleaned)


def clean_words(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line without secrets."""

    def cleaned(found: re.Match[str]) -> str:
        bare = found["value"].strip("'\"")
        if not SECRET.search(found["name"]) or not bare or _is_interpolation(bare):
            return found[0]
        return f"{found['name']}{found['sign']}'{HIDDEN}'"

    known = _secrets()
    return [ASSIGNED.sub(cleaned, _without(argument, known)) for argument in arguments]


def identity_values(value: Any) -> Any:
    """Return settings that identify a run: without secrets, so that rotating a key changes nothing.

    A text from a variable that is no secret by its name includes a digest of its value.
    """

    def fixed(name: str, text: str) -> str:
        if SECRET.search(name) and text:
            return HIDDEN
        source = text.source if isinstance(text, FromEnvironment) else text
        if isinstance(text, FromEnvironment) and not any(
            map(SECRET.search, ENVIRONMENT.findall(source))
        ):
            return f"{source} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
        return ENVIRONMENT.sub(lambda m: HIDDEN if SECRET.search(m[1]) else m[0], source)

    return clean(_each(value, fixed))


def clean_file(path: Path) -> None:
    """Clean a yaml that another package wrote, and make it readable only by its owner."""
    import yaml

    from swarm._util.files import write_atomic

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return
    # A text may be an argument of a command line.
    found = clean(_each(content, lambda _, text: clean_words([text])[0]))
    if found != content:
        write_atomic(path, yaml.safe_dump(found, sort_keys=False, allow_unicode=True).encode())
    path.chmod(0o600)


def _each(value: Any, change: Callable[[str, str], str], name: str = "") -> Any:
    """Return a tree with every text changed by `change(key, text)`."""
    if isinstance(value, Mapping):
        outer = name if SECRET.search(name) else ""  # everything below a secret key is secret too
        return {key: _each(one, change, outer or str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_each(one, change, name) for one in value]
    return change(name, value) if isinstance(value, str) else value


def _paired(resolved: Any, written: Any) -> Any:
    """Return the resolved tree, with `FromEnvironment` for texts whose source differs."""
    if isinstance(resolved, Mapping) and isinstance(written, Mapping):
        return {key: _paired(one, written.get(key)) for key, one in resolved.items()}
    if isinstance(resolved, list) and isinstance(written, list) and len(resolved) == len(written):
        return [_paired(*both) for both in zip(resolved, written, strict=True)]
    if isinstance(resolved, str) and isinstance(written, str) and ENVIRONMENT.search(written):
        return FromEnvironment(resolved, written)
    return resolved


def _as_written(*words: Any) -> str:
    """Replacement of OmegaConf's oc.env that returns the interpolation itself."""

    def quoted(word: Any) -> str:
        if isinstance(word, str) and not re.fullmatch(r"[\w.-]+", word):
            return "'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'"
        return "null" if word is None else str(word)

    return f"${{oc.env:{','.join(map(quoted, words))}}}"


def _secrets() -> list[str]:
    """Return the values of all known secrets, the longest first."""
    named = (value for name, value in os.environ.items() if SECRET.search(name))
    found = {value for value in (*named, *_known) if len(value) >= SHORT}
    return sorted(found, key=len, reverse=True)


def _without(text: str, known: Sequence[str]) -> str:
    for secret in known:
        text = text.replace(secret, HIDDEN)
    text = SHAPES.sub(HIDDEN, text)
    return re.sub(r"(\w+://)[^/?#\s]*@", r"\1", text)


def _is_interpolation(text: str) -> bool:
    return ENVIRONMENT.sub("", text).replace("Bearer", "").strip() in ("", HIDDEN)
