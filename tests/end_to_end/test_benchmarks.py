"""Every benchmark runs at its smallest, on the tiny model; each checks equal results itself."""

import subprocess
import sys
from pathlib import Path

import pytest
import searches

BENCHMARKS = searches.ROOT / "benchmarks"
SMALLEST = {
    "iteration.py": [
        "--particles",
        "2",
        "--items",
        "3",
        "--repeats",
        "1",
        "--cases",
        "short,example",
    ],
    "batching.py": ["--rows", "2,3", "--particles", "2", "--repeats", "1"],
    "journal.py": ["--iterations", "12", "--particles", "5"],
    "startup.py": ["--repeats", "1"],
    "token_swarms.py": ["--items", "3", "--particles", "2", "--repeats", "1"],
    "update.py": ["--particles", "4", "--repeats", "1"],
    "voices.py": ["--names", "base,amber,dune", "--new", "4", "--repeats", "1"],
    "workers.py": ["--items", "2", "--repeats", "1"],
}


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        cwd=searches.ROOT,
        env=searches.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SMALLEST)
def test_it_runs(name: str, tiny_llama: Path, tiny_pool: Path) -> None:
    model = ["--model", str(tiny_llama)] if name != "update.py" else []
    out = run(name, *model, "--pool", str(tiny_pool), *SMALLEST[name])
    assert "ratio" in out or "|" in out or "first answer" in out


def test_throughput_runs() -> None:
    small = ["--count", "30", "--at-once", "4", "--slow", "4", "--kept", "50", "--repeats", "1"]
    out = run("throughput.py", *small)
    assert out.count("| ours, keeping |") == 2 and "50 cached answers: " in out


def test_serving_runs() -> None:
    out = run("serving.py", "--count", "20", "--at-once", "4", "--repeats", "1")
    assert "| served |" in out and "first piece of a stream: " in out


def test_consortium_runs() -> None:
    assert run("consortium.py", "4").count(" peer-review ") == 5


def test_rate_limits() -> None:
    out = run("rate_limit.py", "--count", "40", "--rate", "40")
    assert out.count("| 40 |") == 6, out


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_fault_of_a_sample_is_a_traceback_a_hang_or_silent(seed: int) -> None:
    """A sample of the fault bench; in full it is `python benchmarks/faults.py`."""
    count = 24 if seed == 0 else 160
    out = run("faults.py", "--sample", str(count), "--seed", str(seed), "--jobs", "2")
    assert f"| all | {count} | 0 | 0 | 0 |" in out, out
