"""The commands of a consortium as they are typed; members are functions and an endpoint."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import consortium_members
import pytest
import searches
from click.testing import CliRunner, Result
from consortium_members import BLUE, DEAD, GREEN, JUDGE, RANKER

from swarm.consortium import install_alias
from swarm.consortium.cli import COMMANDS, consortium
from swarm.multi_agent.consortium.settings import STRATEGIES
from swarm.multi_agent.consortium.store import ConsortiumStore, RunLog

TWO = ("-m", BLUE, "-m", GREEN, "--arbiter", JUDGE)
ONCE = (*TWO, "--max-iterations", "1")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh folder of llm's, and nobody's keys."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
    for key in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "TOGETHER_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.chdir(tmp_path)
    consortium_members.heard.clear()
    yield tmp_path


def typed(*words: str, stdin: str = "") -> Result:
    """What a command line comes to."""
    return CliRunner().invoke(consortium, words, input=stdin, prog_name="consortium")


def fine(*words: str, stdin: str = "") -> Result:
    """The same, of one without an error."""
    done = typed(*words, stdin=stdin)
    assert done.exit_code == 0, done.stderr
    return done


def result(*words: str, stdin: str = "") -> Any:
    """A run's result."""
    return json.loads(fine(*words, "--json", "--quiet", stdin=stdin).stdout)


def test_the_answer_alone_goes_to_standard_output() -> None:
    done = fine("Why?", *TWO)
    assert done.stdout == "answer 3\n"
    told = done.stderr.splitlines()
    assert told[0].startswith(f"as the options say: {BLUE}, {GREEN} answer, {JUDGE} judges; str")
    line = rf"iteration 1, member {re.escape(BLUE)}: \d+\.\d s, 0 tokens"
    assert any(re.fullmatch(line, one) for one in told)
    assert "iteration 2 of at most 3: confidence 0.7" in told
    assert told[-3].startswith("confidence 0.80 after 3 iterations (confidence 0.8 reached 0.8); 9")
    assert told[-2:] == ["analysis: blue was said", "dissent: one says green"]
    assert fine("Why?", *TWO, "--quiet").stderr == ""
    out = fine("Why?", *TWO, "--raw", "--max-iterations", "1").stdout
    assert out.startswith("answer 5\nconfidence 0.95 after 1 iteration")
    assert f"--- iteration 1: {GREEN} #1, confidence 0.40\nIt is green.\n" in out
    assert f"arbiter {JUDGE}\n<analysis>blue was said" in out
    assert "\x1b" not in out and "\N{SYMBOL FOR ESCAPE}[2J" in out


def test_run_may_be_left_out_and_nearly_a_command_is_asked_about() -> None:
    assert "2 iterations" in fine("run", "Why?", *TWO, "--confidence-threshold", "70%").stderr
    consortium_members.heard.clear()
    done = typed("lst")
    assert done.exit_code == 2 and "did you mean the command list?" in done.stderr
    assert "consortium run lst" in done.stderr and not consortium_members.heard
    assert "answer 1" in fine("run", "lst", *ONCE).stdout
    assert set(COMMANDS) <= set(fine("--help").stdout.split())


def test_standard_input_belongs_to_the_prompt() -> None:
    assert result(*ONCE, stdin="Why?\n")["original_prompt"] == "Why?"
    assert result("Sum up:", *ONCE, stdin="a text\n")["original_prompt"] == "Sum up:\n\na text"
    assert result("Why?", *ONCE, "--no-stdin", stdin="a")["original_prompt"] == "Why?"
    assert "the prompt is empty" in typed(*ONCE, stdin=" \n").stderr


