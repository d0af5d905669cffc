"""One contract for all executors, and what becomes of workers that fail or die."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searches

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.errors import UserError
from swarm.executors import Executor, Job, JobResult, Worker
from swarm.executors.inline import InlineExecutor
from swarm.executors.processes import ProcessExecutor
from swarm.loop.evaluator import Batching, Evaluator
from swarm.models.base import Request
from swarm.pool.pool import Pool
from swarm.tasks.base import Item, Score, Task, TaskRun
from swarm.tasks.multiple_choice import MultipleChoice

ODD, MISTAKE, DEADLY = 12, 13, 14
POSITIONS = np.eye(5, 4) + 0.1


class Faulty(Task):
    """Twelve good items, and one of each kind of fault."""

    name = "faulty"

    def items(self, split: str) -> Sequence[Item]:
        return [{"id": i} for i in range(15)]

    def run(self, items: Sequence[Item]) -> TaskRun:
        prompts = [f"number {item['id']}: yes or no" for item in items]
        answers = yield [Request(prompt, 0, (" yes", " no")) for prompt in prompts]
        faults = {item["id"] for item in items}
        if DEADLY in faults:
            os.kill(os.getpid(), signal.SIGKILL)
        if MISTAKE in faults:
            raise UserError("data/eval/x.json: item 3 has no answer")
        if ODD in faults:
            raise RuntimeError("something odd")
        return [Score(one.logprobs[0], "yes") for one in answers]

    def grade(self, item: Item, answer: str | None) -> float:
        return 1.0

    def utility(self, scores: Sequence[Score]) -> float:
        return 1.0


def recipe(base: Path, pool: Path, task: Task | None = None) -> Worker:
    return Worker(BaseModel(str(base)), Pool(pool).open(), task or Faulty(), HFEngine())


def jobs(items: range = range(12), positions: int = 5) -> list[Job]:
    return Batching(particles=1, items=6).split_jobs(POSITIONS[:positions], "dev", items)


def by_number(executor: Executor) -> dict[int, JobResult]:
    return {result.number: result for result in executor.map(jobs())}


@pytest.fixture(scope="module")
def inline(tiny_llama: Path, tiny_pool: Path) -> Executor:
    made = InlineExecutor()
    made.open(recipe(tiny_llama, tiny_pool))
    return made


@pytest.fixture(scope="module")
def expected(inline: Executor) -> dict[int, JobResult]:
    """The results of a single worker."""
    return by_number(inline)


@pytest.fixture(scope="module")
def processes(tiny_llama: Path, tiny_pool: Path) -> Iterator[ProcessExecutor]:
    made = ProcessExecutor(workers=2, threads=1)
    made.open(recipe(tiny_llama, tiny_pool))
    yield made
    made.close()


@pytest.fixture(scope="module", params=["inline", "processes"])
def executor(request: pytest.FixtureRequest) -> Executor:
    return request.getfixturevalue(request.param)


def test_every_job_is_answered_once_and_the_same(
    executor: Executor, expected: dict[int, Any]
) -> None:
    asked = jobs()
    found = list(executor.map(asked))
    assert sorted(result.number for result in found) == [job.number for job in asked]
    assert {result.number: result for result in found} == expected
    for job in asked:
        assert [len(row) for row in expected[job.number].scores] == [len(job.items)]
        assert expected[job.number].prompts == len(job.items) < expected[job.number].tokens


def test_an_error_in_a_worker_is_one_line(executor: Executor) -> None:
    with pytest.raises(UserError, match=r"RuntimeError: something odd \(item 12, job 0") as caught:
        list(executor.map(jobs(range(9, 13), 1)))
    assert "\n" not in str(caught.value) and "items 9 to 12" in str(caught.value)
    with pytest.raises(UserError, match=r"^data/eval/x\.json: item 3 has no answer$"):
        list(executor.map(jobs(range(13, 14), 1)))


def test_a_killed_worker_costs_nothing_but_time(
    processes: ProcessExecutor, expected: dict[int, Any]
) -> None:
    by_number(processes)  # the workers are open
    pid = processes._slots[0].worker.pid
    killer = threading.Timer(0.02, os.kill, (pid, signal.SIGKILL))
    killer.start()
    assert by_number(processes) == expected
    killer.join()


def test_a_job_that_kills_three_workers_ends_the_run(processes: ProcessExecutor) -> None:
    with pytest.raises(UserError, match=r"3 workers died .*items 14 to 14"):
        list(processes.map(jobs(range(14, 15), 1)))


def test_the_item_is_looked_for_at_the_position_that_failed_and_no_further(
    tiny_llama: Path, tiny_pool: Path
) -> None:
    """Scoring may cost money: of five positions one is played again, up to the wrong item."""
    job = Batching(particles=5, items=12).split_jobs(POSITIONS, "dev", 12)[0]
    asked: list[list[list[float]]] = []

    class Watched(HFEngine):
        def generate(self, positions: np.ndarray, requests: Any) -> Any:
            asked.append(positions.tolist())
            return super().generate(positions, requests)

    class OfThird(Faulty):
        """Goes wrong in the third play, and in all those that follow the job's own."""

        plays = 0

        def run(self, items: Sequence[Item]) -> TaskRun:
            self.plays += 1
            wrong = self.plays == 3 or self.plays > 5
            yield [Request("yes or no", 1) for _ in items]
            if wrong and any(item["id"] == 2 for item in items):
                raise RuntimeError("something odd")
            return [Score(1.0, "yes") for _ in items]

    worker = recipe(tiny_llama, tiny_pool, OfThird())
    worker.engine = Watched()
    worker.open("cpu")
    with pytest.raises(RuntimeError) as caught:
        worker.run(job)
    assert caught.value.__notes__ == ["item 2"]
    assert [len(rows) for rows in asked] == [5, 1, 1, 1]
    assert asked[1:] == [[list(job.positions[2])]] * 3


def test_equal_positions_are_played_once(tiny_llama: Path, tiny_pool: Path, tmp_path: Path) -> None:
    task = MultipleChoice(
        "tiny", str(searches.choice_file(tmp_path / "tiny.json")), scoring="logits"
    )
    inline = InlineExecutor()
    inline.open(recipe(tiny_llama, tiny_pool, task))
    seen: list[JobResult] = []
    evaluator = Evaluator(task, inline, Batching(particles=2, items=5))
    evaluator.on_job = seen.append
    scores = evaluator.score_positions([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [1.0, 0, 0, 0]], "test")
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
        (lambda: ProcessExecutor([0, 0]), "each once"),
        (lambda: ProcessExecutor([97]), "no CUDA device 97"),
        (lambda: Batching(particles=0), "job.particles"),
    ],
)
def test_wrong_settings_are_named(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()  # type: ignore[operator]
