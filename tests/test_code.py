"""Code that has to pass a test: what is taken for the program, and what it may do."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import UserError
from swarm.scorers.code import Code, block_closed, candidates

ADD = {
    "prompt": 'def add(a, b):\n    """Add."""\n',
    "test": "assert add(1, 2) == 3 and add(-1, 1) == 0",
    "id": 0,
}
TASK = {**ADD, "prompt": "Write a function add that adds two numbers."}
PROGRAM = "def add(a, b):\n    return a + b"


def scored(item: dict[str, Any], *texts: str, **keys: Any) -> list[tuple[float, bool]]:
    """Of each text its value and whether something was read."""
    scores = Code(**keys).score([item] * len(texts), texts)
    assert [score.text for score in scores] == list(texts)
    return [(score.value, score.answer is not None) for score in scores]


RIGHT = [
    "    return a + b",
    "    return a + b\n\n\nprint(add(1, 2))\n",
    "    return a + b\n\ndef more(:\n",  # cut off where the function ends
    "    return a + b\nAnd that is all.",
    "def add(a, b):\n    return a + b",
    "```python\ndef add(a, b):\n    return a + b\n```",
    "Sure:\n\n  ```py\n  def add(a, b):\n      return a + b\n  ```\nThat adds.",
    "```\ndef add(a, b):\n    return a + b",
    "```bash\npip install x\n```\n```python\ndef add(a, b):\n    return a + b\n```\n",
    "```python\ndef add(a, b):\n    return a + b\n```\n```python\nadd = None\n```",
    "```python\n    return a + b\n```",
    "    return a + b\r\n",
]


def test_what_passes() -> None:
    assert scored(ADD, *RIGHT) == [(1.0, True)] * len(RIGHT)


def test_a_prompt_in_words_is_no_code() -> None:
    block = "```python\ndef add(a, b):\n    return a + b\n```"
    assert scored(TASK, block, "def add(a, b): return a + b", "    return a + b") == [
        *((1.0, True), (1.0, True), (0.0, False))
    ]


AMID = [
    f"Sure! Here is the function:\n\n{PROGRAM}\n\nIt adds two numbers.",
    f"So:\n\nimport math\n\n{PROGRAM}\n\nclass More:\n    x = 1\n\nThat is all, isn't it?",
    "Indented, as in Markdown:\n\n    def add(a, b):\n        return a + b\n\nThat is all.",
    f"I import nothing.\nfrom here on it is code\n{PROGRAM}\n\nprint(add(1, 2))\nIt prints 3.",
    f"It goes:\n{PROGRAM}\n\ndef more(a,",
]


@pytest.mark.parametrize("item", [ADD, TASK])
def test_code_amid_words_is_found(item: dict[str, Any]) -> None:
    assert scored(item, *AMID) == [(1.0, True)] * len(AMID)
    assert scored(item, "I am sorry.\n\nThanks", "Let us say\nx be = 5\nso") == [(0.0, False)] * 2


def test_a_long_text_is_taken_apart_in_no_time() -> None:
    for text in ("import x\n" * 20_000, "words are no code\n" * 20_000, "x = (\n" * 20_000):
        began = time.monotonic()
        assert len(candidates("p", text)) <= 310
        assert time.monotonic() - began < 60


WRONG = {
    "    return a - b": True,
    "    return c": True,
    "    raise SystemExit(0)": True,
    "    import os; os._exit(0)": True,
    "```python\nimport os\nos._exit(0)\n```": True,
    **{f"    import os; os._exit({code})": True for code in (1, 97, 98)},
    "    print('passed'); import os; os.write(1, b'passed'); os._exit(0)": True,
    "```python\nexit()\n```": True,
    "```python\nx = 1\n```": True,
    "    return (a +": False,
    "\nI am sorry.": False,
    "```python\ndef add(\n```": False,
    "\0": False,
    "\ud800": False,
    "(" * 5000: False,
    "": False,
    " \n": False,
}


def test_what_does_not_pass_and_what_is_no_code() -> None:
    assert scored(ADD, *WRONG) == [(0.0, read) for read in WRONG.values()]


@pytest.mark.slow
def test_a_program_is_stopped() -> None:
    loops = "    while True:\n        pass", "    import time\n    time.sleep(60)"
    memory = "    return len(bytes(2**31)) and a + b", "    return sum([a, b] + [0] * 10**8)"
    disk = "    open('x', 'wb').write(bytes(2**27))\n    return a + b"
    began = time.monotonic()
    assert scored(ADD, *loops, *memory, disk, seconds=1, memory=256) == [(0.0, True)] * 5
    assert time.monotonic() - began < 200


def test_a_program_that_waits_has_more_than_its_cpu_time() -> None:
    waiting = "    import time\n    time.sleep(5)\n    return a + b"
    assert scored({**ADD, "test": "assert add(1, 2) == 3"}, waiting, seconds=1) == [(1.0, True)]


def test_a_child_that_lives_on_holds_nothing_up() -> None:
    fork = "    import os, time\n    if os.fork() == 0:\n        time.sleep(60)\n    return a + b"
    began = time.monotonic()
    assert scored({**ADD, "test": "assert add(1, 2) == 3"}, fork) == [(1.0, True)]
    assert time.monotonic() - began < 50


def test_its_children_are_stopped_with_it(tmp_path: Path) -> None:
    marked = tmp_path / "marked"
    late = f"import time; time.sleep(3); open({str(marked)!r}, 'w')"
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {late!r}])"
    assert scored(ADD, f"    {start}\n    return a + b") == [(1.0, True)]
    time.sleep(4)
    assert not marked.exists()


def test_a_program_sees_no_secret_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    item = {
        "prompt": "Look around.",
        "test": "assert found == [] and 's3cret' not in seen and home == here and args == ['-c']",
        "id": 0,
    }
    program = (
        "import os, sys\nfound, here = os.listdir('.'), os.getcwd()\n"
        "seen, home, args = str(os.environ), os.environ['HOME'], sys.argv\n"
        "open('file', 'w').write('x' * 10_000)\nprint('x' * 10_000_000)\n"
        "print(sys.stdin.read(), file=sys.stderr)"
    )
    assert scored(item, program) == [(1.0, True)]
    assert list(tmp_path.iterdir()) == []


def test_modules_that_look_for_their_names_work() -> None:
    program = (
        "from __future__ import annotations\nimport pickle\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Pair:\n    x: int\n    y: int\n"
        "def add(a, b):\n    pair = pickle.loads(pickle.dumps(Pair(a, b)))\n"
        "    return pair.x + pair.y\n"
        "if __name__ == '__main__':\n    raise SystemExit\n"
    )
    assert scored(TASK, program) == [(1.0, True)]


def test_items_run_side_by_side(tmp_path: Path) -> None:
    """Each waits for the other."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one CPU")
    text = (
        f"    import os, time\n    home = {str(tmp_path)!r}\n"
        "    open(f'{home}/{os.getpid()}', 'w')\n"
        "    while len(os.listdir(home)) < 2:\n        time.sleep(0.05)\n    return a + b"
    )
    item = {**ADD, "test": "assert add(1, 2) == 3"}
    assert scored(item, text, text) == [(1.0, True)] * 2


