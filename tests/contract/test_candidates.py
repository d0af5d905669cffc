"""What can be evaluated: models alone, votes, and models that speak together."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import endpoints
import numpy as np
import pytest
import small_evaluations
import task_items
import tiny
import torch
from peft import PeftModel
from run_folders import write_state
from transformers import AutoTokenizer

from swarm._util.files import conf_folder
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.token_ensemble import ModelEnsemble, TokenEnsembleEngine
from swarm.errors import UserError
from swarm.evaluation.checkpoints import (
    BestCandidate,
    CheckpointCandidate,
    SavedEnsembleCandidate,
)
from swarm.evaluation.evaluation import SplitScores, prepare_candidate, score_candidate
from swarm.evaluation.logit_ensemble import PackLLM
from swarm.evaluation.models import ModelCandidate
from swarm.evaluation.positions import MixedPositionCandidate, SingleExpertsCandidate
from swarm.evaluation.voting import VotingCandidate, weighted_vote
from swarm.models.base import Message, Request
from swarm.pool.pool import Pool
from swarm.runs.folder import RunFolder, read_state
from swarm.stats.significance import plurality_vote
from swarm.tasks.base import Score
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.metrics import majority_vote
from swarm.tasks.multiple_choice import MultipleChoice

OPTIONS = sorted({p.stem for p in (conf_folder() / "candidate").glob("*.yaml")} - {"moa"})
"""Mixtures of agents: tests/contract/test_agents.py."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for data and searches."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def run(place: Path, tiny_llama: Path, tiny_pool: Path) -> RunFolder:
    """A finished search with a vote of several."""
    return RunFolder(small_evaluations.searched(place, tiny_llama, tiny_pool))


@pytest.fixture
def given(place: Path, tiny_llama: Path, tiny_pool: Path) -> list[str]:
    return small_evaluations.keys(place, tiny_llama, tiny_pool)


@pytest.fixture
def task(place: Path, run: RunFolder) -> MultipleChoice:
    return MultipleChoice("tiny", str(place / "tiny.json"), scoring="logits")


@pytest.fixture
def base(tiny_llama: Path) -> BaseModel:
    return BaseModel(str(tiny_llama))


@pytest.fixture
def talk(tmp_path: Path) -> ExactMatch:
    """A task that lets models write."""

    def item(number: int, split: str) -> dict[str, Any]:
        kinds = ("of 5 nodes the graph has", "the birds flew over", "yes or no, true")
        return {"question": f"{kinds[number % 3]} {split} {number}", "answer": str(number)}

    content = {s: [item(n, s) for n in range(6)] for s in ("dev", "test")}
    return ExactMatch(
        "talk", str(task_items.write(tmp_path / "talk.json", content)), max_new_tokens=6
    )


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[endpoints.Endpoint]:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    with endpoints.endpoint(endpoints.in_turn(endpoints.chat("The answer is B."))) as made:
        yield made


def opened(candidate: Any, task: Any) -> Any:
    prepare_candidate(candidate, task)
    return candidate


def found_on(candidate: Any, task: Any, split: str = "test") -> SplitScores:
    return score_candidate(opened(candidate, task), task, split)


def answers_of(scores: list[Score]) -> list[str | None]:
    return [score.answer for score in scores]


@pytest.fixture
def singles(base: BaseModel, tiny_pool: Path) -> SingleExpertsCandidate:
    """Each expert of the pool by itself."""
    return SingleExpertsCandidate(base, Pool(str(tiny_pool)), HFEngine())


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_evaluated(
    option: str, given: list[str], run: RunFolder, tiny_pool: Path, endpoint: endpoints.Endpoint
) -> None:
    needed = {
        "adapter": [f"candidate.folder={tiny_pool / 'birch'}"],
        "position": ["candidate.coefficients={amber: 0.5, dune: 0.5}"],
        "run": [f"candidate.folder={run.path}"],
        "ensemble": [f"candidate.file={run.path / 'ensemble.yaml'}"],
        "named": [
            f"candidate.name=local/{tiny_pool / 'birch'}",
            "candidate.roster.base=${model.path}",
        ],
        "openai": [
            "candidate.model.model=some",
            f"candidate.model.base_url={endpoint.url}",
            "candidate.model.cache=null",
            "task.scoring=generate",
        ],
    }
    prompts = {"expert": 4, "vote": 4, "pack": 4, "ensemble": None}
    result = small_evaluations.evaluated([*given, f"candidate={option}", *needed.get(option, [])])
    assert result["items"] == 16 and result["task"] == "mmlu" and result["split"] == "test"
    assert len(result["voices"]) == (4 if option == "expert" else 1)
    for voice in result["voices"]:
        low, high = voice["low"], voice["high"]
        assert 0 <= low <= voice["utility"] <= high <= 1
    if (each := prompts.get(option, 1)) is not None:
        assert result["prompts"] == 16 * each
    assert result["tokens"] > 0 and result["seconds"] > 0
    assert "secret-key" not in json.dumps(result)


