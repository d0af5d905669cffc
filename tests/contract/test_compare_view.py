"""The viewer without a browser: what it reads, finds, orders, pairs, serves and refuses."""

import asyncio
import csv
import io
import json
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import searches
import warm_python

from swarm.compare.view import view
from swarm.compare.view.load import load_columns
from swarm.compare.view.query import (
    ComparedSides,
    QueryEngine,
    RowPair,
    SearchTerm,
    column_means,
    find_pairs,
    parse_query,
    parse_terms,
)
from swarm.compare.view.table import AnswerTable
from swarm.errors import UserError

PICTURE = [
    {"type": "text", "text": "What is on it?"},
    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
]


def records() -> list[dict[str, Any]]:
    """Two models, one of them in two groups, two paraphrases, three samples; the last ones odd."""
    found = []
    for group, model in (("a", "m1"), ("b", "m1"), ("b", "m2")):
        for paraphrase, question in enumerate(("Who sings?", "Who is it that sings?")):
            for sample in range(3):
                kwargs = {"model": model, "messages": [{"role": "user", "content": question}]}
                found.append(
                    {
                        "model": model,
                        "group": group,
                        "answer": f"{model} Bird {paraphrase}{sample}",
                        "score": 10.0 * sample + paraphrase,
                        "mood": "calm" if sample else "dark",
                        "question": question,
                        "api_kwargs": kwargs,
                        "paraphrase_ix": paraphrase,
                        "score_question": "How good?",
                        "score_raw_answer": {"10": 0.75, "I": 0.25},
                        "score_probs": {"10": 1.0},
                        "mood_question": "Which?",
                        "error": None,
                    }
                )
    found[-1] |= {"answer": None, "score": None, "mood": None, "error": "m2: it said 500"}
    return found


@pytest.fixture
def finder() -> QueryEngine:
    return QueryEngine(AnswerTable(load_columns(records(), "answers"), "answers"))


def found(finder: QueryEngine, **given: Any) -> list[int]:
    """The rows; a list is several values, and a "." of a name is written "_"."""
    words = [
        (key.replace("is_", "is.").replace("min_", "min.").replace("max_", "max."), str(one))
        for key, value in given.items()
        for one in (value if isinstance(value, list) else [value])
    ]
    return finder.find_rows(parse_query(finder.table, words)).tolist()


# What it reads


def test_every_kind_of_file_gives_the_same(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = records()
    frame = pandas.DataFrame(rows)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    frame.to_csv(tmp_path / "a.csv", index=False)  # dictionaries as Python writes them
    with (tmp_path / "b.csv").open("w", newline="") as file:
        as_json = [
            {k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()} for row in rows
        ]
        made = csv.DictWriter(file, list(rows[0]))
        made.writeheader()
        made.writerows(as_json)
    wanted = {name: [row[name] for row in rows] for name in rows[0]}
    assert load_columns(frame, "x") == wanted
    for name in ("a.jsonl", "a.csv", "b.csv"):
        assert load_columns(tmp_path / name, name) == wanted, name


def test_parquet(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    rows: list[dict[str, Any]] = [{"answer": {"Yes": 0.5}}, {"answer": {"No": 0.25}}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    assert load_columns(tmp_path / "a.parquet", "a") == {"answer": [{"Yes": 0.5}, {"No": 0.25}]}
    (tmp_path / "b.parquet").write_text("none")
    with pytest.raises(UserError, match=r"b\.parquet: is not Parquet"):
        load_columns(tmp_path / "b.parquet", "b")


def test_a_csv_is_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        ',answer,probs,digits,n\n0,"{""a"": 1}","__import__(\'os\').abort()",007,1.50\n'
        "1,plain,\"{'x': 0.5}\",1,2\n2,,,,\n"
    )
    assert load_columns(path, "a") == {
        "answer": ['{"a": 1}', "plain", None],
        "probs": ["__import__('os').abort()", {"x": 0.5}, None],
        "digits": ["007", "1", None],
        "n": [1.5, 2, None],
    }
    path.write_text("answer\n1.50\n2\n")
    assert load_columns(path, "a")["answer"] == ["1.50", "2"]
    path.write_text("answer\n\"{'Yes': 0.5}\"\n")
    assert load_columns(path, "a")["answer"] == [{"Yes": 0.5}]


def test_values_of_a_data_frame_are_plain() -> None:
    pandas, numpy = pytest.importorskip("pandas"), pytest.importorskip("numpy")
    frame = pandas.DataFrame(
        {
            "answer": [numpy.str_("x"), None],
            "score": [numpy.float64(0.5), float("nan")],
            "when": [pandas.Timestamp("2026-01-02"), pandas.NaT],
            "probs": [{1: numpy.float32(1)}, None],
            "kind": pandas.Categorical(["a", None]),
            "list": [(1, 2), numpy.array([3])],
        }
    )
    assert load_columns(frame, "x") == {
        "answer": ["x", None],
        "score": [0.5, None],
        "when": ["2026-01-02T00:00:00", None],
        "probs": [{"1": 1.0}, None],
        "kind": ["a", None],
        "list": [[1, 2], [3]],
    }


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.jsonl", None, "no such file"),
        ("folder", None, "is a folder"),
        ("a.txt", "x", "must end in .jsonl, .csv or .parquet"),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", "\n", "has no rows"),
        ("a.csv", "answer\n", "has no rows"),
        ("a.csv", "", "has no rows"),
        ("a.jsonl", '{"model": "m", "text": 1}', 'no column "answer"; it has model, text'),
        ("a.jsonl", '{"answer": 1}\n{"answer"', "a.jsonl, line 2: is not JSON"),
        ("a.jsonl", "[1]", "line 1: is not a JSON object"),
        ("a.csv", "answer,b\n1\n", "line 2: 1 fields, where the first line has 2"),
        ("a.csv", "answer,b,b\n1,2,3\n", "two of its columns are named b"),
        ("a.jsonl", b"\xff\xfe\x00", "is not text in UTF-8"),
    ],
)
def test_what_cannot_be_shown_is_told_in_one_line(
    tmp_path: Path, name: str, text: str | bytes | None, said: str
) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as error:
        view(path, open_browser=False)
    assert said in str(error.value) and name in str(error.value) and "\n" not in str(error.value)