@pytest.mark.slow
def test_nothing_is_left_when_the_search_is_killed(tmp_path: Path) -> None:
    """The program's own alarm ends it when nobody is left to end it."""
    pid = tmp_path / "pid"
    text = f"    import os, time\n    open({str(pid)!r}, 'w').write(str(os.getpid()))\n"
    text += "    time.sleep(60)"
    code = f"from swarm.scorers.code import Code\nCode(seconds=1).score([{ADD!r}], [{text!r}])"
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not pid.exists() or not pid.read_text():
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    child, ends = int(pid.read_text()), time.monotonic() + 30
    while alive(child):
        assert time.monotonic() < ends
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_it_is_known_beforehand_whether_programs_can_run() -> None:
    Code().check()
    with pytest.raises(UserError, match=r"task.scorer.memory=1, .* raise them"):
        Code(memory=1).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": "assert ("}, 'its "test" is not Python: '),
        ({"test": " "}, 'its "test" is empty'),
        ({"prompt": 3}, 'its "prompt" is not a text'),
    ],
)
def test_a_wrong_item_is_named(change: dict[str, Any], message: str) -> None:
    assert message in str(Code().wrong({**ADD, **change}))
    assert Code().wrong(ADD) is None


@pytest.mark.parametrize("keys", [{"seconds": 0}, {"seconds": 1.5}, {"memory": "1G"}])
def test_a_wrong_key_is_named(keys: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"task\.scorer\.{next(iter(keys))}: "):
        Code(**keys)


def test_a_closed_block_ends_the_answer() -> None:
    text = "Well:\n```bash\nls\n```\n```python\nx = 1\n```\nmore"
    closed = [end for end in range(len(text) + 1) if block_closed(text[:end])]
    assert closed[0] == text.index("more")
    for end in closed:
        assert candidates("p", text[:end]) == candidates("p", text)
    assert not block_closed("no block") and not block_closed("```python\nx = '```'\n")
