"""A dense signal for tasks with right answers: values, requests, and what a verdict rests on."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches
import tiny
from task_items import Knowing, Silent, Unscored, choice_items, match_items, played, write

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.tokenization import encode_choice, encode_prompt
from swarm.errors import UserError
from swarm.executors import Job, Worker
from swarm.executors.inline import InlineExecutor
from swarm.loop.evaluator import Batching, Evaluator
from swarm.loop.racing import Incumbent, Racing
from swarm.models.base import Completion, Model, Request
from swarm.optimizers.swarm import MemeticSwarm
from swarm.pool.pool import Pool
from swarm.runs.run_folder import RunRecord
from swarm.runs.verdict import read_verdict
from swarm.tasks.abstain import Abstain
from swarm.tasks.base import Item, Score, metric_task, unparsed_rate
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.metrics import utility_with_interval
from swarm.tasks.mixture import Mixture
from swarm.tasks.multiple_choice import MultipleChoice
from swarm.tasks.reward_model import RewardModelTask
from swarm.tasks.search_signal import MIN_LOGPROB

K = len(tiny.NAMES)


def choice(folder: Path, **keys: Any) -> MultipleChoice:
    file = write(folder / "letters.json", {"dev": choice_items(8), "test": choice_items(12)[8:]})
    return MultipleChoice("letters", str(file), **keys)


def match(folder: Path, **keys: Any) -> ExactMatch:
    file = write(folder / "golds.json", {"dev": match_items(6), "test": match_items(8)[6:]})
    return ExactMatch("golds", str(file), **keys)


class Sure:
    """Says a text, and gives any continuation so many nats and tokens."""

    def __init__(self, text: str, nats: float, tokens: int) -> None:
        self.text, self.nats, self.tokens = text, nats, tokens

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [
            Completion("", (-self.nats,), choice_tokens=(self.tokens,))
            if request.choices
            else Completion(self.text)
            for request in requests
        ]


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
    requests = {}
    for chat in (False, True):
        task = ExactMatch("golds", file, signal="logprob", chat=chat)
        requests[chat] = next(task.run(task.items("dev")))
        assert all(r.max_new_tokens == 0 and r.stop_check is None for r in requests[chat])
    assert [r.choices for r in requests[False]] == [(" 7",), ("7",), ("7",)]
    assert [r.choices for r in requests[True]] == [("7",)] * 3
    for chat, letter in ((False, " A"), (True, "A")):
        both = choice(tmp_path, signal="both", chat=chat)
        item = next(item for item in both.items("dev") if item["answer"] == "A")
        own, gold = next(both.run([item]))
        assert (own.max_new_tokens, own.choices) == (10, ())
        assert own.prompt == next(both.metric_task.run([item]))[0].prompt
        assert gold == Request(own.prompt, 0, (letter,))


@pytest.mark.parametrize("chat", [False, True])
def test_the_value_is_that_of_a_forward_over_prompt_and_answer(
    chat: bool, tmp_path: Path, tiny_llama: Path
) -> None:
    import torch

    engine = HFEngine()
    engine.load_base(BaseModel(str(tiny_llama)), "cpu", {}, "none")
    model, words = tiny.load(tiny_llama), tiny.tokenizer(tmp_path)
    for task in (
        choice(tmp_path, signal="logprob", chat=chat),
        match(tmp_path, signal="logprob", chat=chat),
    ):
        items = task.items("dev")
        requests = next(task.run(items))
        said = engine.generate(np.zeros((1, 0)), [requests])[0]
        answers = dict(zip(requests, said, strict=True))
        counts = [completion.choice_tokens[0] for completion in said]
        assert max(counts) > 1 or isinstance(task, MultipleChoice)
        for item, request in zip(items, requests, strict=True):
            start = encode_prompt(words, request.prompt)
            gold = encode_choice(words, request.prompt, request.choices[0])
            with torch.inference_mode():
                chances = model(torch.tensor([start + gold])).logits[0].log_softmax(-1)
            each = [float(chances[len(start) + i - 1, token]) for i, token in enumerate(gold)]
            (score,) = played(task, [item], Given(answers))
            assert score.value == pytest.approx(sum(each) / len(each), abs=1e-4)


class Given:
    """Gives the completions that were made before."""

    def __init__(self, answers: dict[Request, Completion]) -> None:
        self.answers = answers

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self.answers[request] for request in requests]


def test_no_number_is_beyond_the_bounds(tmp_path: Path) -> None:
    for signal, low, high in (("logprob", MIN_LOGPROB, 0.0), ("both", 0.0, 1.0)):
        task = match(tmp_path, signal=signal)
        assert (task.lowest, task.highest) == (low, high)
        for nats in (math.nan, math.inf, 1e9):
            scores = played(task, task.items("dev"), Sure("", nats, 1))
            assert [score.value for score in scores] == [pytest.approx(low)] * 6
            # A record is JSON, which knows neither infinity nor NaN.
            assert json.dumps([dict(score.measures) for score in scores], allow_nan=False)
        # Rounding can lift a certain answer's log probability above 0.
        items = task.items("dev")[:1]
        scores = played(task, items, Sure(str(items[0]["answer"]), -1e-7, 1))
        assert [score.value for score in scores] == [high]


def test_an_answer_that_was_not_asked_for_is_not_unparsed(tmp_path: Path) -> None:
    task = choice(tmp_path, signal="logprob")
    items = task.items("dev")
    assert unparsed_rate(played(task, items, Knowing(items))) == 0.0
    assert unparsed_rate(played(task, items, Silent())) == 1.0


class Uncounted:
    """Gives log probabilities, and not of how many tokens."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [Completion("", (-1.0,) * len(request.choices)) for request in requests]


