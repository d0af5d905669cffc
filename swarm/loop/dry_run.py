"""Dry run: report the work and cost of a search before anything is started or written."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from swarm._util.terminal import format_amount, format_duration, pluralize
from swarm.engine.base import DeviceProfile, available_memory_bytes, choose_plan
from swarm.engine.base_model import quicker_dtype
from swarm.engine.hf import BATCH_CPU, BATCH_GPU
from swarm.errors import UserError
from swarm.loop import cost_model as cost
from swarm.loop.cost_model import DeviceSpec, ModelShape, SearchWorkload, read_model_shape
from swarm.loop.final_evaluation import FINALIST_COUNT
from swarm.loop.prompt_stats import (
    PromptStats,
    count_gold_tokens,
    count_judged_texts,
    count_prompt_tokens,
)
from swarm.loop.reporter import buffer_log, describe_descent
from swarm.loop.run import Run
from swarm.loop.search_inputs import search_identity
from swarm.optimizers.gradient import DescentPlan, plan_descent
from swarm.pool.pool import Pool
from swarm.stats.significance import smallest_gain
from swarm.tasks.base import metric_task

MAX_SUGGESTED_WORKERS = 4
"""Maximum number of workers on a CPU that are suggested: a small iteration has few more jobs."""


class SearchCost(NamedTuple):
    """The cost of a search if nothing ends it early.

    Attributes:
        work: Prompts and gradients, in words.
        seconds: Time including the test; `None` if the base model is not on this disk.
        device: Workers and their device, in words; empty without a time.
    """

    work: str
    seconds: float | None
    device: str


def describe_plan(run: Run, config: Mapping[str, Any]) -> tuple[str, SearchCost]:
    """Run the checks of a start and describe the planned search: its cost, then the details.

    Downloads nothing; benchmarks a CPU for half a second.

    Args:
        config: The composed configuration that the run was built from.

    Returns:
        The description, and the cost that its first sentence sums up.

    Raises:
        UserError: An error that a start would raise.
    """
    buffer_log()
    items = run.check_inputs()
    if not isinstance(run.pool, Pool):
        raise UserError(
            "dry_run=true computes the cost of adapters, not of complete models; "
            "docs/token_swarms.md and "
            "docs/full_models.md explain how to estimate those"
        )
    folder = run.model.on_disk()
    tokenizer, begun = None, "new"
    if folder:
        here = replace(run.model, path=str(folder))
        begun = _describe_resume(run, config, here)
        run.pool.check()
        tokenizer = run.engine.check(here, run.pool)
        if run.fit_items_to_context(tokenizer):
            items = run.check_inputs()
    prompts, metric_prompts = (
        count_prompt_tokens(run.task, tokenizer),
        count_prompt_tokens(metric_task(run.task), tokenizer),
    )
    lines = {
        "folder": f"{run.record.folder}: {begun}",
        **_describe_pool(run.pool),
        **_describe_task(run, items, prompts),
        **_describe_judging(run),
        **_describe_gradients(run, items),
        **({"optimizer": "; ".join(run.notes)} if run.notes else {}),
    }
    found, total = _describe_costs(
        run, run.pool, config, folder, prompts, metric_prompts, tokenizer, items
    )
    lines |= found
    head = f"dry run: {lines.pop('total')}. Nothing is started or written; computed, not measured."
    return "\n".join([head, *(f"{name:9} {words}" for name, words in lines.items())]), total


CHANGED_SHARE = 0.3
"""Share of test items that only one of two models answers right, assumed before a search."""


def _describe_resume(run: Run, config: Mapping[str, Any], base: Any) -> str:
    """Describe the folder's state: "new", or a search to resume, which must be this one."""
    if not (run.record.folder / "state.json").is_file():
        run.record.load_state({})
        return "new"
    identity = search_identity(config, run.seed, run.task, base, run.pool)
    if not run.record.load_state(identity):
        return "new"
    ended = run.record.state["finished"]
    progress = f"{len(run.record.iterations)} evaluated rounds"
    return f"ended after {progress} ({ended})" if ended else f"resumes after {progress}"


def _describe_pool(pool: Pool) -> dict[str, str]:
    targets = sorted({name.rpartition(".")[2] for name in pool.modules})
    return {
        "pool": f"{len(pool.names)} experts ({', '.join(pool.names)}) of {pool.folder}",
        "adapter": f"rank {pool.rank} at {len(pool.modules)} modules ({', '.join(targets)}): "
        f"{format_amount(pool.size)} weights each",
    }


