"""Every benchmark runs at its smallest, on the tiny model; each checks equal results itself."""

import json
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
        "short",
    ],
    "batching.py": ["--rows", "2,3", "--particles", "2", "--repeats", "1"],
    "gradient.py": ["--steps", "1", "--repeats", "1"],
    "startup.py": ["--repeats", "1"],
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
    out = run(name, "--model", str(tiny_llama), "--pool", str(tiny_pool), *SMALLEST[name])
    assert "ratio" in out or "|" in out or "first answer" in out


def test_routed_positions_are_measured(tiny_llama: Path, tiny_pool: Path) -> None:
    models = ["--model", str(tiny_llama), "--pool", str(tiny_pool)]
    small = ["--routed", "nlgraph_mini", "--items", "12", "--repeats", "1"]
    assert "| nlgraph_mini | 12 | 2 |" in run("batching.py", *models, *small)


def test_throughput_runs() -> None:
    small = ["--count", "30", "--at-once", "4", "--slow", "4", "--kept", "50", "--repeats", "1"]
    out = run("throughput.py", *small)
    assert out.count("| ours, keeping |") == 2 and "50 cached answers: " in out


def test_serving_runs() -> None:
    out = run("serving.py", "--count", "20", "--at-once", "4", "--repeats", "1")
    assert "| served |" in out and "first piece of a stream: " in out


def test_optimizers_run() -> None:
    out = run("optimizer_bowls.py", "--seeds", "1", "--only", "random,pso")
    assert "\nrandom | " in out and "\npso | " in out


def test_rate_limits() -> None:
    out = run("rate_limit.py", "--count", "40", "--rate", "40")
    assert out.count("| 40 |") == 8, out


def test_no_fault_of_a_sample_is_a_traceback_a_hang_or_silent() -> None:
    """A sample of the fault bench; in full it is `python benchmarks/faults.py`."""
    out = run("faults.py", "--sample", "60", "--seed", "1", "--jobs", "2")
    assert "| all | 60 | 0 | 0 | 0 |" in out, out


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
