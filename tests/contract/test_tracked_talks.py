"""Evaluations, mixtures, consortia and comparisons, as trackers show them."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compare_endpoint
import consortium_members
import fake_models
import pytest
import small_evaluations
import tracker_files
from click.testing import CliRunner
from endpoints import endpoint
from hydra.errors import InstantiationException

from swarm.compare.__main__ import main as compare
from swarm.consortium.cli import consortium
from swarm.moa.__main__ import main as moa

settings = pytest.fixture(compare_endpoint.settings.__wrapped__)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Path) -> Iterator[Path]:
    """A folder of one's own, an endpoint with a key, and nothing kept of others."""
    with endpoint(fake_models.answer) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", fake_models.KEY)
        monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
        monkeypatch.chdir(tmp_path)
        yield tmp_path


def folder() -> Path:
    """The one that a command has made."""
    (found,) = Path("tracking").iterdir()
    return found


def test_an_evaluation(tmp_path: Path, tiny_llama: Path, tiny_pool: Path) -> None:
    keys = small_evaluations.keys(tmp_path, tiny_llama, tiny_pool)[:-1]
    words = [
        *keys,
        "candidate=expert",
        "candidate.names=[cedar,amber]",
        "tracker=both",
        "tracker.mode=offline",
    ]
    result = small_evaluations.evaluated([*words, f"out={tmp_path / 'out'}"])
    shown, found = tracker_files.Offline(tmp_path / "out"), tracker_files.events(tmp_path / "out")
    for voice in result["voices"]:
        row, name = shown.history[0], voice["name"]
        assert row[f"utility/{name}"] == voice["utility"]
        assert [row[f"utility_low/{name}"], row[f"utility_high/{name}"]] == voice["interval"]
        assert found.Scalars(f"utility/{name}")[0].value == pytest.approx(voice["utility"])
    assert len(shown.table("answers")["data"]) == 32 and shown.run.job_type == "evaluation"
    assert shown.history[0]["prompts"] == shown.summary["prompts"] == 32
    assert small_evaluations.evaluated([*words, f"out={tmp_path / 'out'}"]) == result
    assert tracker_files.Offline(tmp_path / "out").history[0]["prompts"] == 32
    with pytest.raises(InstantiationException, match="out=null"):
        small_evaluations.evaluated([*words, "out=null"])


def test_a_mixture(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--aggregator", "big", "--reference_models", "one,two", "--quiet"]
    assert moa([*words, "--tracker", "both-offline", "Why?"]) == 0
    shown = tracker_files.Offline(folder())
    row = shown.history[0]
    assert row["calls/all"] == 3 and row["layer_1/answered"] == 2 and row["seconds"] >= 0
    assert row["tokens/prompt"] == tracker_files.events(folder()).Scalars("tokens/prompt")[0].value
    stages = shown.table("stages")
    assert [line[stages["columns"].index("model")] for line in stages["data"]] == [
        "one",
        "two",
        "big",
    ]
    assert shown.summary["questions"] == 1 and shown.run.job_type == "moa"
    everything = b"".join(p.read_bytes() for p in folder().rglob("*") if p.is_file())
    assert fake_models.KEY.encode() not in everything
    assert moa([*words, "fail", "--tracker", "tensorboard"]) == 1  # nobody answers
    last = sorted(Path("tracking").iterdir())[-1]
    assert "code 1" in tracker_files.text(tracker_files.events(last), "interrupted")
    assert moa([*words, "Why?", "--tracker", "wb"]) == 2
    assert "tracker wb: must be one of none, wandb" in capsys.readouterr().err


def test_a_consortium() -> None:
    blue, green, judge = (
        f"function/consortium_members:{name}" for name in ("blue", "green", "judge")
    )
    words = [
        "Which?",
        "-m",
        blue,
        "-m",
        green,
        "--arbiter",
        judge,
        "--max-iterations",
        "2",
        "--confidence-threshold",
        "1",
        "--tracker",
        "both-offline",
    ]
    consortium_members.heard.clear()
    done = CliRunner().invoke(consortium, words)
    assert done.exit_code == 0, done.stderr
    shown = tracker_files.Offline(folder())
    rounds = shown.summary["iteration_count"]
    confidences = [row["confidence"] for row in shown.history[:rounds]]
    verdicts = shown.table("verdicts")
    assert [line[1] for line in verdicts["data"]] == confidences
    assert all(row["answered"] == 2 for row in shown.history[:rounds])
    assert len(shown.table("responses")["data"]) == 2 * rounds
    told = [event.value for event in tracker_files.events(folder()).Scalars("confidence")]
    assert told == pytest.approx(confidences) and shown.run.job_type == "consortium"


def test_a_comparison(capsys: Any) -> None:
    Path("q.yaml").write_text(
        "- {name: birds, type: free_form, paraphrases: [Name a bird.], samples_per_paraphrase: 2}"
    )
    with compare_endpoint.endpoint():
        assert compare(["run", "q.yaml", "models=one,two", "tracker=both-offline"]) == 0
    shown = tracker_files.Offline(Path("compare/q"))
    assert shown.history[0]["rows"] == 4 and shown.history[0]["errors"] == 0
    with Path("compare/q/birds/answer_summary.csv").open(newline="") as lines:
        columns, *rows = csv.reader(lines)
    table = shown.table("birds/answer_summary")
    assert table["columns"] == columns and len(table["data"]) == len(rows) > 0
    series = set(tracker_files.events(Path("compare/q")).Tags()["scalars"])
    assert any(name.endswith("/low") for name in series), (columns, series)
    assert compare(["run", "q.yaml", "models=one", "tracker=wb"]) == 2
