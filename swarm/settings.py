"""The plain settings of a search, checked before anything is read."""

from swarm.errors import UserError
from swarm.files import name_fault, path_fault


def check_place(name: object, folder: object) -> None:
    """Check where a run is to lie: `folder`/`name`.

    Raises:
        UserError: One is not allowed; it says which and what is.
    """
    if not isinstance(folder, str):
        raise UserError(f"folder={folder!r}: must be the folder where the runs lie")
    if fault := path_fault(folder):
        raise UserError(f"folder={folder[:80]!r} {fault}; must be the folder where the runs lie")
    if not isinstance(name, str) or name in (".", "..") or "/" in name:
        raise UserError(f"name={name!r}: must be the name of a folder below {folder}/")
    if fault := name_fault(name):
        raise UserError(f"name={name[:80]!r} {fault}; must be the name of a folder in {folder}/")


def check_run_settings(
    name: str,
    folder: str,
    seed: int,
    counts: dict[str, int],
    confirm: float,
    switches: dict[str, bool],
) -> None:
    """Check the settings of a run that are no object of their own.

    Args:
        counts: What must be a whole number from 0 on, by key.
        switches: What must be true or false, by key.

    Raises:
        UserError: One is not allowed; it says which and what is.
    """
    check_place(name, folder)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise UserError(f"seed={seed!r}: must be a whole number, 0 or more")
    for word, value in switches.items():
        if not isinstance(value, bool):
            raise UserError(f"{word}={value!r}: must be true or false")
    if type(confirm) not in (int, float) or not 0 <= confirm < 1:
        raise UserError(f"confirm={confirm!r}: must be a share of dev, from 0 to below 1")
    for word, count in counts.items():
        if type(count) is not int or count < 0:
            raise UserError(f"{word}={count!r}: must be a whole number, 0 or more")
