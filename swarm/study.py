"""Methods on tasks with equal budgets: python -m swarm.study compare seeds=3.

A study is a yaml file of conf/study/, or one of your own: tasks, methods, budgets and seeds. Each
method on each task is a process of its own, and its result a line of results.jsonl, written as soon
as it is there: the same command runs what is missing and writes the tables again. Sweeps, ablations
and comparisons are studies.

  python -m swarm.study compare seeds=3 parallel=2     conf/study/compare.yaml
  python -m swarm.study mine.yaml hours=1.5            a yaml of your own; stops after 1.5 hours
  python -m swarm.study sweep                          Optuna draws the next settings (extra: bayes)
  python -m swarm.study main 'only=[nlgraph_mini,cmaes,seed0]' dry_run=true

Keys: seeds (their number, from 0), only (names of tasks and methods, budgets, seed0), hours (null),
parallel (1 process), keep (false: run folders are removed once their result is written), results
(folder of the result files), folder (search), dry_run (false: list what is missing). All other keys
are those of `python -m swarm.search`, for all tasks and methods.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Annotated, Any

import yaml
from pydantic import Field

from swarm._util.cli import one_line_errors, run_hydra_entry
from swarm._util.settings import Positive, Settings, parse_settings
from swarm._util.terminal import format_duration
from swarm.errors import UserError
from swarm.studies import analysis
from swarm.studies.plan import Cell, Study, load_results, read_study
from swarm.studies.runner import run_cells, stop_as_with_ctrl_c


class StudyOptions(Settings):
    """The keys of the command line that are not a search's."""

    seeds: Positive | None = None
    only: list[str | int] | str | int = Field(default_factory=list)
    hours: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    parallel: Positive = 1
    keep: bool = False
    results: str | None = None
    folder: str = "search"
    dry_run: bool = False


def parse_words(words: Sequence[str]) -> tuple[StudyOptions, list[str]]:
    """Return the options of a study, and the words of its searches.

    Raises:
        UserError: A value is not allowed.
    """
    own: dict[str, Any] = {}
    rest = []
    for word in words:
        key, separator, value = word.partition("=")
        if separator and key in StudyOptions.model_fields:
            try:
                own[key] = yaml.safe_load(value)
            except yaml.YAMLError:
                own[key] = value
        else:
            rest.append(word)
    return parse_settings(StudyOptions, own), rest


def describe_missing(study: Study, missing: Sequence[Cell]) -> list[str]:
    """List missing cells, their cost, and their CPU time by the stored results most like them.

    A cell counts as the median of the results with other seeds; if there are none, of the other
    methods on the same task with the same budget.
    """

    def likeness(cell: Cell) -> list[tuple[object, ...]]:
        return [(cell.task, cell.dev, cell.budget, cell.method), (cell.task, cell.budget)]

    known: dict[tuple[object, ...], list[float]] = {}
    for cell, result in load_results(study):
        for key in likeness(cell):
            known.setdefault(key, []).append(result.get("cpu_seconds", 0.0))
    times: list[float] = []
    unknown: Counter[str] = Counter()
    for cell in missing:
        if alike := next(filter(None, map(known.get, likeness(cell))), None):
            times.append(median(alike))
        else:
            unknown[cell.task] += 1
    cost = sum(map(study.prompt_budget, missing))
    lines = [*(cell.path for cell in missing), f"at most {cost:,} prompt-equivalents on dev"]
    if times:
        lines.append(
            f"about {format_duration(sum(times))} of CPU time for {len(times)} of the "
            f"{len(missing)} missing results, by the stored results most like them"
        )
    if unknown:
        listed = ", ".join(f"{name}: {number}" for name, number in unknown.items())
        lines.append(f"no time for {unknown.total()} of them ({listed}): no stored result is alike")
    return lines


def run_study(words: Sequence[str]) -> None:
    """Run the missing parts of a study, then write and print its analysis.

    Raises:
        UserError: A value is not allowed, or a part failed; all other results are written.
    """
    if not words or "=" in words[0]:
        raise UserError("name a study first, such as compare, or a yaml file; see --help", 2)
    options, rest = parse_words(words[1:])
    study = read_study(words[0], options.seeds, options.results, options.folder, rest)
    selected = study.select(options.only if isinstance(options.only, list) else [options.only])
    todo = study.missing(selected)
    done = len(selected) - len(todo)
    print(f"study {study.name}: {done} of {len(selected)} results exist", file=sys.stderr)
    if options.dry_run:
        print("\n".join(describe_missing(study, todo)))
        return
    until = None if options.hours is None else time.monotonic() + 3600 * options.hours
    failed, enough = run_cells(study, todo, options.parallel, until, options.keep)
    found = analysis.analyse_study(study)
    written = analysis.write_analysis(study, found)
    print("\n".join(analysis.format_summary(found)))
    print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
    if not enough:
        print("time is up; rerun the same command to resume", file=sys.stderr)
    if failed:
        name, error = next(iter(failed.items()))
        raise UserError(f"study {study.name}: {len(failed)} failed, the first is {name}: {error}")


def main() -> None:
    """Parse the command line and run the study."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(__doc__, end="")
        return
    stop_as_with_ctrl_c()
    with one_line_errors(""):
        run_study(words)


if __name__ == "__main__":
    run_hydra_entry(main)
