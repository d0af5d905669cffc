"""What a search would do and cost, told before anything is started; nothing is written."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from swarm import cost
from swarm.cost import Device, Search
from swarm.ending import FINALISTS
from swarm.engine.plan import BATCH_CPU, BATCH_GPU, Facts, choose
from swarm.errors import UserError
from swarm.identity import search_identity
from swarm.log import hold_log
from swarm.optimizers import MultiObjective
from swarm.optimizers.starts import static_starts, utility_starts
from swarm.pool import Pool
from swarm.rehearsal import Prompts, asked, judged
from swarm.run import Run
from swarm.shape import Model, read_model
from swarm.tasks import plain


def describe(run: Run, config: Mapping[str, Any]) -> str:
    """Check what a start checks and say, in lines, what it would do.

    Downloads nothing; measures a CPU for half a second.

    Args:
        config: The composed configuration that the run was built from.

    Raises:
        UserError: What a start would raise.
    """
    hold_log()
    items = run.check()
    if not isinstance(run.pool, Pool):
        raise UserError(
            "dry_run=true computes what adapters cost, not whole models; docs/token_swarms.md and "
            "docs/full_models.md say how to reckon that"
        )
    folder = run.model.on_disk()
    tokenizer, begun = None, "new"
    if folder:
        here = replace(run.model, path=str(folder))
        begun = _begun(run, config, here)
        run.pool.check()
        tokenizer = run.engine.check(here, run.pool)
        if run.fit(tokenizer):
            items = run.check()
    prompts, own = asked(run.task, tokenizer), asked(plain(run.task), tokenizer)
    lines = {
        "folder": f"{run.record.folder}: {begun}",
        **_pool(run.pool),
        **_task(run, items, prompts),
        **_judging(run),
        **_gradients(run, items),
        **({"optimizer": "; ".join(run.notes)} if run.notes else {}),
    }
    lines |= _costs(run, run.pool, config, folder, prompts, own, items)
    head = "dry run: nothing is started and nothing written; costs are computed, not measured"
    return "\n".join([head, *(f"{name:9} {words}" for name, words in lines.items())])


def _begun(run: Run, config: Mapping[str, Any], base: Any) -> str:
    """Whether the folder holds a search, which has to be this one."""
    if not (run.record.folder / "state.json").is_file():
        run.record.find({})
        return "new"
    identity = search_identity(config, run.seed, run.task, base, run.pool)
    if not run.record.find(identity):
        return "new"
    ended = run.record.state["finished"]
    done = f"{len(run.record.rounds)} evaluated rounds"
    return f"ended after {done} ({ended})" if ended else f"goes on after {done}"


def _pool(pool: Pool) -> dict[str, str]:
    targets = sorted({name.rpartition(".")[2] for name in pool.modules})
    return {
        "pool": f"{len(pool.names)} experts ({', '.join(pool.names)}) of {pool.folder}",
        "adapter": f"rank {pool.rank} at {len(pool.modules)} modules ({', '.join(targets)}): "
        f"{amount(pool.size)} weights each",
    }


def _task(run: Run, items: int, prompts: Prompts) -> dict[str, str]:
    particles, rounds = asks(run)
    count = particles * rounds * len(prompts.tokens)
    mean = fmean(prompts.tokens)
    test = f", {len(run.task.items('test'))} test items" if run.test else ""
    limit = f"; the budget ends it after {run.budget.prompts}" if run.budget.prompts else ""
    after = [f"{items} dev items again, in other batches"] * run.noise_floor
    after += [f"2 x {len(run.task.items('dev')) - items} kept dev items"] * bool(run.confirm)
    if extra := _baselines(run, items):
        after.append(f"{extra} prompts for the baselines")
    return {
        "task": f"{run.task.name}: {items} dev items{test}",
        "prompts": f"{mean:.0f} tokens on average, {max(prompts.tokens)} the longest, at most "
        f"{prompts.new} new; {prompts.how}",
        "search": f"{particles} particles, at most {rounds} times: at most {amount(count)} prompts "
        f"on dev, {amount(count * mean)} tokens read and {amount(count * prompts.new)} written"
        f"{limit}",
        **({"then": f"at most {' and '.join(after)}"} if after else {}),
    }


def _baselines(run: Run, items: int) -> int:
    """The prompts of what the best found is compared with."""
    if not run.test:
        return 0
    test = len(run.task.items("test"))
    recipes = 0
    if "recipe" in run.baselines:
        static = len(static_starts(run.pool.own)[0])
        recipes = (static + len(utility_starts(np.arange(run.pool.own), run.pool.own)[0])) * items
    return len(run.possible_baselines()) * test + recipes


def _judging(run: Run) -> dict[str, str]:
    """How many texts a scorer is given that is a model, a service or a program; none, no line."""
    particles, rounds = asks(run)
    dev = judged(run.task, "dev")
    test = judged(run.task, "test") if run.test else dev
    kinds = [
        f"{kind}: at most {amount(particles * rounds * count)} texts on dev"
        + (f" and {amount(_tested(run) * test[kind])} on test" if run.test else "")
        for kind, count in dev.items()
    ]
    return {"judging": "; ".join(kinds)} if kinds else {}


def _gradients(run: Run, items: int) -> dict[str, str]:
    """What the swarm's descents take besides; the times of other lines are without them."""
    descent = getattr(getattr(run.optimizer, "chosen", run.optimizer), "descent", None)
    if descent is None or run.differentiating is None:
        return {}
    particles, rounds = asks(run)
    cost = descent.steps * descent.batch * 3 + round(descent.holdout * items)
    words = (
        f"{particles} descending particles, {descent.steps} steps of {descent.batch} items a "
        f"round: {amount(particles * cost)} prompt-equivalents (a backward pass counts as two)"
    )
    return {"gradients": f"{words}, at most {rounds} rounds"}


