"""The plain settings of a search, checked before anything is read."""

from swarm.errors import UserError


def check_run(
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
    if not isinstance(folder, str):
        raise UserError(f"folder={folder!r}: must be the folder where the runs lie")
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name:
        raise UserError(f"name={name!r}: must be the name of a folder below {folder}/")
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