def test_a_run_is_its_best_and_an_ensemble_its_vote(
    run: RunFolder, task: MultipleChoice, tmp_path: Path
) -> None:
    best = found_on(BestCandidate(str(run.path)), task)
    voted = found_on(SavedEnsembleCandidate(str(run.path / "ensemble.yaml")), task)
    metrics = run.verdict
    assert task.utility(best.scores[0]) == metrics.found.test.utility
    assert task.utility(voted.scores[0]) == metrics.vote.test.utility
    recorded = run.load_test_answers((metrics.places[1][0], metrics.places[1][1]))
    assert recorded and answers_of(best.scores[0]) == [row["answer"] for row in recorded]
    assert (best.usage.calls, voted.usage.calls) == (16, 16 * len(metrics.vote.members))
    # Of several, elsewhere: what most of them answer.
    three = [{"folder": f"particle_{i}/personal_best", "utility": 0.1 * i} for i in (0, 1, 3)]
    elsewhere = tmp_path / "three.yaml"
    elsewhere.write_text(json.dumps({"run": str(run.path), "members": three}))
    assert "no such folder" in refused(lambda: SavedEnsembleCandidate(str(elsewhere)), task)
    three = [{**one, "folder": str(run.path / one["folder"])} for one in three]
    elsewhere.write_text(json.dumps({"run": str(run.path), "members": three}))
    found = found_on(SavedEnsembleCandidate(str(elsewhere)), task, "dev")
    places = [run.find_best(i) for i in (0, 1, 3)]
    answers = [[row["answer"] for row in run.load_answers(place)] for place in places]
    assert len({tuple(mine) for mine in answers}) > 1
    for i, one in enumerate(found.scores[0]):
        assert one.text == " | ".join(mine[i] for mine in answers)
        assert one.answer == plurality_vote([mine[i] for mine in answers], [0.0, 0.1, 0.3])


def test_experts_and_positions_answer_as_in_the_search(
    run: RunFolder, task: MultipleChoice, base: BaseModel, tiny_pool: Path, singles: Any
) -> None:
    found = found_on(singles, task, "dev")
    assert found.names == run.experts
    for k, scores in enumerate(found.scores):
        assert answers_of(scores) == [row["answer"] for row in run.load_answers((0, k))]
    place = run.find_best()
    row = run.positions[place].tolist()
    for given in (row, dict(zip(run.experts, row, strict=True))):
        candidate = MixedPositionCandidate(base, Pool(str(tiny_pool)), HFEngine(), given)
        (scores,) = found_on(candidate, task, "dev").scores
        assert answers_of(scores) == [row["answer"] for row in run.load_answers(place)]


def test_saved_folders_of_every_kind_speak_for_themselves(
    task: MultipleChoice,
    base: BaseModel,
    tiny_llama: Path,
    tiny_gemma: Path,
    tiny_pool: Path,
    mixed_pool: Path,
    tmp_path: Path,
) -> None:
    merged = tmp_path / "merged"
    whole = PeftModel.from_pretrained(tiny.load(tiny_llama), tiny_pool / "cedar")
    whole.merge_and_unload().save_pretrained(merged)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(merged)
    panel = ModelEnsemble([str(tiny_llama), str(tiny_gemma)]).open()
    panel.save([0.0, 1.0], tmp_path / "mixture")
    panel.save([1.0, 0.0], tmp_path / "other")
    folders = [tiny_pool / "cedar", merged, tmp_path / "mixture", tiny_gemma]
    folders += [tiny_pool / "amber", tmp_path / "other"]
    found = found_on(CheckpointCandidate(base, [str(f) for f in folders]), task)
    cedar, same, mixture, gemma, amber, llama = map(answers_of, found.scores)
    alone = found_on(CheckpointCandidate(base, []), task)
    assert cedar == same and mixture == gemma and cedar != amber != gemma
    assert llama == answers_of(alone.scores[0]) and alone.names == ["base"]
    assert found.names[:3] == ["cedar", "merged", "mixture"] and found.usage.calls == 6 * 16
    # Adapters of different shapes share the base.
    shapes = CheckpointCandidate(base, [str(mixed_pool / name) for name in tiny.NAMES])
    experts = SingleExpertsCandidate(base, Pool(str(mixed_pool)), HFEngine())
    pairs = zip(found_on(shapes, task).scores, found_on(experts, task).scores, strict=True)
    assert all(answers_of(ours) == answers_of(theirs) for ours, theirs in pairs)