def _describe_task(run: Run, items: int, prompts: PromptStats) -> dict[str, str]:
    plan = plan_search(run, items)
    count = plan.positions * len(prompts.tokens)
    mean = fmean(prompts.tokens)
    test = f", {len(run.task.items('test'))} test items" if run.test else ""
    budget = f", within a budget of {run.budget.prompts}" if run.budget.prompts else ""
    return {
        "task": f"{run.task.name}: {items} dev items{test}",
        "prompts": f"{mean:.0f} tokens on average, {max(prompts.tokens)} the longest, at most "
        f"{prompts.new} new; {prompts.method}",
        "search": f"at most {pluralize(plan.positions, 'position')} evaluated on dev "
        f"({plan.start} at the start, then {plan.batch} an iteration){budget}: at most "
        f"{format_amount(count)} prompts, {format_amount(count * mean)} tokens read and "
        f"{format_amount(count * prompts.new)} written",
        "then": f"at most {run.final_items()} items on test and dev, for the verdict",
        **_describe_resolution(run),
    }


def _describe_resolution(run: Run) -> dict[str, str]:
    """Describe the gains that the test items can show; empty if items are not right or wrong."""
    if not run.test or getattr(metric_task(run.task), "highest", None) != 1.0:
        return {}
    items = len(run.task.items("test"))
    found = smallest_gain(items, CHANGED_SHARE)
    if found is None:
        return {"gains": f"{items} test items cannot show any gain; use six or more"}
    floor = f"at least six items ({600 / items:.2g} points) in any case"
    return {
        "gains": f"under {100 * found:.2g} points cannot be shown with {items} test items, if "
        f"{CHANGED_SHARE:.0%} of them change (assumed; paired test at p < 0.05); {floor}"
    }


def _describe_judging(run: Run) -> dict[str, str]:
    """Count the texts for scorers that are a model, a service or a program; empty if none."""
    particles, rounds = positions_and_rounds(run)
    dev = count_judged_texts(run.task, "dev")
    test = count_judged_texts(run.task, "test") if run.test else dev
    kinds = [
        f"{kind}: at most {format_amount(particles * rounds * count)} texts on dev"
        + (
            f" and {format_amount(run.max_tested_models() * test[kind])} on test"
            if run.test
            else ""
        )
        for kind, count in dev.items()
    ]
    return {"judging": "; ".join(kinds)} if kinds else {}


def _describe_gradients(run: Run, items: int) -> dict[str, str]:
    """Describe the gradient steps that fit the budget; empty if there are none."""
    plan = plan_search(run, items)
    if plan.descent is None:
        return {}
    limit = f" of the budget's {run.budget.prompts}" if run.budget.prompts else ""
    count = format_amount(plan.gradient_cost)
    return {
        "gradients": f"before at most {pluralize(plan.descents, 'iteration')}: "
        f"{describe_descent(plan.descent)}; in all about {count}{limit} "
        "prompt-equivalents (a backward pass counts as two)"
    }


class SearchPlan(NamedTuple):
    """The work of a search on dev if nothing ends it but its iterations and its budget.

    Attributes:
        start, batch: Positions of the first iteration, and of each later one.
        positions: All evaluated positions.
        descent: Size of the gradient steps before an iteration; `None` if there are none.
        descents: Number of iterations with gradient steps.
        gradients, losses: Number of examples with a gradient, and with a loss alone.
    """

    start: int
    batch: int
    positions: int
    descent: DescentPlan | None = None
    descents: int = 0
    gradients: int = 0
    losses: int = 0

    @property
    def gradient_cost(self) -> int:
        """Cost of gradients and losses in prompt-equivalents."""
        return 3 * self.gradients + self.losses


