"""The rule of this folder: no test starts a process, opens a connection or imports torch."""

import importlib.abc
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

STARTS = {
    "subprocess.Popen",
    "os.posix_spawn",
    "os.fork",
    "os.forkpty",
    "socket.connect",
    "socket.bind",
}
broken: list[str] = []
"""What the test that runs has done against the rule."""


def note_start(event: str, arguments: tuple[Any, ...]) -> None:
    """Note a process that starts; audit hooks stay for ever, so other tests add to the list too.

    matplotlib lists a machine's fonts once, with the first picture drawn there.
    """
    if event in STARTS and "fc-list" not in str(arguments):
        broken.append(f"{event}{arguments}")


class NoTorch(importlib.abc.MetaPathFinder):
    """Refuses torch, as where it is not installed, and notes who asked for it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname == "torch":
            broken.append("import torch")
            raise ImportError("a test in tests/unit imports torch")
        return None


sys.addaudithook(note_start)


@pytest.fixture(autouse=True)
def no_process_and_no_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that breaks the rule, whatever was imported before it."""
    broken.clear()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch", raising=False)
        patch.setattr(sys, "meta_path", [NoTorch(), *sys.meta_path])
        yield
    assert not broken, "belongs in tests/contract"
