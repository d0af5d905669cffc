"""Methods on the same budget: python -m swarm.compare_methods task=nlgraph_mini seeds=3 budget=100.

Every search runs in a separate process; all share a score cache, but each is charged for its own
prompts.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from swarm._util.cli import one_line_errors, run_hydra_entry
from swarm._util.files import conf_folder, find_path, write_json
from swarm._util.secrets import unresolved
from swarm.errors import UserError
from swarm.runs.folder import RunFolder
from swarm.search import build_run
from swarm.studies import method_comparison as methods
from swarm.studies import subprocess_runs, suite, suite_analysis, suite_runner

COMPARISON_KEYS = ("methods", "seeds", "budget")

SUITE_KEYS = ("suite", "seeds", "only", "hours", "parallel", "keep", "results")
"""Keys of a study; all other arguments are a search's, except folder= and dry_run=."""

ENSEMBLE_OVERRIDES = {
    "vote": ["candidate=vote"],
    "weighted_vote": ["candidate=vote", "candidate.rule=weighted"],
    "pack": ["candidate=pack"],
    "route": ["candidate=route"],
    "data_merge": ["candidate=adapter"],
}
"""Methods without a search: all experts answer together, once (docs/evaluate.md).

"data_merge" is one adapter, trained on the data of all experts (`swarm.experts train --merged`).
"""

EVALUATION_KEYS = ("task", "model", "pool", "engine", "reward")
"""Configuration groups that such a method takes from a command line."""

HELP_TEXT = """\
Search with several methods on the same budget, and report the results.

  python -m swarm.compare_methods task=nlgraph_mini methods=[pso,cmaes,random] seeds=3 budget=60
  python -m swarm.compare_methods methods='[pso, "pso pool.base_row=true", recipes]' name=mine

The default name is TASK_methods. The same command resumes a stopped comparison; methods or seeds
added later run only the new searches. The table is in search/NAME/methods.md and methods.json, the
plot in methods.svg. Besides optimizers there are vote, weighted_vote, pack and route (ensembles of
all experts) and data_merge: one adapter trained on the data of all experts, if available
(train.jsonl in an expert's folder, or an expert that ships with the package).
`python -m swarm.search --help` lists all other keys.

  python -m swarm.compare_methods suite=small seeds=5 parallel=2 hours=1.5

A study over tasks, methods, budgets and seeds (docs/study.md). Every result is a small JSON file;
the same command runs what is missing and rewrites the analysis. Additional keys:
"""


@dataclass(frozen=True, slots=True)
class ComparedMethod:
    """One method of a comparison.

    Attributes:
        name: Name as on the command line.
        searches: One per seed; none for an ensemble.
        words: An ensemble's command line; else none.
    """

    name: str
    searches: list[subprocess_runs.SearchProcess]
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MethodComparison:
    """A comparison described by a command line.

    Attributes:
        folder: Folder of the searches.
        methods: All methods, in order.
        budget: Number of positions that each search may evaluate.
        dry_run: Only print what would be done.
        config: Configuration of a search, without a method's additions.
        experts: Members of ensembles: the pool's experts, without synthetic rows.
    """

    folder: Path
    methods: list[ComparedMethod]
    budget: int
    dry_run: bool
    config: dict[str, Any]
    experts: tuple[str, ...] = ()


def parse_comparison(arguments: Sequence[str]) -> MethodComparison:
    """Parse the comparison described by a command line, without loading models.

    Raises:
        UserError: A value is not allowed; Hydra raises its own errors.
    """
    own_words = [word for word in arguments if word.partition("=")[0] in COMPARISON_KEYS]
    passed = [word for word in arguments if word not in own_words]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        mine: Any = OmegaConf.to_container(compose("compare_methods", overrides=own_words))
    for key in ("seeds", "budget"):
        if type(mine[key]) is not int or mine[key] < 1:
            raise UserError(f"{key}={mine[key]}: must be an integer, 1 or more")
    names = mine["methods"]
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise UserError(f"methods={names}: must be a list of optimizers, e.g. [pso,cmaes,random]")
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise UserError(f"methods: {duplicates[0]!r} is listed more than once")
    search = subprocess_runs.compose_search(passed, "methods")
    folder = Path(search.folder) / search.name
    if not set(names) - set(ENSEMBLE_OVERRIDES):
        raise UserError(
            f"methods={names}: ensembles need a search for the experts' dev answers; add one, "
            "e.g. random"
        )
    made = [
        ComparedMethod(name, [], _evaluation_overrides(name, passed))
        if name in ENSEMBLE_OVERRIDES
        else ComparedMethod(name, _build_searches(name, passed, folder, mine))
        for name in names
    ]
    return MethodComparison(
        folder, made, mine["budget"], bool(search.dry_run), subprocess_runs.to_plain_config(search)
    )


