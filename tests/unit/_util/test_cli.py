"""What the commands without Hydra share: exit codes, option names, numbers."""

import argparse

import pytest

from swarm._util.cli import normalize_option, number_type, run_command
from swarm.errors import UserError


def test_the_exit_code_is_the_commands_or_its_errors(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise UserError("no such \x1b[2Jfolder", 2)

    def interrupt() -> int:
        raise KeyboardInterrupt

    assert (run_command(lambda: None), run_command(lambda: 3)) == (0, 3)
    assert capsys.readouterr() == ("", "")
    assert run_command(refuse) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: no such ") and "\x1b" not in said and said.count("\n") == 1
    assert run_command(interrupt) == 130 and capsys.readouterr().err == ""
    assert run_command(interrupt, "stopped") == 130 and capsys.readouterr().err == "stopped\n"
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


def test_option_names_may_have_either_sign() -> None:
    words = ("--max-tokens=a-b_c", "--max-tokens", "-x-y", "a-b")
    assert [normalize_option(word) for word in words] == [
        "--max_tokens=a-b_c",
        "--max_tokens",
        "-x-y",
        "a-b",
    ]
    assert normalize_option("--no_cache=a_b", "_", "-") == "--no-cache=a_b"


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x", ""])
def test_a_number_out_of_range_is_refused(text: str) -> None:
    assert number_type(int, 1)("7") == 7 and number_type(float, 0, above=True)("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number above 0"):
        number_type(float, 0, above=True)(text)
    with pytest.raises(argparse.ArgumentTypeError, match="is not an integer of 1 or more"):
        number_type(int, 1)(text)
