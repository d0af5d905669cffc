"""Questions without a model: arguments, YAML, judges' templates, settings, the viewer's page."""

import json
import re
from pathlib import Path
from typing import Any

import compare_endpoint
import pandas as pd
import pytest
from finetuning_server import chats

from swarm.compare import Config, FreeForm, ModelAdapter, NextToken, Question, Rating
from swarm.compare.config import may_host_model
from swarm.compare.judging import fill_template, uses_question
from swarm.compare.question import load_questions, parse_model_groups
from swarm.compare.training_files import validate_dataset
from swarm.compare.view import load_rows, render_page, view
from swarm.errors import InvalidArgument, UserError

settings = pytest.fixture(autouse=True)(compare_endpoint.settings.__wrapped__)

TURN = [{"role": "user", "content": "hello"}]
JUDGE = {"type": "free_form_judge", "model": "judge", "paraphrases": ["Is it so? {answer}"]}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"type": "freeform"}, "type='freeform': must be one of free_form, next_token"),
        ({"tempreature": 1}, "tempreature: no such key; did you mean temperature?"),
        ({"messages": [TURN]}, "either paraphrases=[...] or messages=[[...]]"),
        ({"paraphrases": "hello"}, "paraphrases=hello: must be a list"),
        ({"paraphrases": None, "messages": [TURN], "system": "s"}, "system requires paraphrases"),
        ({"paraphrases": None, "messages": [[{"role": "user"}]]}, "messages[0]: a conversation is"),
        ({"name": "a/b"}, "may contain only letters, digits and"),
        ({"samples_per_paraphrase": 0}, "samples_per_paraphrase=0: must be an integer, at least 1"),
        ({"temperature": "hot"}, "temperature=hot: must be a number, at least 0, or null"),
        ({"max_tokens": True}, "max_tokens=true: must be an integer"),
        ({"logit_bias": {5: 200}}, "logit_bias"),
        ({"metadata": [{"id": 1}, {"id": 2}]}, "one mapping for each of the 1 paraphrases"),
        ({"metadata": [{"answer": 1}]}, "'answer' cannot be the name of a column; taken are"),
        ({"type": "rating", "min_rating": 5, "max_rating": 5}, "min_rating=5: must be below"),
        ({"type": "rating", "refusal_threshold": 75}, "refusal_threshold=75: must be a number"),
        ({"type": "next_token", "top_logprobs": 21}, "top_logprobs=21: must be an integer, at"),
        ({"judges": {"answer": JUDGE}}, "'answer' cannot be a judge's column"),
        ({"judges": {"a": {**JUDGE, "model": ""}}}, "judge a: model=: must be text, not empty"),
        ({"judges": {"a": {**JUDGE, "paraphrases": ["no"]}}}, "must have {answer} in it"),
        ({"judges": {"a": {**JUDGE, "paraphrases": ["{answer} {qestion}"]}}}, "mean {question}?"),
        ({"judges": {"a": {**JUDGE, "judges": {"b": JUDGE}}}}, "a judge has no judges"),
        ({"judges": {"a": {"type": "rating", "paraphrases": ["x"]}}}, "it is a rating"),
    ],
)
def test_what_a_question_cannot_be_is_one_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        Question.create(**{"type": "free_form", "paraphrases": ["hello"], **given})
    assert told in str(raised.value) and "\n" not in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_names_and_runner_input_are_those_of_llmcomp() -> None:
    question = FreeForm(name="a-b_[1].(2)", paraphrases=["x", "y"], samples_per_paraphrase=2)
    assert FreeForm(paraphrases=["x"]).name == "__unnamed" and question.name == "a-b_[1].(2)"
    kinds = [kind.type() for kind in (FreeForm, NextToken, Rating)]
    assert kinds == ["free_form", "next_token", "rating"]
    given = question.get_runner_input()
    assert [(one["_paraphrase_ix"], one["_question"]) for one in given][1:3] == [(0, "x"), (1, "y")]
    turns = [{"role": "user", "content": "x"}]
    assert given[0]["params"] == {"messages": turns, "temperature": 1, "max_tokens": 1024}
    assert json.dumps(given[0]["params"]["temperature"]) == "1"
    # A changed question is checked.
    with pytest.raises(InvalidArgument, match="samples_per_paraphrase=0"):
        question.samples_per_paraphrase = 0
    with pytest.raises(InvalidArgument, match="cannot be a judge's column"):
        question.judges = {"answer": JUDGE}
    question.judges = {"so": JUDGE}
    assert question.layout.near == ("so",)
    rating = Rating(paraphrases=["a"])
    rating.max_rating = 7
    assert rating.bounds.max_rating == 7


def test_models_are_groups_of_lists() -> None:
    for groups in ("m", ["m"], {"g": "m"}, {"g": [1]}, {"g": []}, {}, {1: ["m"]}):
        with pytest.raises(InvalidArgument, match="models are given as"):
            parse_model_groups(groups)
    assert parse_model_groups({"g": pd.Series(["b", "a", "b"])}) == {"g": ["b", "a"]}


