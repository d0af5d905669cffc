"""What makes a search the one it is: whatever decides an answer is part of its identity."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches
from safetensors.numpy import load_file, save_file

from swarm._util.files import hash_file_cached
from swarm.engine.base_model import BaseModel
from swarm.runs.folder import RunRecord, read_state
from swarm.scorers.function import FunctionTask, source_digest

FUNCTIONS = """\
import helper

WORDS = ("good", "better")
POINTS = {}
POINTS["each"] = 3

def worth(text):
    return POINTS["each"] * sum(word in text for word in WORDS) + helper.bonus(text)

def score(prompt, answer, item):
    return worth(answer)

def unrelated():
    return 1
"""


def scale(base: Path, factor: float = 1.5) -> None:
    """Multiply the weights of a model; layout and size stay."""
    file = base / "model.safetensors"
    weights = load_file(file)
    save_file({key: factor * w for key, w in weights.items()}, file, metadata={"format": "pt"})


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(base: Path) -> None:
        text = (base / name).read_text()
        assert old in text
        (base / name).write_text(text.replace(old, new, 1))

    return change


@pytest.mark.parametrize(
    "change",
    [
        scale,
        replace("tokenizer.json", '"a":', '"another":'),
        replace("chat_template.jinja", "", "Hello! "),
        replace("generation_config.json", "{", '{"eos_token_id": 7, "x": 0, '),
        replace("config.json", "{", '{"x": 0, '),
    ],
)
def test_the_fingerprint_follows_what_decides_an_answer(
    change: Callable[[Path], None], tiny_llama: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    before = BaseModel(str(base)).fingerprint()
    (base / "README.md").write_text("A model.")
    replace("config.json", '"transformers_version": "', '"transformers_version": "0')(base)
    assert BaseModel(str(base)).fingerprint() == before
    change(base)
    assert BaseModel(str(base)).fingerprint() != before


def test_the_hash_of_a_large_file_is_kept_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
    file, cache = tmp_path / "weights", tmp_path / "cache" / "hashes"
    file.write_bytes(b"0" * (2 << 20))
    first = hash_file_cached(file)
    assert not cache.exists(), "a file that was just written may change within the clock's tick"
    # Its inode's time cannot be set back, so the clock is what moves.
    monkeypatch.setattr("swarm._util.files.MIN_FILE_AGE_S", -1.0)
    assert hash_file_cached(file) == first
    (kept,) = cache.iterdir()
    assert kept.read_text() == first
    kept.write_text("f" * 64)
    assert hash_file_cached(file) == "f" * 64, "it is read from the cache"
    about = file.stat()
    with file.open("r+b") as stream:
        stream.write(b"1")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    changed = hash_file_cached(file)
    assert changed not in (first, "f" * 64), "changed in place, and its time put back"
    kept.write_text("no hash")
    assert len(hash_file_cached(file)) == 64


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with functions.py and helper.py, importable."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "helper.py").write_text("def bonus(text):\n    return 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("functions", "helper"):
        sys.modules.pop(name, None)


def told(folder: Path) -> str:
    """The digest as a new process finds it."""
    import importlib
    import linecache

    for name in ("functions", "helper"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    linecache.clearcache()
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    return FunctionTask("own", function="functions.score").source_digests()["function source"]


@pytest.mark.parametrize(
    ("file", "old", "new", "counts"),
    [
        ("functions.py", "return worth(answer)", "return -worth(answer)", True),
        ("functions.py", 'POINTS["each"] = 3', 'POINTS["each"] = 4', True),
        ("helper.py", "return 0", "return 1", True),
        ("functions.py", "return 1", "return 2", False),
    ],
)
def test_a_function_counts_with_what_it_uses(
    module: Path, file: str, old: str, new: str, counts: bool
) -> None:
    before = told(module)
    assert before == told(module)
    path = module / file
    path.write_text(path.read_text().replace(old, new))
    assert (told(module) != before) == counts


def test_functions_of_any_kind_have_a_digest() -> None:
    class Called:
        def __call__(self, prompt: str, answer: str, item: Any) -> float:
            return 1.0

    def plain(prompt: str, answer: str, item: Any, weight: float = 1.0) -> float:
        return weight

    made: list[dict[str, Any]] = [{}, {}]
    for number, space in enumerate(made):
        exec(f"def score(p, a, i): return {number}", space)
    kinds = [Called(), plain, *(partial(plain, weight=weight) for weight in (2.0, 3.0))]
    kinds += [lambda p, a, i: 0.0, *(space["score"] for space in made), len]
    found = [source_digest(one) for one in kinds]
    assert len(set(found)) == len(found) and found == [source_digest(one) for one in kinds]


def test_other_weights_are_another_search(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    """Neither does a resume go on with them, nor are shared answers theirs."""
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    more = {"shared": tmp_path / "shared", "test": "false", "optimizer__max_iterations": 1}

    def utilities(name: str, **keys: Any) -> list[Any]:
        words = searches.arguments(tmp_path, base, tiny_pool, name, **{**more, **keys})
        done = searches.run(words)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        state = read_state(tmp_path / "search" / name) or {}
        (kept,) = state["versions"]
        assert kept["from_iteration"] == 0 and kept["packages"]["torch"] == version("torch")
        assert set(kept["packages"]) == {"torch", "transformers", "model-swarms"}
        return [entry["utilities"] for entry in state["rounds"]]

    one = utilities("first")
    assert utilities("first") == one
    scale(base)
    again = searches.run(searches.arguments(tmp_path, base, tiny_pool, "first", **more))
    assert again.returncode == 1 and "base weights" in again.stderr
    assert len(again.stderr.strip().splitlines()) == 1
    two = utilities("second")
    np.testing.assert_equal(two, utilities("alone", shared="null"))
    assert one != two, "the weights make no difference here: the test shows nothing"


def test_a_resume_under_other_versions_says_so_once(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "run")
    record.open_or_resume({"task": "x"}, ["amber"])
    assert record.record_versions({"torch": "2.8", "transformers": "5.0"}) == ""
    assert record.record_versions({"torch": "2.8", "transformers": "5.0"}) == ""
    said = record.record_versions({"torch": "2.9", "transformers": "5.0"})
    assert said == "torch 2.8 before, 2.9 now"
    assert record.record_versions({"torch": "2.9", "transformers": "5.0"}) == ""
    assert [one["packages"]["torch"] for one in record.state["versions"]] == ["2.8", "2.9"]


@pytest.mark.parametrize("place", ["in a package", "in the body"])
def test_imports_of_other_kinds_count(module: Path, place: str) -> None:
    (module / "parts").mkdir()
    (module / "parts" / "__init__.py").write_text("")
    rules = module / "parts" / "rules.py"
    rules.write_text("def bonus(text):\n    return 0\n")
    body = "    from parts import rules\n" if place == "in the body" else ""
    head = "" if body else "from parts import rules\n"
    code = f"{head}def score(prompt, answer, item):\n{body}    return rules.bonus(answer)\n"
    (module / "functions.py").write_text(code)
    before = told(module)
    rules.write_text("def bonus(text):\n    return 1\n")
    assert told(module) != before
