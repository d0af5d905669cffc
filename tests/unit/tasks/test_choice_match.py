"""Multiple choice, exact match and abstention: prompts, requests and values."""

import math
from pathlib import Path
from typing import Any

import pytest
from task_items import Knowing, Silent, Unscored, choice_items, match_items, played, write

from swarm.errors import UserError
from swarm.models.base import Completion, Message, Model, Request
from swarm.stats.significance import mean_interval, plurality_vote
from swarm.tasks import abstain
from swarm.tasks.abstain import ABSTENTION, Abstain
from swarm.tasks.base import Score, unparsed_rate
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.metrics import utility_with_interval
from swarm.tasks.mixture import Mixture
from swarm.tasks.multiple_choice import MultipleChoice
from swarm.tasks.questions import MIN_LOGPROB


def choice(folder: Path, items: Any = 8, **keys: Any) -> MultipleChoice:
    dev = choice_items(items) if isinstance(items, int) else items
    return MultipleChoice("small", str(write(folder / "letters.json", {"dev": dev})), **keys)


def match(folder: Path, *golds: str, **keys: Any) -> ExactMatch:
    """Questions with these answers, or six of the usual ones."""
    items = [{"question": f"{n}?", "answer": gold} for n, gold in enumerate(golds)]
    dev = {"dev": items or match_items(6)}
    return ExactMatch("golds", str(write(folder / "golds.json", dev)), **keys)


def test_the_choice_prompt(tmp_path: Path) -> None:
    item = {"question": "Which?", "choices": {"A": "this", "B": "that"}, "answer": "B"}
    shown = write(tmp_path / "shown.json", {"dev": [item], "icl_prompt": "Q\nThe answer is D."})
    task = choice(tmp_path, [item])
    text = "Question: Which?\nA: this\nB: that\nThe answer is"
    first = "Please choose an option that best answers the question.\n"
    (request,) = next(task.run(task.items("dev")))
    assert request.prompt == first + text and request.max_new_tokens == 10
    task = MultipleChoice("shown", str(shown), instruction=None, chat=True)
    (request,) = next(task.run(task.items("dev")))
    assert request.prompt == (Message("user", "Q\nThe answer is D.\n" + text),)


def test_letters_by_log_probability(tmp_path: Path) -> None:
    for chat, letters in ((False, (" A", " B", " C", " D")), (True, ("A", "B", "C", "D"))):
        task = choice(tmp_path, scoring="logits", chat=chat)
        items = task.items("dev")
        requests = next(task.run(items))
        assert requests[0].choices == letters and requests[0].max_new_tokens == 0
        assert task.utility(played(task, items, Knowing(items))) == 1.0
    with pytest.raises(UserError, match="scoring=generate"):
        played(task, items, Unscored())
    item = next(item for item in items if item["answer"] == "C")
    assert task.read_answer(item, Completion("", (math.nan, -2.0, -1.0, -math.inf))) == "C"
    assert task.read_answer(item, Completion("", (math.nan,) * 4)) is None


def test_texts_by_log_probability_per_character(tmp_path: Path) -> None:
    item = {"question": "Why so?", "choices": {"A": " for long reasons ", "B": "no"}, "answer": "B"}
    file = str(write(tmp_path / "small.json", {"dev": [item], "icl_prompt": "The answer is D."}))
    task = MultipleChoice("small", file, scoring="text")
    (item,) = task.items("dev")
    (request,) = next(task.run([item]))
    assert request.prompt == "Question: Why so?\nAnswer:"
    assert (request.choices, request.max_new_tokens) == ((" for long reasons", " no"), 0)
    # -8 / 16 > -1.5 / 2
    assert task.score_completion(item, Completion("", (-8.0, -1.5))).answer == "A"
    assert task.score_completion(item, Completion("", (-8.0, -0.9))) == Score(1.0, "B")
    with pytest.raises(UserError, match=r"scoring=text .* use task\.scoring=generate"):
        task.read_answer(item, Completion("no"))
    texts = ("1010", "11", "a stone", "nothing")
    for keys, prompt, space in (
        ({"template": "{question}"}, "What comes after 10?", " "),
        ({"template": "{question}\n"}, "What comes after 10?\n", ""),
        ({"template": "{question}", "chat": True}, (Message("user", "What comes after 10?"),), ""),
    ):
        task = choice(tmp_path, 1, scoring="text", **keys)
        (item,) = task.items("dev")
        request, gold = task.build_request(item), task.gold_request(item)
        assert request.prompt == gold.prompt == prompt
        assert request.choices == tuple(space + text for text in texts)
        assert gold.choices == (f"{space}a stone",)
    with pytest.raises(UserError, match=r"task\.template='Answer:': must contain {question}"):
        MultipleChoice("small", template="Answer:")


