"""FLASK: scores by skill, joined by question_id, read from whatever the judge writes at its end."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import searches
from endpoints import Asked, Endpoint, Reply, chat, endpoint
from judge_benches import refused, rows, serving, typed, variables, write

from swarm._util.replies import parse_skill_scores

ASKED = ("Logical Robustness", "Logical Correctness", "Completeness")

N_A = "{'Logical Robustness': 'N/A', 'Logical Correctness': null, 'Completeness': Not applicable}"
REPLIES: dict[str, tuple[float | str | None, ...]] = {
    **dict.fromkeys(
        (
            '{"Logical Robustness": 4, "Logical Correctness": 5, "Completeness": 3}',
            "So:\n{'Logical Robustness': 4, 'Logical Correctness': '5', 'Completeness': 3.0}.",
            '```json\n{"logical_robustness": 4,\n "LOGICAL CORRECTNESS": 5,\n "completeness": 3,}',
            "**Logical Robustness**: 4/5\n- Logical Correctness: 5\nCompleteness score: 3 out of 5",
            '{"Completeness": 1} would be harsh. {"Logical Robustness": 4, "Logical Correctness": 5'
            ', "Completeness": 3}',
            '{"Completeness": {"score": 3, "why": "2: two"}, "Logical Robustness": {"score": 4},'
            ' "Logical Correctness": {"score": "5"}}',
            'Completeness: 2 at first. {"Logical Robustness": 4, "Logical Correctness": 5, '
            '"Completeness": 3',
            '{"Harmlessness": 1, "Logical-Robustness": 4, "Logical Correctness": 5,'
            ' "Completeness": 3} {"thanks": 1}',
        ),
        (4.0, 5.0, 3.0),
    ),
    N_A: ("N/A", "N/A", "N/A"),
    "{'Logical Robustness': 4, 'Completeness': 2}": (4.0, None, 2.0),
    **dict.fromkeys(
        (
            "{'Logical Robustness': 0, 'Logical Correctness': 6, 'Completeness': 80}",
            "{'Logical Robustness': 4/10, 'Logical Correctness': -3, 'Completeness': 3%}",
            "{'Completeness': 3, 'completeness': 4}",
            '{"Logical Robustness": N, "Logical Correctness": N, "Completeness": N}',
            "",
            "[[5]] A fine response, 5 out of 5.",
        ),
        (None, None, None),
    ),
}


def test_scores_are_read_or_are_none() -> None:
    assert {reply: tuple(parse_skill_scores(reply, ASKED).values()) for reply in REPLIES} == REPLIES


ITEMS = [
    {
        "idx": 7,
        "instruction": "How many?",
        "answer": "Three.",
        "task": "own",
        "skill": ["Conciseness", "Logical Correctness"],
        "domain": ["Math"],
        "difficulty": "simple lifestyle knowledge",
    },
    {
        "question_id": 30,
        "text": "Why {so}?",
        "answer": None,
        "metrics": ["factuality"],
        "domain": ["Math", "History"],
        "difficulty": "-1",
    },
    {
        "idx": 4,
        "instruction": "Write.",
        "answer": "x",
        "skill": ["commonsense_understanding"],
        "domain": ["-1"],
        "difficulty": "expert level knowledge",
    },
]


JUDGE = "flask judge --questions items.jsonl --answers m.jsonl --judge big --out"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The items; and answers without a model's name, in another order than these."""
    monkeypatch.chdir(tmp_path)
    answers = [{"question_id": id_, "text": f"answer {id_}"} for id_ in (4, 30, 7)]
    write(Path("m.jsonl"), answers)
    return write(Path("items.jsonl"), ITEMS)


def score(skill: str) -> str:
    return {"Conciseness": "5", "Logical Correctness": "2", "Factuality": '"N/A"'}.get(skill, "?")


def reviewed(asked: Asked) -> str:
    """A judge that scores by the skill alone, and only what it is asked for."""
    text = asked.body["messages"][-1]["content"]
    form = json.loads(re.findall(r"\{\"[^{}]*\}", text)[-1].replace(": N", ": 0"))
    return "Well.\n{" + ", ".join(f'"{skill}": {score(skill)}' for skill in form) + "}"


