"""Code that has to pass a test: what is taken for the program, and what it may do."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import warm_python

from swarm.errors import UserError
from swarm.scorers import function, sandbox
from swarm.scorers.code_execution import CodeScorer, candidate_programs, is_block_closed

ADD = {
    "prompt": 'def add(a, b):\n    """Add."""\n',
    "test": "assert add(1, 2) == 3 and add(-1, 1) == 0",
    "id": 0,
}
TASK = {**ADD, "prompt": "Write a function add that adds two numbers."}
PROGRAM = "def add(a, b):\n    return a + b"


def scored(item: dict[str, Any], *texts: str, **keys: Any) -> list[tuple[float, bool]]:
    """Of each text its value and whether something was read."""
    works = any(sandbox.why_not(kind) is None for kind in sandbox.KINDS)
    keys.setdefault("sandbox", "auto" if works else "none")
    scores = CodeScorer(**keys).score([item] * len(texts), texts)
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
        assert len(candidate_programs("p", text)) <= 310
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


def test_tests_are_read_in_several_threads(tmp_path: Path) -> None:
    """A collection that runs Python code amid ast.parse lets the next thread parse, too."""

    def collect(phase: str, info: Any) -> None:
        sum(range(50))

    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    many = range(100)
    texts = [
        f"assert math.f({n}) == ({', '.join(f'[x.a + {i}]' for i in range(40))})" for n in many
    ]
    (tmp_path / "mine.py").write_text("\n".join(texts) + "\nTERM = 3\n")

    def used(number: int) -> list[str]:
        return function._used_definitions(tmp_path / "mine.py", "TERM", set())

    try:
        gc.callbacks.append(collect)
        gc.set_threshold(20)
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(sandbox._modules, texts))
            defined = list(threads.map(used, range(20)))
    finally:
        gc.callbacks.remove(collect)
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    assert found == [{"math": "math"}] * len(texts)
    assert defined == [["TERM = 3"]] * 20


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


@pytest.fixture(autouse=True)
def cold_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A program under test is no fork of a process outside."""
    monkeypatch.setattr("sys.executable", warm_python.COLD)
    cached = sandbox.why_not, sandbox.paths
    for known in cached:
        known.cache_clear()
    yield
    for known in cached:
        known.cache_clear()


