"""Methods on the same budget, through the command line, on the tiny model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import searches

METHODS = "methods=[pso,random,vote,route,'pso pool.base_row=true']"


def compare(*words: str, timeout: float = 300) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "swarm.compare_methods", *words],
        cwd=searches.ROOT, env=searches.environment(), text=True, capture_output=True,
        timeout=timeout,
    )  # fmt: skip


def keys(folder: Path, base: Path, pool: Path) -> list[str]:
    """A small comparison's command line."""
    given = searches.arguments(folder, base, pool, "mine")
    return [word for word in given if not word.startswith("optimizer.max_iterations")]


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_pool: Path
) -> tuple[Path, list[str], str]:
    place = tmp_path_factory.mktemp("compare")
    command = [*keys(place, tiny_llama, tiny_pool), METHODS, "seeds=2", "budget=9"]
    result = compare(*command)
    assert result.returncode == 0, result.stderr
    return place / "search" / "mine", command, result.stdout


@pytest.mark.slow
def test_every_method_has_the_same_budget(done: tuple[Path, list[str], str]) -> None:
    folder, _, output = done
    found = json.loads((folder / "methods.json").read_text())
    searches_of = found["methods"][:3]
    assert [row["method"] for row in searches_of] == ["pso", "random", "pso pool.base_row=true"]
    for row in searches_of:
        assert row["prompts"] == [9 * 12] * 2, "charged alike, whatever another had asked"
        assert len(row["dev"]) == len(row["test"]) == len(row["seconds"]) == 2
        assert row["test_interval"][0] <= sum(row["test"]) / 2 <= row["test_interval"][1]
        assert row["gain"]["n"] == 16
    vote, route = found["methods"][3:]
    assert [vote["method"], route["method"]] == ["vote", "route"] and vote["prompts"] == [4 * 12]
    assert "4 prompts an answer" in vote["found"][0] and "1 prompts an answer" in route["found"][0]
    shared = [row["prompts_shared"] for row in searches_of]
    assert shared[0][0] == 0 and min(shared[1]) >= 4 * 12, "the experts are known"
    assert output.strip() == (folder / "methods.md").read_text().strip()
    assert "Highest on test: " in output and "best initial expert" in output


@pytest.mark.slow
def test_the_plot_has_a_line_for_each(done: tuple[Path, list[str], str]) -> None:
    picture = (done[0] / "methods.svg").read_text()
    assert picture.count("<path") >= 3 and "random" in picture


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(done: tuple[Path, list[str], str]) -> None:
    folder, command, output = done
    before = searches.tree(folder)
    again = compare(*command)
    assert again.stdout == output and searches.tree(folder) == before
    assert again.stderr.count("done before") == 6
    more = [word for word in command if not word.startswith("methods=")]
    more = compare(*more, "methods=[pso,de]")
    assert more.returncode == 0, more.stderr
    assert more.stderr.count("done before") == 2 and more.stderr.count("searches") == 2


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["methods=[pso,pso]"], "methods: 'pso' is there more than once"),
        (["methods=pso"], "methods=pso: must be a list"),
        (["methods=[nothing]"], "optimizer=nothing: there is no such option"),
        (["methods=[vote]"], "needs a search too"),
        (["methods=['pso foo']"], "methods: 'pso foo' must be an optimizer and keys"),
        (["methods=[pso]", "seeds=0"], "seeds=0: must be a whole number"),
        (["methods=[pso]", "budget=2"], "the 4 experts alone take 4 x 12"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path, words: list[Any], error: str
) -> None:
    result = compare(*keys(tmp_path, tiny_llama, tiny_pool), *words)
    assert result.returncode and error in result.stderr, result.stderr
    assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "search").exists()


def test_help_says_how() -> None:
    result = compare("--help")
    assert result.returncode == 0 and "methods:" in result.stdout and "budget:" in result.stdout
