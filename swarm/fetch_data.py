"""Fetch evaluation files, each checked by its SHA-256: python -m swarm.fetch_data gsm8k."""

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import click

from swarm._util.cli import run_program
from swarm._util.files import PACKAGE_FOLDER, in_checkout, write_atomic
from swarm._util.options import run_click
from swarm.errors import UserError

TARGET = in_checkout("data/eval")
COMMIT = "63e640401dc9cfa8fe9790b4fa7ba74451386fa1"
URL = f"https://raw.githubusercontent.com/BunsenFeng/model_swarm/{COMMIT}/data/eval"
EPILOG = """\b
Examples:
  python -m swarm.fetch_data gsm8k mmlu
  python -m swarm.fetch_data all
  python -m swarm.fetch_data --list
  python -m swarm.fetch_data all --url file:///mnt/mirror
"""
LARGEST = 200 * 2**20
"""Maximum size of a download in bytes; none of the files is larger."""


def pinned(sums: Path | None = None) -> dict[str, str]:
    """Return the SHA-256 of every file, by name without ".json"; default: data/SHA256SUMS."""
    places = (TARGET.parent / "SHA256SUMS", PACKAGE_FOLDER / "data" / "SHA256SUMS")
    sums = sums or next(place for place in places if place.is_file())
    lines = (line.split() for line in sums.read_text(encoding="ascii").splitlines() if line)
    return {name.removesuffix(".json"): digest for digest, name in lines}


def digest(content: bytes) -> str:
    """Return the SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def state(path: Path, expected: str) -> str:
    """Return "absent", "present" or "different"."""
    if not path.exists():
        return "absent"
    return "present" if digest(path.read_bytes()) == expected else "different"


def fetch(name: str, expected: str, folder: Path, url: str, timeout: float) -> str:
    """Fetch one file into `folder`, unless present; return a short status.

    Args:
        timeout: Maximum time without data, in seconds.

    Raises:
        UserError: The file is unavailable or not the pinned one, or a different file of that name
            exists.
    """
    path, source = folder / f"{name}.json", f"{url.rstrip('/')}/{name}.json"
    found = state(path, expected)
    if found == "present":
        return "already present"
    if found == "different":
        raise UserError(f"{path} is not the pinned file: remove it to fetch it again.")
    try:
        with urllib.request.urlopen(source, timeout=timeout) as response:
            content: bytes = response.read(LARGEST)
            announced = int(response.headers.get("Content-Length") or 0)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else error
        raise UserError(
            f"{source}: {reason}. Check the connection, or name a mirror with --url or "
            "$MODEL_SWARMS_DATA_URL."
        ) from error
    if len(content) < announced:
        raise UserError(f"{source}: incomplete download, {len(content)} of {announced} bytes.")
    if digest(content) != expected:
        raise UserError(f"{source}: SHA-256 {digest(content)} is not the pinned {expected}.")
    write_atomic(path, content)
    return f"fetched, {len(content) / 1024:.0f} KiB"


@click.command(epilog=EPILOG)
@click.argument("names", nargs=-1)
@click.option("--list", "shown", is_flag=True, help="List the names and whether they are present.")
@click.option("--to", type=click.Path(path_type=Path), default=TARGET, help="Target folder.")
@click.option(
    "--url",
    default=URL,
    envvar="MODEL_SWARMS_DATA_URL",
    help="Location of NAME.json; default: $MODEL_SWARMS_DATA_URL, else the original's commit.",
)
@click.option(
    "--timeout", default=30.0, show_default=True, help="Maximum time without data, in seconds."
)
def fetch_data(names: Sequence[str], shown: bool, to: Path, url: str, timeout: float) -> None:
    """Fetch evaluation files of Model Swarms by name, or all; each is checked by its SHA-256.

    The files are written to data/eval/, of the checkout or of the working folder. They are from the
    repository BunsenFeng/model_swarm at a fixed commit; their contents are under the licences of
    the original data sets.
    """
    sums = pinned()
    if shown:
        for name, expected in sums.items():
            print(f"{name}  {state(to / f'{name}.json', expected)}")
        return
    unknown = [name for name in names if name not in (*sums, "all")]
    if unknown or not names:
        message = f"unknown file {unknown[0]}" if unknown else "no files given"
        raise UserError(f"{message}; allowed: all, {', '.join(sums)}", 2)
    for name in sums if "all" in names else names:
        print(f"{name}: {fetch(name, sums[name], to, url, timeout)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every file is present, 1 if one is unavailable, 2 for an unknown name."""
    return run_click(fetch_data, arguments, "python -m swarm.fetch_data")


if __name__ == "__main__":
    run_program(main)
