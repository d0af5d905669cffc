"""What the commands share: exit codes, option names, numbers, how an extra is installed."""

import json
from pathlib import Path

import click
import pytest
from omegaconf import OmegaConf

from swarm import __version__
from swarm._util.cli import instantiate_config
from swarm._util.options import run_click
from swarm.errors import CHECKOUT, UserError, install_command


def test_the_exit_code_is_the_commands_or_its_errors(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes: dict[str, object] = {
        "": None,
        "code": 3,
        "refused": UserError("no such \x1b[2Jfolder", 2),
        "stopped": KeyboardInterrupt(),
        "wrong": ZeroDivisionError(),
    }

    @click.command()
    @click.argument("how")
    def command(how: str) -> object:
        if isinstance(outcome := outcomes[how], BaseException):
            raise outcome
        return outcome

    assert (run_click(command, [""], "name"), run_click(command, ["code"], "name")) == (0, 3)
    assert capsys.readouterr() == ("", "")
    assert run_click(command, ["refused"], "name") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: no such ") and "\x1b" not in said and said.count("\n") == 1
    assert run_click(command, ["--unknown"], "name") == 2
    assert capsys.readouterr().err.startswith("error: No such option")
    assert run_click(command, ["stopped"], "name") == 130
    assert capsys.readouterr().err.strip() == "stopped"
    with pytest.raises(ZeroDivisionError):
        run_click(command, ["wrong"], "name")


def test_an_extra_comes_from_where_the_package_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's record of an installed package; none is written for one found by --find-links."""
    monkeypatch.chdir(CHECKOUT)
    assert install_command("ui") == 'pip install -e ".[ui]"'
    monkeypatch.chdir(tmp_path)
    assert install_command("ui") == f'pip install -e "{CHECKOUT}[ui]"'
    folder = tmp_path / "model_swarms-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: model-swarms\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("swarm.errors.CHECKOUT", tmp_path)
    wheel = f"model_swarms-{__version__}-py3-none-any.whl[ui]"
    assert install_command("ui") == f'pip install "{wheel}"'
    vcs = {"vcs": "git", "commit_id": "1b5c"}
    for record, command in (
        ({"url": "file:///a%20b/x-1.whl", "archive_info": {}}, "/a b/x-1.whl[ui]"),
        ({"url": "ssh://git@h/x", "vcs_info": vcs}, "model-swarms[ui] @ git+ssh://git@h/x@1b5c"),
        ({"url": "https://h/x.whl", "archive_info": {}}, "model-swarms[ui] @ https://h/x.whl"),
    ):
        (folder / "direct_url.json").write_text(json.dumps(record))
        assert install_command("ui") == f'pip install "{command}"'


def test_a_task_without_its_class_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"no _target_, the class of the task"):
        instantiate_config(OmegaConf.create({"task": {"file": "questions.jsonl"}}))
