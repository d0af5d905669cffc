"""What the base and the best shipped expert come to on every task: the table of docs/objectives.md.

    python scripts/task_table.py [--items 24] [--data data/eval] [NAME ...]

Tasks whose file is not there, or that need a judge or a scoring model, are listed without numbers.
"""

import argparse
import logging
import sys
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from swarm._util.files import conf_folder
from swarm.engine.hf import HFEngine
from swarm.errors import UserError
from swarm.executors.worker import JobUsage, run_tasks_lockstep
from swarm.pool.pool import Pool
from swarm.tasks.base import Item, Score, Task, unparsed_rate
from swarm.tasks.metrics import utility_with_interval


def composed(name: str, data: Path) -> DictConfig:
    """The configuration of a task, its files looked for in `data`."""
    config = compose(f"task/{name}").task
    for part in config.tasks.values() if "tasks" in config else [config]:
        file = data / Path(part.get("file") or f"{part.name}.json").name
        if "file" in part and file.exists():
            part.file = str(file)
    return config


def prompt_of(task: Task, item: Item) -> str:
    """The first 80 characters of what is put to a model."""
    prompt = next(task.run([item]))[0].prompt
    text = prompt if isinstance(prompt, str) else prompt[-1].content
    return " ".join(text.split())[:80].replace("|", "\\|")


def shown(task: Task, scores: list[Score]) -> str:
    """A utility with its interval and, where there are such, the share of unread answers."""
    found = utility_with_interval(task, scores)
    lost = f", {unparsed_rate(scores):.0%} unparsed" if unparsed_rate(scores) else ""
    return f"{task.utility(scores):.3f} [{found.low:.3f}, {found.high:.3f}]{lost}"


def row(name: str, options: argparse.Namespace, engine: HFEngine, pool: Pool) -> str:
    """One line of the table."""
    config = composed(name, options.data)
    kind = OmegaConf.select(config, "scorer._target_") or config._target_
    kind = kind.rpartition(".")[2]
    try:
        task = instantiate(config, _convert_="all")
        dev, test = len(task.items("dev")), len(task.items("test"))
    except UserError:
        return f"| {name} | {kind} | not available | | | |"
    head = f"| {name} | {kind} | {dev}/{test} | {prompt_of(task, task.items('dev')[0])} |"
    if OmegaConf.select(config, "scorer._target_"):
        return f"{head} needs a scorer | |"
    mixed = config.get("tasks")  # a mixture's parts come one after the other
    items = task.items("dev")
    asked = items[:: len(items) // options.items] if mixed else items[: options.items]
    experts = len(pool.names)
    positions = np.vstack([np.zeros(experts), np.eye(experts)])
    scores = run_tasks_lockstep(task, engine, positions, asked, JobUsage())
    best = max(range(1, experts + 1), key=lambda i: task.utility(scores[i]))
    return f"{head} {shown(task, scores[0])} | {pool.names[best - 1]} {shown(task, scores[best])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="tasks; default: all of conf/task")
    parser.add_argument("--items", type=int, default=24, help="number of dev items")
    parser.add_argument("--data", type=Path, default=Path("data/eval"))
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        names = options.names or sorted(p.stem for p in (conf_folder() / "task").glob("*.yaml"))
        base = instantiate(compose("model/smollm2").model)
        pool, engine = Pool("initial_experts").open(), HFEngine()
        engine.open(base, pool, "cpu")
        print("| task | kind | dev/test | prompt, its first 80 characters | base | best of 9 |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name in names:
            print(row(name, options, engine, pool), flush=True)


if __name__ == "__main__":
    sys.exit(main())
