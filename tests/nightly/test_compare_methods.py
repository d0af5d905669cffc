"""Methods on the same budget, through the command line, on the tiny model."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import searches
import small_evaluations
import tiny

from swarm.compare_methods import parse_comparison
from swarm.runs.folder import RunFolder
from swarm.studies import method_comparison

METHODS = "methods=[pso,random,vote]"


def compare(*words: str, timeout: float = 300) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "swarm.compare_methods", *words],
        cwd=searches.ROOT,
        env=searches.environment(),
        text=True,
        capture_output=True,
        timeout=timeout,
    )


def keys(folder: Path, base: Path, pool: Path) -> list[str]:
    """A small comparison's command line."""
    given = searches.arguments(folder, base, pool, "mine")
    swarm = ("optimizer.max_iterations", *searches.PLAIN)
    return [word for word in given if not word.startswith(swarm)]


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_pool: Path
) -> tuple[Path, list[str], str]:
    place = tmp_path_factory.mktemp("compare")
    command = [*keys(place, tiny_llama, tiny_pool), METHODS, "seeds=2", "budget=9"]
    result = compare(*command)
    assert result.returncode == 0, result.stderr
    return place / "search" / "mine", command, result.stdout


def assert_drawn(picture: str, names: list[str]) -> None:
    """Each method has a group with a line, numbered in order, and its name in the legend."""
    groups = re.findall(r'<g id="series-(\d+)">\s*<path d="M', picture)
    assert sorted(groups) == [str(n) for n in range(len(names))]
    legend = [
        words for words in re.findall(r"<text [^>]*>([^<]*)</text>", picture) if words in names
    ]
    assert legend == names


def test_a_dry_run_has_the_sum_of_all_searches(
    done: tuple[Path, list[str], str], tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    words = [*keys(tmp_path, tiny_llama, tiny_pool), METHODS, "seeds=2", "budget=30"]
    dry = compare(*words, "optimizer.max_iterations=1", "dry_run=true")
    assert dry.returncode == 0, dry.stderr
    lines = dry.stdout.splitlines()
    assert lines[0].startswith("pso: 2 searches, 2 left, each dry run: at most ")
    assert lines[1].startswith("random: 2 searches, 2 left, each dry run: at most ")
    assert lines[2] == "the first of them:" and lines[3].startswith("dry run: at most ")
    assert not (tmp_path / "search").exists()
    # What is finished is not counted, and seeds added later are.
    finished = compare(*done[1], "dry_run=true").stdout.splitlines()
    assert finished == ["pso: 2 searches, all finished", "random: 2 searches, all finished"]
    more = [word.replace("seeds=2", "seeds=3") for word in done[1]]
    begun = compare(*more, "dry_run=true").stdout
    assert "pso: 3 searches, 1 left, each dry run: at most" in begun


def test_every_method_has_the_same_budget(done: tuple[Path, list[str], str]) -> None:
    folder, _, output = done
    found = json.loads((folder / "methods.json").read_text())
    searches_of = found["methods"][:2]
    assert [row["method"] for row in searches_of] == ["pso", "random"]
    for row in searches_of:
        assert row["prompts"] == [9 * 12] * 2, "charged alike, whatever another had asked"
        assert len(row["dev"]) == len(row["test"]) == len(row["seconds"]) == 2
        assert row["test_interval"][0] <= sum(row["test"]) / 2 <= row["test_interval"][1]
        assert row["gain"]["n"] == 16
    vote = found["methods"][2]
    assert vote["method"] == "vote" and vote["prompts"] == [4 * 12]
    assert "4 prompts per answer" in vote["found"][0]
    shared = [row["prompts_shared"] for row in searches_of]
    assert shared[0][0] == 0 and min(shared[1]) >= 4 * 12, "the experts are known"
    assert output.strip() == (folder / "methods.md").read_text().strip()
    assert "Highest on test: " in output and "best initial expert" in output


def test_the_plot_has_a_line_for_each(done: tuple[Path, list[str], str]) -> None:
    picture = (done[0] / "methods.svg").read_text()
    assert_drawn(picture, ["pso", "random"])


def test_it_goes_on_where_it_stopped(done: tuple[Path, list[str], str]) -> None:
    folder, command, output = done
    before = searches.tree(folder)
    again = compare(*command)
    assert again.stdout == output and searches.tree(folder) == before
    assert again.stderr.count("already finished") == 4
    given = [word for word in command if not word.startswith("methods=")]
    # The vote has weights from de's dev answers now, which are those that it had from pso's.
    more = compare(*given, "methods=[de,vote,pso]")
    assert more.returncode == 0, more.stderr
    assert more.stderr.count("already finished") == 2 and more.stderr.count("searching") == 2


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["methods=[pso,pso]"], "methods: 'pso' is listed more than once"),
        (["methods=pso"], "methods=pso: must be a list"),
        (["methods=[nothing]"], "optimizer=nothing: no such option"),
        (["methods=[vote]"], "need a search for the experts' dev answers"),
        (["methods=['pso foo']"], "methods: 'pso foo' must be an optimizer"),
        (["methods=[pso]", "seeds=0"], "seeds=0: must be an integer"),
        (["methods=[pso]", "budget=2"], "budget=2: pso needs at least 4 positions"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path, words: list[Any], error: str
) -> None:
    result = compare(*keys(tmp_path, tiny_llama, tiny_pool), *words)
    assert result.returncode and error in result.stderr, result.stderr
    assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "search").exists()


