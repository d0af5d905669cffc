"""Studies, run small by the command line: killed, resumed, timed out, with a method that fails."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import searches
import yaml


def command(folder: Path, base: Path, pool: Path, *words: str) -> list[str]:
    return [
        *(sys.executable, "-m", "swarm.study", "smoke", "seeds=1"),
        *(f"folder={folder / 'search'}", f"results={folder / 'results'}"),
        *("model=local", f"model.path={base}", f"pool.folder={pool}"),
        *words,
    ]


def run(line: list[str], timeout: float = 300) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        line,
        cwd=searches.ROOT,
        env=searches.environment(),
        text=True,
        capture_output=True,
        timeout=timeout,
    )


def test_a_study_runs_and_goes_on_after_a_kill(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    line = command(tmp_path, tiny_llama, tiny_pool, "parallel=2", "only=[letters,8]")
    results = tmp_path / "results" / "results.jsonl"

    def lines() -> list[str]:
        return results.read_text().splitlines() if results.exists() else []

    first = subprocess.Popen(
        line,
        cwd=searches.ROOT,
        env=searches.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while not lines() and time.monotonic() < deadline:
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    kept = lines()
    assert first.returncode and 1 <= len(kept) < 5
    again = run(line)
    assert again.returncode == 0, again.stderr
    assert f"{len(kept)} of 5 results exist" in again.stderr
    assert again.stderr.count(": begins") == 5 - len(kept)
    assert lines()[: len(kept)] == kept
    found = {row["cell"]: row for row in map(json.loads, sorted(lines()))}
    assert [name.removeprefix("letters/") for name in sorted(found)] == [
        "finetune_dev10_budget8_seed0",
        "gradient_dev10_budget8_seed0",
        "random_dev10_budget8_seed0",
        "recipes_dev10_budget8_seed0",
        "vote_dev10",
    ]
    tuned, descended, searched, *_ = (found[name] for name in sorted(found))
    assert descended["gradients"] > 0 and 50 < descended["prompt_equivalents"] <= 80
    assert searched["prompt_equivalents"] == searched["prompts"] == 80
    assert len(searched["coefficients"]) == 4 and len(searched["values"]) == 20
    # Eight examples are learnt from, at three rates that are tried, two held out.
    assert tuned["prompts"] + 3 * tuned["gradients"] == tuned["prompt_equivalents"] <= 80
    assert tuned["gradients"] and tuned["start"] is None and tuned["found"].startswith("rate 0.0")
    assert len({one["dev_digest"] for one in (tuned, searched)}) == 1
    assert not list((tmp_path / "search").glob("*/letters/*")), "run folders are not kept"
    assert "| finetune " in again.stdout and "5 of 15 results" in again.stdout
    third = run([*line, "hours=0"])
    assert third.returncode == 0 and third.stdout == again.stdout, third.stderr


def test_time_and_failures(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    """No cell begins after the limit; a method that fails is named, and all others run."""
    late = run(command(tmp_path, tiny_llama, tiny_pool, "hours=0"))
    assert late.returncode == 0 and "time is up" in late.stderr, late.stderr
    assert "begins" not in late.stderr and "0 of 15 results" in late.stdout
    mine = yaml.safe_load((searches.ROOT / "conf" / "study" / "smoke.yaml").read_text())
    mine["methods"]["random"]["words"] = ["optimizer=random", "optimizer.particles=2"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    line = command(tmp_path, tiny_llama, tiny_pool, "only=[text,8]")
    line[3] = str(tmp_path / "mine.yaml")
    found = run(line)
    assert found.returncode == 1 and len(found.stderr.strip().splitlines()[-1]) < 400
    assert "1 failed, the first is text/random_dev6_budget8_seed0: " in found.stderr
    rows = (tmp_path / "results" / "results.jsonl").read_text().splitlines()
    assert sorted(json.loads(row)["cell"] for row in rows) == [
        "text/gradient_dev6_budget8_seed0",
        "text/recipes_dev6_budget8_seed0",
    ]