def test_the_original_rules_can_be_chosen(tmp_path: Path) -> None:
    said = Completion("Answer: C")
    for parser, letter in (("original", "A"), ("anchored", "C")):
        task = choice(tmp_path, 1, parser=parser)
        assert task.read_answer(task.items("dev")[0], said) == letter
    texts = [Completion("Node"), Completion("118"), Completion("18 or rather a b c d e f g h i 7")]
    wanted = {("original", None): [1.0, 1.0, 1.0], ("original", 10): [1.0, 1.0, 0.0]}
    for (parser, last_words), values in {**wanted, ("anchored", None): [0.0, 0.0, 0.0]}.items():
        keys = {"parser": parser, "last_words": last_words, "take": "last"}
        own = match(tmp_path, "No", "18", "18", **keys)
        pairs = list(zip(own.items("dev"), texts, strict=True))
        scores = [own.score_completion(*pair) for pair in pairs]
        assert [score.value for score in scores] == values
        graded = [own.grade(item, s.answer) for (item, _), s in zip(pairs, scores, strict=True)]
        assert graded == values
    # Case counts where the parser is cased.
    for parser, value in (("whole", 1.0), ("cased", 0.0)):
        own = match(tmp_path, "WORD", parser=parser)
        (item,) = own.items("dev")
        assert own.score_completion(item, Completion("word")).value == value
        assert own.grade(item, "WORD") == 1.0 and own.gold_examples([item])[0].final


# The signal that a search maximizes.


class Sure(Model):
    """Says a text, and gives any continuation so many nats and tokens."""

    def __init__(self, text: str, nats: float, tokens: int) -> None:
        self.text, self.nats, self.tokens = text, nats, tokens

    def generate(self, requests: Any) -> list[Completion]:
        forced = Completion("", (-self.nats,), choice_tokens=(self.tokens,))
        return [forced if request.choices else Completion(self.text) for request in requests]


class Uncounted(Model):
    """Gives log probabilities, and not of how many tokens."""

    def generate(self, requests: Any) -> list[Completion]:
        return [Completion("", (-1.0,) * len(request.choices)) for request in requests]


def test_a_value_is_nats_a_token_or_the_mean_of_both(tmp_path: Path) -> None:
    model = Sure(" A.", nats=2.0, tokens=4)
    task = choice(tmp_path, signal="logprob")
    scores = played(task, task.items("dev"), model)
    assert scores == [Score(-0.5, "")] * 8 and task.utility(scores) == -0.5
    task = choice(tmp_path, signal="both")
    items = task.items("dev")
    for item, score in zip(items, played(task, items, model), strict=True):
        correct = float(item["answer"] == "A")
        assert score.value == pytest.approx((correct + math.exp(-0.5)) / 2)
        assert (score.answer, score.text) == ("A", " A.")
        assert score.measures == {"correct": correct, "logprob": -0.5}


def test_one_round_asks_for_the_gold_answer_as_it_is_written(tmp_path: Path) -> None:
    golds = [{"question": q, "answer": 7} for q in ("How many?", "How many?\n", "How many: ")]
    file = str(write(tmp_path / "golds.json", {"dev": golds}))
    for chat, texts in ((False, [" 7", "7", "7"]), (True, ["7"] * 3)):
        task = ExactMatch("golds", file, signal="logprob", chat=chat)
        requests = next(task.run(task.items("dev")))
        assert all(r.max_new_tokens == 0 and r.stop_check is None for r in requests)
        assert [r.choices for r in requests] == [(text,) for text in texts]
    both = choice(tmp_path, signal="both")
    item = next(item for item in both.items("dev") if item["answer"] == "A")
    own, gold = next(both.run([item]))
    assert own.prompt == next(both.metric_task.run([item]))[0].prompt
    assert gold == Request(own.prompt, 0, (" A",)) and (own.max_new_tokens, own.choices) == (10, ())


def test_no_number_is_beyond_the_bounds(tmp_path: Path) -> None:
    for signal, low, high in (("logprob", MIN_LOGPROB, 0.0), ("both", 0.0, 1.0)):
        task = match(tmp_path, signal=signal)
        assert (task.lowest, task.highest) == (low, high)
        items = task.items("dev")
        for nats in (math.nan, math.inf, 1e9):
            scores = played(task, items, Sure("", nats, 1))
            assert [score.value for score in scores] == [pytest.approx(low)] * 6
            assert all(math.isfinite(x) for score in scores for x in score.measures.values())
        # Rounding can lift a certain answer's log probability above 0.
        scores = played(task, items[:1], Sure(str(items[0]["answer"]), -1e-7, 1))
        assert [score.value for score in scores] == [high]
    assert unparsed_rate(played(task, items, Silent())) == 1.0
    for model in (Unscored(), Uncounted()):
        with pytest.raises(UserError, match=r"task\.signal=both .*task\.signal=accuracy"):
            played(task, items, model)


