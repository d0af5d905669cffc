"""Exceptions that are shown to users."""

import contextlib
import json
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from swarm._util.terminal import escape_control_chars
from swarm._version import __version__

CHECKOUT = Path(__file__).resolve().parents[1]
"""Folder of the package; a checkout of the repository if it has a pyproject.toml."""


class UserError(Exception):
    """A mistake the user can fix; entries print it as one line and exit with `code`.

    The message should name the key or file, the allowed values and the remedy. Control characters,
    which file names or responses of services may contain, are made visible.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(escape_control_chars(" ".join(message.split())))
        self.code = code


class NotFinite(UserError):
    """A model produced NaN or infinite numbers, so that its answers are meaningless.

    Attributes:
        position: Index of the position in the request.
        quantity: "weights" or "activations".
    """

    def __init__(self, position: int, quantity: str) -> None:
        super().__init__(
            f"the mixed model's {quantity} are not finite: its weights are far from the experts', "
            "or exceed the range of model.dtype (float16: 65,504; try bfloat16 or float32)"
        )
        self.position, self.quantity = position, quantity


class InvalidArgument(UserError, ValueError):
    """An argument has an invalid value."""


def install_command(extra: str) -> str:
    """Return the command that adds an extra's packages to this installation.

    It installs from where this installation is from: the package index has no such package, or one
    of somebody else. pip records the source of a local file, folder or repository (PEP 610).
    """
    if (CHECKOUT / "pyproject.toml").is_file():
        folder = "." if Path.cwd() == CHECKOUT else CHECKOUT
        return f'pip install -e "{folder}[{extra}]"'
    from importlib import metadata

    source: dict[str, Any] = {}
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
        text = metadata.distribution("model-swarms").read_text("direct_url.json")
        source = dict(json.loads(text or "{}"))
    url = str(source.get("url", ""))
    place = f"model-swarms[{extra}] @ {url}"
    if "vcs_info" in source:
        vcs = source["vcs_info"]
        place = f"model-swarms[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    elif url.startswith("file:"):
        place = f"{unquote(urlsplit(url).path)}[{extra}]"
    elif not url:
        place = f"model_swarms-{__version__}-py3-none-any.whl[{extra}]"
    return f'pip install "{place}"'


def missing_extra_error(error: ImportError, extra: str) -> UserError:
    """Return the error for a missing package of an extra."""
    return UserError(f"{error.name or error} is not installed: {install_command(extra)}")


def require_packages(extra: str, *names: str) -> None:
    """Import packages of an extra.

    Raises:
        UserError: One is missing; the error names the command that installs it.
    """
    for name in names:
        try:
            import_module(name)
        except ImportError as error:
            raise missing_extra_error(error, extra) from None


class NoClientForModel(UserError):
    """No known endpoint has a model of this name.

    Attributes:
        lasting: Whether the failure persists in this process: retrying would be slow, or useless as
            long as the settings are unchanged.
    """

    lasting = True
