"""Where files lie: in a checkout beside the package, or inside an installed wheel."""

import os
from pathlib import Path

from swarm.errors import UserError

PACKAGE_FOLDER = Path(__file__).resolve().parent


def conf_folder() -> Path:
    """The folder of the Hydra configuration."""
    checkout = PACKAGE_FOLDER.parent / "conf"
    return checkout if (checkout / "search.yaml").is_file() else PACKAGE_FOLDER / "conf"


def in_checkout(path: str) -> Path:
    """`path` below the checkout; from the working folder where the package is installed."""
    root = PACKAGE_FOLDER.parent
    return root / path if (root / "conf" / "search.yaml").is_file() else Path(path)


def as_path(path: str | Path) -> Path:
    """The path with "~" expanded.

    Raises:
        UserError: It cannot be a path: too long, or the home of nobody.
    """
    try:
        given = Path(path).expanduser()
        given.exists()
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{str(path)[:80]}: cannot be a path ({why})") from None
    return given


def find_path(path: str | Path) -> Path:
    """`path` as given if it exists from here, else below the checkout or the installed package.

    The path comes back unchanged where nothing of that name exists, so that the caller's message
    names what the user wrote.

    Raises:
        UserError: It cannot be a path.
    """
    given = as_path(path)
    if given.is_absolute() or given.exists():
        return given
    for root in (PACKAGE_FOLDER.parent, PACKAGE_FOLDER):
        if (root / given).exists():
            return root / given
    return given


def cache_folder() -> Path:
    """Where downloads are kept: $MODEL_SWARMS_CACHE, else the user's cache folder."""
    if own := os.environ.get("MODEL_SWARMS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "model-swarms"