# Words after "Why?" and two members, and the line with which they are refused.
MISTAKES = {
    "--output no/folder/x.json": "--output no/folder/x.json: cannot be written",
    "--min-iterations 4": "min_iterations=4: is above max_iterations=3",
    "--keep 1": "--keep has no effect with strategy default",
    "--budget 2": "the first iteration takes 3 calls",
    "--dry-run --json": "--json has no effect with --dry-run",
    "--raw --json": "--raw has no effect with --json",
    "--system no/rules.txt": "no/rules.txt: no such file",
    "more": "unexpected extra argument",
    "--confidence-threshold 1.5": "or 10 to 100 as percent",
}
OTHER_MISTAKES = {
    "Why? -n 2": "--count has no effect without -m",
    f"Why? -m {BLUE} --arbiter {JUDGE}:2": "cannot have several samples",
    f"Why? -m nobody --arbiter {JUDGE}": "nobody: the model's location is unknown",
    f"Why? -m gpt-4oo --arbiter {JUDGE}": "gpt-4oo: no such model; did you",
    "show nobody": "not found",
    "remove nobody": "no consortium of this name is saved",
    f"save council -m {BLUE}": "save needs --arbiter MODEL",
    f"save council --arbiter {BLUE}": "save needs members",
    f"save council -m council --arbiter {BLUE}": "would contain itself",
    f"save gpt-4o {shlex.join(TWO)}": "llm already has a model of this name",
    "run-info ''": "run-info needs the id of a run",
    "run-info 12": "no run with this id",
    "runs --since soon": "is not a date",
}


def test_mistakes_are_told_in_one_line_and_nobody_is_asked() -> None:
    after = {f"Why? {shlex.join(TWO)} {words}": told for words, told in MISTAKES.items()}
    for words, told in {**after, **OTHER_MISTAKES}.items():
        done = typed(*shlex.split(words))
        assert done.exit_code in (1, 2) and done.stdout == "" and not consortium_members.heard
        assert told in done.stderr and done.stderr.splitlines()[-1].startswith("Error: "), words
    assert not RunLog().list() and not ConsortiumStore().list_names()


def test_a_dead_member_is_a_warning_and_all_dead_an_error() -> None:
    done = fine("Why?", "-m", DEAD, *ONCE)
    assert done.stdout == "answer 1\n" and f"{DEAD} failed: ValueError: no power" in done.stderr
    done = typed("Why?", "-m", f"{DEAD}:2", "--arbiter", JUDGE, "--quiet")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and "Error: iteration 1: 0 of 2 members" in done.stderr
    assert [run["status"] for run in RunLog().list()] == ["failed", "done"]


def test_a_preset_can_be_planned() -> None:
    done = fine("Why?", "--dry-run", "--consortium", "local")
    assert "consortium local: local/base" in done.stderr and "4 to 6 calls in all" in done.stdout
    done = fine("--dry-run", "--consortium", "council", "--max-iterations", "2")
    assert "strategy peer-review" in done.stdout and not RunLog().list()


ALL = f"""
-m {BLUE}:2,role=critic --model {GREEN} --models {BLUE},temperature=0.5 -n 3
--arbiter-model {JUDGE} --fallback {RANKER} --judging-method elimination --eliminate 2 --keep 3
--confidence-threshold 75 --max-iterations 5 --minimum-iterations 2 --system 'Be brief.'
--quorum 2 --seed 4 --budget 90 --max-cost 2.5
--temperature 0.1 --max-tokens 50 --timeout 9
"""


