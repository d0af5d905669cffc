"""A save is whole or not at all, whatever was in the folder and whatever the disk does."""

import json
import os
import resource
from pathlib import Path

import pytest

from swarm.errors import UserError
from swarm.pool import adapter
from swarm.pool.adapter import CONFIG_FILE, WEIGHTS_FILE
from swarm.pool.pool import Pool


class FileLimit:
    """No file may grow beyond `size` bytes: the system refuses to write, as on a full disk."""

    def __init__(self, size: int) -> None:
        self.size, self.before = size, resource.getrlimit(resource.RLIMIT_FSIZE)

    def __enter__(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_saving_again_replaces_the_whole_folder(tiny_pool: Path, tmp_path: Path) -> None:
    pool, best = Pool(tiny_pool).open(), tmp_path / "runs" / "best"
    pool.save([1, 0, 0, 0], best, {"utility": 0.1})
    (best / "answers.jsonl").write_text("of the old one")
    pool.save([0, 1, 0, 0], best)
    assert sorted(path.name for path in best.iterdir()) == [
        CONFIG_FILE,
        WEIGHTS_FILE,
        adapter.NOTE_FILE,
    ]
    assert json.loads((best / adapter.NOTE_FILE).read_text())["coefficients"] == [0, 1, 0, 0]
    assert [path.name for path in best.parent.iterdir()] == ["best"]


def test_others_may_read_what_the_user_s_umask_lets_them(tiny_pool: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # in a folder of the owner's alone, files are too
    before = os.umask(0o022)
    try:
        Pool(tiny_pool).open().save([1, 0, 0, 0], tmp_path / "best")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "best").iterdir()} == {0o644}


def test_what_a_killed_save_leaves_is_put_right(tiny_pool: Path, tmp_path: Path) -> None:
    pool, best = Pool(tiny_pool).open(), tmp_path / "best"
    pool.save([1, 0, 0, 0], best)
    # Killed between the two renames: the old folder is aside, the new one not yet in place.
    best.rename(tmp_path / ".best.old")
    (tmp_path / ".best.new").mkdir()
    with FileLimit(1000), pytest.raises(UserError):
        pool.save([0, 1, 0, 0], best)
    assert json.loads((best / adapter.NOTE_FILE).read_text())["coefficients"] == [1, 0, 0, 0]
    pool.save([0, 1, 0, 0], best)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_full_disk_is_one_line_and_leaves_the_old_adapter(
    tiny_pool: Path, tmp_path: Path
) -> None:
    pool, best = Pool(tiny_pool).open(), tmp_path / "best"
    pool.save([1, 0, 0, 0], best)
    before = {path.name: path.read_bytes() for path in best.iterdir()}
    with FileLimit(4096), pytest.raises(UserError, match="could not be saved") as caught:
        pool.save([0, 1, 0, 0], best)
    assert str(best) in str(caught.value) and "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in best.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_save_overwrites_nothing_but_saved_adapters(tiny_pool: Path, tmp_path: Path) -> None:
    pool = Pool(tiny_pool).open()
    with pytest.raises(UserError, match="an expert of the pool"):
        pool.save([1, 0, 0, 0], tiny_pool / "amber")
    for name in ("one", "two"):  # saved bests, while they are experts
        pool.save([1, 0, 0, 0], tmp_path / "saved" / name)
    with pytest.raises(UserError, match="an expert of the pool"):
        Pool(tmp_path / "saved").open().save([0.5, 0.5], tmp_path / "saved" / "one")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(UserError, match="something other"):
        pool.save([1, 0, 0, 0], tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="something other"):
        pool.save([1, 0, 0, 0], tmp_path / "file")


def test_a_failed_swap_puts_the_old_adapter_back(
    tiny_pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, best = Pool(tiny_pool).open(), tmp_path / "best"
    pool.save([1, 0, 0, 0], best)
    replace = Path.replace

    def refuse_new(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            raise OSError("the disk has gone")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse_new)
    with pytest.raises(UserError, match="the disk has gone"):
        pool.save([0, 1, 0, 0], best)
    assert json.loads((best / adapter.NOTE_FILE).read_text())["coefficients"] == [1, 0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
