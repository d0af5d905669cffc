"""Items beyond the model's context: counted before anything is written, refused, dropped or cut."""

import html
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import searches
from finetune_runs import tune
from finetune_runs import words as finetune_words

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine, HFModel
from swarm.engine.tokenization import encode_prompt
from swarm.errors import UserError
from swarm.evaluation.evaluation import Evaluation, format_result
from swarm.evaluation.positions import SingleExpertsCandidate
from swarm.evaluation.voting import VotingCandidate
from swarm.export.model_card import ModelCard
from swarm.export.source import read_source
from swarm.loop.prompt_stats import fit_to_context
from swarm.pool.pool import Pool
from swarm.report.build import build_report
from swarm.report.html import render_page
from swarm.runs.verdict import read_verdict
from swarm.scorers.llm_judge import LLMJudge
from swarm.scorers.rules import Regex
from swarm.tasks.abstain import Abstain
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.free_text import FreeText
from swarm.tasks.mixture import Mixture
from swarm.tasks.multiple_choice import MultipleChoice
from swarm.tasks.perplexity import Perplexity
from swarm.ui.run_data import load_run_series

CONTEXT = 512
LONG = "the question is which of the answers is right " * 60


@pytest.fixture(scope="module")
def words(tiny_llama: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


def data(folder: Path, field: str = "question") -> str:
    """Four dev items and four test items; number 2 and number 11 are long."""

    def item(number: int) -> dict[str, Any]:
        text = LONG * (1 + number % 10) if number in (2, 11) else "which one"
        choices = {"A": f"one {number}", "B": "two"}
        return {"id": number, field: f"{text}, {number}?", "choices": choices, "answer": "A"}

    path = folder / "items.json"
    splits = {"dev": range(4), "test": range(10, 14)}
    path.write_text(json.dumps({s: [item(n) for n in rows] for s, rows in splits.items()}))
    return str(path)


def choice(folder: Path, **more: Any) -> MultipleChoice:
    return MultipleChoice("tiny", data(folder), **more)


KINDS: dict[str, Any] = {
    "logits": lambda folder, **more: choice(folder, scoring="logits", **more),
    "text": lambda folder, **more: choice(folder, scoring="text", **more),
    "generate": choice,
    "chat": lambda folder, **more: choice(folder, chat=True, **more),
    "logprob": lambda folder, **more: ExactMatch("tiny", data(folder), signal="logprob", **more),
    "match": lambda folder, **more: ExactMatch("tiny", data(folder), **more),
    "abstain": lambda folder, **more: Abstain("tiny", data(folder), **more),
    "written": lambda folder, **more: FreeText(
        "tiny", Regex("(a)"), data(folder, "prompt"), chat=True, **more
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_is_named(kind: str, tmp_path: Path, words: Any) -> None:
    with pytest.raises(UserError) as error:
        fit_to_context(KINDS[kind](tmp_path), words, CONTEXT)
    said = str(error.value)
    assert "1 of 4 dev items do not fit" in said and "item 2, needs" in said and "\n" not in said
    assert "task.too_long=drop or truncate" in said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_dropped_or_truncated_it_fits(kind: str, policy: str, tmp_path: Path, words: Any) -> None:
    task = KINDS[kind](tmp_path, too_long=policy)
    before = {split: list(task.items(split)) for split in ("dev", "test")}
    told = fit_to_context(task, words, CONTEXT)
    assert len(told) == 2 and "1 of 4 dev" in told[0] and policy[:4] in told[0]
    after = {split: list(task.items(split)) for split in ("dev", "test")}
    assert [item["id"] for item in after["dev"]] == [0, 1, 3] if policy == "drop" else [0, 1, 2, 3]
    same = [item for item in before["test"] if item["id"] != 11]
    assert [item for item in after["test"] if item["id"] != 11] == same
    if policy == "truncate":
        (cut,) = [item for item in after["dev"] if item["id"] == 2]
        field = "prompt" if kind == "written" else "question"
        assert before["dev"][2][field].endswith(cut[field]) and len(cut[field]) > 500
        request = task.run([cut]).send(None)[0]
        size = len(encode_prompt(words, request.prompt)) + max(request.max_new_tokens, 1)
        assert CONTEXT - 60 < size <= CONTEXT
    assert fit_to_context(task, words, CONTEXT) == []


def test_new_tokens_count(tmp_path: Path, words: Any) -> None:
    task = ExactMatch("tiny", data(tmp_path), max_new_tokens=510)
    with pytest.raises(UserError, match="4 of 4 dev items do not fit"):
        fit_to_context(task, words, CONTEXT)


def test_a_part_of_a_mixture_names_its_key(tmp_path: Path, words: Any) -> None:
    mixture = Mixture("both", {"one": choice(tmp_path), "two": choice(tmp_path)}, "mean")
    with pytest.raises(UserError, match=r"task\.tasks\.one\.too_long=drop"):
        fit_to_context(mixture, words, CONTEXT)
    parts = {name: choice(tmp_path, too_long="drop") for name in ("one", "two")}
    mixture = Mixture("both", parts, "mean")
    assert len(fit_to_context(mixture, words, CONTEXT)) == 4 and len(mixture.items("dev")) == 6


def test_a_window_is_never_cut(tmp_path: Path, words: Any) -> None:
    (tmp_path / "text.txt").write_text(LONG * 6)
    settings = {"file": str(tmp_path / "text.txt"), "window": 600, "context": 9000}
    with pytest.raises(UserError, match="do not fit"):
        fit_to_context(Perplexity(**settings), words, CONTEXT)  # type: ignore[arg-type]
    task = Perplexity(**settings, too_long="truncate")  # type: ignore[arg-type]
    windows = [item["answer"] for item in task.items("dev")]
    assert fit_to_context(task, words, CONTEXT)
    assert [item["answer"] for item in task.items("dev")] == windows
    with pytest.raises(UserError, match="cannot be truncated"):
        fit_to_context(
            Perplexity(**{**settings, "window": 6000}, too_long="truncate"), words, CONTEXT
        )  # type: ignore[arg-type]


def test_a_judge_on_this_machine_has_room_too(tmp_path: Path, words: Any, tiny_llama: Path) -> None:
    path = Path(data(tmp_path, "prompt"))
    short = json.loads(path.read_text().replace(LONG * 3, LONG).replace(LONG * 2, LONG))
    path.write_text(json.dumps(short))
    judge = LLMJudge(HFModel(BaseModel(str(tiny_llama))), max_new_tokens=8)
    with pytest.raises(UserError, match="do not fit into the judge's 512 tokens"):
        fit_to_context(FreeText("judged", judge, str(path)), words, 1e6)
    task = FreeText("judged", judge, str(path), too_long="truncate")
    with pytest.raises(UserError, match=r"not truncated: set task\.too_long=drop"):
        fit_to_context(task, words, 1e6)


def test_when_all_are_dropped_none_are_left(tmp_path: Path, words: Any) -> None:
    with pytest.raises(UserError, match="no item would remain"):
        fit_to_context(choice(tmp_path, too_long="drop"), words, 8)


@pytest.mark.parametrize("scoring", ["logits", "generate"])
def test_a_search_refuses_before_it_writes(
    scoring: str, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    file = data(tmp_path)
    more = {"task__file": file, "task__scoring": scoring}
    done = searches.run(searches.arguments(tmp_path, tiny_llama, tiny_pool, **more))
    assert done.returncode == 1 and "item 2, needs" in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not (tmp_path / "search").exists()


def test_a_search_without_the_dropped_says_and_records_it(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    more = {"task__file": data(tmp_path), "task__too_long": "drop", "optimizer__max_iterations": 1}
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool, **more)
    for _ in range(2):
        done = searches.run(command)
        assert done.returncode == 0, done.stderr
        assert "1 of 4 dev items do not fit" in done.stderr and "1 dropped" in done.stderr
    folder = tmp_path / "search" / "run"
    state = json.loads((folder / "state.json").read_text())
    assert len(state["too_long"]) == 2 and len(searches.answers(folder, 0)["0"]) == 3
    assert "1 dropped" in (folder / "log.txt").read_text()
    assert read_verdict(state).settings["test_items"]
    # The caveats of the terminal's summary, the report, the page and the card name both splits.
    lines = [f"{line}." for line in state["too_long"]]
    assert set(lines) <= set(done.stdout.splitlines())
    card = ModelCard(read_source(str(folder)), False, None, "card", {}, "").render()
    assert all(html.escape(line) in render_page(build_report(folder)) for line in lines)
    assert set(lines) <= set(card.splitlines()) and set(lines) <= set(
        load_run_series(folder).sentences
    )


@pytest.mark.parametrize("signal", ["accuracy", "logprob"])
@pytest.mark.parametrize(("split", "item"), [("dev", 2), ("test", 11)])
def test_an_evaluation_fits_the_split_asked_for(
    signal: str, split: str, item: int, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    """Counts, constants and warnings are of that split; long items of the other are no matter."""
    base = BaseModel(str(tiny_llama))
    candidate = SingleExpertsCandidate(base, Pool(tiny_pool), HFEngine("stacked"))

    def evaluate(too_long: str, **more: Any) -> Evaluation:
        task = ExactMatch("tiny", data(tmp_path), signal=signal, too_long=too_long, **more)
        return Evaluation(task, candidate, split, "cpu", str(tmp_path / "out"))

    with pytest.raises(UserError, match=f"1 of 4 {split} items .* item {item}, needs"):
        evaluate("refuse").run()
    asked = evaluate("drop")
    result = asked.run()
    (line,) = result["too_long"]
    assert f"1 of 4 {split} items" in line and "1 dropped" in line
    assert result["items"] == 3 and result["voices"][0]["n"] == 3
    assert result["constant_answers"][split]["n"] == 3
    assert item not in [row["id"] for row in asked.answer_rows()]
    assert evaluate("drop").run() == result
    assert f"tiny, {split}, 3 items" in format_result(result)
    assert f"{line}." in format_result(result).splitlines()
    # The other split alone is too long.
    other = {"dev": "test", "test": "dev"}[split]
    rows = json.loads((tmp_path / "items.json").read_text())
    rows[split] = [row for row in rows[split] if row["id"] != item]
    (tmp_path / "half.json").write_text(json.dumps(rows))
    task = ExactMatch("tiny", str(tmp_path / "half.json"), signal=signal)
    assert len(task.items(other)) == 4
    assert "too_long" not in Evaluation(task, candidate, split, "cpu").run()
    # A vote by utilities on dev reads dev too.
    vote = VotingCandidate(candidate, "weighted")
    with pytest.raises(UserError, match="1 of 4 dev items"):
        Evaluation(ExactMatch("tiny", data(tmp_path)), vote, split, "cpu").run()


def test_a_fine_tuning_says_and_records_what_was_dropped(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"task.file": data(tmp_path), "task.too_long": "drop", "steps": 2, "every": 1}
    keys |= {"expert": "amber", "holdout": 0.34}
    metrics = tune(finetune_words(tmp_path, tiny_llama, tiny_pool, "run", **keys))
    assert metrics["examples"] == 2 and len(metrics["too_long"]) == 2
    shown = capsys.readouterr().out.splitlines()
    assert {f"{line}." for line in metrics["too_long"]} <= set(shown)
    card = ModelCard(
        read_source(str(tmp_path / "search" / "run")), False, None, "card", {}, ""
    ).render()
    assert {f"{line}." for line in metrics["too_long"]} <= set(card.splitlines())


def test_nine_hundred_items_cost_little(tiny_llama: Path, tmp_path: Path, words: Any) -> None:
    import time

    shutil.copy(searches.choice_file(tmp_path / "many.json", 300, 600), tmp_path / "copy.json")
    task = MultipleChoice("many", str(tmp_path / "copy.json"), scoring="logits")
    began = time.monotonic()
    fit_to_context(task, words, CONTEXT)
    assert time.monotonic() - began < 40