WAYS = [*sandbox.KINDS, "none"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """Each way to run code, where it works."""
    kind: str = request.param
    if kind != "none" and (why := sandbox.why_not(kind)):
        pytest.skip(f"{kind}: {why}")
    return kind


@pytest.fixture(params=sandbox.KINDS)
def box(request: pytest.FixtureRequest) -> str:
    """Each kind of sandbox that works here."""
    kind: str = request.param
    if why := sandbox.why_not(kind):
        pytest.skip(f"{kind}: {why}")
    return kind


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("bubblewrap", "bwrap --unshare-all --ro-bind / / --proc /proc true"),
        ("namespaces", "unshare --user --map-root-user --mount --net --ipc --pid --fork true"),
    ],
)
def test_a_sandbox_works_where_the_system_lets_it(kind: str, command: str) -> None:
    try:
        allowed = subprocess.run(command.split(), capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip(f"{command} does not work here")
    assert sandbox.why_not(kind) is None


def test_a_child_that_lives_on_holds_nothing_up(way: str) -> None:
    fork = "    import os, time\n    if os.fork() == 0:\n        time.sleep(60)\n    return a + b"
    back = "    import os\n    os.fork()\n    return a + b"  # both come back from the call
    began = time.monotonic()
    item = {**ADD, "test": "assert add(1, 2) == 3"}
    assert scored(item, fork, back, sandbox=way) == [(1.0, True)] * 2
    assert time.monotonic() - began < 50


def marked(mark: str) -> list[int]:
    """The processes that have a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_all_its_children_end_with_it(box: str) -> None:
    """20 that are leaders of sessions of their own, and orphans."""
    mark = f"mark{os.getpid()}{box}"
    late = f"import time; time.sleep(300)  # {mark}"
    program = (
        "import subprocess, sys\n"
        f"begun = [subprocess.Popen([sys.executable, '-S', '-c', {late!r}], start_new_session=True)"
        " for _ in range(20)]\nbegun = len(begun)"
    )
    item = {"prompt": "", "test": "assert begun == 20", "id": 0}
    assert scored(item, program, sandbox=box, seconds=20) == [(1.0, True)]
    ends = time.monotonic() + 5
    while marked(mark) and time.monotonic() < ends:
        time.sleep(0.05)
    assert marked(mark) == []


LOOK = """
import os, socket
found, here = os.listdir("."), os.getcwd()
environment, home, args = dict(os.environ), os.environ["HOME"], __import__("sys").argv
texts = []
for process in os.listdir("/proc") if os.path.isdir("/proc") else []:
    for name in ("environ", "cmdline"):
        try:
            texts.append(open(f"/proc/{process}/{name}", "rb").read().decode("latin-1"))
        except OSError:
            pass
seen, texts = len([p for p in os.listdir("/proc") if p.isdigit()]), "".join(texts)
def tried(work):
    try:
        work()
        return "done"
    except OSError as error:
        return "refused"
"""


def test_a_program_sees_no_secret_and_leaves_nothing(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    item = {
        "prompt": "Look around.",
        "test": "assert found == [] and 'SECRET_KEY' not in environment\n"
        "assert home == here and args == ['-c']",
        "id": 0,
    }
    program = (
        f"{LOOK}\nopen('file', 'w').write('x' * 10_000)\nprint('x' * 10_000_000)\n"
        "import sys; print(sys.stdin.read(), file=sys.stderr)"
    )
    assert scored(item, program, sandbox=way) == [(1.0, True)]
    assert list(tmp_path.iterdir()) == []


def test_the_parents_key_cannot_be_read(box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the environment of the process that scores, and of the one that runs the test."""
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    parent = subprocess.Popen(["sleep", "60"])  # its environment is what /proc would show
    try:
        test = "assert 's3cret' not in texts and 'sleep' not in texts and 1 <= seen <= 3"
        assert scored({**TASK, "test": test}, LOOK, sandbox=box) == [(1.0, True)]
        test = "assert 's3cret' in texts"
        assert scored({**TASK, "test": test}, LOOK, sandbox="none") == [(1.0, True)]
    finally:
        parent.kill()
        parent.wait()


def test_nothing_can_be_written_outside(box: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    home = Path.home() / f".marked_by_a_test_{os.getpid()}"
    places = [
        str(tmp_path / "new"),
        str(tmp_path / "there"),
        str(home),
        "/etc/new",
        "/usr/new",
        f"{sys.prefix}/new",
        "/new",
        "/dev/new",
        "/proc/sys/kernel/hostname",
    ]
    test = (
        f"for place in {places!r}:\n    assert write(place) == 'refused', place\n"
        "for place in ('here', '/tmp/new'):\n    assert write(place) == 'done', place\n"
        f"assert read({str(tmp_path / 'there')!r}) == 'refused'"
    )
    program = (
        f"{LOOK}\ndef write(place):\n    return tried(lambda: open(place, 'w').write('x'))\n"
        "def read(place):\n    return tried(lambda: open(place).read())"
    )
    assert scored({**TASK, "test": test}, program, sandbox=box) == [(1.0, True)]
    assert (tmp_path / "there").read_text() == "mine" and not home.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_there_is_no_network(box: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = (
            f"{LOOK}\ndef reach(host, port):\n"
            "    return tried(lambda: socket.create_connection((host, port), 1))"
        )
        test = f"assert reach('127.0.0.1', {port}) == reach('1.1.1.1', 53) == 'refused'"
        assert scored({**TASK, "test": test}, program, sandbox=box) == [(1.0, True)]


def test_a_fork_bomb_ends(box: str) -> None:
    began = time.monotonic()
    mark = f"bomb{os.getpid()}{box}"
    bomb = f"    import os  # {mark}\n    while True:\n        os.fork()"
    assert scored(ADD, bomb, sandbox=box, seconds=5) == [(0.0, True)]
    assert time.monotonic() - began < 40


def test_memory_is_limited_over_all_processes_and_files(box: str) -> None:
    share = (
        "    import os, time\n    for _ in range(8):\n        if os.fork() == 0:\n"
        "            held = bytearray(100 * 2**20)\n            time.sleep(20)\n"
        "    time.sleep(5)\n    return a + b"
    )
    files = (
        "    for place in ('.', '/tmp', '/dev/shm'):\n        for i in range(8):\n"
        "            open(f'{place}/{i}', 'wb').write(bytes(2**25))\n    return a + b"
    )
    found = scored(ADD, share, files, sandbox=box, memory=400)
    assert found == [(0.0, True)] * 2


def test_no_namespaces_can_be_made_inside(box: str) -> None:
    program = (
        "import ctypes, os\ndef unshare():\n"
        "    return ctypes.CDLL(None).unshare(0x10000000)\n"
        "def caps():\n    lines = open('/proc/self/status').read().splitlines()\n"
        "    return [int(line.split()[1], 16) for line in lines"
        " if line.startswith(('CapEff', 'CapPrm', 'CapInh', 'NoNewPrivs'))]"
    )
    test = "assert unshare() == -1 and sorted(caps()) == [0, 0, 0, 1]"
    assert scored({**TASK, "test": test}, program, sandbox=box) == [(1.0, True)]


EQUAL = "class Equal({}):\n    " + "\n    ".join(
    f"def __{name}__(self, *other): return {value}"
    for name, value in {
        **dict.fromkeys(("eq", "lt", "le", "gt", "ge", "contains", "bool"), "True"),
        "ne": "False",
        **dict.fromkeys(("sub", "rsub", "add", "radd", "mul", "truediv", "mod"), "0"),
        "abs": "0",
        "hash": "0",
        "neg": "0",
        "round": "0",
    }.items()
)
CHECKS = [
    "assert add(1, 2) == 3",
    "assert 3 == add(1, 2)",
    "assert not add(1, 2) != 3",
    "assert add(1, 2) in (3,)",
    "assert abs(add(1, 2) - 3) < 1e-6",
    "assert abs(3 - add(1, 2)) < 1e-6",
    "assert 2 < add(1, 2) < 4",
    "import math; assert math.isclose(add(1, 2), 3)",
    "assert math.isclose(add(1, 2), 3)",
    "assert [add(1, 2)] == [3] and {1: add(1, 2)} == {1: 3}",
    "assert 3 in add(1, 2)",
    "assert add(1, 2) - 3 == 0",
    "assert sorted([add(1, 2), 3])[0] == 3 and str(add(1, 2)) == '3'",
    "import unittest; unittest.TestCase().assertEqual(add(1, 2), 3)",
    "import unittest; unittest.TestCase().assertAlmostEqual(add(1, 2), 3)",
    "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)",
]
FORGERIES = {
    "an object that equals everything": f"{EQUAL.format('')}\ndef add(a, b): return Equal()",
    "a number that equals everything": f"{EQUAL.format('float')}\ndef add(a, b): return Equal(9)",
    "a class in place of the function": EQUAL.format("").replace("Equal", "add")
    + "\n    def __init__(self, a, b): pass",
    "unittest's object that equals everything": "from unittest.mock import ANY\n"
    "def add(a, b): return ANY",
    "a function of the standard library": "from unittest.mock import MagicMock as add",
    "patched builtins": "import builtins, math\n"
    "for name in ('abs', 'sorted', 'str', 'len', 'isinstance', 'AssertionError'):\n"
    "    setattr(builtins, name, lambda *a, **k: '3')\n    globals()[name] = lambda *a, **k: 0\n"
    "math.isclose = lambda *a, **k: True\nimport unittest\n"
    "unittest.TestCase.assertEqual = unittest.TestCase.assertAlmostEqual = print\n"
    "def add(a, b): return 9",
    "a module of one's own": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\n"
    "def add(a, b): return 9",
    "frames": "import sys, os, gc\ndef add(a, b):\n    frame = sys._getframe()\n"
    "    while frame:\n        for names in (frame.f_locals, frame.f_globals):\n"
    "            for key, value in list(names.items()):\n"
    "                if key == 'verdict': os.write(value, b'passed')\n"
    "                if isinstance(value, dict):\n"
    "                    value.update(test='pass', passed=True, role='judge')\n"
    "        frame = frame.f_back\n    return 9",
    "every descriptor": "import os\ndef add(a, b):\n    for fd in range(256):\n"
    "        try: os.write(fd, b'passed')\n        except OSError: pass\n    return 9",
    "every message": "import os, json\ndef add(a, b):\n"
    "    form = ['done', 1, 3, {}]\n    for fd in range(3, 256):\n"
    "        for text in (['passed'], True, ['ask', 1, 'call', [['yours', 0]], {}],\n"
    "                     ['ask', 1, 'getattr', [['yours', 0], '__globals__'], {}], form * 2):\n"
    "            try: os.write(fd, (json.dumps(text) + '\\n').encode())\n"
    "            except OSError: pass\n    return 9",
    "an early end": "import os\ndef add(a, b): os._exit(0)",
    "SystemExit": "def add(a, b): raise SystemExit(0)",
    "an exception of the test's own": "def add(a, b): raise StopIteration",
    "its arguments' frames": "import gc, sys\ndef add(a, b):\n"
    "    [d.update(lost=False) for d in gc.get_objects() if isinstance(d, dict)]\n    return 9",
}


EACH = f"""passed = []
for check in {CHECKS!r}:
    try:
        exec(check, globals())
        passed.append(check)
    except BaseException:
        pass
"""


def test_no_program_forges_a_verdict(way: str) -> None:
    """Not without a sandbox either: the verdict comes from another process."""
    item = {**TASK, "test": f"{EACH}assert passed"}
    found = scored(item, *FORGERIES.values(), sandbox=way)
    assert dict(zip(FORGERIES, found, strict=True)) == dict.fromkeys(FORGERIES, (0.0, True))
    # Each of the checks passes for what is right, but for the one of a number that contains.
    assert scored(
        {**item, "test": f"{EACH}assert len(passed) == {len(CHECKS) - 1}"}, PROGRAM, sandbox=way
    ) == [(1.0, True)]


def test_a_program_does_nothing_with_the_tests_functions_but_call_them() -> None:
    steal = (
        "def add(f, b):\n    for name in ('__globals__', '__code__', '__closure__', '__self__',\n"
        "                 'gi_frame', 'tb_frame', '__class__', '__dict__'):\n        try:\n"
        "            found = getattr(f, name) if name != '__class__' else f.real\n"
        "            return 'stolen'\n        except (TypeError, AttributeError): pass\n"
        "    return f(b)"
    )
    test = (
        "assert add(lambda x: x + 1, 2) == 3\ndef made():\n    yield 3\n"
        "try:\n    add(made(), 2)\n    assert False, 'called'\nexcept TypeError:\n    pass"
    )
    assert scored({**TASK, "test": test}, steal) == [(1.0, True)]


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (
            "def f(x): x.sort(); x[0].append(9)",
            "x = [[2], [1]]; y = x[1]; f(x)\nassert x == [[1, 9], [2]]",
        ),
        (
            "def f(d, *, s): d['new'] = (1, 2); s.add(3)",
            "d, s = {'a': 1}, {1}; f(d, s=s); assert d == {'a': 1, 'new': (1, 2)} and s == {1, 3}",
        ),
        (
            "def f(n):\n    while True:\n        yield n\n        n += 1",
            "from itertools import islice; assert list(islice(f(3), 3)) == [3, 4, 5]",
        ),
        (
            "class P(Exception): pass\nclass Q(P, ValueError):\n    pass\n"
            "def f(x): raise Q('no', x)",
            "try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert e.args == "
            "('no', 1)"
            "\ntry:\n    f(1)\nexcept Q as e:\n    pass",
        ),
        (
            "class Stack:\n    def __init__(self): self.items = []\n"
            "    def push(self, x): self.items.append(x); return self\n"
            "    def __len__(self): return len(self.items)\n    def __repr__(self): return 'S'\n"
            "    def __getitem__(self, i): return self.items[i]\n"
            "    def __eq__(self, other): return self.items == other.items\n"
            "    def __add__(self, other): return Stack().push(self[0] + other[0])",
            "s = Stack(); s.push(1).push([2])\n"
            "assert len(s) == 2 and s[1] == [2] and s.items[0] == 1\n"
            "assert isinstance(s, Stack) and repr(s) == 'S' and s == s and s != 3 and bool(s)\n"
            "assert Stack().push(1) == Stack().push(1) and (s + s).items == [2]\n"
            "s.name = 'x'; assert s.name == 'x' and not hasattr(s, 'none')\n"
            "assert list(s) == [1, [2]]",
        ),
        (
            "from collections import *\nfrom decimal import Decimal\nfrom fractions import "
            "Fraction\n"
            "import datetime, enum\nP = namedtuple('P', 'x y')\n"
            "class E(enum.IntEnum):\n    A = 3\n"
            "def f(): return [P(1, 2), Counter('aab'), OrderedDict(a=1), deque([1], 3), {1, "
            "(2,)},\n"
            "  b'x', bytearray(b'y'), 2**5000, 1j, float('nan'), -0.0, range(3), None, True, E.A,\n"
            "  Decimal('1.50'), Fraction(1, 3), datetime.date(2020, 1, 2), frozenset([1]), ..., "
            "str]",
            "from collections import Counter, deque\nfrom decimal import Decimal\n"
            "from fractions import Fraction\nimport datetime, math\nr = f()\n"
            "assert r[0] == (1, 2) and r[0].y == 2 and r[1] == Counter('aab') and r[1]['z'] == 0\n"
            "assert r[2:9] == [{'a': 1}, deque([1]), {1, (2,)}, b'x', b'y', 2**5000, 1j]\n"
            "assert math.isnan(r[9]) and str(r[10]) == '-0.0' and list(r[11]) == [0, 1, 2]\n"
            "assert r[12] is None and r[13] is True and r[14] == 3 and r[14] + 1 == 4\n"
            "assert r[15:19] == [Decimal('1.50'), Fraction(1, 3), datetime.date(2020, 1, 2), {1}]\n"
            "assert r[20] is str",
        ),
        (
            "def f(node):\n    back = None\n    while node:\n"
            "        node.next, back, node = back, node, node.next\n    return back",
            "class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\n"
            "n = f(Node(1, Node(2, Node(3))))\n"
            "assert [n.v, n.next.v, n.next.next.v, n.next.next.next] == [3, 2, 1, None]",
        ),
        (
            "def f(g, xs): return sorted(map(g, xs), key=abs)",
            "import math\nassert f(lambda x: -x, [2, 1]) == [-1, -2] and f(math.floor, [1.5]) == "
            "[1]",
        ),
        (
            "total = 0\ndef f(x):\n    global total\n    total += x",
            "f(2); f(3); assert total == 5\nimport unittest\nclass T(unittest.TestCase):\n"
            "    def test_it(self): self.assertEqual(total, 5)\n"
            "assert unittest.TextTestRunner().run(T('test_it')).wasSuccessful()",
        ),
        (
            "class f:\n    def __enter__(self): return 3\n    def __exit__(self, *a): "
            "return a[0] is not None",
            "with f() as x:\n    assert x == 3\n    1 / 0",
        ),
        (
            "def sum(a, b): return a - b\ndef f(a): return sum(a, 1)",
            "assert f(3) == 2 and sum([1, 2]) == 3",
        ),
        ("def f(s): return s + chr(0xd800)", "assert f('\\n\\u2028é') == '\\n\\u2028é\\ud800'"),
    ],
)
def test_what_a_test_may_do(program: str, test: str) -> None:
    assert scored({**TASK, "test": test}, program, sandbox="none") == [(1.0, True)]


def test_a_name_of_pythons_is_the_programs_where_the_prompt_asks_for_it() -> None:
    item = {"prompt": "import math\ndef max(a):\n", "test": "assert max([1, 2]) == 3", "id": 0}
    assert scored(item, "    return math.floor(sum(a) + .5)") == [(1.0, True)]
    item = {**item, "test": "assert math.floor(2.5) == 2"}  # the prompt's import
    assert scored(item, "    return 1\nmath = None") == [(1.0, True)]


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
    assert scored(item, text, text, sandbox="none") == [(1.0, True)] * 2


@pytest.mark.slow
def test_nothing_is_left_when_the_search_is_killed(way: str) -> None:
    mark = f"left{os.getpid()}{way}"
    late = f"import time; time.sleep(600)  # {mark}"
    text = f"    import subprocess, sys\n    subprocess.run([sys.executable, '-c', {late!r}])"
    code = f"from swarm.scorers.code_execution import CodeScorer\nCodeScorer(1, sandbox={way!r})"
    code += f".score([{ADD!r}], [{text!r}])"
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        while not set(marked(mark)) - {parent.pid}:
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
    ends = time.monotonic() + (30 if way == "none" else 5)
    while way != "none" and marked(mark):
        assert time.monotonic() < ends
        time.sleep(0.1)
    for one in marked(mark):  # without a sandbox a child lives on
        os.kill(one, signal.SIGKILL)


def test_it_is_known_beforehand_whether_programs_can_run() -> None:
    CodeScorer().check()
    with pytest.raises(UserError, match=r"task.scorer.memory=1, .* raise them"):
        CodeScorer(memory=1).check()


def test_without_a_sandbox_it_refuses_unless_none_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sandbox, "why_not", lambda kind: f"{kind} is not here")
    for kind in ("auto", *sandbox.KINDS):
        with pytest.raises(UserError, match=f"sandbox={kind}: no sandbox works.*sandbox=none"):
            CodeScorer(sandbox=kind).check()
        with pytest.raises(UserError, match="no sandbox works"):
            CodeScorer(sandbox=kind).score([ADD], ["    return a + b"])
    with caplog.at_level("WARNING"):
        CodeScorer(sandbox="none").check()
    assert "runs with your permissions" in caplog.text
    assert scored(ADD, "    return a + b", sandbox="none") == [(1.0, True)]
    with pytest.raises(UserError, match="must be one of auto, bubblewrap, namespaces, none"):
        CodeScorer(sandbox="docker")


