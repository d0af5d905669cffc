"""Run a file of questions on groups of models: data, plots and a report in a folder."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from swarm._util.terminal import pluralize
from swarm.compare.config import Config
from swarm.compare.power import detectable
from swarm.compare.question import Question, load_questions
from swarm.errors import InvalidArgument, UserError, missing_extra_error


def run_file(
    file: Path,
    groups: Mapping[str, Sequence[str]],
    folder: Path,
    names: Sequence[str] | None = None,
    samples: int | None = None,
    settings: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> int:
    """Run the questions of a file and write the results.

    Args:
        file: File of questions, or a folder of such files.
        groups: Models by group.
        folder: Output folder.
        names: Names of the questions; `None` runs all.
        samples: Samples per paraphrase; `None` is that of the file.
        settings: Settings of `Config` for this run.
        dry_run: Only print what would be requested.

    Returns:
        1 if an answer failed, else 0.

    Raises:
        UserError: The file, a question or a setting is invalid; no request was sent.
    """
    found = {question.name: question for question in load_questions(file)}
    if missing := [name for name in names or () if name not in found]:
        raise InvalidArgument(f"--questions {missing[0]}: {file} has {', '.join(found)}")
    questions = [found[name] for name in dict.fromkeys(names or found)]
    for question in questions:
        question.samples_per_paraphrase = samples or question.samples_per_paraphrase
    yaml_dir = file if file.is_dir() else file.parent
    with Config.override(**(settings or {}), yaml_dir=yaml_dir):
        if dry_run:
            print("\n".join(describe_plan(questions, groups)))
            return 0
        _check_writable(folder)
        frames = Question.many(questions, groups, details=True)
    if all((frame["answer"].isna() & frame["error"].notna()).all() for frame in frames):
        raise UserError(f"there are no answers, so {folder} is unchanged")
    from swarm.compare.report import write_report

    by_name = {one.name: frame for one, frame in zip(questions, frames, strict=True)}
    if conclusions := write_report(folder, by_name, groups):
        print(conclusions)
    failed = sum(int(frame["error"].notna().sum()) for frame in frames)
    rows = pluralize(sum(map(len, frames)), "row")
    print(f"{rows}, {failed} with an error: {folder / 'report.html'}")
    first = shlex.quote(str(folder / questions[0].name / "data.jsonl"))
    print(f"browse them with: python -m swarm.compare view {first}", file=sys.stderr)
    return int(failed > 0)


def _check_writable(folder: Path) -> None:
    """Raise an error if results that will be paid for could not be written."""
    try:
        import pandas  # noqa: F401

        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except ImportError as error:
        raise UserError(f"{missing_extra_error(error, 'compare')}; no request was sent") from None
    except OSError as error:
        raise UserError(
            f"folder={folder}: is not writable ({error.strerror}); no request was sent"
        ) from None


def parse_groups(models: str | None, groups: Sequence[str]) -> dict[str, list[str]]:
    """Parse the models of the command line into groups.

    Args:
        models: "a,b": each is a group.
        groups: "NAME=a,b" for each group.

    Raises:
        InvalidArgument: There are none, or a name is empty.
    """
    found = {name.strip(): [name.strip()] for name in models.split(",")} if models else {}
    for one in groups:
        name, equals, members = one.partition("=")
        found[name.strip() if equals else ""] = [part.strip() for part in members.split(",")]
    if not found or not all(name and all(members) for name, members in found.items()):
        raise InvalidArgument(
            "name the models: --models a,b for a group each, or --group NAME=a,b; e.g. "
            "--models local/base,local/rooms"
        )
    return found


def describe_plan(questions: Sequence[Question], groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Describe the requests of a run, line by line."""
    models = sorted({model for group in groups.values() for model in group})
    lines = []
    for question in questions:
        wordings, each = len(question.as_messages()), question.samples_per_paraphrase
        answers = pluralize(len(models) * wordings * each, "answer")
        judges = ", ".join(question.layout.near) if question.type() == "free_form" else ""
        lines.append(
            f"{question.name} ({question.type()}): {pluralize(len(models), 'model')} x "
            f"{pluralize(wordings, 'paraphrase')} x {pluralize(each, 'sample')} = {answers}"
            + f", each judged by {judges}"
            * bool(judges)
        )
        if len(groups) > 1:
            lines.append(f"  {detectable(groups, wordings, each)}")
    return [*lines, f"models: {', '.join(models)}", "no request was sent (dry run)"]
