"""A real browser without a window, for the tests of pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SIZES = {"desk": {"width": 1280, "height": 900}, "telephone": {"width": 390, "height": 844}}


@contextmanager
def opened() -> Iterator[Any]:
    """Debian's Chromium; the test is skipped where it is not."""
    driver = pytest.importorskip("playwright.sync_api", reason="needs: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH; on Debian: apt-get install chromium")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def shown(
    browser: Any, address: str, size: str = "desk", scheme: str = "light", **more: Any
) -> Iterator[Any]:
    """A page in a fresh window; at its end nothing went wrong or was loaded elsewhere."""
    context = browser.new_context(viewport=SIZES[size], color_scheme=scheme, **more)
    view = context.new_page()
    view.set_default_timeout(60_000)
    told: list[str] = []
    asked: list[str] = []
    view.on("console", lambda message: told.append(message.text))
    view.on("pageerror", lambda error: told.append(str(error)))
    view.on("dialog", lambda dialog: told.append(dialog.message))
    view.on("request", lambda request: asked.append(request.url))
    token = getattr(address, "token", None)
    view.goto(f"{address}?token={token}" if token else address)
    yield view
    assert told == [], told
    within = address.partition("#")[0]
    assert all(url.startswith((within, f"blob:{within}", "data:")) for url in asked), asked
    context.close()
