"""AlpacaEval's form: answers are made and joined by instruction, and judged in both orders."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from endpoints import Asked, Endpoint, Reply, chat, endpoint
from judge_benches import serving, typed
from judge_endpoints import FENCED

from swarm._util.jsonl import read_json_rows
from swarm.errors import UserError
from swarm.judge.alpaca_eval import (
    ORDERS,
    PairVerdict,
    mean_preference,
    orders_disagree,
    parse_verdict,
    read_annotations,
)
from swarm.judge.pipeline import send_requests
from swarm.judge.win_rates import length_controlled_win_rate, mean_win_rate
from swarm.models.base import Completion, Model, Request, Token

COUNT = 6


def logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def worth(answer: str) -> float:
    """What the loopback judge thinks of an answer."""
    return answer.count("good") - answer.count("bad") + 0.01 * len(answer)


def logprobs(chances: dict[str, float]) -> Reply:
    """A reply of one token with its likeliest ones."""
    top = [{"token": token, "logprob": math.log(p)} for token, p in chances.items()]
    said = max(chances, key=lambda token: chances[token])
    reply = chat(said, prompt=50, new=1)
    first = {"token": said, "logprob": math.log(chances[said]), "top_logprobs": top}
    reply.body["choices"][0]["logprobs"] = {"content": [first]}
    reply.body["usage"]["total_tokens"] = 51
    return reply


def house(asked: Asked) -> Reply:
    """Answers questions, and compares answers with a taste for the first one shown."""
    text = asked.body["messages"][-1]["content"]
    if "Answer B:" not in text:
        return chat(f"good answer to {text[:20]}", prompt=7, new=4)
    (_, _), (_, first), (_, second) = FENCED.findall(text)
    p = 0.9 * logistic(worth(first) - worth(second) + 0.8)
    if not asked.body.get("logprobs"):
        return chat("Neither is long. [[A]]" if p > 0.45 else "I like the second.\n[[B]]")
    # A letter can be written in two ways, and something else is likely as well.
    return logprobs({"A": p * 0.75, " A": p * 0.25, "B": 0.9 - p, "The": 0.1})


def fair(asked: Asked) -> Reply:
    """A judge without a taste for a place."""
    first, second = [one for _, one in FENCED.findall(asked.body["messages"][-1]["content"])][1:]
    p = logistic(worth(first) - worth(second))
    return logprobs({"A": p, "B": 1 - p})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Endpoint]:
    """The loopback as the default provider; the working folder is empty."""
    monkeypatch.chdir(tmp_path)
    with serving(monkeypatch, tmp_path, house) as made:
        yield made


def write(path: str, rows: Any) -> str:
    Path(path).write_text(json.dumps(rows))
    return path


def questions(count: int = COUNT) -> str:
    rows = [{"instruction": f"Say {n}.", "dataset": "own"} for n in range(count)]
    return write("questions.json", rows)


def answers(name: str, texts: list[str]) -> list[dict[str, Any]]:
    """Write a model's answers to the questions."""
    asked = [{"instruction": f"Say {n}.", "dataset": "own"} for n in range(len(texts))]
    rows = [
        {**one, "output": text, "generator": name} for one, text in zip(asked, texts, strict=True)
    ]
    write(f"{name}.json", rows)
    return rows


GENERATE = "alpaca_eval generate --model small --questions questions.json --output answers.json"
JUDGE = "alpaca_eval judge --outputs mine.json --reference theirs.json --judge grand --out judged"


def generate(words: str = "") -> int:
    return typed(f"{GENERATE} {words}")


def judge(words: str = "") -> int:
    return typed(f"{JUDGE} {words}")


MINE = ["good good answer", "fine", "bad", "good", "same", "a longer answer than that one is"]
THEIRS = ["good", "good fine", "bad bad", "bad", "same", "short"]


def test_answers_are_in_alpaca_evals_form(server: Endpoint, capsys: Any) -> None:
    questions()
    more = "--temperature 0.3 --max-tokens 99 --system Briefly. --seed 7"
    assert generate(more) == 0
    asked = [{"instruction": f"Say {n}.", "dataset": "own"} for n in range(COUNT)]
    said = [{"output": f"good answer to Say {n}.", "generator": "small"} for n in range(COUNT)]
    whole = [{**one, **other} for one, other in zip(asked, said, strict=True)]
    assert json.loads(Path("answers.json").read_text()) == whole
    body = server.asked[0].body
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0.3, 99, 7)
    assert body["messages"][0] == {"role": "system", "content": "Briefly."}
    assert "6 answers, 42 tokens read, 24 written" in capsys.readouterr().out
    # The same again asks nothing; another temperature, or a question more, is asked.
    assert generate(more) == 0 and len(server.asked) == COUNT
    assert "6 of 6 answers, 6 of them from earlier" in capsys.readouterr().out
    questions(COUNT + 1)
    assert generate(more) == 0 and len(server.asked) == COUNT + 1
    assert generate("--limit 2") == 0 and len(server.asked) == COUNT + 3
    assert server.asked[-1].body["temperature"] == 0.7
    assert len(read_json_rows("answers.json")) == 2


