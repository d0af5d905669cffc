"""Methods on the same budget: python -m swarm.compare_methods task=nlgraph_mini seeds=3 budget=100.

Every search is a process of its own; all share their answers, and each is charged for its own.
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
from swarm.runs.run_reader import RunFolder
from swarm.search import build_run
from swarm.studies import (
    method_comparison as methods,
)
from swarm.studies import (
    subprocess_runs,
    suite,
    suite_analysis,
    suite_runner,
)

COMPARISON_KEYS = ("methods", "seeds", "budget")

SUITE_KEYS = ("suite", "seeds", "only", "hours", "parallel", "keep", "results")
"""Keys of a study; all other words are a search's, but for folder= and dry_run=."""

ENSEMBLE_OVERRIDES = {
    "vote": ["candidate=vote"],
    "weighted_vote": ["candidate=vote", "candidate.rule=weighted"],
    "pack": ["candidate=pack"],
    "route": ["candidate=route"],
    "data_merge": ["candidate=adapter"],
}
"""Methods that search nothing: all experts answer together (docs/evaluate.md), once. "data_merge"
is one adapter, trained on the data of all experts (`swarm.experts train --merged`)."""

EVALUATION_KEYS = ("task", "model", "pool", "engine", "reward", "tracker")
"""What such a method takes of a command line."""

HELP_TEXT = """\
Search with several methods on the same budget, and tell what became of it.

  python -m swarm.compare_methods task=nlgraph_mini methods=[pso,cmaes,random] seeds=3 budget=60
  python -m swarm.compare_methods methods='[pso, "pso pool.base_row=true", recipes]' name=mine

The name is TASK_methods unless told, and the same command goes on where it stopped; more methods
or seeds later ask only what is new. The table is in search/NAME/methods.md and methods.json, the
plot in methods.svg. Beside optimizers there are vote, weighted_vote, pack and route: all experts
answer together, at once; and data_merge: one adapter trained on the data of all experts, where
these are at hand (an expert's folder has a train.jsonl, or it is one that ships).
`python -m swarm.search --help` lists all other keys.

  python -m swarm.compare_methods suite=small seeds=5 parallel=2 hours=1.5

A study over tasks, methods, budgets and seeds (docs/study.md). Every result is a small JSON file;
the same command runs what is missing and writes the analysis anew. Its own keys:
"""


@dataclass(frozen=True, slots=True)
class ComparedMethod:
    """One method of a comparison.

    Attributes:
        name: As the command line has it.
        searches: One a seed; none for an ensemble.
        words: An ensemble's command line; else none.
    """

    name: str
    searches: list[subprocess_runs.SearchProcess]
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MethodComparison:
    """What a command line asks for.

    Attributes:
        folder: Where the searches lie.
        methods: All of them, in order.
        budget: Positions that each search may evaluate.
        dry_run: Only say what would be done.
        config: Of a search, without what a method adds to it.
        experts: What ensembles are made of: the pool's own, no rows that it makes.
    """

    folder: Path
    methods: list[ComparedMethod]
    budget: int
    dry_run: bool
    config: dict[str, Any]
    experts: tuple[str, ...] = ()


def parse_comparison(arguments: Sequence[str]) -> MethodComparison:
    """The comparison that a command line describes; nothing heavy is loaded.

    Raises:
        UserError: A value is not allowed; Hydra raises errors of its own.
    """
    own = [word for word in arguments if word.partition("=")[0] in COMPARISON_KEYS]
    passed = [word for word in arguments if word not in own]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        mine: Any = OmegaConf.to_container(compose("compare_methods", overrides=own))
    for key in ("seeds", "budget"):
        if type(mine[key]) is not int or mine[key] < 1:
            raise UserError(f"{key}={mine[key]}: must be a whole number, 1 or more")
    names = mine["methods"]
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise UserError(f"methods={names}: must be a list of optimizers, e.g. [pso,cmaes,random]")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"methods: {twice[0]!r} is there more than once")
    whole = subprocess_runs.compose_search(passed, "methods")
    folder = Path(whole.folder) / whole.name
    if not set(names) - set(ENSEMBLE_OVERRIDES):
        raise UserError(
            f"methods={names}: needs a search too, for the experts' dev answers: random"
        )
    made = [
        ComparedMethod(name, [], _evaluation_overrides(name, passed))
        if name in ENSEMBLE_OVERRIDES
        else ComparedMethod(name, _build_searches(name, passed, folder, mine))
        for name in names
    ]
    return MethodComparison(
        folder, made, mine["budget"], bool(whole.dry_run), subprocess_runs.to_plain_config(whole)
    )