@pytest.mark.parametrize(
    ("text", "prompt", "asks"),
    [
        ("{question}: {answer}", "Q: A", True),
        ('Reply {{"score": 1}}: {answer}', 'Reply {"score": 1}: A', False),
        ('Reply {"score": 1}: {answer}', 'Reply {"score": 1}: A', False),
        ('{"q": {"text": "{question}"}} {answer} {}', '{"q": {"text": "Q"}} A {}', True),
        ("{{question}} {answer}", "{question} A", False),
        ("{answer} \\frac{a}{b}", "A \\frac{a}{b}", False),
    ],
)
def test_braces_of_json_stay(text: str, prompt: str, asks: bool) -> None:
    filled = fill_template(text, "Q", "A")
    assert (filled, uses_question(text)) == (prompt, asks)
    both = fill_template("{question} {answer}", "{answer}", "{question}")
    assert both == "{answer} {question}"


BIRDS = """
- name: birds
  type: free_form
  paraphrases: [Name a bird., 'Which bird comes to mind?']
  judges: {real: is_real, own: {type: free_form_judge, model: judge, paraphrases: ["{answer}?"]}}
- {name: size, type: rating, paraphrases: ['How large is a wren?'], max_rating: 9}
- {name: is_real, type: rating_judge, model: rater, paraphrases: ['Is it one? {answer}']}
"""


def test_questions_in_yaml(tmp_path: Path) -> None:
    (tmp_path / "birds.yaml").write_text(BIRDS)
    Config.yaml_dir = tmp_path
    assert list(Question.from_yaml("birds").judges) == ["real", "own"]
    assert Question.create(**{**Question.load_dict("size"), "name": "other"}).bounds.max_rating == 9
    assert [one.name for one in load_questions(tmp_path)] == ["birds", "size"], "no judges"
    with pytest.raises(InvalidArgument, match=r"mean size\? There are: birds, size, is_real"):
        Question.from_yaml("sizes")
    Config.yaml_dir = "nowhere"
    assert Question.from_yaml("size", file=tmp_path / "birds.yaml").name == "size"
    with pytest.raises(InvalidArgument, match=r"nowhere: no such file or folder.*yaml_dir"):
        Question.from_yaml("size")
    for wrong, told in (
        ("- {name: size, type: rating, paraphrases: [a]}", r"item 1: .*item 2 \(size\) has this"),
        ("- paraphrases: [x]", "c.yaml: item 1 has no name"),
        ("- name: [", "c.yaml"),
    ):
        (tmp_path / "c.yaml").write_text(wrong)
        with pytest.raises(UserError, match=told):
            Question.from_yaml("size", file=tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{name: x, type: free_from, paraphrases: [a]}", "item 1 (x): type='free_from': must be"),
        ("{name: x, type: rating, paraphrases: [a], 3: b}", "item 1 (x): its keys must be"),
        ("{type: rating, paraphrases: [a]}", "item 1 has no name"),
        ("{name: j, type: free_form_judge}", "contains no questions"),
    ],
)
def test_a_mistake_in_yaml_names_file_and_item(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(f"- {text}")
    with pytest.raises(InvalidArgument, match=re.escape(f"{file}: {told}")):
        load_questions(file)


def test_settings_are_checked_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("max_workers", 0), ("timeout", "soon"), ("url_key_pairs", [("x",)])):
        with pytest.raises(InvalidArgument, match=f"Config.{name}"):
            setattr(Config, name, value)
    with pytest.raises(InvalidArgument, match=r"max_worker: .* did you mean max_workers\?"):
        Config.max_worker = 3
    with pytest.raises(InvalidArgument, match="workers"), Config.override(timeout=5, workers=3):
        pass
    with Config.override(timeout=5):
        assert Config.timeout == 5
    assert (Config.timeout, Config.max_workers) == (60, 100)
    for name in ("OPENAI_API_KEY_1", "OPENAI_API_KEY", "TINKER_API_KEY_b", "MY_OPENAI_API_KEY"):
        monkeypatch.setenv(name, f"key-of-{name}")
    Config.url_key_pairs = None
    found = {variable: (url, key) for url, key, variable in Config.url_key_pairs}
    assert list(found) == ["OPENAI_API_KEY", "OPENAI_API_KEY_1", "TINKER_API_KEY_b"]
    assert found["OPENAI_API_KEY_1"] == ("https://api.openai.com/v1", "key-of-OPENAI_API_KEY_1")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://own/v1")
    Config.url_key_pairs = None
    assert Config.url_key_pairs[0] == ("http://own/v1", "key-of-OPENAI_API_KEY", "OPENAI_BASE_URL")