@pytest.mark.parametrize("model", [Unscored(), Uncounted()])
@pytest.mark.parametrize("signal", ["logprob", "both"])
def test_a_model_without_log_probabilities_is_told_so(
    signal: str, model: Model, tmp_path: Path
) -> None:
    task = match(tmp_path, signal=signal)
    with pytest.raises(UserError) as caught:
        played(task, task.items("dev"), model)
    message = str(caught.value)
    assert message.startswith(f"task.signal={signal}") and "task.signal=accuracy" in message


def test_plain_is_the_task_by_its_accuracy_and_reads_nothing_again(tmp_path: Path) -> None:
    for make in (choice, match):
        task = make(tmp_path)
        assert task.metric_task is task and metric_task(task) is task
        for signal in ("logprob", "both"):
            task = make(tmp_path, signal=signal)
            items = task.items("dev")
            task.data.file = "moved away"
            own = task.metric_task
            assert own.signal == "accuracy" and task.signal == signal
            assert own.items("dev") is items
            assert own.utility(played(own, items, Knowing(items))) == 1.0
            assert own.votes and not task.votes and own.highest == 1.0
            for item in items:
                assert task.grade(item, str(item["answer"])) == 1.0


def test_signals_that_there_are(tmp_path: Path) -> None:
    for make in (choice, match):
        with pytest.raises(UserError, match=r"^task\.signal: 'log' is not one of accuracy, logp"):
            make(tmp_path, signal="log")
    with pytest.raises(UserError, match=r"^task\.signal: 'both' is not one of accuracy\.$"):
        Abstain("small", signal="both")
    assert Abstain("small").metric_task.lowest == -1.0


class Lengths:
    """Rewards an answer's length, as a scorer."""

    highest = None
    votes = False

    def item_error(self, item: Item) -> str | None:
        return None

    def score(self, items: Sequence[Item], texts: Sequence[str]) -> list[Score]:
        measures = [{"reward": float(len(text)), "length": 1.0} for text in texts]
        return [Score(m["reward"], t, t, measures=m) for m, t in zip(measures, texts, strict=True)]


@pytest.fixture
def mixture(tmp_path: Path) -> Mixture:
    """One part with a signal, one whose scale the experts set."""
    prompts = [{"prompt": f"write {n}", "id": n} for n in range(4)]
    file = str(write(tmp_path / "free.json", {"dev": prompts, "test": prompts}))
    free = RewardModelTask("free", Lengths(), file=file, dedupe=False, max_new_tokens=6)
    parts = {"letters": choice(tmp_path, signal="logprob", scoring="logits"), "free": free}
    return Mixture("two", parts, combine="mean")


def test_a_mixture_is_plain_where_its_parts_are(mixture: Mixture, tmp_path: Path) -> None:
    own = mixture.metric_task
    assert own.tasks["free"] is mixture.tasks["free"] and own.metric_task is own
    assert own.tasks["letters"].signal == "accuracy"  # type: ignore[attr-defined]
    assert (own.name, own.combine, own.items("dev")) == ("two", "mean", mixture.items("dev"))
    assert (
        mixture.signal == "letters: logprob" and mixture.lowest == MIN_LOGPROB and own.lowest == 0.0
    )
    outer = Mixture(
        "outer", {"inner": mixture, "golds": match(tmp_path)}, "weights", {"inner": 1, "golds": 3}
    )
    assert outer.metric_task.weights == {"inner": 1, "golds": 3}
    assert outer.metric_task.tasks["inner"].lowest == 0.0  # type: ignore[attr-defined]


