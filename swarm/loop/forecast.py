"""The dry run: the checks of a start, then counts, memory and the speed of an earlier run."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarm._util.files import parse_json
from swarm._util.terminal import format_amount, format_duration, pluralize
from swarm.engine.base import available_memory_bytes
from swarm.errors import UserError
from swarm.loop.identity import search_identity
from swarm.loop.run import Run, describe_descent
from swarm.loop.terminal import buffer_log
from swarm.pool.pool import Pool
from swarm.runs.folder import RunFolder, find_run_folders, is_run_folder
from swarm.stats.significance import smallest_gain

CHANGED_SHARE = 0.3
"""Share of test items that only one of two models answers right, assumed before a search."""

RECENT_RUNS = 20
"""Number of runs, the newest ones, among which one with a measured speed is looked for."""


def describe_plan(run: Run, config: Mapping[str, Any]) -> str:
    """Run the checks of a start and describe the planned search; nothing is written or loaded.

    The first sentence has the largest counts, and a time where an earlier run in the same folder
    has measured the speed of this task and base on these devices.

    Args:
        config: The composed configuration that the run was built from.

    Raises:
        UserError: An error that a start would raise.
    """
    buffer_log()
    run.check_inputs()
    folder, begun = run.model.on_disk(), "new"
    if folder:
        here = replace(run.model, path=str(folder))
        run.load_selection(config, here)
        begun = _describe_progress(run, config, here)
        run.pool.check()
        run.fit_items_to_context(run.engine.check(here, run.pool))
    items, budget, optimizer = len(run.searched), run.budget.prompts, run.optimizer
    start, batch, final = len(optimizer.ask()), optimizer.new_rows, run.final_items()
    positions = start + batch * optimizer.max_iterations
    if budget is not None:
        positions = min(positions, budget // items)
    spent = positions * items
    descent = optimizer.plan_descent(items) if run.descents else None
    if descent:
        spent += descent.cost * optimizer.max_iterations
        spent = spent if budget is None else min(spent, budget)
    within = f", within a budget of {budget}" if budget else ""
    test = f", {len(run.task.items('test'))} test items" if run.settings.test else ""
    lines = {
        "folder": f"{run.record.folder}: {begun}",
        "pool": f"{len(run.pool.names)} adapters ({', '.join(run.pool.names)})",
        "task": f"{run.task.name}: {items} dev items{test}",
        "search": f"at most {pluralize(positions, 'mixture')} ({start} at the start, then {batch} "
        f"a round) on {items} dev items{within}",
        "then": f"at most {final} items on test and dev, for the verdict",
        "gains": _describe_resolution(run),
        "judging": _describe_judging(run, positions),
        "optimizer": "; ".join(run.notes),
        "gradients": f"before a round: {describe_descent(descent)}" if descent else "",
        "memory": _describe_memory(run, config, folder),
    }
    selection, to_choose = run.selection, 0
    if selection and "chosen" not in run.selected:
        to_choose = selection.prompts
        lines["pool"] = (
            f"{selection.most} of {len(selection.names)} adapters, chosen at the start by dev "
            f"{selection.measure_name}: {format_amount(to_choose)} prompts beside the budget, "
            f"{len(selection.items)} of {items} dev items for each"
        )
    thrice = " (a gradient counts as three)" * bool(descent)
    head = (
        f"dry run: the search takes at most {format_amount(spent)} prompts on dev{thrice}, the "
        f"test after it {format_amount(final)} items; "
        f"{_describe_time(run, config, spent + to_choose, final)}. Nothing is started or written."
    )
    return "\n".join([head, *(f"{name:9} {words}" for name, words in lines.items() if words)])


def _describe_progress(run: Run, config: Mapping[str, Any], base: Any) -> str:
    """Describe the folder's state: "new", or a search to resume, which must be this one."""
    identity: Mapping[str, Any] = {}
    if is_run_folder(run.record.folder):
        identity = search_identity(config, run.settings.seed, run.task, base, run.pool)
    if not run.record.load_state(identity):
        return "new"
    ended = run.record.state["finished"]
    progress = f"{len(run.record.iterations)} evaluated rounds"
    return f"ended after {progress} ({ended})" if ended else f"resumes after {progress}"