def test_wrong_arguments_are_told() -> None:
    rows = records()
    with pytest.raises(ValueError, match=r'sort_by="quality": .*score.*"__random__"'):
        view(rows, sort_by="quality", open_browser=False)
    with pytest.raises(ValueError, match="port=70000"):
        view(rows, port=70000, open_browser=False)
    with pytest.raises(ValueError, match="int cannot be shown"):
        view(3, open_browser=False)
    with pytest.raises(ValueError, match="answers: has no rows"):
        view([], open_browser=False)


# What it finds


def test_a_search_has_words_exclusions_and_phrases() -> None:
    assert parse_terms('Bird -"the  sea" -x "a b" - ""') == (
        SearchTerm("bird"),
        SearchTerm("the  sea", True),
        SearchTerm("x", True),
        SearchTerm("a b"),
        SearchTerm("-"),
    )


def test_questions_and_answers_are_searched(finder: QueryEngine) -> None:
    assert found(finder, search="M2 bird") == [12, 13, 14, 15, 16]
    assert found(finder, search="bird -m1 -THAT") == [12, 13, 14]
    assert found(finder, search='"bird 00"') == [0, 6, 12]
    assert found(finder, search='-"bird 0" -"bird 1"') == [17]
    assert found(finder, search="nowhere") == []


def test_lists_and_nothing_are_searched_as_well() -> None:
    rows = [
        {"answer": "a cat", "api_kwargs": {"messages": [{"role": "user", "content": PICTURE}]}},
        {"answer": None, "api_kwargs": {"messages": [{"role": "user", "content": None}, 3]}},
        {"answer": {"Yes": 0.9}, "api_kwargs": None},
        {"answer": ["two", {"text": "parts"}], "api_kwargs": {"messages": "odd"}},
    ]
    finder = QueryEngine(AnswerTable(load_columns(rows, "x"), "x"))
    assert found(finder, search="what is") == found(finder, search="cat") == [0]
    assert found(finder, search="yes") == [2] and found(finder, search="parts") == [3]
    assert found(finder, search="-cat") == [1, 2, 3]


def test_filters(finder: QueryEngine) -> None:
    assert found(finder, is_model="m2", is_paraphrase_ix=0) == [12, 13, 14]
    assert found(finder, is_group=["a", "b"], is_mood=["dark", ""], min_score=1) == [3, 9, 15]
    assert found(finder, min_score=20.5) == [5, 11] and found(finder, max_score=0) == [0, 6, 12]
    assert found(finder, errors="only") == [17] and len(found(finder, errors="none")) == 17
    assert found(finder, is_mood="") == [17] and found(finder, is_mood="none") == []
    finder.flags.add(3)
    assert found(finder, flagged=1) == [3]
    finder.flags.add(2)
    assert found(finder, flagged=1, sort="-paraphrase_ix") == [3, 2]