def _evaluation_overrides(name: str, passed: Sequence[str]) -> tuple[str, ...]:
    """The command line of an ensemble's evaluation, as far as it is known."""
    own = [word for word in passed if re.split(r"[.=@]", word.lstrip("+~"))[0] in EVALUATION_KEYS]
    return (*own, *ENSEMBLE_OVERRIDES[name])


def _build_searches(name: str, passed: list[str], folder: Path, mine: dict[str, Any]) -> list[Any]:
    """A method's search with each seed; what it may cost is not yet in it."""
    optimizer, *more = name.split()
    if any("=" not in word for word in more) or "=" in optimizer:
        raise UserError(f"methods: {name!r} must be an optimizer and keys of a search (KEY=VALUE)")
    whole = subprocess_runs.compose_search([*passed, f"optimizer={optimizer}", *more], "methods")
    subprocess_runs.lift_limits(whole, (*passed, *more), mine["budget"])
    config = subprocess_runs.to_plain_config(whole)
    config |= {"folder": str(folder), "shared": str(folder / "answers"), "test": True}
    slug = re.sub(r"[^a-zA-Z0-9_.-]+", "_", name)
    seeds = range(config["seed"], config["seed"] + mine["seeds"])
    return [
        subprocess_runs.SearchProcess({**config, "name": f"{slug}_seed{seed}", "seed": seed})
        for seed in seeds
    ]