def _describe_resolution(run: Run) -> str:
    """Describe the gains that the test items can show; empty if items are not right or wrong."""
    if not run.settings.test or run.task.metric_task.highest != 1.0:
        return ""
    items = len(run.task.items("test"))
    found = smallest_gain(items, CHANGED_SHARE)
    if found is None:
        return f"{items} test items cannot show any gain; use six or more"
    return (
        f"under {100 * found:.2g} points cannot be shown with {items} test items, if "
        f"{CHANGED_SHARE:.0%} of them change (assumed; paired test at p < 0.05); at least six "
        f"items ({600 / items:.2g} points) in any case"
    )


def _describe_judging(run: Run, positions: int) -> str:
    """Count the texts for scorers that are a model or a service; empty if there are none."""
    words = []
    for task in (run.task.tasks or {"": run.task}).values():
        scorer = getattr(task, "scorer", None)
        if task.needs_setup and scorer is not None:
            dev = positions * len(task.items("dev"))
            test = run.max_tested_models() * len(task.items("test")) if run.settings.test else 0
            on_test = f" and {format_amount(test)} on test" if test else ""
            name = type(scorer).__name__
            words.append(f"{name}: at most {format_amount(dev)} texts on dev{on_test}")
    return "; ".join(words)


def _describe_memory(run: Run, config: Mapping[str, Any], folder: Path | None) -> str:
    """Sum weights, experts and the positions of a job; the cache of a batch comes on top."""
    if folder is None:
        return f"unknown: {run.model.path} is not on this disk; a start downloads it"
    if not isinstance(run.pool, Pool):
        return ""
    gpus = list(config.get("gpus") or [])
    size = {"float32": 4, "auto": 2 if gpus else 4}.get(run.model.dtype, 2)
    stored = parse_json((folder / "config.json").read_text()).get("torch_dtype")
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    weights = weights * size // (4 if stored == "float32" else 2)
    basis = 4 * len(run.pool.names) * run.pool.size
    mixed = (run.job.particles or len(run.optimizer.ask())) * run.pool.size * size
    free = available_memory_bytes()
    if gpus:
        import torch

        free = torch.cuda.mem_get_info(gpus[0])[0]
    parts = {"weights": weights, "adapters": basis, "mixtures of a job": mixed}
    listed = ", ".join(f"{name} {format_amount(number, 'B')}" for name, number in parts.items())
    total = sum(parts.values())
    fits = "" if total < free else "; DOES NOT FIT"
    return (
        f"a worker: {format_amount(total, 'B')} of {format_amount(free, 'B')} free "
        f"({listed}), and the cache of a batch{fits}"
    )


def _describe_time(run: Run, config: Mapping[str, Any], prompts: int, final: int) -> str:
    """Return the time of search and test by an earlier run's speed, or the time limit."""
    limit = run.limit.seconds
    ends = f"it ends after about {format_duration(limit)} (minutes=)" if limit else ""
    if not (found := measured_speed(run, config)):
        return ends or "the first job will show how long it takes"
    if limit and (prompts + final) / found[0] > limit:
        return ends
    search, test = (format_duration(count / found[0]) for count in (prompts, final))
    return (
        f"at most about {search} for the search and {test} for the test, at the speed of {found[1]}"
    )


def measured_speed(run: Run, config: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return the prompts per second of the newest comparable run in the same folder, and its path.

    It is comparable if task, base, engine, executor and devices are equal; how many items are used
    may differ.
    """

    def facts(of: Mapping[str, Any]) -> list[Any]:
        task = {k: v for k, v in of["task"].items() if k not in ("dev_limit", "test_limit", "chat")}
        return [task, *(of.get(key) for key in ("model", "engine", "executor", "gpus"))]

    folders = find_run_folders(run.record.folder.parent)
    for folder in sorted(folders, key=lambda one: -one.stat().st_mtime)[:RECENT_RUNS]:
        try:
            earlier = RunFolder(folder)
            same = facts(earlier.config) == facts(config)
        except (UserError, KeyError):
            continue
        seconds = sum(entry.get("seconds", 0.0) for entry in earlier.rounds)
        if same and seconds:
            shared = sum(entry.get("prompts_shared", 0) for entry in earlier.rounds)
            return (earlier.prompts_spent() - shared) / seconds, str(folder)
    return None