def test_what_is_missing_comes_last_both_ways(finder: QueryEngine) -> None:
    up, down = found(finder, sort="score"), found(finder, sort="-score")
    assert up[:3] == [0, 6, 12] and down[:2] == [5, 11] and up[-1] == down[-1] == 17
    assert found(finder, sort="-model", then="-score")[:6] == [14, 16, 13, 15, 12, 17]
    assert found(finder, sort="-answer")[-1] == found(finder, sort="answer")[-1] == 17
    assert found(finder, sort="score_probs") == list(range(18))


def test_numbers_come_before_texts_and_case_does_not_matter() -> None:
    rows = [{"answer": one} for one in ("b", 10, "A", None, 9, True, "a")]
    finder = QueryEngine(AnswerTable(load_columns(rows, "x"), "x"))
    assert found(finder, sort="answer") == [5, 4, 1, 2, 6, 0, 3]


def test_an_order_by_chance_stays_and_another_seed_is_another(finder: QueryEngine) -> None:
    first = found(finder, sort="__random__", seed=1)
    again = QueryEngine(finder.table)
    assert (
        found(again, sort="__random__", seed=1) == first != found(again, sort="__random__", seed=2)
    )
    assert sorted(first) == list(range(18)) != first
    fewer = found(finder, sort="__random__", seed=1, is_model="m2")
    assert fewer == [row for row in first if row >= 12]


