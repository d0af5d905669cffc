"""What every command says of itself, and how it ends."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import commands
import pytest
import searches
import yaml
from click.testing import CliRunner
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from swarm import __version__
from swarm.__main__ import list_commands
from swarm._util.cli import normalize_arguments
from swarm._util.config_help import MAIN_KEYS
from swarm._util.files import conf_folder
from swarm.consortium.cli import COMMANDS, consortium

PACKAGE = searches.ROOT / "swarm"
COMPOSED = ("search", "evaluate", "finetune")
WRITTEN = ("study", "export")
"""Entries whose help is a text of their module and a yaml."""


def swarm(*words: str, **how: Any) -> "subprocess.CompletedProcess[str]":
    """Run `python -m WORDS` to its end."""
    environment = {**searches.environment(), **how.pop("env", {})}
    given = {"cwd": searches.ROOT, "stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, **how}
    given.setdefault("stdout", subprocess.PIPE)
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, env=environment, text=True, timeout=300, **given)


def test_the_list_names_every_module_that_runs() -> None:
    """A module with a main has to be there, and in the form that the list reads."""
    paths = [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/__main__.py")]
    guarded = [p for p in paths if 'if __name__ == "__main__":' in p.read_text()]
    names = {p.parent.name if p.stem == "__main__" else p.stem for p in guarded} - {"swarm"}
    found = {one.name: one for one in list_commands()}
    assert set(found) == names and {"search", "ui", "compare", "study", "cache"} <= names
    out = swarm("swarm").stdout
    for name, one in found.items():
        assert one.about and one.example.startswith(f"python -m swarm.{name}"), one
        assert f"{name} " in out and one.about in out and one.example in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_list_has_flags_and_runs_a_command() -> None:
    assert swarm("swarm", "--version").stdout == f"model-swarms {__version__}\n"
    wrong = swarm("swarm", "serch")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: serch: no such command; did")
    assert "did you mean search?" in wrong.stderr and wrong.stderr.count("\n") == 1
    report = swarm("swarm", "report", "search/none")
    assert report.returncode == 1 and "search/none contains no search" in report.stderr


def test_every_command_without_an_output_ends_with_one_line() -> None:
    words = "cannot write the output: No space left on device"
    for name in ("swarm", *(f"swarm.{one.name}" for one in list_commands())):
        with Path("/dev/full").open("w") as full:
            # argparse ignores errors of an unbuffered output
            done = swarm(name, "--help", stdout=full, env={"PYTHONUNBUFFERED": ""})
        assert done.returncode == 1 and done.stderr.count("\n") == 1, (name, done.stderr)
        assert done.stderr.startswith("error: ") and words in done.stderr, name


def test_an_ascii_locale_is_no_failure(tmp_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    env = {**ascii_only, "PYTHONCOERCECLOCALE": "0"}
    done = swarm("swarm.cache", "info", "--file", "größer", cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.isascii()
    assert done.stdout.startswith("gr") and "er: no responses" in done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "swarm.search model.path=MODEL model=local pool.folder=POOL dry_run=true",
        "swarm.search --help",
        "swarm.pool check initial_experts --json",
        "swarm",
    ],
)
def test_a_reader_that_has_closed_the_output_ends_a_command_quietly(
    line: str, tiny_llama: Path, tiny_pool: Path
) -> None:
    line = line.replace("MODEL", str(tiny_llama)).replace("POOL", str(tiny_pool))
    read, write = os.pipe()
    os.close(read)
    try:
        done = swarm(*line.split(), stdout=write)
    finally:
        os.close(write)
    assert done.stderr == "" and done.returncode in (0, 1)


@pytest.mark.parametrize("name", COMPOSED)
def test_the_examples_of_a_composed_entry_are_valid(name: str) -> None:
    settings = yaml.safe_load((conf_folder() / f"{name}.yaml").read_text())
    lines = re.findall(
        rf"^ *python -m swarm\.{name} (.*)$", settings["hydra"]["help"]["template"], re.MULTILINE
    )
    assert lines, "no example"
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        for line in lines:
            words = normalize_arguments(shlex.split(line))
            if "-m" in words:  # a sweep: its first job
                words = [word.partition(",")[0] for word in words if word != "-m"]
            assert compose(name, overrides=words)


@pytest.mark.parametrize("name", [*COMPOSED, *WRITTEN, "moa", "serve"])
def test_help_has_examples(name: str) -> None:
    done = swarm(f"swarm.{name}", "--help")
    assert done.returncode == 0 and re.search(rf"  python -m swarm\.{name}\b", done.stdout)


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_commands_of_click_have_examples_that_they_understand(name: str | None) -> None:
    words = [name] if name else []
    prog = "python -m swarm.consortium"
    help_text = CliRunner().invoke(consortium, [*words, "--help"], prog_name=prog).output
    lines = re.findall(rf"^ *({re.escape(prog)} .*)$", help_text.partition("xample")[2], re.M)
    assert lines or (name is None and f"{prog} save" in help_text), help_text
    for line in lines:
        group = click.Context(consortium, info_name=prog)
        command = consortium.get_command(group, shlex.split(line)[3])
        assert command and command.make_context(str(name), shlex.split(line)[4:], group)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("search --nonsense", 2, "--nonsense: no such flag"),
        ("search optimizer=3", 2, "as in optimizer=pso"),
        ("search task=nlgraph_mini job=3", 2, "job.particles=5"),
        ("study nothing", 1, "no such study; allowed: ablation"),
        ("study compare seeds=0", 1, "seeds=0: must be an integer, at least 1"),
        ("report {broken}", 1, "has a rounds.jsonl that is not the record of a search"),
        ("report {odd}", 1, "rounds.jsonl is damaged"),
        ("evaluate task=nlgraph_mini out={odd}/rounds.jsonl", 1, "must be a folder"),
        ("search task=nlgraph_mini name=rounds.jsonl folder={odd}", 1, "cannot write"),
    ],
)
def test_a_mistake_is_one_line_with_a_hint(
    words: str, code: int, said: str, tmp_path: Path
) -> None:
    states = {
        "odd": "x",
        "broken": '{"identity": {}, "experts": [], "rounds": 5, "verdict": {}, '
        '"optimizer": {}, "finished": null}',
    }
    for name, text in states.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "rounds.jsonl").write_text(text)
    places: dict[str, Any] = {name: tmp_path / name for name in states}
    entry, *rest = words.format(**places).split()
    done = swarm(f"swarm.{entry}", *rest)
    assert done.returncode == code, done.stderr
    assert re.fullmatch(r"(search .*: loading\n)?", done.stdout)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr


@pytest.mark.parametrize("name", COMPOSED)
def test_help_lists_the_main_keys_in_a_line_each_and_the_groups_have_the_others(name: str) -> None:
    """The keys of the composed configuration, each with its default and the comment of its yaml."""
    done = commands.run(f"swarm.{name}", "--help")
    assert done.code == 0, done.err
    shown = re.findall(r"^  ([a-z][\w.]*)=\S*\s+\S", done.out, re.MULTILINE)
    assert shown == MAIN_KEYS[name].split() and len(done.out.splitlines()) < 45
    groups = done.out.partition("options of: ")[2].partition(".\n")[0].split(", ")
    every = "\n".join(commands.run(f"swarm.{name}", f"help={group}").out for group in groups)
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = compose(name, overrides=["name=x"] if name != "evaluate" else ["out=x"])

    def keys(tree: Any, prefix: str = "") -> set[str]:
        found = set()
        for key in tree:
            if key == "_target_" or OmegaConf.is_interpolation(tree, key):
                continue
            deep = OmegaConf.is_dict(tree[key]) and len(tree[key])
            found |= keys(tree[key], f"{prefix}{key}.") if deep else {f"{prefix}{key}"}
        return found

    listed = set(re.findall(r"^  ([a-z][\w.]*)=", every, re.MULTILINE)) | {*groups}
    assert keys(config) <= listed, keys(config) - listed
    assert not re.search(r"\.(_target_|defaults)", every)


def test_help_of_one_group_and_of_a_chosen_option() -> None:
    task = swarm("swarm.search", "help=task").stdout
    assert "task=gsm8k" in task and "task.dev_limit=null" in task and "pool.folder" not in task
    scorer = swarm("swarm.search", "help=scorer").stdout
    assert "scorer@task.scorer=judge" in scorer and "task.scorer.model.base_url=" in scorer
    experiment = swarm("swarm.search", "help=experiment").stdout
    assert "experiment=paper" in experiment and "@package" not in experiment
    other = swarm("swarm.search", "optimizer=cmaes", "help=optimizer").stdout
    assert "optimizer=cmaes (key" in other and "optimizer.inertia" not in other
    inherited = swarm("swarm.search", "task=human", "help=task").stdout
    assert "task.scorer.model.base_url=" in inherited
    wrong = swarm("swarm.search", "help=tsk")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
    assert wrong.stderr.startswith("error: help=tsk: no such group; did you mean help=task?")


def test_the_resolved_configuration_is_printed() -> None:
    done = swarm("swarm.search", "--cfg", "job", "--resolve")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert config["name"].startswith("nlgraph_mini_") and config["executor"]["gpus"] == []
