"""One contract for all executors, and what becomes of workers that fail or die."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.errors import UserError
from swarm.executors import Executor, Job, Worker
from swarm.executors.inline import InlineExecutor
from swarm.executors.processes import ProcessExecutor
from swarm.loop.evaluator import Batching, Evaluator
from swarm.models.base import Request
from swarm.pool.pool import Pool
from swarm.tasks.base import Item, Score, Task, TaskRun
from swarm.tasks.multiple_choice import MultipleChoice

EXECUTORS = {
    "inline": InlineExecutor,
    "one process": ProcessExecutor,
    "three processes": lambda: ProcessExecutor(workers=3, threads=1),
}


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    made: Executor = EXECUTORS[request.param]()  # type: ignore[assignment]
    yield made
    made.close()


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> MultipleChoice:
    file = searches.choice_file(tmp_path_factory.mktemp("task") / "tiny.json")
    return MultipleChoice("tiny", str(file), scoring="logits")


def recipe(base: Path, pool: Path, task: object) -> Worker:
    return Worker(BaseModel(str(base)), Pool(pool).open(), task, HFEngine())  # type: ignore[arg-type]


def jobs(count: int = 5, items: int = 12) -> list[Job]:
    return Batching(particles=1, items=items // 2).split_jobs(
        np.eye(5, 4)[:count] + 0.1, "dev", items
    )


def test_every_job_is_answered_once_and_the_same(
    executor: Executor, task: MultipleChoice, tiny_llama: Path, tiny_pool: Path
) -> None:
    executor.open(recipe(tiny_llama, tiny_pool, task))
    asked = jobs()
    results = {r.number: r for r in executor.map(asked)}
    assert sorted(results) == [job.number for job in asked]
    inline = InlineExecutor()
    inline.open(recipe(tiny_llama, tiny_pool, task))
    expected = {r.number: r for r in inline.map(asked)}
    assert results == expected
    for job in asked:
        assert [len(row) for row in results[job.number].scores] == [len(job.items)]
        assert results[job.number].prompts == len(job.items)
        assert results[job.number].tokens > len(job.items)


class Broken(Task):
    """A task that goes wrong in a way of its own at one item."""

    name = "broken"

    def __init__(self, how: str, at: int) -> None:
        self.how, self.at = how, at

    def items(self, split: str) -> Sequence[Item]:
        return [{"id": i} for i in range(12)]

    def run(self, items: Sequence[Item]) -> TaskRun:
        yield [Request("yes or no", 1) for _ in items]
        if any(item["id"] == self.at for item in items):
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "user":
                raise UserError("data/eval/x.json: item 3 has no answer")
            raise RuntimeError("something odd")
        return [Score(1.0, "yes") for _ in items]

    def grade(self, item: Item, answer: str | None) -> float:
        return 1.0

    def utility(self, scores: Sequence[Score]) -> float:
        return 1.0


@pytest.mark.parametrize("how", ["error", "user"])
def test_an_error_in_a_worker_is_one_line(
    executor: Executor, how: str, tiny_llama: Path, tiny_pool: Path
) -> None:
    executor.open(recipe(tiny_llama, tiny_pool, Broken(how, 3)))
    with pytest.raises(UserError) as caught:
        list(executor.map(jobs()))
    message = str(caught.value)
    assert "\n" not in message
    if how == "user":
        assert message == "data/eval/x.json: item 3 has no answer"
    else:
        assert "RuntimeError: something odd (item 3, job " in message
        assert "items 0 to 5" in message


def test_the_item_is_looked_for_at_the_position_that_failed_and_no_further(
    tiny_llama: Path, tiny_pool: Path
) -> None:
    """Scoring may cost money: of five positions one is played again, up to the wrong item."""
    job = Batching(particles=5, items=12).split_jobs(np.eye(5, 4) + 0.1, "dev", 12)[0]
    asked: list[list[list[float]]] = []

    class Watched(HFEngine):
        def generate(self, positions: np.ndarray, requests: Any) -> Any:
            asked.append(positions.tolist())
            return super().generate(positions, requests)

    class OfThird(Broken):
        """Goes wrong in the third play, and in all those that follow the job's own."""

        plays = 0

        def run(self, items: Sequence[Item]) -> TaskRun:
            self.plays += 1
            wrong = self.plays == 3 or self.plays > 5
            yield [Request("yes or no", 1) for _ in items]
            if wrong and any(item["id"] == self.at for item in items):
                raise RuntimeError("something odd")
            return [Score(1.0, "yes") for _ in items]

    worker = recipe(tiny_llama, tiny_pool, OfThird("error", 2))
    worker.engine = Watched()
    worker.open("cpu")
    with pytest.raises(RuntimeError) as caught:
        worker.run(job)
    assert caught.value.__notes__ == ["item 2"]
    assert [len(rows) for rows in asked] == [5, 1, 1, 1]
    assert asked[1:] == [[list(job.positions[2])]] * 3


def test_a_job_that_kills_three_workers_ends_the_run(tiny_llama: Path, tiny_pool: Path) -> None:
    executor = ProcessExecutor(workers=2, threads=1)
    executor.open(recipe(tiny_llama, tiny_pool, Broken("dies", 7)))
    try:
        with pytest.raises(UserError, match=r"3 workers died .*items 6 to 11"):
            list(executor.map(jobs(1)))
    finally:
        executor.close()


def test_a_killed_worker_costs_nothing_but_time(
    task: MultipleChoice, tiny_llama: Path, tiny_pool: Path
) -> None:
    executor = ProcessExecutor(workers=2, threads=1)
    executor.open(recipe(tiny_llama, tiny_pool, task))
    expected = {r.number: r for r in executor.map(jobs())}

    def kill() -> None:
        time.sleep(0.02)
        os.kill(executor._workers[0].process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = {r.number: r for r in executor.map(jobs())}
    killer.join()
    again = {r.number: r for r in executor.map(jobs())}
    executor.close()
    assert found == again == expected


def test_equal_positions_are_played_once(
    task: MultipleChoice, tiny_llama: Path, tiny_pool: Path
) -> None:
    inline = InlineExecutor()
    inline.open(recipe(tiny_llama, tiny_pool, task))
    seen = []
    scores = Evaluator(task, inline, Batching(particles=2, items=5)).score_positions(
        [[1.0, 0, 0, 0], [0, 1.0, 0, 0], [1.0, 0, 0, 0]], "test", seen.append
    )
    assert scores[0] == scores[2] and [len(row) for row in scores] == [16, 16, 16]
    assert sum(len(row) for result in seen for row in result.scores) == 32


def test_the_cut_covers_everything_once() -> None:
    found = Batching(particles=2, items=5).split_jobs(np.eye(3), "dev", 12)
    cells = [(p, i) for job in found for p in job.positions for i in job.items]
    assert len(cells) == len(set(cells)) == 36
    assert [job.number for job in found] == list(range(len(found)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InlineExecutor([0, 1]), "gpus"),
        (lambda: InlineExecutor([-1]), "gpus"),
        (lambda: InlineExecutor(["a"]), "gpus"),  # type: ignore[list-item]
        (lambda: ProcessExecutor([0, 0]), "once"),
        (lambda: ProcessExecutor([97]), "no CUDA device 97"),
        (lambda: ProcessExecutor(workers=0), "executor.workers"),
        (lambda: Batching(particles=0), "job.particles"),
        (lambda: Batching(items=-3), "job.items"),
    ],
)
def test_wrong_settings_are_named(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()  # type: ignore[operator]