@pytest.mark.parametrize(
    "given", [{"is_x": 1}, {"min_mood": 1}, {"min_score": "x"}, {"sort": "x"}, {"max_score": "inf"}]
)
def test_an_address_that_makes_no_sense_is_told(finder: QueryEngine, given: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        found(finder, **given)


# Side by side


def test_models_are_compared_sample_against_sample(finder: QueryEngine) -> None:
    table = finder.table
    sides = ComparedSides("model", "m1", "m2")
    told = find_pairs(finder, parse_query(table, []), sides)
    # m1 is in two groups; its answers are there once.
    assert told == [RowPair(n % 3, n, 12 + n) for n in range(6)]
    assert column_means(table, told) == {"score": (10.5, 8.4)}
    one = find_pairs(finder, parse_query(table, [("search", '"m2 bird 11"')]), sides)
    assert one == [RowPair(1, 4, 16)]
    grouped = find_pairs(finder, parse_query(table, [("is.group", "b"), ("is.model", "m2")]), sides)
    assert grouped == [RowPair(n % 3, 6 + n, 12 + n) for n in range(6)]


def test_groups_are_compared_and_a_missing_side_is_none(finder: QueryEngine) -> None:
    told = find_pairs(finder, parse_query(finder.table, []), ComparedSides("group", "b", "a"))
    assert told[0] == RowPair(0, 6, 0) and RowPair(3, 12, None) in told and len(told) == 12
    assert find_pairs(finder, parse_query(finder.table, []), ComparedSides("group", "a", "x"))[
        0
    ] == RowPair(0, 0, None)


# What it serves


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    rows = records()
    rows[0] |= {"answer": "</script>\ud800 é\x00", "score_probs": {"1": float("-inf")}}
    with view(rows, sort_by="score", port=0, open_browser=False, block=False) as running:
        yield running.url


def get(url: str, headers: dict[str, str] | None = None, data: bytes | None = None) -> bytes:
    asked = urllib.request.Request(url, data, headers or {})
    with urllib.request.urlopen(asked, timeout=10) as reply:
        content: bytes = reply.read()
        return content


def refused(url: str, headers: dict[str, str] | None = None, data: bytes | None = None) -> int:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(url, headers, data)
    assert json.loads(error.value.read())["error"]
    return error.value.code


def test_what_a_run_keeps_beside_answers_is_no_judgement() -> None:
    rows = [
        {
            "model": "m",
            "answer": f"{n}",
            "good": n,
            "good_question": f"is {n}?",
            "sample": n,
            "new_tokens": n,
            "seconds": 0.1 * n,
            "length": n,
        }
        for n in range(3)
    ]
    table = AnswerTable(load_columns(rows, "rows"), "rows")
    assert table.listed_columns == ["model", "good", "length"]
    assert "good_question" not in table.filter_choices and "answer" in table.filter_choices


def test_rows_come_a_page_at_a_time(url: str) -> None:
    about = json.loads(get(f"{url}about"))
    assert about["count"] == 18 and about["judges"] == ["score", "mood"] and about["errors"] == 1
    assert (
        about["choices"]["model"] == [["m1", 12], ["m2", 6]] and about["ranges"]["score"][1] == 21
    )
    assert about["start"]["sort"] == "score"
    told = json.loads(get(f"{url}rows?sort=score&from=2&count=3"))
    assert told["total"] == 18 and [one["row"] for one in told["rows"]] == [12, 3, 9]
    one = json.loads(get(f"{url}row?at=0"))
    assert one["cells"]["answer"] == "</script>\ud800 é\x00"
    assert one["cells"]["score_probs"] == {"1": "-inf"}
    assert json.loads(get(f"{url}row?at=99"))["at"] == 17
    assert json.loads(get(f"{url}row?row=4&is.model=m2"))["at"] == -1
    none = json.loads(get(f"{url}row?search=nowhere"))
    assert none["total"] == 0 and none["row"] is None
    beside = json.loads(get(f"{url}pairs?by=model&left=m1&right=m2&count=1"))
    assert beside["total"] == 6 and beside["pairs"][0]["right"]["cells"]["answer"] == "m2 Bird 00"
    assert b"</script>" not in get(f"{url}").replace(b'"page.js"></script>', b"")


def test_what_is_filtered_is_exported_and_can_be_read_again(url: str, tmp_path: Path) -> None:
    kept = load_columns([records()[row] for row in (14, 16, 13)], "x")
    query = "is.model=m2&min.score=10&sort=-paraphrase_ix&then=-score"
    for kind in ("jsonl", "csv"):
        path = tmp_path / f"a.{kind}"
        path.write_bytes(get(f"{url}export.{kind}?{query}"))
        again = load_columns(path, kind)
        order = [again["answer"].index(one) for one in kept["answer"]]
        assert {name: [column[at] for at in order] for name, column in again.items()} == kept
        assert again["answer"] == ["m2 Bird 11", "m2 Bird 02", "m2 Bird 01"]
    everything = list(csv.reader(io.StringIO(get(f"{url}export.csv").decode())))
    assert len(everything) == 19


def test_no_cell_of_a_csv_is_a_formula(tmp_path: Path) -> None:
    bad = ["=1+1", "+1", "-2", "@SUM(A1)", "\t=1", "\r=1", "=cmd|' /C calc'!A0"]
    rows = [{"answer": one, "model": "=m", "n": -1, "x": {"=a": 1}} for one in [*bad, "a=1", ""]]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with view(str(path), port=0, open_browser=False, block=False) as running:
        told = get(f"{running.url}export.csv").decode()
        exact = [json.loads(one) for one in get(f"{running.url}export.jsonl").splitlines()]
    table = list(csv.DictReader(io.StringIO(told, newline="")))
    safe = [*("'" + one for one in bad), "a=1", ""]
    assert sorted(row["answer"] for row in table) == sorted(safe)
    assert {row["model"] for row in table} == {"'=m"} and {row["n"] for row in table} == {"-1"}
    assert sorted(row["answer"] for row in exact) == sorted(row["answer"] for row in rows)


def test_flags_are_kept_and_exported(url: str) -> None:
    head = {"Content-Type": "application/json"}
    told = json.loads(get(f"{url}flag", head, b'{"row": 3, "flagged": true}'))
    assert told == {"flags": [3]}
    assert json.loads(get(f"{url}export.jsonl?flagged=1"))["answer"] == "m1 Bird 10"
    assert json.loads(get(f"{url}flag", head, b'{"row": 3, "flagged": false}')) == {"flags": []}
    assert get(f"{url}export.jsonl?flagged=1") == b""
    assert refused(f"{url}flag", head, b'{"row": 18}') == refused(f"{url}flag", head, b"[]") == 400


def test_others_are_kept_out(url: str) -> None:
    assert refused(f"{url}about", {"Host": "evil.example"}) == 403
    assert refused(url, {"Host": "evil.example:8501"}) == 403
    assert refused(f"{url}flag", {"Content-Type": "text/plain"}, b'{"row": 3}') == 415
    assert refused(f"{url}../secret") == 404 and refused(f"{url}about", data=b"x") == 405
    assert refused(f"{url}rows?from=-1") == refused(f"{url}pairs?by=x") == 400
    place = urllib.parse.urlsplit(url)
    assert place.hostname == "127.0.0.1"
    # On all interfaces it would answer at the loopback's other addresses, too.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", place.port or 0), 2)
    with urllib.request.urlopen(url, timeout=10) as reply:
        assert "default-src 'none'" in reply.headers["Content-Security-Policy"]


def test_a_taken_port_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with view(records(), port=port, open_browser=False, block=False) as running:
            assert running.port != port and json.loads(get(f"{running.url}about"))["count"] == 18
            assert repr(running) == f"viewer at {running.url}"
        assert f"port {port} is in use; using {running.port}" in capsys.readouterr().out
    assert repr(running) == "viewer, closed"
    with pytest.raises(urllib.error.URLError):
        get(running.url)
    with pytest.raises(UserError, match="cannot be bound"):
        view(records(), host="203.0.113.1", open_browser=False)


def test_another_address_is_taken_when_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with view(records(), host="0.0.0.0", port=0, open_browser=False, block=False) as running:
        assert get(f"http://127.0.0.2:{running.port}/about")
    assert "everyone who can reach this address can read the answers" in capsys.readouterr().out


def test_in_a_notebook_it_does_not_wait() -> None:
    async def cell() -> Any:
        return view(records(), port=0, open_browser=False)

    running = asyncio.run(cell())
    assert get(running.url)
    running.close()
    running.close()


def test_the_command_ends_quietly_at_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"answer": "alone"}\n')
    words = [
        warm_python.COLD,
        "-m",
        "swarm.compare",
        "view",
        str(path),
        "--no-browser",
        "--port",
        "0",
    ]
    with subprocess.Popen(
        words,
        cwd=searches.ROOT,
        env=searches.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as command:
        assert command.stdout is not None
        line = command.stdout.readline()
        assert line.startswith("viewing a.jsonl at http://127.0.0.1:") and "Ctrl-C" in line
        about = json.loads(get(f"{line.split()[3]}about"))
        assert about["columns"] == ["answer"] and about["start"]["sort"] == "__random__"
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=20)
    assert (command.returncode, out.strip(), err) == (0, "", "")


