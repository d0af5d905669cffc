"""Run a file of questions on groups of models: data, plots and a report in a folder."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from swarm._util.terminal import pluralize
from swarm.compare.config import Config
from swarm.compare.settings import get_max_workers
from swarm.errors import InvalidArgument, UserError, missing_extra_error

if TYPE_CHECKING:
    import pandas as pd

    from swarm.compare.question import Question

OUTPUT_ROOT = "compare"
"""Default parent of output folders."""

CONFIG_SETTINGS = {
    "workers": "max_workers",
    **{key: key for key in ("requests_per_minute", "timeout", "cache_dir", "base", "pool")},
}
"""Keys that are settings of `Config`, and their names there."""


def run_file(file: Path, settings: Mapping[str, Any]) -> int:
    """Run the questions of a file and write the results.

    Args:
        file: File of questions, or a folder of such files.
        settings: See `swarm.compare.cli.RUN_KEYS`.

    Returns:
        1 if an answer failed, else 0.

    Raises:
        UserError: The file, a question or a setting is invalid; no request was sent.
    """
    groups = parse_models(settings.get("models"))
    questions = select_questions(file, settings.get("questions"), settings.get("samples"))
    folder = Path(settings.get("folder") or Path(OUTPUT_ROOT) / file.resolve().stem).expanduser()
    dry = settings.get("dry_run", False)
    if not isinstance(dry, bool):
        raise InvalidArgument(f"dry_run={dry}: must be true or false")
    with ExitStack() as stack:
        values = {CONFIG_SETTINGS[key]: settings[key] for key in CONFIG_SETTINGS if key in settings}
        stack.enter_context(Config.override(**values))
        stack.enter_context(Config.override(yaml_dir=str(file if file.is_dir() else file.parent)))
        get_max_workers()
        if dry:
            print("\n".join(describe_plan(questions, groups)))
            return 0
        _check_writable(folder)
        frames = _ask_and_report(questions, groups, folder)
        return int(any(frame["error"].notna().any() for frame in frames.values()))


def _check_writable(folder: Path) -> None:
    """Raise an error if results that will be paid for could not be written."""
    try:
        import pandas  # noqa: F401

        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except ImportError as error:
        raise UserError(f"{missing_extra_error(error, 'compare')}; no request was sent") from None
    except OSError as error:
        raise UserError(
            f"folder={folder}: is not writable ({error.strerror}); no request was sent"
        ) from None


def _ask_and_report(
    questions: "Sequence[Question]", groups: Mapping[str, Sequence[str]], folder: Path
) -> "dict[str, pd.DataFrame]":
    from swarm.compare.question import Question
    from swarm.compare.report import write_report

    frames = Question.many(questions, groups, details=True)
    by_name = dict(zip((question.name for question in questions), frames, strict=True))
    failed = sum(int(frame["error"].notna().sum()) for frame in frames)
    if all((frame["answer"].isna() & frame["error"].notna()).all() for frame in frames):
        raise UserError(f"there are no answers, so {folder} is unchanged")
    if found := write_report(folder, by_name, groups):
        print(found)
    rows = sum(map(len, frames))
    print(f"{pluralize(rows, 'row')}, {failed} with an error: {folder / 'report.md'}")
    first = shlex.quote(str(folder / questions[0].name / "data.jsonl"))
    print(f"browse them with: python -m swarm.compare view {first}", file=sys.stderr)
    return by_name


def parse_models(models: Any) -> dict[str, list[str]]:
    """Parse the models of the command line into groups.

    Raises:
        UserError: There are none.
    """
    if isinstance(models, str) and models.strip():
        models = [one.strip() for one in models.split(",")]
    if isinstance(models, list) and all(isinstance(one, str) and one for one in models) and models:
        return {one: [one] for one in models}
    if isinstance(models, dict) and models:
        lists = {
            str(group): [one] if isinstance(one, str) else one for group, one in models.items()
        }
        if all(
            isinstance(one, list) and one and all(isinstance(name, str) and name for name in one)
            for one in lists.values()
        ):
            return lists
    raise InvalidArgument(
        "models: must be a,b for a group each, or {group: [a, b], ...}; e.g. "
        "models=local/base,local/rooms"
    )


def select_questions(file: Path, names: Any, samples: Any) -> "list[Question]":
    """Return the questions of a file to run.

    Raises:
        UserError: There are none, or one is invalid.
    """
    from swarm.compare.judges import FreeFormJudge, RatingJudge
    from swarm.compare.question import load_questions

    found = [
        question
        for question in load_questions(file)
        if not isinstance(question, FreeFormJudge | RatingJudge)
    ]
    if names is not None:
        listed = names if isinstance(names, list) else str(names).split(",")
        requested = list(dict.fromkeys(str(name).strip() for name in listed))
        by_name = {question.name: question for question in found}
        if missing := [name for name in requested if name not in by_name]:
            raise InvalidArgument(
                f"questions={missing[0]}: {file} has {', '.join(by_name) or 'none'}"
            )
        found = [by_name[name] for name in requested]
    if not found:
        raise InvalidArgument(f"{file}: contains no question for a model")
    if samples is not None:
        if type(samples) is not int or samples < 1:
            raise InvalidArgument(f"samples={samples!r}: must be an integer, 1 or more")
        for question in found:
            question.samples_per_paraphrase = samples
    return found


def describe_plan(
    questions: "Sequence[Question]", groups: Mapping[str, Sequence[str]]
) -> list[str]:
    """Describe the requests of a run, line by line."""
    from swarm.stats.summary_table import detectable

    models = sorted({model for group in groups.values() for model in group})
    lines = []
    for question in questions:
        wordings, each = len(question.as_messages()), question.samples_per_paraphrase
        rows = wordings * each
        judges = getattr(question, "judges", None) or {}
        judged = f", each judged by {', '.join(judges)}" if judges else ""
        lines.append(
            f"{question.name} ({question.type()}): {pluralize(len(models), 'model')} x "
            f"{pluralize(wordings, 'paraphrase')} x {pluralize(each, 'sample')} = "
            f"{pluralize(len(models) * rows, 'answer')}{judged}"
        )
        if len(groups) > 1:
            lines.append(f"  {detectable(groups, wordings, each)}")
    return [*lines, f"models: {', '.join(models)}", "no request was sent (dry_run)"]