def _tested(run: Run) -> int:
    """The most positions that are put to test: both bests, voters, and points of a front."""
    front = run.front if isinstance(run.optimizer, MultiObjective) else 0
    return 2 + (run.ensemble if getattr(plain(run.task), "votes", True) else 0) + front


def asks(run: Run) -> tuple[int, int]:
    """How many positions a round are scored and at most how many rounds, the start's counted in.

    Where only a `batch` of all rows, or the active ones, are new in a round, the start is several
    such rounds.
    """
    optimizer = getattr(run.optimizer, "chosen", run.optimizer)
    rows = len(optimizer.ask())
    active = getattr(optimizer, "most_active", None) or rows
    batch = min(rows, getattr(optimizer, "batch", rows), active)
    rounds = -(-rows // batch) + optimizer.max_iterations
    return batch, min(rounds, -(-run.budget.positions // batch)) if run.budget.prompts else rounds


def _costs(
    run: Run, pool: Pool, config: Mapping[str, Any], folder: Path | None, prompts: Prompts,
    own: Prompts, items: int,
) -> dict[str, str]:  # fmt: skip
    """Memory, time and traffic, as far as the base's shape is known."""
    if folder is None:
        why = f"model {run.model.path} is not on this disk; a start downloads it"
        return {"costs": f"unknown: {why}; benchmarks/plan.py computes them from a config.json"}
    try:
        model = read_model(folder)
    except UserError as error:
        return {"costs": f"unknown: {error.args[0]}"}
    gpus, workers = list(config.get("gpus") or []), _workers(config)
    size = {"float32": 4, "auto": 2 if gpus else 4}.get(run.model.dtype, 2)
    device = _device(gpus, workers, model, size)
    search = _search(run, pool, config, prompts, items, bool(gpus), size)
    search, why = planned(run, search, model, device, bool(gpus))
    own_way = replace(_search(run, pool, config, own, items, bool(gpus), size), plan=search.plan)
    nodes = " (this machine's; the cluster's nodes are not asked)" if _remote(config) else ""
    return {
        "model": f"{run.model.path}: {amount(model.parameters)} weights of {size} bytes, "
        f"{amount(model.linear)} of them in linear layers",
        "device": f"{workers} x {device.name}: {amount(device.flops, 'FLOP/s')}, "
        f"{amount(device.bandwidth, 'B/s')} a worker{nodes}",
        "plan": f"{search.plan}: {why}",
        **told(model, search, device, workers),
        **_choice(run, model, own_way, device, workers),
        "test": _test(run, model, own_way, device, workers),
    }


def _workers(config: Mapping[str, Any]) -> int:
    named = config.get("executor", {}).get("workers")
    return len(config.get("gpus") or []) or named or 1


def _remote(config: Mapping[str, Any]) -> bool:
    return bool(config.get("executor", {}).get("address"))


def _device(gpus: Sequence[int], workers: int, model: Model, size: int) -> Device:
    from swarm import speed

    if gpus:
        return speed.gpu(gpus[0], size)
    return speed.cpu(model.hidden, model.intermediate, size, workers)


def _search(
    run: Run, pool: Pool, config: Mapping[str, Any], prompts: Prompts, items: int, gpu: bool,
    size: int,
) -> Search:  # fmt: skip
    job = config.get("job", {})
    particles, rounds = asks(run)
    # A task may ask more than once about an item; costs count requests.
    count = len(prompts.tokens)
    wide, long = job.get("particles") or particles, job.get("items") or items
    # In the delta space one combination is all experts already, after each other.
    experts = 1 if pool.space == "delta" else len(pool.names)
    return Search(
        experts=experts, adapter=pool.size,
        adapted=sum(inputs * outputs for inputs, outputs, _ in pool.modules.values()),
        particles=particles, rounds=rounds, items=count,
        prompt=fmean(prompts.tokens), longest=max(prompts.tokens), new=prompts.new,
        job_particles=min(wide, particles), job_items=min(long * count // items, count),
        max_tokens=getattr(run.engine, "max_tokens", None) or (BATCH_GPU if gpu else BATCH_CPU),
        item_bytes=size,
    )  # fmt: skip


def planned(
    run: Run, search: Search, model: Model, device: Device, gpu: bool
) -> tuple[Search, str]:
    """The search with the plan that the engine would follow, and why."""
    engine = run.engine
    plan, why = getattr(engine, "plan", "auto"), getattr(engine, "why", "as engine.plan says")
    if plan == "auto":
        plan, why = automatic(search, model, device, gpu)
    return replace(search, plan=plan), why


def automatic(search: Search, model: Model, device: Device, gpu: bool) -> tuple[str, str]:
    """What engine.plan=auto would choose, and why."""
    size = search.item_bytes
    used = model.parameters * size + search.experts * search.adapter * 4
    facts = Facts(gpu, size == 4, search.adapted * size, device.memory - used)
    return choose(search.job_particles, search.job_items, facts)


def told(model: Model, search: Search, device: Device, workers: int) -> dict[str, str]:
    """Memory, jobs, time and traffic in words."""
    parts = cost.memory(model, search)
    total, room = sum(parts.values()), device.memory * cost.USABLE
    fits = "" if total <= room else "; DOES NOT FIT: the engine halves its batches"
    if parts["weights"] + parts["basis"] + parts["particles"] > room:
        fits = f"; DOES NOT FIT: {cost.devices_needed(model, search, device)} devices would do"
    spent = cost.seconds(model, search, device, workers, search.particles, search.items)
    read, write = cost.job_seconds(model, search, device, search.job_particles, search.job_items)
    count = len(cost.jobs(search, search.particles, search.items))
    moved = {name: amount(number, "B") for name, number in cost.travel(search).items()}
    listed = ", ".join(f"{name} {amount(number, 'B')}" for name, number in parts.items())
    return {
        "memory": f"{amount(total, 'B')} of {amount(device.memory, 'B')} free ({listed}){fits}",
        "jobs": f"{count} a round of {search.job_particles} positions x {search.job_items} prompts",
        "time": f"a job {duration(read + write)} (reading {duration(read)}, writing at most "
        f"{duration(write)}), a round {duration(spent)}, the search at most "
        f"{duration(spent * search.rounds)}",
        "travels": f"{moved['down']} down and {moved['up']} up a round, {moved['once']} once "
        "a worker",
    }


def _choice(run: Run, model: Model, search: Search, device: Device, workers: int) -> dict[str, str]:
    """What it takes to choose by the task's own measure; no line if the search goes by that."""
    if plain(run.task) is run.task:
        return {}
    most = search.experts + min(FINALISTS, search.particles)
    one = cost.seconds(model, search, device, workers, 1, search.items)
    words = f"at most {most} positions on dev by the task's own measure, one after the other"
    return {"choice": f"{words}: {duration(most * one)}"}


def _test(run: Run, model: Model, search: Search, device: Device, workers: int) -> str:
    """How long the test split takes, about whose items as much is asked as about those of dev."""
    if not run.test:
        return "no test"
    most, test, dev = _tested(run), len(run.task.items("test")), len(run.task.items("dev"))
    one = cost.seconds(model, search, device, workers, 1, -(-test * search.items // dev))
    return f"at most {most} positions, one after the other: {duration(most * one)}"


def amount(number: float, unit: str = "") -> str:
    """A number in three digits, with k, M, G, T or P before the unit."""
    letters = iter(("", "k", "M", "G", "T", "P"))
    letter = next(letters)
    while number >= 999.5:
        number, letter = number / 1000, next(letters)
    return f"{number:.3g} {letter}{unit}".rstrip()


def duration(seconds: float) -> str:
    """Seconds in two units."""
    if seconds < 59.5:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