def test_a_sandbox_that_breaks_is_an_error_and_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "why_not", lambda kind: None)
    monkeypatch.setattr(sandbox, "paths", lambda: ["/nowhere"])
    for kind in sandbox.KINDS:
        with pytest.raises(UserError, match=r"nowhere|bwrap"):
            CodeScorer(sandbox=kind).score([ADD], ["    return a + b"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": "assert ("}, 'its "test" is not Python: '),
        ({"test": " "}, 'its "test" is empty'),
        ({"prompt": 3}, 'its "prompt" is not a string'),
    ],
)
def test_a_wrong_item_is_named(change: dict[str, Any], message: str) -> None:
    assert message in str(CodeScorer().item_error({**ADD, **change}))
    assert CodeScorer().item_error(ADD) is None


@pytest.mark.parametrize(
    "keys", [{"seconds": 0}, {"seconds": 1.5}, {"memory": "1G"}, {"processes": 0}]
)
def test_a_wrong_key_is_named(keys: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"task\.scorer\.{next(iter(keys))}: "):
        CodeScorer(**keys)


def test_a_closed_block_ends_the_answer() -> None:
    text = "Well:\n```bash\nls\n```\n```python\nx = 1\n```\nmore"
    closed = [end for end in range(len(text) + 1) if is_block_closed(text[:end])]
    assert closed[0] == text.index("more")
    for end in closed:
        assert candidate_programs("p", text[:end]) == candidate_programs("p", text)
    assert not is_block_closed("no block") and not is_block_closed("```python\nx = '```'\n")