def test_who_cannot_vote_is_told_before_any_search(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    given = [word for word in keys(tmp_path, tiny_llama, tiny_pool) if "task" not in word]
    result = compare(*given, "task=human", "methods=[random,vote]")
    assert result.returncode and "which cannot be voted on; leave it out" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "search").exists()


def test_only_ends_that_nobody_set_are_lifted(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    def ends(*words: str) -> list[tuple[int, int]]:
        told = [*keys(tmp_path, tiny_llama, tiny_pool), "budget=70", "seeds=1", *words]
        made = [m.searches[0].config["optimizer"] for m in parse_comparison(told).methods]
        return [(one["patience"], one["max_iterations"]) for one in made]

    pair = "methods=[pso,'pso optimizer.patience=5']"
    assert ends(pair) == [(70, 70), (5, 70)]
    assert ends(pair, "optimizer.max_iterations=3") == [(70, 3), (5, 3)]


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_pool: Path
) -> dict[str, RunFolder]:
    """Searches on each signal, and one that saw half of dev: its best expert is another."""
    place = tmp_path_factory.mktemp("runs")
    wanted: dict[str, dict[str, Any]] = {
        "plain": {},
        "dense": {"task__signal": "both"},
        "nats": {"task__signal": "logprob"},
        "half": {"confirm": 0.5},
    }
    return {
        name: RunFolder(
            small_evaluations.searched(
                place,
                tiny_llama,
                tiny_pool,
                name=name,
                ensemble=0,
                optimizer__max_iterations=1,
                **more,
            )
        )
        for name, more in wanted.items()
    }


def test_a_search_on_a_signal_is_told_of_and_not_plotted(
    runs: dict[str, RunFolder], tmp_path: Path
) -> None:
    rows = [("plain", [runs["plain"]]), ("dense", [runs["dense"]])]
    found = method_comparison.summarize_methods(rows, {}, None, 9)
    method_comparison.write_comparison(tmp_path, found, rows)
    assert_drawn((tmp_path / "methods.svg").read_text(), ["plain"])
    text = method_comparison.format_comparison(found)
    assert (
        "Not in the plot, as their signal has another unit: dense (signal: both)." in text
        and "takes two requests" in text
    )
    assert "scored by the task's metric at the end" not in text
    alone = method_comparison.summarize_methods(rows[:1], {}, None, 9)
    assert "Not in the plot" not in method_comparison.format_comparison(alone)
    method_comparison.write_comparison(
        tmp_path, method_comparison.summarize_methods(rows[1:], {}, None, 9), rows[1:]
    )
    assert not (tmp_path / "methods.svg").exists()


