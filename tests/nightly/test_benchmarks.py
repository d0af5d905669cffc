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
    (
        "iteration.py",
        MODELS + "--particles 2 --items 3 --cases short",
        ["| short | ours, float32 |"],
    ),
    (
        "engines.py",
        MODELS + "--rows 2,3 --particles 2 --kinds text,choices,loss,gradient",
        ["| text | 4 | peft |", "| choices | 6 | auto |", "| loss | 2 |", "| gradient | 3 |"],
    ),
    ("startup.py", MODELS, ["| first answer |"]),
    (
        "endpoints.py",
        "--count 40 --rate 40 --at-once 4",
        ["| quick | 4 | 40 | stored |", "| faults | 4 | 40 | compare |", "| served | 4 | 40 |"],
    ),
    ("optimizer_bowls.py", "--only random,pso", ["| random | 60 |", "| pso | 1020 |"]),
    # A sample of the fault bench: no traceback, hang or silence; in full it is all of it.
    ("faults.py", "--sample 60 --seed 1 --jobs 2", ["| all | 60 | 0 | 0 | 0 |"]),
]
"""A benchmark, its arguments, and what the output has."""


@pytest.mark.parametrize(("name", "arguments", "says"), SMALLEST)
def test_it_runs(
    name: str, arguments: str, says: list[str], tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    words = f"{arguments} --repeats 1 --out {tmp_path}".format(base=tiny_llama, pool=tiny_pool)
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *words.split()],
        cwd=searches.ROOT,
        env=searches.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = subprocess.run(
        [sys.executable, str(BENCHMARKS / "frame.py"), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    for out in (done.stdout, page.stdout):
        assert all(one in out for one in says), out


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
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
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
    assert text["share of plain"][0] > 0 and len(text["profile"]) == 6
    # A job of 2 positions and 3 items is one stacked batch, as a search would answer it.
    assert text["plan"] == "stacked"
    assert [row["items"] for row in results["tiny_plan"]["result"]["rows"]] == [2, 3]
    assert "tiny, correctness ..." in out and "tiny, correctness ..." not in run_it()