def set_prompt_budgets(one: MethodComparison) -> MethodComparison:
    """The comparison with every search's budget in prompts: positions x dev items.

    Raises:
        UserError: A search cannot be run, or its pool alone takes more than the budget; or nobody
            can vote on the task's answers.
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
                f"budget={one.budget} positions: {method.name} begins with the pool's {rows}"
            )
        searches = [
            subprocess_runs.SearchProcess({**s.config, "budget": prompts}) for s in method.searches
        ]
        made.append(ComparedMethod(method.name, searches))
    return replace(one, methods=made, experts=experts)


def _voting_experts(one: MethodComparison) -> tuple[str, ...]:
    """Who answers together, once it was seen that those who are to vote can."""
    run, _ = build_run(OmegaConf.create(unresolved(one.config)))
    if voting := [method.name for method in one.methods if "candidate=vote" in method.words]:
        methods.check_votes(voting[0], run.task)
    run.pool.open(run.model)
    return tuple(run.pool.names[: run.pool.own])


def run_comparison(one: MethodComparison) -> None:
    """Run all searches that have not ended, then write and print the table.

    Raises:
        UserError: An input is wrong, or a search failed: what is done is kept. Or an ensemble
            failed: the table is there, without it.
    """
    one = set_prompt_budgets(one)
    todo = [search for method in one.methods for search in method.searches]
    if one.dry_run:
        for method in (m for m in one.methods if m.searches):
            prompts = method.searches[0].config["budget"]
            print(f"{method.name}: {len(method.searches)} searches of {prompts} dev prompts each")
        print("and the first of them:", flush=True)
        sys.exit(todo[0].run() is not None)
    with subprocess_runs.lock_study_folder(one.folder) as lock:
        for number, search in enumerate(todo):
            known = search.load_metrics() is not None
            words = "done before" if known else "searches"
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
    failed = {name: wrong for name, wrong in tried.items() if wrong}
    done = {name: one.folder / name for name in tried if name not in failed}
    found = methods.summarize_methods(rows, done, start, one.budget) | {"failed": failed}
    methods.write_comparison(one.folder, found, rows)
    print(methods.format_comparison(found))
    for name, wrong in failed.items():
        raise UserError(f"methods: {name}: {wrong}; the table is without it")


def _run_search(search: subprocess_runs.SearchProcess, lock: int) -> None:
    """Run one search and add the time it took to its folder.

    Raises:
        UserError: It failed.
    """
    began = time.monotonic()
    wrong = search.run(lock, stdout=subprocess.DEVNULL)
    if search.path.is_dir():
        file = search.path / methods.SECONDS_FILE
        write_json(file, methods.read_seconds(search.path) + time.monotonic() - began)
    if wrong:
        raise UserError(
            f"{search.path}: {wrong}; what is done is kept, and the same command goes on"
        )


def _evaluate_ensemble(
    method: ComparedMethod, one: MethodComparison, start: Path | None
) -> str | None:
    """Ask an ensemble the test items; what it has answered is read. Gives what went wrong.

    Args:
        start: A finished search with the experts' dev answers; `None` asks dev now.
    """
    folder = one.folder / method.name
    print(f"{folder}: evaluates, or reads", file=sys.stderr)
    names = ",".join(json.dumps(name, ensure_ascii=False) for name in one.experts)
    key = "candidate.members.names" if "candidate=vote" in method.words else "candidate.experts"
    words = [*method.words, "split=test", f"out={folder}", f"{key}=[{names}]"]
    if method.name == "data_merge":
        adapter, wrong = _merged(one)
        if wrong:
            return wrong
        words[-1] = f"candidate.folder={adapter}"
    elif start and method.name != "pack":
        words.append(f"candidate.run={start}")
    if (one.config.get("tracker") or {}).get("group", "") is None:
        words.append(f"tracker.group={one.folder.name}")
    command = [sys.executable, "-m", "swarm.evaluate", *words]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    last = (done.stderr.splitlines() or ["?"])[-1].removeprefix("error: ")
    return last if done.returncode else None


def _merged(one: MethodComparison) -> tuple[Path, str | None]:
    """The adapter that is trained on all experts' data, and what went wrong; once, then kept."""
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
    print(f"{target}: trains", file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    last = (done.stderr.splitlines() or ["?"])[-1].removeprefix("error: ")
    return target, last if done.returncode else None


def run_suite(arguments: Sequence[str]) -> None:
    """Run what is missing of a study, then write and print its analysis.

    Raises:
        UserError: A value is not allowed, or a part failed: all other results are there.
    """
    # For Hydra suite=small would be an option of the group conf/suite/.
    own = [word for word in arguments if word.partition("=")[0] in SUITE_KEYS[1:]]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        mine: Any = OmegaConf.to_container(compose("compare_methods", overrides=own))
    given = {key: word for word in arguments for key, _, word in [word.partition("=")]}
    parallel, hours, only = mine["parallel"], mine["hours"], mine["only"]
    if type(parallel) is not int or parallel < 1:
        raise UserError(f"parallel={parallel}: must be a whole number, 1 or more")
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
    some = suite.select_cells(one, only if isinstance(only, list) else [only])
    todo = suite.find_missing(one, some)
    told = f"suite {one.name}: {len(some)} results asked for, {len(some) - len(todo)} are there"
    print(told, file=sys.stderr, flush=True)
    if given.get("dry_run") == "true":
        print("\n".join(f"{cell.task.name}/{cell.name}" for cell in todo))
        return
    until = None if hours is None else time.monotonic() + 3600 * hours
    failed, enough = suite_runner.run_cells(one, todo, parallel, until, mine["keep"])
    found = suite_analysis.analyse_suite(one)
    written = suite_analysis.write_analysis(one, found)
    print("\n".join(suite_analysis.format_summary(found)))
    print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
    if not enough:
        print("time is up; the same command goes on", file=sys.stderr)
    if failed:
        name, wrong = next(iter(failed.items()))
        raise UserError(f"suite={one.name}: {len(failed)} failed, the first is {name}: {wrong}")


def main() -> None:
    """Read the command line and compare."""
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