def test_the_rules_of_a_vote() -> None:
    task = ExactMatch("poll")
    items = [{"question": "?", "answer": "7", "id": n} for n in range(4)]
    said = (("7", "7", None, "1"), ("7", "1", None, "7"), ("1", None, None, "3"))
    voices = [[Score(0.0, answer) for answer in mine] for mine in said]
    weights = [0.2, 0.3, 0.6]
    majority = majority_vote(task, items, voices, weights)
    by_weight = majority_vote(task, items, voices, weights, weighted_vote)
    assert answers_of(majority) == ["7", "1", None, "3"]
    assert answers_of(by_weight) == ["1", "1", None, "3"]
    assert [s.value for s in majority] == [1.0, 0.0, 0.0, 0.0]
    assert majority[1].text == "7 | 1 | -"
    assert weighted_vote(["a", "b", "b"], [0.5, 0.2, -0.9]) == "a"
    assert weighted_vote(["a", "b", "b"], [0.0, 0.0, -0.9]) == "b"


def test_votes_weigh_by_dev_utility(run: RunFolder, task: MultipleChoice, singles: Any) -> None:
    vote = opened(VotingCandidate(singles, "weighted"), task)
    calls = [score_candidate(vote, task, "test").usage.calls for _ in range(2)]
    assert vote.weights == run.utilities[0, :4].tolist()
    assert calls == [4 * (16 + 12), 4 * 16], "dev is asked once and for all"


def test_a_vote_of_several_candidates(talk: ExactMatch) -> None:
    knowing = ModelCandidate(task_items.Knowing(talk.items("test")), "knows")
    mistaken = [
        ModelCandidate(task_items.Mistaken(talk.items("test")), f"wrong {n}") for n in range(2)
    ]
    right = VotingCandidate([knowing, *mistaken], "weighted", [1.0, 0.4, 0.4])
    wrong = VotingCandidate([knowing, *mistaken])
    assert talk.utility(found_on(right, talk).scores[0]) == 1.0
    assert talk.utility(found_on(wrong, talk).scores[0]) == 0.0
    assert right.voter_names() == ["knows", "wrong 0", "wrong 1"]


PROMPTS = ("the question is which of the answers", "a graph of 5 nodes", "once upon a time")


def members(base: Path, pool: Path) -> list[Any]:
    """Each expert by itself, as PEFT loads it."""
    return [PeftModel.from_pretrained(tiny.load(base), pool / name).eval() for name in tiny.NAMES]


def test_requests_have_weights_of_their_own(base: BaseModel, tiny_pool: Path) -> None:
    panel = ModelEnsemble([str(tiny_pool / name) for name in tiny.NAMES], base).open()
    engine, small = TokenEnsembleEngine(), TokenEnsembleEngine(max_tokens=30)
    for one in (engine, small):
        one.open(base, panel, "cpu")
    weights = np.array([[0.7, 0.3, 0, 0], [0, 0, 0, 1], [0.25] * 4, [0.1, 0.2, 0, 0.7]])
    asked = [
        Request(PROMPTS[0], 8),
        Request(PROMPTS[1], 8),
        Request(PROMPTS[2], 0, (" yes", " no or none")),
        Request(PROMPTS[2], 5),
    ]
    alone = [engine.generate(weights[i : i + 1], [[asked[i]]])[0][0] for i in range(4)]
    for one in (engine, small):
        together = [found for (found,) in one.generate(weights, [[request] for request in asked])]
        for found, wanted in zip(together, alone, strict=True):
            assert (found.text, found.new_tokens) == (wanted.text, wanted.new_tokens)
            assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