def test_another_start_than_the_heads_is_named(runs: dict[str, RunFolder]) -> None:
    plain, half = runs["plain"], runs["half"]
    names = [run.experts[run.best_expert()[1]] for run in (plain, half)]
    assert names[0] != names[1], "choose another share to confirm by"
    rows = [("all", [plain]), ("half", [half])]
    text = method_comparison.format_comparison(
        method_comparison.summarize_methods(rows, {}, None, 9)
    )
    assert f"whose test score is not that of the first line with half: {names[1]} (" in text
    same = method_comparison.format_comparison(
        method_comparison.summarize_methods(rows[:1], {}, None, 9)
    )
    assert "Each gain is relative to" not in same


def test_weights_are_read_where_dev_is_graded(runs: dict[str, RunFolder]) -> None:
    plain, dense, nats = runs["plain"], runs["dense"], runs["nats"]
    assert method_comparison.find_start_run([dense, plain], plain.experts) is dense, (
        "it keeps what was right"
    )
    assert method_comparison.find_start_run([nats, plain], plain.experts) is plain
    assert method_comparison.find_start_run([nats], plain.experts) is None
    assert method_comparison.find_start_run([plain], ["others"]) is None


def test_experts_answer_together_beside_rows_and_signals(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    """Nothing of such a search can be read for them, and one that fails takes no other along."""
    taken = tmp_path / "search" / "mine" / "pack"
    taken.mkdir(parents=True)
    (taken / "result.json").write_text("{}")
    words = [
        "pool.base_row=true",
        "seeds=1",
        "budget=7",
        "task.signal=logprob",
        "methods=[random,vote,route,pack]",
    ]
    result = compare(*keys(tmp_path, tiny_llama, tiny_pool), *words)
    assert result.returncode == 1 and "methods: pack: out=" in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].endswith("the table was written without it")
    found = json.loads((taken.parent / "methods.json").read_text())
    random, vote, route = found["methods"]
    assert vote["found"] == ["all experts together, 4 prompts per answer"]
    assert route["found"] == ["all experts together, 1 prompts per answer"]
    assert (vote["prompts"], route["prompts"]) == ([0], [4 * 12]), "routing has asked dev"
    assert random["signal"] == "logprob" and not (taken.parent / "methods.svg").exists()
    text = (taken.parent / "methods.md").read_text()
    assert (
        "Not in the table: pack (out=" in text and "scored by the task's metric at the end" in text
    )


def test_one_adapter_of_all_experts_data(tmp_path: Path, tiny_llama: Path) -> None:
    pool = tiny.pool(tiny_llama, tmp_path / "pool")
    words = [
        *keys(tmp_path, tiny_llama, pool),
        "methods=[random,data_merge]",
        "seeds=1",
        "budget=7",
    ]
    result = compare(*words)
    assert result.returncode == 1, "no expert has its data there"
    assert "its training data are missing; put them into" in result.stderr
    row = json.dumps({"prompt": "Is there a path?", "response": "Yes"}) + "\n"
    for expert in pool.iterdir():
        (expert / "train.jsonl").write_text(row * 8)
    result = compare(*words)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "search" / "mine"
    merged = json.loads((folder / "methods.json").read_text())["methods"][1]
    assert merged["found"] == ["one adapter trained on the data of all experts"]
    assert merged["prompts"] == [0]
    saved = folder / "data_merge_adapter" / "adapter_model.safetensors"
    before = saved.stat().st_mtime_ns
    assert compare(*words).returncode == 0 and saved.stat().st_mtime_ns == before


def test_help_says_how() -> None:
    result = compare("--help")
    assert result.returncode == 0 and "methods:" in result.stdout and "budget:" in result.stdout