def test_a_harmonic_mean_of_log_probabilities_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Mixture("two", {"letters": choice(tmp_path, signal="logprob")})
    message = str(caught.value)
    assert "letters by its signal=logprob can be negative" in message
    assert "task.tasks.letters.signal=both" in message
    assert Mixture("two", {"letters": choice(tmp_path, signal="both")}).lowest == 0.0


def worker(base: Path, pool: Path, task: Any) -> Worker:
    return Worker(BaseModel(str(base)), Pool(pool).open(), task, HFEngine())


def test_a_worker_plays_the_signal_on_dev_alone(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    task = choice(tmp_path, signal="logprob", scoring="logits")
    mine = worker(tiny_llama, tiny_pool, task)
    mine.open("cpu")
    position = tuple(np.eye(K)[0])

    def values(split: str, count: int) -> list[float]:
        (scores,) = mine.run(Job(0, (position,), split, tuple(range(count)))).scores
        return [score.value for score in scores]

    dev, judged, test = values("dev", 8), values("judged", 8), values("test", 4)
    assert all(value < 0 for value in dev) and {*judged, *test} <= {0.0, 1.0}
    mine.task = task.metric_task
    assert values("dev", 8) == judged and values("test", 4) == test


def test_judged_scores_are_on_the_scale_of_a_calibrated_part(
    mixture: Mixture, tiny_llama: Path, tiny_pool: Path
) -> None:
    executor = InlineExecutor()
    executor.open(worker(tiny_llama, tiny_pool, mixture))
    evaluator = Evaluator(mixture, executor, Batching())
    dev = evaluator.score_positions(np.eye(K), "dev")
    mixture.calibrate([score for scores in dev for score in scores])
    (judged,) = evaluator.score_positions(np.eye(K)[:1], "judged")
    values = {part: [s.value for s in judged if s.part == part] for part in ("letters", "free")}
    assert len(values["letters"]) == 8 and set(values["letters"]) <= {0.0, 1.0}
    assert len(values["free"]) == 4 and all(0.0 <= value <= 1.0 for value in values["free"])
    assert values["free"] == [mixture.apply_scale(s).value for s in dev[0] if s.part == "free"]
    assert 0.0 <= mixture.metric_task.utility(judged) <= 1.0


def test_racing_knows_that_no_log_probability_is_above_0(tmp_path: Path) -> None:
    racing, optimizer = Racing("exact", chunk=2), MemeticSwarm()
    optimizer.start(K, 0)
    racing.check_raceable(match(tmp_path, signal="logprob"), optimizer)

    def ask(positions: Any, *, items: Sequence[int]) -> list[list[Score]]:
        return [[Score(-5.0, "") for _ in items] for _ in positions]

    # After n items the mean of ten is at most -n / 2: the race is over once that is no gain.
    for best, asked in ((-0.9, 2), (-1.0, 2), (-1.01, 4), (-2.1, 6), (-5.1, 10)):
        raced = racing.race_particles(ask, {0: [1.0]}, [Incumbent(best, (best,) * 10)], 10, 0, 1)
        assert len(raced.scores[0]) == asked


def test_a_certain_model_has_no_interval_of_right_and_wrong(tmp_path: Path) -> None:
    task = choice(tmp_path, signal="logprob")
    items = task.items("dev")
    interval = utility_with_interval(task, played(task, items, Knowing(items)))
    assert (interval.low, interval.high) == (0.0, 0.0)
    own = utility_with_interval(task.metric_task, played(task.metric_task, items, Knowing(items)))
    assert own.low < 0.7 and own.high == 1.0


def test_a_search_climbs_the_signal_and_reports_the_accuracy(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    command = searches.arguments(
        tmp_path, tiny_llama, tiny_pool, task__signal="logprob", optimizer__max_iterations=2
    )
    done = searches.run(command)
    assert done.returncode == 0, done.stderr
    record = RunRecord(tmp_path / "search" / "run")
    record.state = json.loads((record.folder / "state.json").read_text())
    utilities = [u for entry in record.iterations for u in entry["utilities"]]
    assert all(u < 0 for u in utilities)
    rows = record.load_iteration_answers(0, 0)
    assert np.mean([row["value"] for row in rows]) == pytest.approx(utilities[0])
    assert {(row["answer"], row["text"]) for row in rows} == {("", "")}
    metrics = read_verdict(record.state)
    assert metrics.signal == "logprob"
    for one in (metrics.start_model.dev, metrics.found.test):
        assert 0.0 <= one.utility <= 1.0
    assert metrics.dev.utility * 12 == pytest.approx(round(metrics.dev.utility * 12))