def test_perplexities_are_those_of_the_models(
    base: BaseModel, tiny_llama: Path, tiny_pool: Path
) -> None:
    panel = ModelEnsemble([str(tiny_pool / name) for name in tiny.NAMES], base).open()
    engine = TokenEnsembleEngine()
    engine.open(base, panel, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    turns = (Message("user", "is it (A)?"),)
    chat = tokenizer.apply_chat_template(
        [turns[0]._asdict()], add_generation_prompt=True, return_dict=True
    ).input_ids
    texts = [*[tokenizer(text).input_ids for text in PROMPTS], chat]
    found, tokens = engine.log_perplexities([*PROMPTS, turns, PROMPTS[0]])
    assert found.shape == (5, 4) and (found[4] == found[0]).all()
    for k, network in enumerate(members(tiny_llama, tiny_pool)):
        for i, ids in enumerate(texts):
            tokens_after = torch.tensor(ids[1:])
            with torch.inference_mode():
                # What the vocabulary has beyond the tokenizer is padding.
                logits = network(torch.tensor([ids])).logits[0, :-1, : tiny.WORDS]
            loss = torch.nn.functional.cross_entropy(logits, tokens_after)
            assert found[i, k] == pytest.approx(float(loss), abs=1e-4)
    # Of each text all tokens but the last are read.
    assert tokens == 4 * sum(len(ids) - 1 for ids in texts)


def test_a_pack_speaks_by_the_mixture_of_its_chances(
    base: BaseModel, tiny_llama: Path, tiny_pool: Path, talk: ExactMatch
) -> None:
    pack = opened(PackLLM(base, Pool(str(tiny_pool)), temperature=0.2), talk)
    requests = [Request(text, 5) for text in PROMPTS]
    weights = pack.compute_weights(requests)
    found, _ = pack.engine.log_perplexities(PROMPTS)
    shares = np.exp(-found / 0.2)
    assert weights == pytest.approx(shares / shares.sum(1, keepdims=True))
    tokenizer, networks = AutoTokenizer.from_pretrained(tiny_llama), members(tiny_llama, tiny_pool)
    for request, row, said in zip(requests, weights, pack.generate(requests), strict=True):
        ids = list(tokenizer(request.prompt).input_ids)
        new: list[int] = []
        while len(new) < 5:
            with torch.inference_mode():
                chances = sum(
                    w * n(torch.tensor([ids + new])).logits[0, -1, : tiny.WORDS].softmax(-1)
                    for w, n in zip(row, networks, strict=True)
                )
            if (token := int(chances.argmax())) == tokenizer.eos_token_id:
                break
            new.append(token)
        assert said.text == tokenizer.decode(new, skip_special_tokens=True)


def refused(candidate: Any, task: Any) -> str:
    with pytest.raises(UserError) as error:
        prepare_candidate(candidate(), task)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_mistakes_are_named(
    task: MultipleChoice,
    base: BaseModel,
    tiny_pool: Path,
    tiny_llama: Path,
    singles: Any,
    tmp_path: Path,
) -> None:
    other = tmp_path / "other"
    tiny.expert(tiny_llama, other)
    tiny.change(other, base_model_name_or_path="some/other-base")
    (tmp_path / "bad.yaml").write_text("members: [1]")
    (tmp_path / "empty").mkdir()
    amber = str(tiny_pool / "amber")
    given = (base, Pool(str(tiny_pool)), HFEngine())
    pool = given[:2]
    wrong: list[tuple[Any, str]] = [
        (lambda: SingleExpertsCandidate(*given, "zebra"), "zebra.*amber"),
        (lambda: MixedPositionCandidate(*given, {"zebra": 1.0}), "zebra.*amber"),
        (lambda: MixedPositionCandidate(*given, [1.0, 2.0]), "coefficients.*4"),
        (lambda: MixedPositionCandidate(*given, {}), "candidate.coefficients is empty"),
        (lambda: CheckpointCandidate(base, "nowhere"), "nowhere"),
        (lambda: CheckpointCandidate(base, str(tmp_path / "empty")), "empty"),
        (lambda: CheckpointCandidate(base, [amber, amber]), "more than once"),
        (lambda: CheckpointCandidate(base, [amber, str(other)]), "some/other-base"),
        (lambda: BestCandidate(str(tmp_path)), "contains no search"),
        (lambda: SavedEnsembleCandidate(str(tmp_path / "none.yaml")), "none.yaml"),
        (lambda: SavedEnsembleCandidate(str(tmp_path / "bad.yaml")), "bad.yaml.*members"),
        (lambda: VotingCandidate(singles, weights=[1.0]), "candidate.weights.*4"),
        (lambda: PackLLM(*pool, ["amber"]), "two experts"),
        (lambda: PackLLM(*pool, ["amber", "zebra"]), "zebra"),
        (lambda: PackLLM(base, Pool(str(tiny_pool), base_row=True)), "base.*folder"),
    ]
    for candidate, words in wrong:
        assert re.search(words, refused(candidate, task)), words


def test_a_search_that_is_not_over_is_refused(run: RunFolder, tmp_path: Path) -> None:
    state = read_state(run.path)
    # A search that was killed between its last iteration and its verdict has a `finished`.
    for left in ({"finished": None, "verdict": None}, {"verdict": None}):
        write_state(tmp_path, {**state, **left})
        with pytest.raises(UserError, match="not finished"):
            BestCandidate(str(tmp_path))


class Prose(MultipleChoice):
    """For a task whose answers are texts."""

    votes = False


def test_texts_cannot_be_voted_on(run: RunFolder, place: Path, singles: Any) -> None:
    prose = Prose("tiny", str(place / "tiny.json"))
    assert "cannot be voted on" in refused(lambda: VotingCandidate(singles), prose)
