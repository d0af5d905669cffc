"""The command line of experiments: what it asks, writes and says, and how it ends."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compare_endpoint
import endpoints
import pandas as pd
import pytest

from swarm.compare import Config
from swarm.compare.__main__ import main

settings = pytest.fixture(autouse=True)(compare_endpoint.settings.__wrapped__)

BIRDS = """
- name: birds
  type: free_form
  paraphrases: [Name a bird., 'Which bird comes to mind?']
  samples_per_paraphrase: 2
  judges:
    real: is_real
    own: {type: free_form_judge, model: judge, paraphrases: ["{answer}?"]}
- {name: size, type: rating, paraphrases: ['How large is a wren?'], max_rating: 9}
- {name: is_real, type: rating_judge, model: judge, paraphrases: ['Is {answer} one?']}
"""


def told(asked: endpoints.Asked) -> endpoints.Reply:
    """A bird, or a rating of 3 or 7; the model "broken" is refused."""
    if asked.body["model"] == "broken":
        return endpoints.Reply({"error": {"message": "no such model"}}, 400)
    if not asked.body.get("logprobs"):
        return endpoints.chat(f"{asked.body['model']} wren")
    top = [{"token": token, "logprob": math.log(0.5)} for token in "37"]
    message = {"role": "assistant", "content": "3"}
    content = [{"token": "3", "logprob": math.log(0.5), "top_logprobs": top}]
    choice = {"message": message, "finish_reason": "stop", "logprobs": {"content": content}}
    return endpoints.Reply({"choices": [choice], "usage": {}})


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An endpoint, and a folder of one's own with birds.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("birds.yaml").write_text(BIRDS)
    with compare_endpoint.endpoint(told) as running:
        yield running


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command; gives its code and what it says on stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        return code, *capsys.readouterr()

    return run


def test_a_run_writes_data_plots_and_a_report(server: endpoints.Endpoint, said: Any) -> None:
    code, out, err = said("run", "birds.yaml", "models={x: [a, b], y: c}")
    assert code == 0, err
    assert "15 rows, 0 with an error: compare/birds/report.md" in out
    assert "birds: answer: " in out and "birds: real: " in out and "size: answer: " in out
    assert err.endswith(
        "browse them with: python -m swarm.compare view compare/birds/birds/data.jsonl\n"
    )
    place = Path("compare/birds")
    text = (place / "report.md").read_text()
    assert "- x: a, b\n- y: c\n" in text and "## birds" in text and "### own" in text
    pictures = [part.split(")")[0] for part in text.split("](")[1:] if ".png)" in part]
    assert pictures == [
        "birds/plot.png",
        "birds/answer_models.png",
        "birds/real_plot.png",
        "birds/real_models.png",
        "birds/own_plot.png",
        "birds/own_models.png",
        "size/plot.png",
    ]
    assert all((place / one).read_bytes().startswith(b"\x89PNG") for one in pictures)
    rows = [json.loads(line) for line in (place / "birds/data.jsonl").read_text().splitlines()]
    assert [row["model"] for row in rows[::4]] == ["a", "b", "c"]
    assert {row["real"] for row in rows} == {5.0}
    assert len(pd.read_csv(place / "size/data.csv")) == 3
    assert compare_endpoint.KEY not in "".join(
        path.read_text() for path in place.rglob("*") if path.suffix != ".png" and path.is_file()
    )


def test_a_second_run_asks_what_is_new_and_replaces_the_folder(
    server: endpoints.Endpoint, said: Any
) -> None:
    words = ("run", "birds.yaml", "questions=size", "folder=7")
    assert said(*words, "models=a,b")[0] == 0
    asked = len(server.asked)
    assert (Path("7") / "size/answer_differences.csv").exists(), "7 is a folder's name"
    code, out, _ = said(*words, "models=a", "samples=3", "workers=2", "timeout=9.5")
    assert (code, out) == (0, "3 rows, 0 with an error: 7/report.md\n"), "nothing is compared"
    assert [one.body["model"] for one in server.asked[asked:]] == ["a", "a"], "two more samples"
    assert not (Path("7") / "size/answer_differences.csv").exists()
    assert "no price known" in (Path("7") / "report.md").read_text()
    assert (Config.max_workers, Config.timeout) == (100, 60), "of the run alone"


def test_a_failed_row_is_code_1_and_the_others_are_there(
    server: endpoints.Endpoint, said: Any
) -> None:
    code, out, err = said("run", "birds.yaml", "models=[a, broken]", "questions=[size]")
    assert code == 1
    assert "2 rows, 1 with an error" in out and "no such model" in err
    assert "1 failed" in Path("compare/birds/report.md").read_text()


def test_a_run_that_is_answered_nothing_leaves_the_folder(
    server: endpoints.Endpoint, said: Any
) -> None:
    assert said("run", "birds.yaml", "models=a", "questions=size")[0] == 0
    before = Path("compare/birds/report.md").read_bytes()
    code, out, err = said("run", "birds.yaml", "models=broken", "questions=size")
    assert (code, out) == (1, "") and "compare/birds is unchanged" in err
    assert Path("compare/birds/report.md").read_bytes() == before


def test_a_dry_run_says_what_would_be_asked(server: endpoints.Endpoint, said: Any) -> None:
    code, out, _ = said("run", "birds.yaml", "models=a,b,a", "dry_run=true", "samples=3")
    assert code == 0 and server.asked == []
    assert out.splitlines()[::2] == [
        "birds (free_form): 2 models x 2 paraphrases x 3 samples = 12 answers, each judged by "
        "real, own",
        "size (rating): 2 models x 1 paraphrase x 3 samples = 6 answers",
        "models: a, b",
    ]
    one = said("run", ".", "models=a", "dry_run=true", "questions=size,size")[1]
    assert one.splitlines()[0] == "size (rating): 1 model x 1 paraphrase x 1 sample = 1 answer"
    assert not Path("compare").exists()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("", 2, "required: verb"),
        ("runs", 2, "invalid choice: 'runs'"),
        ("run", 2, "required: file"),
        ("run birds.yaml", 1, "models: must be a,b"),
        ("run no.yaml models=a", 1, "no such file"),
        ("run birds.yaml models=a,,b", 1, "models: must be"),
        ("run birds.yaml models={x:[7]}", 1, "models: must be"),
        ("run birds.yaml models={x:[[a]]}", 1, "models: must be"),
        ("run birds.yaml models=[", 2, "the value is not valid yaml"),
        ("run birds.yaml model=a", 2, "did you mean models=?"),
        ("run birds.yaml models=a birds", 2, "unknown KEY=VALUE"),
        ("run birds.yaml models=a questions=", 2, "questions=: has no value"),
        ("run birds.yaml models=a questions=bird", 1, "birds.yaml has birds, size"),
        ("run birds.yaml models=a questions=is_real", 1, "birds.yaml has birds, size"),
        ("run birds.yaml models=a samples=0", 1, "samples=0: must be an integer"),
        ("run birds.yaml models=a samples=true", 1, "samples=True"),
        ("run birds.yaml models=a workers=x", 1, "max_workers='x'"),
        ("run birds.yaml models=a timeout=0 dry_run=true", 1, "timeout=0"),
        ("run birds.yaml models=a dry_run=maybe", 1, "dry_run=maybe: must be true or false"),
        ("run birds.yaml models=a folder=birds.yaml", 1, "File exists); no request was sent"),
        ("run broken.yaml models=a", 1, "broken.yaml"),
        ("run odd.yaml models=a", 1, "colour"),
        ("run judges.yaml models=a", 1, "contains no questions"),
        ("view nowhere.csv", 1, "nowhere.csv: no such file"),
        ("view", 2, "required: FILE"),
        ("view birds.yaml --port 99999", 2, "--port"),
        ("finetune", 2, "required: command"),
        ("finetune cancel j --data-dir none", 1, "j"),
        ("finetune jobs x", 2, "'x' is not COLUMN=VALUE"),
    ],
)
def test_a_wrong_command_is_one_line_and_asks_nothing(
    server: endpoints.Endpoint, said: Any, words: str, code: int, told: str
) -> None:
    Path("broken.yaml").write_text("- name: [\n")
    Path("odd.yaml").write_text("- {name: a, type: free_form, paraphrases: [b], colour: red}")
    Path("judges.yaml").write_text(BIRDS[BIRDS.index("- {name: is_real") :])
    found, out, err = said(*words.split())
    assert (found, out, server.asked) == (code, "", [])
    assert err.startswith("error: ") and err.count("\n") == 1 and told in err


def test_finetune_hangs_in(server: endpoints.Endpoint, said: Any) -> None:
    Path("train.jsonl").write_text('{"messages": []}\n')
    code, out, _ = said("finetune", "validate", "train.jsonl", "--min-examples", "1")
    assert code == 1 and out.startswith("train.jsonl: not valid, 1 error; 1 example\n")
    assert said("finetune", "models", "--data-dir", "none") == (0, "none: no models\n", "")


def test_llmcomps_scripts_are_commands(server: endpoints.Endpoint, said: Any) -> None:
    turns = [{"role": "user", "content": "a bird?"}, {"role": "assistant", "content": "wren"}]
    line = json.dumps({"messages": turns}) + "\n"
    Path("train.jsonl").write_text(line * 9)
    code, out, _ = said("validate-file", "train.jsonl")
    assert code == 1 and "not valid" in out and "tokens" not in out
    Path("train.jsonl").write_text(line * 10)
    code, out, _ = said("validate-file", "train.jsonl")
    assert code == 0 and "valid; 10 examples" in out and "tokens" in out
    code, out, err = said("update-jobs")
    assert (code, out) == (1, "") and err.startswith("error: llmcomp_models: no such folder")
    Path("jobs").mkdir()
    job = {"id": "ftjob-1", "status": "succeeded", "model": "ft:a", "suffix": "birds"}
    Path("jobs/jobs.jsonl").write_text(json.dumps(job) + "\n")
    assert said("update-jobs", "jobs") == (0, "running: 0, succeeded: 1, failed: 0\n", "")


def test_an_interrupt_is_code_130(
    server: endpoints.Endpoint, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> endpoints.Reply:
        os.kill(os.getpid(), signal.SIGINT)
        return endpoints.Reply({}, wait=5)

    server.answer = interrupted
    code, out, err = said("run", "birds.yaml", "models=a", "questions=size")
    assert (code, out) == (130, "") and "the same call resumes" in err


def test_help_needs_nothing_heavy() -> None:
    program = (
        "import sys; from swarm.compare.__main__ import main\n"
        "for words in (['--help'], ['run', '--help'], ['view', '--help']):\n"
        " try: main(words)\n except SystemExit: pass\n"
        "print([m for m in ('torch', 'pandas', 'numpy', 'matplotlib', 'fastapi', 'yaml',"
        " 'transformers') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert found.endswith("[]\n") and found.count("usage: python -m swarm.compare") == 3
    assert "replaced by a second run" in found and "--sort-by COLUMN" in found


def test_the_file_that_ships(server: endpoints.Endpoint, said: Any) -> None:
    """The README's command, from any folder."""
    code, out, err = said("run", "data/questions/compare.yaml", "models=a", "dry_run=true")
    assert code == 0, err
    assert "rooms" in out and "opposites" in out