def _evaluation_overrides(name: str, passed: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of an ensemble's evaluation, without its folder and experts."""
    shared_words = [
        word for word in passed if re.split(r"[.=@]", word.lstrip("+~"))[0] in EVALUATION_KEYS
    ]
    return (*shared_words, *ENSEMBLE_OVERRIDES[name])


def _build_searches(name: str, passed: list[str], folder: Path, mine: dict[str, Any]) -> list[Any]:
    """Return a method's search for each seed; its prompt budget is set later."""
    optimizer, *more = name.split()
    if any("=" not in word for word in more) or "=" in optimizer:
        raise UserError(
            f"methods: {name!r} must be an optimizer, then keys of a search as KEY=VALUE"
        )
    search = subprocess_runs.compose_search([*passed, f"optimizer={optimizer}", *more], "methods")
    subprocess_runs.lift_limits(search, (*passed, *more), mine["budget"])
    config = subprocess_runs.to_plain_config(search)
    config |= {"folder": str(folder), "shared": str(folder / "answers"), "test": True}
    slug = re.sub(r"[^a-zA-Z0-9_.-]+", "_", name)
    seeds = range(config["seed"], config["seed"] + mine["seeds"])
    return [
        subprocess_runs.SearchProcess({**config, "name": f"{slug}_seed{seed}", "seed": seed})
        for seed in seeds
    ]


def set_prompt_budgets(one: MethodComparison) -> MethodComparison:
    """Return the comparison with every search's budget in prompts: positions x dev items.

    Raises:
        UserError: A search is invalid, its pool alone exceeds the budget, or the task's answers do
            not allow voting.
    """
    made, experts = [], _voting_experts(one) if any(m.words for m in one.methods) else ()
    for method in one.methods:
        if method.words:
            made.append(method)
            continue
        run, _ = build_run(OmegaConf.create(unresolved(method.searches[0].config)))
        prompts, rows = one.budget * run.check_inputs(), len(run.pool.names)
        if one.budget < rows:
            raise UserError(
                f"budget={one.budget}: {method.name} needs at least {rows} positions, one per "
                "row of the pool"
            )
        searches = [
            subprocess_runs.SearchProcess({**s.config, "budget": prompts}) for s in method.searches
        ]
        made.append(ComparedMethod(method.name, searches))
    return replace(one, methods=made, experts=experts)


def _voting_experts(one: MethodComparison) -> tuple[str, ...]:
    """Return the experts of ensembles, after checking that they can vote if required."""
    run, _ = build_run(OmegaConf.create(unresolved(one.config)))
    if voting := [method.name for method in one.methods if "candidate=vote" in method.words]:
        methods.check_votes(voting[0], run.task)
    run.pool.open(run.model)
    return tuple(run.pool.names[: run.pool.expert_count])


def describe_comparison(one: MethodComparison) -> str:
    """Describe the cost of the unfinished searches: each method's, their sum, the first in detail.

    Args:
        one: The comparison, with the budgets of `set_prompt_budgets`.

    Raises:
        UserError: An error that a start of a search would raise.
    """
    from swarm.loop.forecast import describe_plan

    lines, first = [], ""
    for method in (m for m in one.methods if m.searches):
        todo = [search for search in method.searches if search.load_verdict() is None]
        number = len(method.searches)
        count = f"{method.name}: {number} search{'es' * (number != 1)}"
        if not todo:
            lines.append(f"{count}, all finished")
            continue
        run, config = build_run(OmegaConf.create(unresolved(todo[0].config)))
        details = describe_plan(run, config)
        first = first or details
        lines.append(f"{count}, {len(todo)} left, each {details.splitlines()[0]}")
    return "\n".join([*lines, *(["the first of them:", first] if first else [])])


def run_comparison(one: MethodComparison) -> None:
    """Run all unfinished searches, then write and print the table.

    Raises:
        UserError: An input is invalid, or a search failed (finished work is saved), or an ensemble
            failed (the table is written without it).
    """
    one = set_prompt_budgets(one)
    todo = [search for method in one.methods for search in method.searches]
    if one.dry_run:
        print(describe_comparison(one))
        return
    with subprocess_runs.lock_study_folder(one.folder) as lock:
        for number, search in enumerate(todo):
            known = search.load_verdict() is not None
            words = "already finished" if known else "searching"
            print(f"{search.path} ({number + 1} of {len(todo)}): {words}", file=sys.stderr)
            if not known:
                _run_search(search, lock)
        rows = [
            (m.name, [RunFolder(s.path) for s in m.searches]) for m in one.methods if m.searches
        ]
        start = methods.find_start_run([run for _, mine in rows for run in mine], one.experts)
        together = [method for method in one.methods if method.words]
        path = start.path if start else None
        tried = {method.name: _evaluate_ensemble(method, one, path) for method in together}
    failed = {name: error for name, error in tried.items() if error}
    finished = {name: one.folder / name for name in tried if name not in failed}
    found = methods.summarize_methods(rows, finished, start, one.budget) | {"failed": failed}
    methods.write_comparison(one.folder, found, rows)
    print(methods.format_comparison(found))
    for name, error in failed.items():
        raise UserError(f"methods: {name}: {error}; the table was written without it")


def _run_search(search: subprocess_runs.SearchProcess, lock: int) -> None:
    """Run one search and store its duration in its folder.

    Raises:
        UserError: It failed.
    """
    began = time.monotonic()
    error = search.run(lock, stdout=subprocess.DEVNULL)
    if search.path.is_dir():
        file = search.path / methods.SECONDS_FILE
        write_json(file, methods.read_seconds(search.path) + time.monotonic() - began)
    if error:
        raise UserError(f"{search.path}: {error}; rerun the same command to resume")


def _evaluate_ensemble(
    method: ComparedMethod, one: MethodComparison, start: Path | None
) -> str | None:
    """Evaluate an ensemble on test, reusing stored answers; return an error message or `None`.

    Args:
        start: A finished search with the experts' dev answers; `None` scores dev now.
    """
    folder = one.folder / method.name
    print(f"{folder}: evaluating, or reading stored answers", file=sys.stderr)
    names = ",".join(json.dumps(name, ensure_ascii=False) for name in one.experts)
    key = "candidate.members.names" if "candidate=vote" in method.words else "candidate.experts"
    words = [*method.words, "split=test", f"out={folder}", f"{key}=[{names}]"]
    if method.name == "data_merge":
        adapter, error = _merged(one)
        if error:
            return error
        words[-1] = f"candidate.folder={adapter}"
    elif start and method.name != "pack":
        words.append(f"candidate.run={start}")
    command = [sys.executable, "-m", "swarm.evaluate", *words]
    process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    message = (process.stderr.splitlines() or ["?"])[-1].removeprefix("error: ")
    return message if process.returncode else None


def _merged(one: MethodComparison) -> tuple[Path, str | None]:
    """Return the adapter trained on all experts' data, and an error message; trained only once."""
    target = one.folder / "data_merge_adapter"
    if (target / "adapter_model.safetensors").is_file():
        return target, None
    model = one.config["model"]
    pool = find_path(one.config["pool"]["folder"])
    command = [
        *(sys.executable, "-m", "swarm.experts", "train", target.name, "--to", str(one.folder)),
        *("--base", str(model["path"])),
        "--base_name",
        str(model["name"] or model["path"]),
        *("--dtype", str(model["dtype"]), "--merged"),
        *(str(pool / name) for name in one.experts),
    ]
    print(f"{target}: training", file=sys.stderr)
    process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    message = (process.stderr.splitlines() or ["?"])[-1].removeprefix("error: ")
    return target, message if process.returncode else None


def run_suite(arguments: Sequence[str]) -> None:
    """Run the missing parts of a study, then write and print its analysis.

    Raises:
        UserError: A value is not allowed, or a part failed; all other results are written.
    """
    # Hydra would take suite=small for an option of the group conf/suite/.
    own_words = [word for word in arguments if word.partition("=")[0] in SUITE_KEYS[1:]]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        mine: Any = OmegaConf.to_container(compose("compare_methods", overrides=own_words))
    given = {key: word for word in arguments for key, _, word in [word.partition("=")]}
    parallel, hours, only = mine["parallel"], mine["hours"], mine["only"]
    if type(parallel) is not int or parallel < 1:
        raise UserError(f"parallel={parallel}: must be an integer, 1 or more")
    if hours is not None and (type(hours) not in (int, float) or hours < 0):
        raise UserError(f"hours={hours}: must be null or a number, 0 or more")
    if type(mine["keep"]) is not bool:
        raise UserError(f"keep={mine['keep']}: must be true or false")
    words = [
        word
        for word in arguments
        if word.partition("=")[0] not in (*SUITE_KEYS, "folder", "dry_run")
    ]
    one = suite.read_suite(
        given["suite"],
        mine["seeds"] if "seeds" in given else None,
        mine["results"],
        given.get("folder", "search"),
        words,
    )
    selected = suite.select_cells(one, only if isinstance(only, list) else [only])
    todo = suite.find_missing(one, selected)
    status = f"suite {one.name}: {len(selected) - len(todo)} of {len(selected)} results exist"
    print(status, file=sys.stderr, flush=True)
    if given.get("dry_run") == "true":
        print("\n".join(f"{cell.task.name}/{cell.name}" for cell in todo))
        print("\n".join(suite.describe_missing_time(one, todo)), file=sys.stderr)
        return
    until = None if hours is None else time.monotonic() + 3600 * hours
    failed, enough = suite_runner.run_cells(one, todo, parallel, until, mine["keep"])
    found = suite_analysis.analyse_suite(one)
    written = suite_analysis.write_analysis(one, found)
    print("\n".join(suite_analysis.format_summary(found)))
    print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
    if not enough:
        print("time is up; rerun the same command to resume", file=sys.stderr)
    if failed:
        name, error = next(iter(failed.items()))
        raise UserError(f"suite={one.name}: {len(failed)} failed, the first is {name}: {error}")


def main() -> None:
    """Parse the command line and run the comparison."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(HELP_TEXT + (conf_folder() / "compare_methods.yaml").read_text(), end="")
        return
    subprocess_runs.stop_as_with_ctrl_c()
    if any(word.startswith("suite=") for word in arguments):
        with one_line_errors(""):
            run_suite(arguments)
        return
    one = parse_comparison(arguments)
    with one_line_errors(""):
        run_comparison(one)


if __name__ == "__main__":
    run_hydra_entry(main)