def test_the_metric_task_reads_nothing_again(tmp_path: Path) -> None:
    assert (task := match(tmp_path)).metric_task is task
    for make in (choice, match):
        task = make(tmp_path, signal="both")
        items = task.items("dev")
        task.file = "moved away"
        own = task.metric_task
        assert own.signal == "accuracy" and task.signal == "both"
        assert own.items("dev") is items and own.votes and not task.votes
        assert own.utility(played(own, items, Knowing(items))) == 1.0
    mixture = Mixture("two", {"letters": task}, "mean")
    assert mixture.signal == "letters: both" and mixture.metric_task.signal == "letters: accuracy"


# Abstention: an answer, then a verdict on it.

ITEM = {"question": "Which?", "choices": {"A": "this", "B": "that"}, "answer": "B", "id": 0}
ROUND_1 = (
    "Please choose an option that best answers the question.\n"
    "Question: Which?\nA: this\nB: that\nThe answer is"
)
ROUND_2 = (
    ROUND_1 + "\nProposed answer: {}\n"
    "Is the proposed answer true or false? Directly answer with true or false."
)


class Replying(Model):
    """Says one text to all in the first round and another in the second."""

    def __init__(self, first: str, second: str) -> None:
        self.texts = [first, second]
        self.asked: list[Request] = []

    def generate(self, requests: Any) -> list[Completion]:
        self.asked += requests
        return [Completion(self.texts[len(self.asked) > 1])] * len(requests)


def doubting(folder: Path, **settings: Any) -> Abstain:
    return Abstain("one", str(write(folder / "one.json", {"dev": [ITEM]})), **settings)


TRUE = "True|I cannot say|It is not false.|Yes|There is no doubt: true|True, it is not false"
FALSE = "False|It is not true.|That isn't quite true|untrue|It is not correct|**No**, it is"


@pytest.mark.parametrize(
    ("first", "replies", "value", "answer"),
    [
        (" B.", TRUE, 1.0, "B"),
        (" A.", TRUE, -1.0, "A"),
        (" B.", FALSE, 0.0, ABSTENTION),
        (" no idea", "", -1.0, None),
        ("", "false", 0.0, ABSTENTION),
    ],
)
def test_abstention(
    tmp_path: Path, first: str, replies: str, value: float, answer: str | None
) -> None:
    task = doubting(tmp_path)
    (item,) = task.items("dev")
    for reply in replies.split("|"):
        (score,) = played(task, [item], Replying(first, reply))
        assert (score.value, score.answer) == (value, answer), reply
        assert task.grade(item, answer) == value >= task.lowest
        assert score.measures == {"abstained": float(value == 0.0), "right": float(first == " B.")}
    assert abstain.verdict("no") is False and abstain.verdict("perhaps") is None
    assert not abstain.is_decided("not true") and abstain.is_decided("not true,")


def test_the_second_round_proposes_the_answer(tmp_path: Path) -> None:
    for settings, said, proposed in (
        ({}, " B. For", "B: that"),
        ({}, " Neither", " Neither"),
        ({"parser": "original"}, " B. For", "B. For"),
    ):
        model = Replying(said, "true")
        task = doubting(tmp_path, **settings)
        played(task, task.items("dev"), model)
        assert [request.prompt for request in model.asked] == [ROUND_1, ROUND_2.format(proposed)]
        stops = [request.stop_check for request in model.asked]
        assert (stops[0] is None) == ("parser" in settings) and stops[1] is not None
        assert stops[1]("it is FALSE.") and not stops[1]("it is")
    model = Replying(" B", "True, it is not false")
    (score,) = played(task, task.items("dev"), model)
    assert score.value == 0.0  # the original finds "false" anywhere


def test_both_rounds_by_log_probability(tmp_path: Path) -> None:
    class Doubting(Knowing):
        """Knows the letter, and holds it for false."""

        def answer(self, request: Request) -> Completion:
            false = request.choices[-1:] == (" false",)
            return Completion("", (-2.0, -1.0)) if false else super().answer(request)

    file = str(write(tmp_path / "small.json", {"dev": choice_items(4)}))
    task = Abstain("small", file, scoring="logits")
    scores = played(task, task.items("dev"), Doubting(task.items("dev")))
    assert task.utility(scores) == 0.0
    assert all(score.measures["right"] == score.measures["abstained"] == 1.0 for score in scores)
    for wrong in ({"scoring": "text"}, {"signal": "both"}):
        with pytest.raises(UserError, match=r"task\.(scoring|signal)="):
            Abstain("small", **wrong)


def test_abstentions_vote_and_are_no_wrong_answers(tmp_path: Path) -> None:
    task = doubting(tmp_path)
    answer = plurality_vote(["A", ABSTENTION, ABSTENTION], [-0.1, -0.2, -0.3])
    assert task.grade(task.items("dev")[0], answer) == 0.0
    right = [Score(value, "B") for value in (1.0, 0.0) * 10]
    interval = mean_interval([score.value for score in right], signed=True)
    assert utility_with_interval(task, right) == interval
    zeros = [Score(0.0, ABSTENTION)] * 20
    assert utility_with_interval(task, zeros)[:3] == (0.0, 0.0, 0.0)
    assert utility_with_interval(MultipleChoice("c", "c.json"), zeros).high > 0.1
