"""Multiple choice and exact match: prompts, scoring, data files and keys."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from task_items import Knowing, Unscored, choice_items, played, write

from swarm.errors import UserError
from swarm.models.base import Completion, Message
from swarm.tasks.abstain import Abstain
from swarm.tasks.base import Score, mean_score, unparsed_rate
from swarm.tasks.dataset import balance_domains
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.multiple_choice import MultipleChoice


def test_the_choice_prompt(tmp_path: Path) -> None:
    item = {"question": "Which?", "choices": {"A": "this", "B": "that"}, "answer": "B"}
    plain = write(tmp_path / "plain.json", {"dev": [item], "test": [item]})
    shown = write(tmp_path / "shown.json", {"dev": [item], "icl_prompt": "Q\nThe answer is D."})
    task = MultipleChoice("plain", str(plain))
    text = "Question: Which?\nA: this\nB: that\nThe answer is"
    first = "Please choose an option that best answers the question.\n"
    (request,) = next(task.run(task.items("dev")))
    assert request.prompt == first + text and request.max_new_tokens == 10
    task = MultipleChoice("shown", str(shown), instruction=None, chat=True)
    (request,) = next(task.run(task.items("dev")))
    assert request.prompt == (Message("user", "Q\nThe answer is D.\n" + text),)


def test_letters_by_log_probability(tmp_path: Path) -> None:
    file = str(write(tmp_path / "small.json", {"dev": choice_items(8)}))
    for chat, letters in ((False, (" A", " B", " C", " D")), (True, ("A", "B", "C", "D"))):
        task = MultipleChoice("small", file, scoring="logits", chat=chat)
        items = task.items("dev")
        requests = next(task.run(items))
        assert requests[0].choices == letters and requests[0].max_new_tokens == 0
        assert task.utility(played(task, items, Knowing(items))) == 1.0
    with pytest.raises(UserError, match="scoring=generate"):
        played(task, items, Unscored())


def test_log_probabilities_that_are_no_numbers_pick_nothing(tmp_path: Path) -> None:
    file = str(write(tmp_path / "small.json", {"dev": choice_items(1)}))
    task = MultipleChoice("small", file, scoring="logits")
    (item,) = task.items("dev")
    nan, low = float("nan"), float("-inf")
    assert task.read_answer(item, Completion("", (nan, -2.0, -1.0, low))) == "C"
    assert task.read_answer(item, Completion("", (nan,) * 4)) is None


def test_texts_by_log_probability_per_character(tmp_path: Path) -> None:
    item = {"question": "Why so?", "choices": {"A": " for long reasons ", "B": "no"}, "answer": "B"}
    file = str(write(tmp_path / "small.json", {"dev": [item], "icl_prompt": "The answer is D."}))
    task = MultipleChoice("small", file, scoring="text")
    (item,) = task.items("dev")
    (request,) = next(task.run([item]))
    assert request.prompt == "Question: Why so?\nAnswer:"
    assert (request.choices, request.max_new_tokens) == ((" for long reasons", " no"), 0)
    assert task.score_completion(item, Completion("", (-8.0, -1.5))).answer == "A", (
        "-8 / 16 > -1.5 / 2"
    )
    assert task.score_completion(item, Completion("", (-8.0, -0.9))) == Score(1.0, "B")
    assert task.read_answer(item, Completion("", (float("nan"), -99.0))) == "B"
    assert task.read_answer(item, Completion("", (float("nan"),) * 2)) is None
    with pytest.raises(UserError, match=r"scoring=text .* use task\.scoring=generate"):
        task.read_answer(item, Completion("no"))


def test_a_text_follows_its_prompt(tmp_path: Path) -> None:
    file = str(write(tmp_path / "small.json", {"dev": choice_items(1)}))
    texts = ("1010", "11", "a stone", "nothing")
    for keys, prompt, space in (
        ({"template": "{question}"}, "What comes after 10?", " "),
        ({"template": "{question}\n"}, "What comes after 10?\n", ""),
        ({"template": "{question}", "chat": True}, (Message("user", "What comes after 10?"),), ""),
    ):
        task = MultipleChoice("small", file, scoring="text", **keys)  # type: ignore[arg-type]
        (item,) = task.items("dev")
        request, gold = task.build_request(item), task.gold_request(item)
        assert request.prompt == gold.prompt == prompt
        assert request.choices == tuple(space + text for text in texts)
        assert gold.choices == (f"{space}a stone",)
    with pytest.raises(UserError, match=r"task\.template: 'Answer:' does not contain {question}"):
        MultipleChoice("small", template="Answer:")
    with pytest.raises(UserError, match=r"task\.scoring: 'text' is not one of generate, logits"):
        Abstain("small", scoring="text")


def test_the_original_rules_can_be_chosen(tmp_path: Path) -> None:
    file = str(write(tmp_path / "small.json", {"dev": choice_items(1)}))
    said = Completion("Answer: C")
    for parser, letter in (("original", "A"), ("anchored", "C")):
        task = MultipleChoice("small", file, parser=parser)
        assert task.read_answer(task.items("dev")[0], said) == letter
    golds = [{"question": "?", "answer": gold} for gold in ("No", "18", "18")]
    file = str(write(tmp_path / "match.json", {"dev": golds}))
    texts = [Completion("Node"), Completion("118"), Completion("18 or rather a b c d e f g h i 7")]
    values = {}
    for parser, last_words in (("original", None), ("original", 10), ("anchored", None)):
        match = ExactMatch("match", file, parser=parser, last_words=last_words, take="last")
        items = match.items("dev")
        scores = [
            match.score_completion(item, said) for item, said in zip(items, texts, strict=True)
        ]
        assert [match.grade(i, s.answer) for i, s in zip(items, scores, strict=True)] == [
            score.value for score in scores
        ]
        values[parser, last_words] = [score.value for score in scores]
    assert values == {
        ("original", None): [1.0, 1.0, 1.0],
        ("original", 10): [1.0, 1.0, 0.0],
        ("anchored", None): [0.0, 0.0, 0.0],
    }


def test_a_limit_keeps_the_domains_in_proportion(tmp_path: Path) -> None:
    items = [{"question": "?", "answer": "1", "domain": "x" if n < 30 else "y"} for n in range(40)]
    others = [{**item, "question": "!"} for item in items]
    file = str(write(tmp_path / "small.json", {"dev": items, "test": others}))
    ids = {}
    for limit in (4, 8, 20, None, 99):
        task = ExactMatch("small", file, dev_limit=limit)
        chosen = task.items("dev")
        ids[limit] = [item["id"] for item in chosen]
        assert len(chosen) == min(limit or 40, 40)
        assert Counter(item["domain"] for item in chosen)["y"] * 4 == len(chosen)
        assert len(task.items("test")) == 40
    assert ids[20] == ids[None][:20] and ids[8] == ids[20][:8]
    assert balance_domains(balance_domains(items)) == balance_domains(items)


def test_ids_are_the_files_or_positions(tmp_path: Path) -> None:
    items = [{"question": "?", "answer": "1", "id": 0} for _ in range(3)]
    file = str(write(tmp_path / "small.json", {"dev": items}))
    assert [i["id"] for i in ExactMatch("small", file, ids="position").items("dev")] == [0, 1, 2]
    with pytest.raises(UserError, match=r'1 ids occur more than once in dev: "0"; .*task.ids'):
        ExactMatch("small", file).items("dev")


GOOD = {"question": "?", "choices": {"A": "x", "B": "y"}, "answer": "A", "id": "i7"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": "C"}, "'i7': its \"answer\" is not among its choices: 'C' is not one of A, B"),
        ({"answer": ["A"]}, "is not among"),
        ({"answer": None}, "is not among"),
        ({"choices": {"A": "x"}}, "at least two"),
        ({"choices": ["x", "y"]}, "at least two"),
        ({"choices": {"A": "x", "b": "y"}}, 'is not one capital letter: "b"'),
        ({"choices": {"A": "x", "B": 3}}, 'one of its choices is not a string: "B"'),
        ({"choices": {"A": "x", "B": " "}}, "an empty choice: B"),
        ({"question": ""}, '"question" is empty'),
        ({"question": 3}, '"question" is not a string'),
        ({"id": [1]}, "its id"),
    ],
)
def test_a_wrong_choice_item_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = write(tmp_path / "small.json", {"dev": [{**GOOD, "id": "i6"}, {**GOOD, **change}]})
    with pytest.raises(UserError) as caught:
        MultipleChoice("small", str(file)).items("dev")
    assert message in str(caught.value) and str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("3", "neither an object nor a list"),
        ("[]", '"dev" is not a list of at least one item'),
        ('{"test": []}', '"dev" is not a list'),
        ('{"dev": []}', '"dev" is not a list of at least one item'),
        ('{"dev": [3]}', "dev item 0: it is not an object"),
        ('{"dev": [{"answer": "1"}]}', 'dev item 0: it has no "question"'),
        ('{"dev": [{"question": "?"}]}', 'dev item 0: it has no "answer"'),
        (
            '{"dev": [{"q": "?", "a": "1"}]}',
            '"question"; the first of them has "q", "a": no option',
        ),
        ('{"dev": [{"question": "?", "answer": true}]}', "neither a string nor a number"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "small.json"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        ExactMatch("small", str(file)).items("dev")
    assert message in str(caught.value) and str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"run `python -m swarm.fetch_data elsewhere`"):
        MultipleChoice("elsewhere").items("dev")
    with pytest.raises(UserError, match=r"mine.json is missing: see task.file"):
        MultipleChoice("elsewhere", "mine.json").items("dev")
    (tmp_path / "data" / "eval").mkdir(parents=True)
    write(tmp_path / "data" / "eval" / "elsewhere.json", {"dev": choice_items(2)})
    assert len(MultipleChoice("elsewhere").items("dev")) == 2


@pytest.mark.parametrize("kind", [MultipleChoice, ExactMatch])
@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("name", "", "not a string"),
        ("dev_limit", 0, "null nor a positive integer"),
        ("test_limit", True, "null nor a positive integer"),
        ("max_new_tokens", 2.5, "a positive integer"),
        ("parser", "strict", "anchored, original"),
        ("ids", None, "file, position"),
        ("chat", "0", "true, false"),
        ("dedupe", 1, "true, false"),
        ("instruction", 5, "not a string"),
        ("file", 5, "not a string"),
    ],
)
def test_a_wrong_key_is_named(kind: type, key: str, value: object, allowed: str) -> None:
    with pytest.raises(UserError) as caught:
        kind(**{"name": "small", key: value})
    assert str(caught.value).startswith(f"task.{key}: {value!r}") and allowed in str(caught.value)


def test_wrong_keys_of_one_kind_are_named() -> None:
    with pytest.raises(
        UserError, match=r"task\.scoring: 'logit' is not one of generate, logits, text"
    ):
        MultipleChoice("small", scoring="logit")
    with pytest.raises(UserError, match=r"task\.take: 'middle' is not one of first, last"):
        ExactMatch("small", take="middle")
    with pytest.raises(UserError, match=r"task\.last_words"):
        ExactMatch("small", last_words=-5)


def test_mean_and_share_of_unparsed_answers() -> None:
    scores = [Score(1.0, "A"), Score(0.0, None), Score(0.0, "B"), Score(0.0, None)]
    assert mean_score(scores) == 0.25 and unparsed_rate(scores) == 0.5 and unparsed_rate([]) == 0.0
    with pytest.raises(ValueError, match="no scores"):
        mean_score([])


def test_a_seed_draws_other_dev_items_in_proportion(tmp_path: Path) -> None:
    """Ten of forty, a quarter of them "rare": other ones by each seed, of one seed always these."""
    rows = [
        {
            "question": f"What is {i}?",
            "answer": str(i),
            "id": i,
            "domain": "rare" if i % 4 == 0 else "common",
        }
        for i in range(60)
    ]
    file = str(write(tmp_path / "small.json", {"dev": rows[:40], "test": rows[40:]}))

    def dev(seed: int | None, limit: int | None = 8) -> list[int]:
        return [item["id"] for item in ExactMatch("m", file, limit, dev_seed=seed).items("dev")]

    drawn = [dev(seed) for seed in range(5)]
    assert len({tuple(sorted(ids)) for ids in drawn}) == 5 and dev(None) not in drawn
    for ids in drawn:
        assert sum(i % 4 == 0 for i in ids) == 2
    assert dev(3) == dev(3) and dev(3, 4) == dev(3)[:4], "few are the first of more"
    assert sorted(dev(3, None)) == sorted(dev(None, None)) == list(range(40))
    tests = [ExactMatch("m", file, 8, dev_seed=seed).items("test") for seed in (None, 1, 2)]
    assert tests[0] == tests[1] == tests[2]
    with pytest.raises(UserError, match=r"task\.dev_seed"):
        ExactMatch("m", file, dev_seed=-1)