def test_tables_by_skill_domain_and_difficulty_are_those_of_the_hand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    with serving(monkeypatch, tmp_path, reviewed):
        assert typed(f"{JUDGE} out") == 0
    assert "1 scores cannot be read" in capsys.readouterr().out
    assert [row["score"] for row in rows(Path("out/reviews.jsonl"))] == [
        {"Commonsense Understanding": None},
        {"Conciseness": 5, "Logical Correctness": 2},
        {"Factuality": "N/A"},
    ]
    assert typed("flask show --out out") == 0
    text = capsys.readouterr().out
    assert "m, judge big" in text and "3.50 n=2, 1 unparsed" in text
    lines = json.loads(Path("out/scores.json").read_text())
    numbers = ("average", "n", "unparsed", "not_applicable")
    told = {(one["table"], one["name"]): tuple(one[key] for key in numbers) for one in lines}
    assert told == {
        ("all", "all"): (3.5, 2, 1, 1),
        ("skill", "Commonsense Understanding"): (None, 0, 1, 0),
        ("skill", "Conciseness"): (5, 1, 0, 0),
        ("skill", "Factuality"): (None, 0, 0, 1),
        ("skill", "Logical Correctness"): (2, 1, 0, 0),
        ("domain", "History"): (None, 0, 0, 1),
        ("domain", "Math"): (3.5, 2, 0, 1),
        ("domain", "unlabelled"): (None, 0, 1, 0),
        ("difficulty", "simple lifestyle knowledge"): (3.5, 2, 0, 0),
        ("difficulty", "expert level knowledge"): (None, 0, 1, 0),
        ("difficulty", "unlabelled"): (None, 0, 0, 1),
    }
    with Path("out/scores.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["name"] for row in table] == [line["name"] for line in lines]
    assert (table[0]["average"], table[0]["n"]) == ("3.5", "2")


def test_a_wrong_item_is_one_line(capsys: Capture) -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"idx": 1, "instruction": "a", "skill": ["wit"]}, "item 1: skill 'wit' is not one of Log"),
        ({"idx": 1, "instruction": "a", "skill": ["logical"]}, "skill 'logical' is not one of"),
        ({"idx": 1, "instruction": "a"}, 'item 1: its "skill" (or "metrics") is no list'),
        ({"idx": 1, "skill": ["Factuality"]}, 'item 1: it has no "instruction" (or "text")'),
        ({"instruction": "a", "skill": ["Factuality"]}, 'has no "idx" (or "question_id")'),
    )
    for item, words in wrong:
        write(Path("q.jsonl"), [item])
        assert words in refused(capsys, "flask", "--questions", "q.jsonl")


def test_the_scripts_generate_judge_and_show(tmp_path: Path) -> None:
    def answer(asked: Asked) -> Reply:
        text = asked.body["messages"][-1]["content"]
        if "in double brackets" in text:
            return chat("Grade: [[6]]")
        return chat(reviewed(asked) if "dictionary of the scores" in text else "Well then.")

    def script(name: str, server: Endpoint) -> str:
        env = searches.environment(
            **variables(server.url, tmp_path),
            MODEL="small",
            JUDGE="big",
            PYTHON=sys.executable,
            OUT=str(tmp_path / name),
        )
        done = subprocess.run(
            ["bash", str(searches.ROOT / "scripts" / f"{name}.sh")],
            env=env,
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    with endpoint(answer) as server:
        flask = script("eval_flask", server)
        assert re.search(r"Logical Correctness +\| 2\.00 \[2\.00, 2\.00\] n=6", flask), flask
        assert len(server.asked) == 2 * 12
        assert "6.00 [6.00, 6.00] n=32" in script("eval_mt_bench", server)
        assert len(server.asked) == 2 * 12 + 4 * 16
    assert len(rows(tmp_path / "eval_flask" / "reviews.jsonl")) == 12
