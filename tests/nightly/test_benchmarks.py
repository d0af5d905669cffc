"""Every benchmark runs at its smallest, on the tiny model; each checks equal results itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import searches

BENCHMARKS = searches.ROOT / "benchmarks"
MODELS = "--model {base} --pool {pool} "
SMALLEST = [
    ("iteration.py", MODELS + "--particles 2 --items 3 --repeats 1 --cases short", ["ratio"]),
    ("batching.py", MODELS + "--rows 2,3 --particles 2 --repeats 1", ["| 2 |", "| 3 |"]),
    ("gradient.py", MODELS + "--steps 1 --repeats 1", ["|"]),
    ("startup.py", MODELS + "--repeats 1", ["first answer"]),
    (
        "throughput.py",
        "--count 30 --at-once 4 --slow 4 --kept 50 --repeats 1",
        ["| ours, keeping |", "50 cached answers: "],
    ),
    (
        "serving.py",
        "--count 20 --at-once 4 --repeats 1",
        ["| served |", "first piece of a stream: "],
    ),
    ("optimizer_bowls.py", "--seeds 1 --only random,pso", ["\nrandom | ", "\npso | "]),
    ("rate_limit.py", "--count 40 --rate 40", ["| 40 |"]),
    # A sample of the fault bench: no traceback, hang or silence; in full it is all of it.
    ("faults.py", "--sample 60 --seed 1 --jobs 2", ["| all | 60 | 0 | 0 | 0 |"]),
]
"""A benchmark, its arguments, and what the output has."""


@pytest.mark.parametrize(("name", "arguments", "says"), SMALLEST)
def test_it_runs(
    name: str, arguments: str, says: list[str], tiny_llama: Path, tiny_pool: Path
) -> None:
    words = arguments.format(base=tiny_llama, pool=tiny_pool).split()
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *words],
        cwd=searches.ROOT,
        env=searches.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(one in done.stdout for one in says), done.stdout


BLOCKED = """
import runpy, sys
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *rest):
        if name.split(".")[0] in {"hydra", "omegaconf", "wandb", "peft", "scipy", "matplotlib"}:
            return None
        return self.finder.find_spec(name, *rest)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Hiding, sys.meta_path)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_gpu_benchmark_runs_on_a_cpu_and_needs_few_packages(tmp_path: Path) -> None:
    command = [str(BENCHMARKS / "gpu.py"), "--device", "cpu"]
    command += ["--quick", "--models", "tiny", "--out", str(tmp_path)]

    def run_it(*start: str) -> str:
        done = subprocess.run(
            [sys.executable, *start, *command],
            cwd=tmp_path,
            env=searches.environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
        return done.stdout

    out = run_it("-c", BLOCKED)
    results = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    parts = ["correctness", "memory", "plan", "speed"]
    assert sorted(results) == [f"tiny_{part}" for part in parts]
    correct = results["tiny_correctness"]["result"]
    assert correct["passed"] and correct["rows"], out
    text = results["tiny_speed"]["result"]["text"]
    assert text["share of plain"] > 0 and 0 < text["in batches: decode share of copy rate"] < 1
    # A job of 2 positions and 3 items in one stacked batch, as a search would answer it.
    assert text["plan"] == "stacked" and text["in batches: rows"] == 6
    assert text["in batches: decode steps"] == 7
    assert [row["items"] for row in results["tiny_plan"]["result"]["rows"]] == [2, 3]
    assert "tiny, correctness ..." in out and "tiny, correctness ..." not in run_it()