def test_a_wrong_command_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from swarm.compare.view.__main__ import main

    path = str(tmp_path / "none.csv")
    for words, said in (
        ([path], "no such file"),
        ([], "FILE"),
        ([path, "--prot", "1"], "--port"),
        ([path, "--port", "x"], "integer"),
    ):
        assert main(words) in (1, 2)
        err = capsys.readouterr().err
        assert err.startswith("error: ") and said in err and err.count("\n") == 1


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    heavy = ("torch", "pandas", "numpy", "fastapi", "uvicorn", "aiohttp")
    code = f"import sys, swarm.compare.view; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run(
        [warm_python.COLD, "-c", code],
        cwd=searches.ROOT,
        capture_output=True,
        text=True,
        env=searches.environment(),
        check=True,
    )
    assert out.stdout.strip() == "[]"


# How long it takes


def test_a_hundred_thousand_rows_stay_usable() -> None:
    """The bounds are several times what an idle core takes, and far below what a person bears."""
    words = "the river of a dream bird machine mountain quiet green light always music".split()
    count = 100_000
    texts = [" ".join(words[(n * k) % 13] for k in range(1, 60)) for n in range(997)]
    columns: dict[str, list[Any]] = {
        "model": [f"m{n % 4}" for n in range(count)],
        "answer": [f"{texts[n % 997]} {n}" for n in range(count)],
        "score": [float(n * 7919 % 1000) for n in range(count)],
        "question": [f"Question {n % 10}?" for n in range(count)],
    }
    began = time.perf_counter()
    table = AnswerTable(columns, "big")
    with_finder = QueryEngine(table)
    assert table.filter_choices and table.number_ranges and time.perf_counter() - began < 20
    for given in (
        {"search": "bird 7 -mountain"},
        {"search": "nowhere"},
        {"sort": "-score", "then": "model"},
        {"search": '"river of"', "is_model": "m1", "min_score": 500, "sort": "__random__"},
    ):
        began = time.perf_counter()
        first = found(with_finder, **given)
        taken = time.perf_counter() - began
        assert taken < 5, (given, taken)
        began = time.perf_counter()
        assert found(with_finder, **given) == first and time.perf_counter() - began < 1