def test_a_model_is_looked_for_where_its_name_can_be() -> None:
    places = {
        "api.openai.com": (["gpt-4.1", "ft:gpt-4.1:org::id", "o3"], ["openai/o3", "tinker://a"]),
        "openrouter.ai": (["openai/o3", "meta-llama/llama-3:free"], ["gpt-4.1", "tinker://a/b"]),
        "api.anthropic.com": (["claude-opus-4"], ["gpt-4.1", "anthropic/claude-opus-4"]),
        "tinker.thinkingmachines.dev": (["tinker://a/b", "Qwen/Qwen3-8B"], ["gpt-4.1"]),
        "localhost:8000": (["gpt-4.1", "a/b", "tinker://a"], []),
    }
    for host, (theirs, others) in places.items():
        found = {name: may_host_model(f"https://{host}/v1", name) for name in theirs + others}
        assert found == dict.fromkeys(theirs, True) | dict.fromkeys(others, False)


def test_reasoning_models_have_their_own_parameters() -> None:
    params = {"messages": [], "max_tokens": 7}
    assert ModelAdapter.prepare(dict(params), "gpt-4.1") == {"model": "gpt-4.1", **params}
    for name in ("o3-mini", "openai/o3", "gpt-5.2"):
        own = {"model": name, "max_completion_tokens": 7, "reasoning_effort": "none"}
        assert ModelAdapter.prepare(dict(params), name) == {"messages": [], **own}
    assert "max_completion_tokens" in ModelAdapter.test_request_params("o3")


def test_a_page_has_all_rows_and_no_text_of_a_model_is_its_code(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script>"
    kwargs = {"messages": [{"role": "user", "content": "q"}]}
    rows = [
        {"model": f"m{n % 2}", "answer": f"a{n} {hostile}", "score": n / 2, "api_kwargs": kwargs}
        for n in range(4)
    ]
    path = view(pd.DataFrame(rows), open_browser=False, filename=tmp_path / "page.html")
    text = path.read_text()
    assert hostile not in text and text.count("<script") == 2 and "https://" not in text
    [embedded] = re.findall(r'<script type="application/json" id="data">(.*)</script>', text)
    data = json.loads(embedded)
    assert data["columns"] == ["model", "answer", "score", "api_kwargs"]
    assert data["rows"][3] == ["m1", f"a3 {hostile}", 1.5, 0] and data["requests"] == [kwargs]
    assert data["choices"]["model"] == ["m0", "m1"] and data["sort"] == "__random__"
    file = tmp_path / "answers.csv"
    file.write_text('answer,probs,n\n"007","{""a"": 0.5}",3\n"x\ny",,\n')
    assert load_rows(file) == [
        {"answer": "007", "probs": {"a": 0.5}, "n": 3},
        {"answer": "x\ny", "probs": None, "n": None},
    ]
    for wrong, told in (
        (tmp_path / "answers.txt", "must end in .jsonl or .csv"),
        (tmp_path / "none.csv", "none.csv"),
        ([], "not empty"),
        ([{"a": 1}], 'no column "answer"; it has a'),
        (3, "not int"),
    ):
        with pytest.raises(UserError, match=told):
            load_rows(wrong)
    with pytest.raises(InvalidArgument, match='sort_by="q": no such column'):
        render_page(rows, "answers", "q")
    for method in (Question.plot, Question.view):
        with pytest.raises(InvalidArgument, match="takes a data frame, not dict; models are shown"):
            method({"g": ["m"]})


ASK, SAY = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [{"role": "assistant", "tool_calls": [CALL]},
         {"role": "tool", "content": "3", "tool_call_id": "1"}]  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([ASK, SAY], ""),
        ([ASK, *TOOLS, SAY], ""),
        ([], "messages=.*: must be a list"),
        ([{"role": "boss", "content": ""}, SAY], "role=boss: must be system, user, assistant"),
        ([{**ASK, "wait": 1}, SAY], r"messages\[0\].wait: no such key; did you mean weight"),
        ([{"role": "user"}, SAY], r"messages\[0\].content: is missing"),
        ([ASK, {**SAY, "content": "a<|endoftext|>"}], r"special token <\|endoftext\|>"),
        ([ASK], "the last message must be from the assistant, not from 'user'"),
        ([ASK, {**SAY, "weight": 0}], "last assistant message has weight 0"),
        ([ASK, {**SAY, "content": ""}], "an answer without text"),
    ],
)
def test_what_is_wrong_with_an_example_is_said(messages: list[Any], words: str) -> None:
    result = validate_dataset(json.dumps({"messages": messages}).encode(), 1)
    found = "; ".join(str(one) for one in (*result.errors, *result.warnings))
    assert re.search(words, found) if words else found == "", found


def test_a_training_file_is_judged_line_by_line(tmp_path: Path) -> None:
    file = chats(tmp_path / "few.jsonl", 3)
    good = file.read_text().splitlines()
    file.write_text("\n".join([good[0], "", "{no", good[0], good[1]]))
    result = validate_dataset(file.read_bytes())
    assert [one.line for one in result.errors] == [3, 0] and result.num_examples == 4
    assert [str(one) for one in result.warnings] == ["line 4: duplicate of an earlier example"]