def test_written_answers_are_an_aggregators_first_layer(server: Endpoint, capsys: Any) -> None:
    questions()
    paths = "--reference_paths first.json,second.json"
    write("first.json", answers("first", [f"one <{n}>" for n in range(COUNT)])[::-1])
    second = answers("second", [f"two <{n}>" for n in range(COUNT)])
    assert generate(paths) == 0 and len(server.asked) == COUNT
    for asked in server.asked:
        shown = " ".join(turn["content"] for turn in asked.body["messages"])
        number = re.search(r"Say (\d)\.", shown)
        assert number and re.findall(r"<(\d)>", shown) == [number[1]] * 2
        assert "one <" in shown and "two <" in shown and "first" not in shown
    # Other answers are another question.
    write("second.json", [dict(row, output="two again <9>") for row in second])
    assert generate(paths) == 0 and len(server.asked) == 2 * COUNT
    write("second.json", second[:-1])
    assert generate(paths) == 1 and len(server.asked) == 2 * COUNT
    assert 'error: second.json: has no answer to "Say 5."' in capsys.readouterr().err


def test_pairs_are_judged_in_both_orders(server: Endpoint, capsys: Any) -> None:
    answers("mine", MINE)
    # Rows belong together by instruction, not by place.
    write("theirs.json", answers("theirs", THEIRS)[::-1])
    assert judge("--export exported.json") == 0
    assert len(server.asked) == 2 * (COUNT - 1), "nobody is asked about two equal answers"
    for asked in server.asked:
        assert (asked.body["max_tokens"], asked.body["top_logprobs"]) == (1, 5)
        assert asked.body["temperature"] == 0
        assert not re.search("mine|theirs|grand", asked.body["messages"][0]["content"])
    rows = read_annotations(Path("judged"))
    for row, mine, theirs in zip(rows, MINE, THEIRS, strict=True):
        gap, same = worth(mine) - worth(theirs), mine == theirs
        both = (logistic(gap + 0.8), 1 - logistic(-gap + 0.8))
        assert row["preference"] == pytest.approx(0.5 if same else sum(both) / 2)
        orders = [one["preference"] for one in row["orders"]]
        assert orders == pytest.approx([] if same else both)
    summary = json.loads(Path("judged/summary.json").read_text())
    preferences = [row["preference"] for row in rows]
    assert summary["win_rate"]["rate"] == pytest.approx(mean_win_rate(preferences).mean)
    lengths = [len(a) - len(b) for a, b in zip(MINE, THEIRS, strict=True)]
    controlled = length_controlled_win_rate(preferences, lengths)
    assert summary["length_controlled"]["rate"] == pytest.approx(controlled.rate.mean)
    # Only the last pair is so close that the place decides.
    assert summary["order_disagreement"] == pytest.approx(1 / 5)
    assert 0.55 < summary["first_preferred"] < 0.7
    spent = {"answers": 10, "prompt_tokens": 500, "new_tokens": 10, "cost": 0.0, "unpriced": 10}
    told = capsys.readouterr().out
    assert summary["judging"] == spent and "| mine  |" in told
    assert "rates of fewer than 100 instructions depend on the fit's penalty" in told
    for one, row in zip(json.loads(Path("exported.json").read_text()), rows, strict=True):
        assert one["preference"] == 1 + row["preference"]
        assert (one["generator_1"], one["generator_2"]) == ("theirs", "mine")
        assert (one["output_1"], one["output_2"]) == (row["reference_output"], row["output"])
    assert judge() == 0 and len(server.asked) == 10


def test_a_judge_without_probabilities_writes_a_verdict(server: Endpoint, capsys: Any) -> None:
    answers("mine", MINE)
    answers("theirs", THEIRS)
    assert judge("--reading text --max_tokens 77") == 0
    assert server.asked[0].body["max_tokens"] == 77 and "logprobs" not in server.asked[0].body
    preferences = [row["preference"] for row in read_annotations(Path("judged"))]
    assert preferences == [1.0, 0.0, 1.0, 1.0, 0.5, 0.5]
    assert "without probabilities" not in capsys.readouterr().out, "none were asked for"


def test_a_failed_judgement_is_no_annotation(server: Endpoint, capsys: Any) -> None:
    answers("mine", MINE)
    answers("theirs", THEIRS)
    no = Reply({"error": {"message": "no"}}, status=400)
    server.answer = lambda asked: no if "Say 3." in str(asked.body) else fair(asked)
    assert judge() == 1
    assert "failed: Say 3./model first:" in capsys.readouterr().out
    assert not Path("judged/annotations.jsonl").exists()
    server.answer = fair
    assert judge() == 0
    assert "10 of 10 judgements, 8 of them from earlier" in capsys.readouterr().out