def test_every_option_is_saved_and_told() -> None:
    fine("save", "council", *shlex.split(ALL))
    each = {"temperature": 0.1, "max_tokens": 50, "timeout": 9.0}
    members = [{"model": BLUE, "count": 2, "role": "critic"}, {"model": GREEN, "count": 3}]
    members.append({"model": BLUE, "count": 3, "temperature": 0.5})
    expected: dict[str, Any] = {"members": [{**each, **member} for member in members]}
    expected |= {"arbiter": {"model": JUDGE, "count": 1, **each}}
    expected |= {"fallback": {"model": RANKER, "count": 1, **each}}
    others: dict[str, Any] = {"strategy": "elimination", "confidence_threshold": 0.75, "keep": 3}
    others |= {"max_iterations": 5, "min_iterations": 2, "system": "Be brief.", "eliminate": 2}
    others |= {"quorum": 2, "seed": 4, "budget": 90, "max_cost": 2.5}
    others["roles"] = None
    shown = json.loads(fine("show", "council", "--json").stdout)
    assert shown == {"name": "council", **expected, **others}
    assert json.loads(fine("list", "--json").stdout) == [shown]
    lines = fine("info", "council").stdout
    assert "max_cost: 2.5" in lines and f"member: {BLUE} x 2 (temperature 0.1" in lines
    Path("words.txt").write_text("From a file.\n")
    fine("save", "others", *TWO, "--system", "words.txt", "--role", "critic")
    other = ConsortiumStore().get("others")
    assert (other.system, other.strategy, other.roles) == ("From a file.", "roles", ("critic",))


def test_saved_ones_are_kept_replaced_and_removed() -> None:
    listed = fine("list").stdout
    assert "no consortium is saved" in listed and "preset classic:" in listed
    assert "use it as llm -m council" in fine("save", "council", *TWO).stdout
    done = fine("save", "council", "--consortium", "council", "--max-iterations", "7")
    assert done.stdout.startswith("replaced council: ")
    assert ConsortiumStore().get("council").max_iterations == 7
    fine("save", "above", "-m", "council", "-m", BLUE, "--arbiter", JUDGE)
    done = typed("save", "council", "-m", "above", "--arbiter", JUDGE)
    assert done.exit_code == 1 and "council would contain itself, by above" in done.stderr
    fine("remove", "above")
    assert result("Why?", "--consortium", "council", "--max-iterations", "1")["metadata"]["run"]
    assert RunLog().list()[0]["name"] == "council"
    fine("remove", "council")
    assert ConsortiumStore().list_names() == []


def test_runs_are_listed_and_shown() -> None:
    assert fine("runs").stdout == "no run is recorded\n"
    ranked = ("-m", BLUE, "-m", GREEN, "--arbiter", RANKER, "--strategy", "rank")
    fine("Who is right?", *ranked)
    fine("Why?", *TWO, "--no-log")
    (run,) = json.loads(fine("runs", "--json").stdout)
    assert run["strategy"] == "rank" and run["prompt"] == "Who is right?"
    assert run["id"][:12] in fine("runs", "--since", "2020-01-01").stdout
    shown = fine("run-info", run["id"][:6]).stdout
    assert "prompt: Who is right?" in shown and f"--- iteration 1: {GREEN} #1" in shown
    kept = json.loads(fine("run-info", run["id"], "--json-output").stdout)["result"]
    assert [one["model"] for one in kept["model_responses"]] == [BLUE, GREEN]


@pytest.mark.parametrize("package", ["swarm.consortium", "llm_consortium"])
def test_what_the_page_has_for_python_programs_runs(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (searches.ROOT / "docs" / "consortium.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = code.replace("from swarm.consortium ", f"from {package} ")
    install_alias()
    names = {"gpt-4o:2": f"{BLUE}:2", "claude-3-opus": GREEN, "gpt-4o": JUDGE}
    for name, ours in names.items():
        code = code.replace(f'"{name}"', f'"{ours}"')
    exec(code, {})
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "answer 4 0.9" and f"{GREEN} 1 It is green." in out


def test_the_page_names_all_commands_options_and_strategies() -> None:
    page = (searches.ROOT / "docs" / "consortium.md").read_text()
    group = click.Context(consortium)
    names = [*consortium.list_commands(group), *STRATEGIES]
    for command in (consortium.get_command(group, name) for name in ("run", "save")):
        assert command
        names += [word for one in command.params for word in one.opts if word[:2] == "--"]
    assert [name for name in names if f"`{name}" not in page] == []