def plan_search(run: Run, items: int) -> SearchPlan:
    """Count positions and gradients on `items` dev items, as the search's budget admits them."""
    batch, rounds = positions_and_rounds(run)
    optimizer = getattr(run.optimizer, "inner_optimizer", run.optimizer)
    start = len(optimizer.ask())
    descent = plan_descent(optimizer, items) if run.differentiating is not None else None
    if run.budget.prompts is None and descent is None:
        return SearchPlan(start, batch, batch * rounds)
    left = float("inf") if run.budget.prompts is None else run.budget.prompts
    positions = min(start, int(min(start, left // items)))
    left -= positions * items
    descents = gradients = losses = 0
    for number in range(optimizer.max_iterations):
        if left < items:
            break
        if descent is not None:
            steps, alone = descent.count_affordable(left - items, number == 0)
            examples = descent.particles * steps * descent.batch
            descents, gradients, losses = (
                descents + bool(steps),
                gradients + examples,
                losses + alone,
            )
            left -= 3 * examples + alone
        new = int(min(batch, left // items))
        positions, left = positions + new, left - new * items
    return SearchPlan(start, batch, positions, descent, descents, gradients, losses)


def positions_and_rounds(run: Run) -> tuple[int, int]:
    """Return the positions per iteration and the maximum number of iterations.

    The start is included. If only a `batch` of all rows, or the active ones, are new in an
    iteration, the start counts as several iterations.
    """
    optimizer = getattr(run.optimizer, "inner_optimizer", run.optimizer)
    rows = len(optimizer.ask())
    active = getattr(optimizer, "most_active", None) or rows
    gradients = getattr(optimizer, "needs_gradients", None) and not hasattr(optimizer, "descent")
    # An optimizer of gradients alone moves one position; its `batch` is of items.
    batch = 1 if gradients else min(rows, getattr(optimizer, "batch", rows), active)
    rounds = -(-rows // batch) + optimizer.max_iterations
    return batch, min(
        rounds, -(-run.budget.max_positions // batch)
    ) if run.budget.prompts else rounds


def _describe_costs(
    run: Run,
    pool: Pool,
    config: Mapping[str, Any],
    folder: Path | None,
    prompts: PromptStats,
    metric_prompts: PromptStats,
    tokenizer: Any,
    items: int,
) -> tuple[dict[str, str], SearchCost]:
    """Estimate memory, time and traffic, if the base model's shape is known.

    "total" is the sentence that sums them up.
    """
    work = _count_prompts(run, prompts, items)
    unknown = SearchCost(work, None, "")
    if folder is None:
        reason = f"model {run.model.path} is not on this disk; a start downloads it"
        known = "benchmarks/plan.py computes them from a config.json"
        return {"total": f"{work}; time unknown", "costs": f"unknown: {reason}; {known}"}, unknown
    try:
        model = read_model_shape(folder)
    except UserError as error:
        return {"total": f"{work}; time unknown", "costs": f"unknown: {error.args[0]}"}, unknown
    gpus, workers = list(config.get("gpus") or []), _count_workers(config)
    size = {"float32": 4, "auto": 2 if gpus else 4}.get(run.model.dtype, 2)
    device = _measure_device(gpus, workers, model, size)
    search = _build_workload(run, pool, config, prompts, items, bool(gpus), size)
    search, reason = resolve_plan(run, search, model, device, bool(gpus))
    own_way = _build_workload(run, pool, config, metric_prompts, items, bool(gpus), size)
    own_way = cost.fit_cache(replace(own_way, plan=search.plan), model, device)
    costs = format_costs(model, search, device, workers)
    seconds = _gradient_seconds(run, model, search, tokenizer, device, workers, items)
    seconds += _total_seconds(run, model, search, own_way, device, workers)
    duration = f"at most about {format_duration(seconds)}"
    if run.limit.seconds is not None and seconds > run.limit.seconds:
        seconds = run.limit.seconds
        duration = (
            f"about {format_duration(seconds)} (minutes={run.limit.minutes:g}; longer if the first "
            "iteration and the test take longer)"
        )
    total = SearchCost(work, seconds, f"{workers} x {device.name}")
    memory = sum(cost.estimate_memory(model, search).values())
    judging = " without judging" if _describe_judging(run) else ""
    nodes = " (this machine's; the cluster's nodes are not queried)" if _is_remote(config) else ""
    return {
        "total": f"{duration}{judging} on {total.device}, "
        f"{format_amount(memory, 'B')} of memory each, for {work}",
        "model": f"{run.model.path}: {format_amount(model.parameter_count)} weights of {size} "
        "bytes, "
        f"{format_amount(model.linear_weights)} of them in linear layers",
        "device": f"{workers} x {device.name}: {format_amount(device.flops, 'FLOP/s')}, "
        f"{format_amount(device.bandwidth, 'B/s')} a worker{nodes}"
        f"{_suggest_settings(run, gpus, workers, size, memory, items)}",
        "plan": f"{search.plan}: {reason}",
        **costs,
        **_describe_finalist_scoring(run, model, own_way, device, workers),
        "test": _describe_test(run, model, own_way, device, workers),
    }, total


def _count_prompts(run: Run, prompts: PromptStats, items: int) -> str:
    plan = plan_search(run, items)
    words = f"at most {format_amount(plan.positions * len(prompts.tokens))} prompts on dev"
    if not plan.gradients:
        return words
    return f"{words} and gradients at the cost of about {format_amount(plan.gradient_cost)} more"


def _total_seconds(
    run: Run,
    model: ModelShape,
    search: SearchWorkload,
    own_way: SearchWorkload,
    device: DeviceSpec,
    workers: int,
) -> float:
    """Return the seconds of a search without gradients, and of its test, an upper bound."""
    seconds = search.rounds * cost.estimate_total_seconds(
        model, search, device, workers, search.particles, search.items
    )
    seconds += _choice_seconds(run, model, own_way, device, workers)
    seconds += _test_seconds(run, model, own_way, device, workers)
    if recipes := run.count_recipes():
        one = cost.estimate_total_seconds(model, own_way, device, workers, 1, own_way.items)
        seconds += recipes * one
    return seconds


def _gradient_seconds(
    run: Run,
    model: ModelShape,
    search: SearchWorkload,
    tokenizer: Any,
    device: DeviceSpec,
    workers: int,
    items: int,
) -> float:
    """Estimate the seconds of all gradients and of the losses without."""
    plan = plan_search(run, items)
    if plan.descent is None:
        return 0.0
    tokens = count_gold_tokens(run.task, tokenizer)
    batch = max(1, min(plan.descent.batch, run.job.examples))
    job = cost.estimate_gradient_seconds(model, search, device, batch, tokens)
    turns = -(-_count_gradient_jobs(plan.descent, run.job.examples) // workers)
    steps = (plan.gradients + plan.losses / cost.GRADIENT_PASSES) / (
        plan.descent.particles * plan.descent.batch
    )
    return steps * turns * job


def _count_gradient_jobs(descent: DescentPlan, examples: int) -> int:
    """Return the number of jobs of a gradient step, which workers do at the same time."""
    return descent.particles * -(-descent.batch // max(1, examples))


def _count_workers(config: Mapping[str, Any]) -> int:
    named = config.get("executor", {}).get("workers")
    return len(config.get("gpus") or []) or named or 1


def _suggest_settings(
    run: Run, gpus: Sequence[int], workers: int, size: int, memory: float, items: int
) -> str:
    """Suggest what makes a search quicker on a CPU; empty if nothing does, and on GPUs.

    Small batches hardly use a second thread, so the cores are better divided among workers.
    """
    if gpus:
        return ""
    words, cores = [], os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    most = min(cores, MAX_SUGGESTED_WORKERS, int(available_memory_bytes() // (2 * memory)))
    if workers == 1 < most:
        words.append(f"executor=processes executor.workers={most} (each with this memory)")
        workers = most
    descent = plan_search(run, items).descent
    if descent and _count_gradient_jobs(descent, run.job.examples) < workers:
        # On a GPU, launches would take as long for fewer examples.
        words.append(f"job.examples={-(-descent.particles * descent.batch // workers)}")
    if size == 4 and quicker_dtype() == "bfloat16":
        words.append("model.dtype=bfloat16")
    return f"; usually quicker: {', '.join(words)}" if words else ""


def _is_remote(config: Mapping[str, Any]) -> bool:
    return bool(config.get("executor", {}).get("address"))


def _measure_device(gpus: Sequence[int], workers: int, model: ModelShape, size: int) -> DeviceSpec:
    from swarm.loop import cost_model as speed

    if gpus:
        return speed.gpu_spec(gpus[0], size)
    return speed.measure_cpu(model.hidden, model.intermediate, size, workers)


def _build_workload(
    run: Run,
    pool: Pool,
    config: Mapping[str, Any],
    prompts: PromptStats,
    items: int,
    gpu: bool,
    size: int,
) -> SearchWorkload:
    job = config.get("job", {})
    plan = plan_search(run, items)
    particles = plan.batch
    # A task may make several requests per item; costs count requests.
    count = len(prompts.tokens)
    wide, long = job.get("particles") or particles, job.get("items") or items
    # In the delta space a combination already is all experts, concatenated.
    experts = 1 if pool.space == "delta" else len(pool.names)
    return SearchWorkload(
        experts=experts,
        adapter=pool.size,
        adapted=sum(inputs * outputs for inputs, outputs, _ in pool.modules.values()),
        particles=particles,
        rounds=-(-plan.positions // particles),
        items=count,
        prompt=fmean(prompts.tokens),
        longest=max(prompts.tokens),
        new=prompts.new,
        job_particles=min(wide, particles),
        job_items=min(long * count // items, count),
        max_tokens=getattr(run.engine, "max_tokens", None) or (BATCH_GPU if gpu else BATCH_CPU),
        item_bytes=size,
        slots=gpu,
    )


def resolve_plan(
    run: Run, search: SearchWorkload, model: ModelShape, device: DeviceSpec, gpu: bool
) -> tuple[SearchWorkload, str]:
    """Return the workload with the plan that the engine would follow, and the reason."""
    engine = run.engine
    plan, reason = (
        getattr(engine, "plan", "auto"),
        getattr(engine, "why", "set by engine.plan"),
    )
    if plan == "auto":
        router = getattr(run.pool, "router", None)
        routes = len(router.names) if router else 1
        mixed = routes == 1 or getattr(run.pool, "space", "") == "delta"
        plan, reason = choose_auto_plan(search, model, device, gpu, routes, mixed)
    return cost.fit_cache(replace(search, plan=plan), model, device), reason


def choose_auto_plan(
    search: SearchWorkload,
    model: ModelShape,
    device: DeviceSpec,
    gpu: bool,
    routes: int = 1,
    mixed: bool = True,
) -> tuple[str, str]:
    """Return the plan that engine.plan=auto would choose, and the reason.

    Args:
        routes: To the engine, a position is as many.
        mixed: Whether routes can share batches.
    """
    size = search.item_bytes
    used = model.parameter_count * size + search.experts * search.adapter * 4
    facts = DeviceProfile(gpu, size == 4, search.adapted * size, device.memory - used)
    rows = -(-search.job_items // routes)
    return choose_plan(search.job_particles * routes, rows, facts, mixed)


def format_costs(
    model: ModelShape, search: SearchWorkload, device: DeviceSpec, workers: int
) -> dict[str, str]:
    """Format memory, jobs, time and traffic as text."""
    parts = cost.estimate_memory(model, search)
    total, usable = sum(parts.values()), device.memory * cost.USABLE_MEMORY
    fits = "" if total <= usable else "; DOES NOT FIT: the engine halves its batches"
    if parts["weights"] + parts["basis"] + parts["particles"] > usable:
        fits = (
            f"; DOES NOT FIT: {cost.count_devices_needed(model, search, device)} devices would do"
        )
    spent = cost.estimate_total_seconds(
        model, search, device, workers, search.particles, search.items
    )
    read, write = cost.estimate_job_seconds(
        model, search, device, search.job_particles, search.job_items
    )
    count = len(cost.list_job_sizes(search, search.particles, search.items))
    moved = {
        name: format_amount(number, "B") for name, number in cost.estimate_traffic(search).items()
    }
    listed = ", ".join(f"{name} {format_amount(number, 'B')}" for name, number in parts.items())
    return {
        "memory": f"{format_amount(total, 'B')} of {format_amount(device.memory, 'B')} free "
        f"({listed}){fits}",
        "jobs": f"{count} a round of {search.job_particles} positions x {search.job_items} prompts",
        "time": f"a job {format_duration(read + write)} (reading {format_duration(read)}, writing "
        "at most "
        f"{format_duration(write)}), a round {format_duration(spent)}",
        "travels": f"{moved['down']} down and {moved['up']} up a round, {moved['once']} once "
        "a worker",
    }


def _describe_finalist_scoring(
    run: Run, model: ModelShape, search: SearchWorkload, device: DeviceSpec, workers: int
) -> dict[str, str]:
    """Describe the cost of choosing by the task's own metric; empty if the search uses it."""
    if metric_task(run.task) is run.task:
        return {}
    positions = search.experts + min(FINALIST_COUNT, search.particles)
    words = f"at most {positions} positions on dev by the task's metric, one after the other"
    seconds = _choice_seconds(run, model, search, device, workers)
    return {"choice": f"{words}: {format_duration(seconds)}"}


def _choice_seconds(
    run: Run, model: ModelShape, search: SearchWorkload, device: DeviceSpec, workers: int
) -> float:
    """Return the seconds of choosing by the task's own metric; 0 if the search uses it."""
    if metric_task(run.task) is run.task:
        return 0.0
    positions = search.experts + min(FINALIST_COUNT, search.particles)
    return positions * cost.estimate_total_seconds(model, search, device, workers, 1, search.items)


def _describe_test(
    run: Run, model: ModelShape, search: SearchWorkload, device: DeviceSpec, workers: int
) -> str:
    """Describe the duration of the test split."""
    if not run.test:
        return "no test"
    seconds = _test_seconds(run, model, search, device, workers)
    positions = run.max_tested_models()
    return f"at most {positions} positions, one after the other: {format_duration(seconds)}"


def _test_seconds(
    run: Run, model: ModelShape, search: SearchWorkload, device: DeviceSpec, workers: int
) -> float:
    """Estimate the seconds of the test split, assuming its items cost as much as those of dev."""
    if not run.test:
        return 0.0
    test, dev = len(run.task.items("test")), len(run.task.items("dev"))
    one = cost.estimate_total_seconds(
        model, search, device, workers, 1, -(-test * search.items // dev)
    )
    return run.max_tested_models() * one