def test_another_endpoint_or_another_preset_is_asked_anew(
    server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions(2)
    preset = "proposers: [small]\naggregator: {model: small, system: Be %s.}\n"
    Path("mine.yaml").write_text(preset % "brief")
    own = "--model moa/mine.yaml"
    assert generate(own) == 0 and generate(own) == 0
    assert len(server.asked) == 4
    Path("mine.yaml").write_text(preset % "kind")
    assert generate(own) == 0 and len(server.asked) == 6, "the proposers are the same"
    with endpoint(lambda asked: chat("another model of this name")) as other:
        monkeypatch.setenv("OPENAI_BASE_URL", other.url)
        assert generate(own) == 0 and len(other.asked) == 4
    outputs = {row["output"] for row in read_json_rows("answers.json")}
    assert outputs == {"another model of this name"}


def test_probabilities_are_summed_and_a_preference_is_the_mean_of_both_orders() -> None:
    top = (("A", math.log(0.2)), (" A", math.log(0.1)), (" B", math.log(0.1)), ("x", -9.0))
    told = Completion("A", tokens=(Token("A", math.log(0.2), top),))
    assert parse_verdict(told, ORDERS[0])[:2] == pytest.approx((0.75, 0.4))
    assert parse_verdict(told, ORDERS[1]).preference == pytest.approx(0.25)
    scored = Completion("", logprobs=tuple(map(math.log, (0.2, 0.1, 0.05, 0.05))))
    assert parse_verdict(scored, ORDERS[0]).preference == pytest.approx(0.75)
    assert parse_verdict(Completion("B"), ORDERS[0]) == PairVerdict(0.0, None, "B")
    assert parse_verdict(Completion("hm"), ORDERS[0]).preference is None

    def two(first: float | None, second: float | None) -> list[PairVerdict]:
        return [PairVerdict(first, 1.0, ""), PairVerdict(second, 1.0, "")]

    assert mean_preference(two(1.0, 0.5)) == 0.75 and mean_preference([]) == 0.5
    assert mean_preference(two(1.0, None)) is None
    assert orders_disagree(two(0.9, 0.1)) and not orders_disagree(two(0.9, 0.6))
    assert not orders_disagree(two(0.9, 0.5)) and not orders_disagree(two(None, 0.1))


WRONG_FILES: list[tuple[Any, str]] = [
    ("", "q: is empty"),
    ("[]", "q: is empty"),
    ('[{"a": "x"},\n {"a": }]', "q, line 2: is not JSON"),
    ('{"a": "x"}\n\n{"a": \n', "q, line 3: is not JSON"),
    ('{"a": "x"}\n7\n', "q, line 2: is not a JSON object"),
    ('[{"a": "x"}, {"b": "y"}]', 'q, entry 2: has no "a"; it has b'),
    ('{"a": 3}\n', 'q, line 1: its "a" is no text'),
    (b'{"a": "x"}\n{"a": "\xff"}', "q, line 2: is not UTF-8"),
    (None, "q: cannot be read: No such file"),
]


@pytest.mark.parametrize(("content", "message"), WRONG_FILES)
def test_a_file_that_is_wrong_is_named_with_its_line(
    content: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("q").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=re.escape(message)):
        read_json_rows("q", {"a": str})


class Touchy(Model):
    """Does not answer where there is a word it does not like."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def generate_each(self, requests: Sequence[Request]) -> list[Completion | UserError]:
        self.batches.append(len(requests))
        no = UserError("I do not speak of that")
        return [no if "never" in one.prompt else Completion(str(one.prompt)) for one in requests]


def test_where_a_whole_batch_fails_nothing_more_is_asked() -> None:
    model = Touchy()
    requests = {text: Request(text) for text in ("a", "b", "never 1", "never 2", "c")}
    replies = send_requests(model, "touchy", requests, 2)
    assert list(replies.answers) == ["a", "b"] and model.batches == [2, 2]
    assert replies.failures["c"] == "not asked, after a whole batch failed"
    assert "the same command asks only these again" in replies.format_report()


def test_options_are_checked_and_reference_models_make_an_aggregator(
    server: Endpoint, capsys: Any
) -> None:
    questions(2)
    assert generate("--reference-models other:2,third --rounds 2") == 0
    # Two layers of three proposers and the aggregator.
    assert len(server.asked) == 2 * (2 * 3 + 1)
    models = [asked.body["model"] for asked in server.asked]
    assert [models.count(one) for one in ("other", "third", "small")] == [8, 4, 2]
    # The aggregator alone is another model, though its name is the same.
    assert generate() == 0 and len(server.asked) == 16
    for words, told in {
        "--rounds 2": "--rounds has no effect without --reference-models",
        "--reference_models other --reference_paths a.json": "give one",
        "--temperature=-1": "'--temperature': -1: must be",
        "--temperature=nan": "'--temperature': nan: must be",
        "--max_tokens=0": "'--max-tokens': 0: must be",
    }.items():
        assert generate(words) == 2 and told in capsys.readouterr().err
