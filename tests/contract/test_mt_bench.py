"""MT-Bench: answers of two turns, grades and comparisons, joined by question and never by place."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from endpoints import Asked, Endpoint, Reply
from judge_benches import BROKEN, fenced, refused, rows, serving, typed, worth, write

from swarm._util.replies import parse_grade, parse_letter_pick
from swarm.judge.mt_bench import build_comparison_prompt, build_grade_prompt, read_questions

# Replies, one a line; ¶ stands for a new line.
SEVEN = """\
[[7]]
Good.¶¶**Grade: [[7]]**
[[7/10]]
[[7]]/10
[[rating: 7]]
[[N]] is wanted. [[7]]
[7]
Rating: 7/10
［［7］］
[[ **7** ]]
[[7]
It wants [[10]] of me.¶Grade: [[7]]
Final rating: [[7]]/10¶(not [[10]])"""
NO_GRADE = """\

[[N]]
[[0]]
[[85]]
[[seven]]
[[7-8]]
[[A]]
It wants [[10]], I say [[2]].
A good answer.
[[1e1]]
[[]]
Rating: 4/5
Grade: [[1
The answer to question 1: good."""
PICK_A = """\
[[A]]
So: **[[A]]**
[[Answer A]]
[A]
A
Verdict: A
Winner: Assistant A
The better answer is A.
B says [[B]] should win.¶Final verdict: [[A]]"""
NO_PICK = """\

[[A]] or [[B]]
[[A|B|C]]
[[7]]
A is not worse than B.
Verdict: A good answer
Verdict: A¶Verdict: B
see [a](http://b)
[[D]]"""


def test_grades_and_picks_are_read_or_are_none() -> None:
    grades: dict[str, float | None] = dict.fromkeys(SEVEN.split("\n"), 7.0)
    grades |= {"[[7.5]]": 7.5, "[[7,5]]": 7.5, "Rating: 8.5/10": 8.5, "[[1]]": 1.0, "[[10]]": 10.0}
    grades |= dict.fromkeys(NO_GRADE.split("\n"))
    picks: dict[str, str | None] = dict.fromkeys(PICK_A.split("\n"), "A")
    picks |= dict.fromkeys(("[[B]]", "[B]", "Verdict: **B**", "answer b"), "B")
    picks |= dict.fromkeys(("[[C]]", "[[tie]]", "[[ C ]]", "Tie.", "Verdict: a tie"), "tie")
    picks |= dict.fromkeys(NO_PICK.split("\n"))
    assert {reply: parse_grade(reply.replace("¶", "\n")) for reply in grades} == grades
    assert {reply: parse_letter_pick(reply.replace("¶", "\n")) for reply in picks} == picks


QUESTIONS: list[dict[str, Any]] = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Write more."]},
    {"question_id": 9, "category": "math", "turns": ["1+1?", "2 more?"], "reference": ["2", "4"]},
    {"question_id": 102, "category": "stem", "turns": ["Why?", "Really?"]},
]
QUESTIONS[2]["required_temperature"] = 0.35
GENERATE = "mt_bench generate --model small --questions questions.jsonl --output small.jsonl"
JUDGE = "mt_bench judge --questions questions.jsonl --judge big --out out"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The questions, in the working folder."""
    monkeypatch.chdir(tmp_path)
    return write(Path("questions.jsonl"), QUESTIONS)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Endpoint]:
    """The loopback, whose answers name what they answer."""
    with serving(monkeypatch, tmp_path, echo) as made:
        yield made


def echo(asked: Asked) -> str:
    return f"re: {asked.body['messages'][-1]['content']}"


def test_the_second_turn_sees_the_first_answer(server: Endpoint) -> None:
    assert typed(f"{GENERATE} --max_tokens 77") == 0
    turns = [len(asked.body["messages"]) for asked in server.asked]
    assert turns == [1, 1, 1, 3, 3, 3], "all first turns together, then all second ones"
    asked = {one.body["messages"][-1]["content"]: one.body for one in server.asked}
    said = [turn["content"] for turn in asked["Write more."]["messages"]]
    assert said == ["Write.", "re: Write.", "Write more."]
    heat = {"Write.": 0.7, "Write more.": 0.7, "1+1?": 0, "2 more?": 0, "Why?": 0.35}
    assert {text: body["temperature"] for text, body in asked.items()} == {**heat, "Really?": 0.35}
    assert {body["max_tokens"] for body in asked.values()} == {77}
    before = Path("small.jsonl").read_bytes()
    assert typed(f"{GENERATE} --max_tokens 77") == 0
    assert len(server.asked) == 6 and Path("small.jsonl").read_bytes() == before
    assert typed(f"{GENERATE} --max_tokens 77 --temperature 0.5") == 0
    # All but the question that says how it wants to be answered.
    assert [one.body["temperature"] for one in server.asked[6:]] == [0.5] * 4
    written = rows(Path("small.jsonl"))
    assert [row["question_id"] for row in written] == [9, 81, 102]
    assert set(written[0]) == {"question_id", "answer_id", "model_id", "choices", "tstamp"}
    assert written[0]["model_id"] == "small"
    assert written[0]["choices"] == [{"index": 0, "turns": ["re: 1+1?", "re: 2 more?"]}]


def test_a_failed_question_has_no_row_and_is_all_that_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    broken = True

    def answer(asked: Asked) -> str | Reply:
        failed = broken and asked.body["messages"][-1]["content"] == "Really?"
        return BROKEN if failed else echo(asked)

    with serving(monkeypatch, tmp_path, answer) as server:
        assert typed(f"{GENERATE} --num_choices 2") == 1
        assert "no such thing" in capsys.readouterr().out
        assert [row["question_id"] for row in rows(Path("small.jsonl"))] == [9, 81]
        broken, before = False, len(server.asked)
        assert typed(f"{GENERATE} --num_choices 2") == 0
        again = [asked.body["messages"][-1]["content"] for asked in server.asked[before:]]
        assert set(again) == {"Really?"}
    written = rows(Path("small.jsonl"))
    assert [row["question_id"] for row in written] == [9, 81, 102]
    assert [choice["index"] for choice in written[0]["choices"]] == [0, 1]


def answered(file: str, model: str, said: dict[int, list[str]]) -> None:
    """A file of answers as the original has them."""
    row = {"answer_id": "x", "model_id": model, "tstamp": 1.0}
    write(
        Path(file),
        [
            {**row, "question_id": id_, "choices": [{"index": 0, "turns": turns}]}
            for id_, turns in said.items()
        ],
    )


def graded(asked: Asked) -> str:
    """A judge that knows what the last answer is worth, and says nothing of one that does not."""
    value = worth(fenced(asked)[-1])
    return "I cannot tell." if value is None else f"Reasons.\nGrade: [[{value:g}]]"


def compared(asked: Asked) -> str:
    """A judge that prefers the answer worth more, and cannot tell where one says nothing."""
    blocks = [block for block in fenced(asked) if "worth" in block]
    one, other = (worth(blocks[len(blocks) // 2 - 1]), worth(blocks[-1]))
    if one is None or other is None:
        return "Hm."
    return "[[A]]" if one > other else "[[B]]" if one < other else "[[C]]"


def shown(capsys: Capture, words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert typed(f"mt_bench show {words} --json") == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_grades_by_category_and_turn_are_those_of_the_hand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    said = {102: ["worth 4", "worthless"], 81: ["worth 9", "worth 6"], 9: ["worth 8", "worth 1.5"]}
    answered("a.jsonl", "a", said)
    answered("b.jsonl", "org/b", {81: ["worth 10", "worth 10"]})
    judge, out = f"{JUDGE} --answers a.jsonl,b.jsonl --max_tokens 99", Path("out/big_single.jsonl")
    with serving(monkeypatch, tmp_path, graded) as server:
        assert typed(judge) == 0
        asked = {(one.body["max_tokens"], one.body["temperature"]) for one in server.asked}
        assert asked == {(99, 0)}
        told = capsys.readouterr().out
        assert "1 of 8 replies hold no verdict" in told
        assert "org/b: no answer to 2 of 3 questions: 9, 102" in told
        before = out.read_bytes()
        assert typed(judge) == 0 and len(server.asked) == 8 and out.read_bytes() == before
    written = rows(out)
    scores = {(row["question_id"], row["model"], row["turn"]): row["score"] for row in written}
    assert scores == {
        (9, "a", 1): 8,
        (9, "a", 2): 1.5,
        (81, "a", 1): 9,
        (81, "a", 2): 6,
        (81, "org/b", 1): 10,
        (81, "org/b", 2): 10,
        (102, "a", 1): 4,
        (102, "a", 2): -1,
    }
    fields = {"question_id", "model", "judge", "user_prompt", "judgment", "score", "turn", "tstamp"}
    assert list(scores) == sorted(scores) and fields <= set(written[0])
    assert written[1]["judge"] == ["big", "single-reference-multi-turn"]
    table = shown(capsys, "--out out")
    found = {(line["model"], line["category"], line["turn"]): line for line in table}
    assert found["a", "all", 1]["average"] == pytest.approx((4 + 9 + 8) / 3)
    assert found["a", "all", 2]["average"] == pytest.approx((6 + 1.5) / 2)
    assert found["a", "all", "all"]["average"] == pytest.approx((4 + 9 + 8 + 6 + 1.5) / 5)
    assert (found["a", "all", "all"]["n"], found["a", "all", "all"]["unparsed"]) == (5, 1)
    assert (found["a", "stem", 2]["average"], found["a", "stem", 2]["unparsed"]) == (None, 1)
    assert found["org/b", "writing", "all"]["average"] == 10
    assert found["org/b", "all", 1]["low"] is None, "one question has no interval"
    assert typed("mt_bench show --out out") == 0
    text = capsys.readouterr().out
    assert "5.70" in text and "n=5, 1 unparsed" in text and "judge big" in text


def test_a_reference_is_shown_where_there_is_one(questions: Path) -> None:
    writing, math, _ = read_questions(questions)
    assert "Reference" not in build_grade_prompt(writing, ["a", "b"], 1)
    first, second = (build_grade_prompt(math, ["a", "b"], turn) for turn in (0, 1))
    assert "Reference answer to question 1" in first and "question 2" not in first
    assert "Reference answer to question 2" in second and "Judge the answer to question 2" in second
    both = build_comparison_prompt(math, ["a", "b"], ["c", "d"], 1)
    assert "Reference answer to question 2" in both
    answered("ref.jsonl", "r", {9: ["two, surely", "four"], 81: ["x", "y"]})
    writing, math, _ = read_questions(questions, references="ref.jsonl")
    assert math.reference == ("two, surely", "four")
    assert "Reference" not in build_grade_prompt(writing, ["a", "b"], 1)


THREE = {
    "a": {81: ["worth 9", "worth 5"], 9: ["worth 3", "worth 3"]},
    "b": {81: ["worth 7", "worth 5"], 9: ["worth 8", "worthless"]},
    "c": {81: ["worth 1", "worth 1"], 9: ["worth 9", "worth 9"]},
}


@pytest.fixture
def three() -> None:
    """The answers of three models."""
    for name, said in THREE.items():
        answered(f"{name}.jsonl", name, said)


@pytest.mark.usefixtures("three")
def test_every_pair_of_three_is_judged_in_both_orders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    with serving(monkeypatch, tmp_path, compared) as server:
        assert typed(f"{JUDGE} --mode pairwise-all --answers a.jsonl,b.jsonl,c.jsonl") == 0
        assert len(server.asked) == 3 * 2 * 4, "pairs, orders, turns of two questions"
    assert "4 of 24 replies hold no verdict" in capsys.readouterr().out
    written = rows(Path("out/big_pair.jsonl"))
    assert len(written) == 12
    assert (written[0]["model_1"], written[0]["model_2"]) == ("a", "b")
    winners = {(row["g1_winner"], row["g2_winner"]) for row in written}
    assert winners == {(one, one) for one in ("model_1", "model_2", "tie", "error")}
    table = shown(capsys, "--mode pairwise-all --out out")
    lines = [line for line in table if (line["category"], line["turn"]) == ("all", "all")]
    found = {line["model"]: line for line in lines}
    outcomes = ("wins", "ties", "losses", "unparsed")
    counts = {name: tuple(line[one] for one in outcomes) for name, line in found.items()}
    # a and b: 9 > 7, 5 = 5, 3 < 8, unread; a and c: 9 > 1, 5 > 1, 3 < 9, 3 < 9;
    # b and c: 7 > 1, 5 > 1, 8 < 9, unread.
    assert counts == {"a": (3, 1, 3, 1), "b": (3, 1, 2, 2), "c": (3, 0, 4, 1)}
    assert found["a"]["average"] == pytest.approx(100 * (3 + 0.5) / 7)
    assert found["b"]["average"] == pytest.approx(100 * (3 + 0.5) / 6)


@pytest.mark.usefixtures("three")
def test_a_judge_that_goes_by_the_place_ends_in_ties(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    judge, baseline = f"{JUDGE} --answers a.jsonl,b.jsonl --answers c.jsonl", "pairwise-baseline"
    with serving(monkeypatch, tmp_path, lambda asked: "Verdict: [[A]]") as server:
        assert typed(f"{judge} --mode {baseline} --baseline b --first_n 1") == 0
        assert len(server.asked) == 2 * 2 * 2
        for words, told in {
            f"--mode {baseline}": "needs --baseline NAME",
            f"--mode {baseline} --baseline d": "there are answers of a, b, c",
            "--baseline b": "no place in --mode single",
        }.items():
            assert typed(f"{judge} {words}") == 1 and told in capsys.readouterr().err
        assert len(server.asked) == 8
    show = f"--mode {baseline} --baseline b --out out"
    table = shown(capsys, show)
    assert {line["model"] for line in table} == {"a", "c"}
    assert {(line["average"], line["wins"], line["losses"]) for line in table} == {(50.0, 0, 0)}
    turned = [(line["ties"], line["turned"]) for line in table if line["turn"] == "all"]
    assert turned == [(2, 2)] * 4
    assert typed(f"mt_bench show {show}") == 0
    assert "0-2-0 (2 tied by order)" in capsys.readouterr().out


def test_a_wrong_question_is_one_line(capsys: Capture) -> None:
    row: dict[str, Any] = {"question_id": 1, "category": "math"}
    for more, words in (
        ({}, 'line 1: has no "turns"'),
        ({"turns": []}, 'question 1: its "turns" are no'),
        ({"turns": ["a"], "reference": "b"}, '"reference"'),
    ):
        write(Path("q.jsonl"), [{**row, **more}])
        assert words in refused(capsys, "mt_bench", "--questions", "q.jsonl")
