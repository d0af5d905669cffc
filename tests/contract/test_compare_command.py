"""The command line of experiments: what it asks, writes and says, and how it ends."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compare_endpoint
import endpoints
import pytest

from swarm.compare import Config
from swarm.compare.__main__ import main

settings = pytest.fixture(autouse=True)(compare_endpoint.settings.__wrapped__)

BIRDS = """
- name: birds
  type: free_form
  paraphrases: [Name a bird., 'Which bird comes to mind?']
  samples_per_paraphrase: 2
  judges: {own: {type: free_form_judge, model: judge, paraphrases: ["{answer}?"]}}
- {name: size, type: rating, paraphrases: ['How large is a wren?'], max_rating: 9}
"""


def told(asked: endpoints.Asked) -> endpoints.Reply:
    """A bird, or a rating of 3 or 7; the model "broken" is refused."""
    if asked.body["model"] == "broken":
        return endpoints.Reply({"error": {"message": "no such model"}}, 400)
    if not asked.body.get("logprobs"):
        return endpoints.chat(f"{asked.body['model']} wren")
    top = [{"token": token, "logprob": math.log(0.5)} for token in "37"]
    reply = endpoints.chat("3")
    reply.body["choices"][0]["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    return reply


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An endpoint, and a folder of one's own with birds.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("birds.yaml").write_text(BIRDS)
    with compare_endpoint.endpoint(told) as running:
        yield running


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[str], tuple[int, str, str]]:
    """Runs a command; gives its code and what it says on stdout and stderr."""
    return lambda line: (main(line.split()), *capsys.readouterr())


def test_a_run_writes_data_plots_and_a_report_and_a_second_one_replaces_them(
    server: endpoints.Endpoint, said: Any
) -> None:
    code, out, err = said("run birds.yaml -g x=a,b -g y=c")
    assert code == 0, err
    assert "15 rows, 0 with an error: compare/birds/report.html" in out
    assert "birds: answer: " in out and "birds: own: " in out and "size: answer: " in out
    place = Path("compare/birds")
    text = (place / "report.html").read_text()
    assert "<li>x: a, b</li><li>y: c</li>" in text
    assert "<h2>birds</h2>" in text and "<h3>own</h3>" in text and text.count("<svg") == 3
    rows = [json.loads(line) for line in (place / "birds/data.jsonl").read_text().splitlines()]
    assert [row["model"] for row in rows[::4]] == ["a", "b", "c"]
    written = [path for path in place.rglob("*") if path.suffix in (".html", ".jsonl", ".csv")]
    assert compare_endpoint.KEY not in "".join(path.read_text() for path in written)
    code, _, err = said("view compare/birds/birds/data.jsonl --no-browser")
    assert code == 0 and "c wren" in (place / "birds/data.html").read_text(), err
    assert (place / "size/answer_differences.csv").exists()
    asked = len(server.asked)
    again = "run birds.yaml --questions size --models a --samples 3 --workers 2 --timeout 9.5"
    assert said(again)[:2] == (0, "3 rows, 0 with an error: compare/birds/report.html\n")
    assert [one.body["model"] for one in server.asked[asked:]] == ["a", "a"], "two more samples"
    assert not (place / "size/answer_differences.csv").exists(), "nothing is compared"
    assert (Config.max_workers, Config.timeout) == (100, 60), "of the run alone"


def test_failures_are_code_1_and_no_answer_leaves_the_folder(
    server: endpoints.Endpoint, said: Any
) -> None:
    code, out, err = said("run birds.yaml --models a,broken --questions size")
    assert (code, "2 rows, 1 with an error" in out, "no such model" in err) == (1, True, True)
    before = Path("compare/birds/report.html").read_bytes()
    assert b"1 failed" in before
    code, out, err = said("run birds.yaml --models broken --questions size")
    assert (code, out) == (1, "") and "compare/birds is unchanged" in err
    assert Path("compare/birds/report.html").read_bytes() == before


def test_a_dry_run_says_what_would_be_asked(server: endpoints.Endpoint, said: Any) -> None:
    code, out, _ = said("run birds.yaml --models a,b,a --dry-run --samples 3")
    assert code == 0 and server.asked == [] and not Path("compare").exists()
    assert out.splitlines()[::2] == [
        "birds (free_form): 2 models x 2 paraphrases x 3 samples = 12 answers, each judged by own",
        "size (rating): 2 models x 1 paraphrase x 3 samples = 6 answers",
        "models: a, b",
    ]
    shipped = said("run data/questions/compare.yaml --models a --dry-run")
    assert shipped[0] == 0 and "rooms" in shipped[1], "the README's command, from any folder"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("run birds.yaml", 1, "name the models: --models a,b"),
        ("run no.yaml --models a", 1, "no such file"),
        ("run birds.yaml --models a,,b", 1, "name the models"),
        ("run birds.yaml --model a", 2, "--models"),
        ("run birds.yaml --models a --questions bird", 1, "birds.yaml has birds, size"),
        ("run birds.yaml --models a --samples 0", 2, "0 is not in the range x>=1"),
        ("run birds.yaml --models a --workers 0", 1, "Config.max_workers=0: must be an integer"),
        ("run birds.yaml --models a --folder birds.yaml", 1, "File exists); no request was sent"),
        ("run odd.yaml --models a", 1, "colour: no such key"),
        ("view nowhere.csv", 1, "nowhere.csv cannot be read"),
        ("finetune jobs x", 2, "'x' is not NAME=VALUE"),
    ],
)
def test_a_wrong_command_is_one_line_and_asks_nothing(
    server: endpoints.Endpoint, said: Any, words: str, code: int, told: str
) -> None:
    Path("odd.yaml").write_text("- {name: a, type: free_form, paraphrases: [b], colour: red}")
    found, out, err = said(words)
    assert (found, out, server.asked) == (code, "", [])
    assert err.startswith("error: ") and err.count("\n") == 1 and told in err
