"""Cases of damaged run folders and shared answers."""

import json
import os
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fault_cases import Case, Lab
from fault_cases.running import run_in_fork

# Damages -------------------------------------------------------------------------------------


def damages(lab: Lab, draw: random.Random, count: int) -> Iterator[Case]:
    """A finished and a half-finished run whose files are damaged, and each command that reads.

    Args:
        count: Maximum number of damaged files.
    """
    runs = {"finished": _run(lab, "finished", None), "half": _run(lab, "half", 2)}
    every = [
        (state, name, how)
        for state, (_, tree) in runs.items()
        for name in tree
        if name not in UNREAD
        for how in DAMAGES
        if how not in JSON_ALONE or name.endswith((".json", ".jsonl"))
    ]
    # Every kind of file with every damage, as far as `count` reaches.
    draw.shuffle(every)
    met: Counter[Any] = Counter()
    kinds = [re.sub(r"\d+|_[0-9a-f]{16}", "", name) for _, name, _ in every]
    ranks = []
    for (state, _, how), kind in zip(every, kinds, strict=True):
        met[state, kind, how] += 1
        ranks.append((met[state, kind, how], draw.random()))
    order = [one for _, one in sorted(zip(ranks, every, strict=True), key=lambda pair: pair[0])]
    for number, (state, name, how) in enumerate(order[:count]):
        folder, tree = runs[state]
        readers = READERS if state == "finished" else READERS[:3]
        yield _damaged(lab, folder, tree, state, name, how, "resume")
        if number % 3 == 0:
            reader = readers[1 + number // 3 % (len(readers) - 1)]
            yield _damaged(lab, folder, tree, state, name, how, reader)
    yield from _vanishing(lab)
    yield from _shared(lab)


UNREAD = ("log.txt", "report.html", "running.json")
"""Files of a run folder that nothing reads back."""


def _emptied(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def _halved(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _garbage(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(path.stat().st_size))


def _flipped(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _zeroed(path: Path, draw: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _loop(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _brackets(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"[" * 100_000)


def _retyped(path: Path, draw: random.Random) -> None:
    """Sound JSON with a value of another type, without its checksum."""
    text = path.read_text()
    try:
        value = json.loads(text)
    except ValueError:  # JSON lines
        lines = text.splitlines()
        lines[draw.randrange(len(lines))] = draw.choice(["{}", "[]", "null", "5"])
        path.write_text("\n".join(lines) + "\n")
        return
    if not isinstance(value, dict) or not value:
        path.write_text(draw.choice(["{}", "[]", "null", "5"]))
        return
    for name in ("checksum", "versions"):
        value.pop(name, None)
    key = draw.choice(sorted(value))
    value[key] = draw.choice([5, "x", [{}], {"a": []}, [[[]]], True])
    path.write_text(json.dumps(value))


def _lacking(path: Path, draw: random.Random) -> None:
    """Sound JSON without one of its keys, and without its checksum."""
    value = json.loads(
        path.read_text().splitlines()[0] if path.suffix == ".jsonl" else path.read_text()
    )
    if not isinstance(value, dict) or not value:
        path.write_text("{}")
        return
    for name in ("checksum", "versions"):
        value.pop(name, None)
    value.pop(draw.choice(sorted(value)), None)
    # With an end of line: a last line without one is what a kill leaves, and is no damage.
    path.write_text(json.dumps(value) + "\n")


def _deleted(path: Path, draw: random.Random) -> None:
    path.unlink()


Damage = Callable[[Path, random.Random], None]
DAMAGES: tuple[Damage, ...] = (
    *(_deleted, _emptied, _halved, _garbage, _flipped, _zeroed, _folder, _pipe, _loop),
    *(_brackets, _retyped, _lacking),
)
JSON_ALONE = (_brackets, _retyped, _lacking)
READERS = ("resume", "report", "numbers", "export", "evaluate")


def _run(lab: Lab, name: str, rounds: int | None) -> tuple[Path, dict[str, bytes]]:
    """A run that ended, or was interrupted before a round; its folder and its files."""
    here = lab.home / name
    here.mkdir()
    case = Case("damage", name, _resumed(lab), hook=_interrupted(rounds))
    code, _, err, _ = run_in_fork(case, here, 120)
    assert code == (130 if rounds else 0), err
    return here, _tree(here / "search" / "run")


def _resumed(lab: Lab) -> list[str]:
    return lab.search(
        "optimizer.max_iterations=3", "optimizer.patience=9", "ensemble=2", "noise_floor=true"
    )


def _interrupted(rounds: int | None) -> Callable[[], None]:
    """Ctrl-C as the search is about to begin that round."""

    def hook() -> None:
        from swarm.loop.run import Run

        iterate = Run._run_iteration

        def stopped(run: Any, number: int) -> None:
            if number == rounds:
                raise KeyboardInterrupt
            iterate(run, number)

        if rounds is not None:
            Run._run_iteration = stopped  # type: ignore[method-assign]

    return hook


def _tree(run: Path) -> dict[str, bytes]:
    return {
        path.relative_to(run).as_posix(): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }


_expected: dict[tuple[str, str], Any] = {}
"""What a reader makes of the undamaged folder, by state and reader."""


def _damaged(
    lab: Lab, folder: Path, tree: dict[str, bytes], state: str, name: str, how: Damage, reader: str
) -> Case:
    def whole(here: Path) -> None:
        shutil.copytree(folder, here, dirs_exist_ok=True, symlinks=True)

    def prepare(here: Path) -> None:
        whole(here)
        how(here / "search" / "run" / name, random.Random(f"{state} {name} {how.__name__}"))

    words = {
        "resume": _resumed(lab),
        "report": ["-m", "swarm.report", "{here}/search/run"],
        "numbers": ["-m", "swarm.report", "{here}/search/run", "--json"],
        "export": ["-m", "swarm.export", "{here}/search/run", "to={here}/out"],
        "evaluate": [
            *("-m", "swarm.evaluate", "task=mmlu", f"task.file={lab.data}", "task.scoring=logits"),
            *("model=local", f"model.path={lab.base}", f"pool.folder={lab.pool}", "out=null"),
            *("candidate=run", "candidate.folder={here}/search/run"),
        ],
    }[reader]

    def made(here: Path, out: str) -> Any:
        run = here / "search" / "run"
        if reader == "resume":
            # The command and the configuration hold the folder's own path, as do their checksums.
            own = ("log.txt", "config.json", "command.json", "rounds.jsonl")
            tree = {k: v for k, v in _tree(run).items() if k not in own}
            left = {k: v.replace(str(here).encode(), b"") for k, v in tree.items()}
            # A repair adds lines to rounds.jsonl, which the summary counts.
            facts = json.loads(left["run.json"])
            return left | {"run.json": {**facts, "lines": None, "checksum": None}}
        if reader == "report":
            # Without the run's path; config.json of another place is another text.
            return (run / "report.html").read_text().replace(str(here), "")
        if reader == "export":
            return {k: v for k, v in _tree(here / "out").items() if k != "README.md"}
        return re.sub(r"[\d.]+ (s|seconds)\b.*", "", out.replace(str(here), ""))

    def judge(here: Path, out: str, err: str) -> str:
        if (state, reader) not in _expected:
            with tempfile.TemporaryDirectory(dir=lab.home) as other:
                sound = Case("damage", "sound", words, whole)
                whole(Path(other))
                code, said, complaint, _ = run_in_fork(sound, Path(other), 120)
                assert code == 0, complaint
                _expected[state, reader] = made(Path(other), said)
        wanted = _expected[state, reader]
        if (found := made(here, out)) != wanted:
            if isinstance(found, dict):
                found = sorted(k for k in {**found, **wanted} if found.get(k) != wanted.get(k))
            return f"exit code 0 with another result: {str(found)[:300]}"
        if reader == "resume" and Path(name).name not in err and Path(name).parts[0] not in err:
            return "repaired without a warning"
        return ""

    label = f"{state} run, {how.__name__[1:]} {name}: {reader}"
    return Case("damage", label, words, prepare, judge)


def _vanishing(lab: Lab) -> Iterator[Case]:
    """The run's folder, or its answers, deleted while the search is at work."""
    for number in (0, 1, 2):
        for what in ("run", "run/answers", ""):

            def hook(number: int = number, what: str = what) -> None:
                from swarm.loop.run import Run

                iterate = Run._run_iteration

                def gone(run: Any, now: int) -> None:
                    if now == number:
                        shutil.rmtree(run.record.folder.parent / what, ignore_errors=True)
                    iterate(run, now)

                Run._run_iteration = gone  # type: ignore[method-assign]

            name = f"{what or 'folder'} deleted before round {number}"
            yield Case("damage", name, _resumed(lab), hook=hook, judge=_complete)


def _complete(here: Path, out: str, err: str) -> str:
    """A search that ended well has everything that another command needs."""
    run = here / "search" / "run"
    state = (run / "rounds.jsonl").is_file()
    answers = [(run / "answers" / f"iteration_{n:04d}.json.gz").is_file() for n in range(4)]
    return "" if state and all(answers) else "exit code 0, and rounds are lost"


def _shared(lab: Lab) -> Iterator[Case]:
    """Damaged answers that searches share."""
    for how in DAMAGES[:9]:

        def prepare(here: Path, how: Damage = how) -> None:
            shutil.copytree(_store(lab), here / "shared")
            for number, path in enumerate(sorted((here / "shared").rglob("*.gz"))):
                how(path, random.Random(f"{how.__name__} {number}"))

        name = f"shared answers {how.__name__[1:]}"
        judge: Any = (lambda here, out, err: "") if how is _deleted else Case.judge
        yield Case("damage", name, lab.search("shared={here}/shared"), prepare, judge)


def _store(lab: Lab) -> Path:
    here = lab.home / "store"
    if not here.exists():
        here.mkdir()
        case = Case("damage", "store", lab.search("shared={here}/shared"))
        code, _, err, _ = run_in_fork(case, here, 120)
        assert code == 0, err
    return here / "shared"
