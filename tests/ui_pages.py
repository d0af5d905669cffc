"""The page of `python -m swarm.ui`, as a user would open it, for the tests of its parts."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from browsers import SIZES, shown
from searches import environment


@contextmanager
def served(folder: Path, *options: str, **more: str) -> Iterator[str]:
    """The address of the page, started in a folder; it has to end well."""
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm.ui", "--port", "0", "--no-browser", *options],
        cwd=folder, env=environment(**more), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout and process.stderr
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    reader.start()
    line = process.stdout.readline()
    try:
        assert line.startswith("the page is at http://127.0.0.1:"), (line, said)
        yield line.split()[4]
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(20)
        reader.join(5)
    assert (code, "".join(said)) == (130, "stopped\n")


@contextmanager
def window(browser: Any, url: str, size: str = "desk", scheme: str = "light") -> Iterator[Any]:
    """As `browsers.shown`, with the patience that a process that starts wants."""
    with shown(browser, url, size, scheme) as page:
        page.set_default_timeout(60_000)
        yield page


def fits(page: Any, size: str) -> None:
    """Nothing sticks out of a page to the right."""
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= SIZES[size]["width"], page.url
