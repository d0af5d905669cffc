"""The search loop over one run folder: ask, evaluate, tell, record; with stop and resume."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swarm.engine.base import Engine, ExpertPool
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.executors import Executor, Worker
from swarm.loop.context import check_context
from swarm.loop.evaluator import (
    Batching,
    Budget,
    EvaluatedPositions,
    Evaluator,
    TimeLimit,
    calibrate_scale,
    mean_by_route,
    rows_to_evaluate,
    scores_to_records,
    split_dev_holdout,
)
from swarm.loop.final_evaluation import FINALIST_COUNT, FinalEvaluation, ScoreFn
from swarm.loop.final_metrics import encode_ensemble, final_metrics
from swarm.loop.racing import Racing
from swarm.loop.reporter import RunReporter, buffer_log, flush_log_to
from swarm.loop.search_inputs import (
    check_run_settings,
    digest_items,
    engine_versions,
    resolve_baselines,
    resolve_groups,
    search_identity,
    shared_score_context,
    start_optimizer,
    validate_baselines,
)
from swarm.optimizers.base import Optimizer
from swarm.optimizers.static_merges import count_static_merges
from swarm.runs.folder import (
    RunRecord,
)
from swarm.runs.pareto_front import (
    check_objectives,
    compute_objectives,
    count_items_by_subtask,
    describe_front,
    objectives_to_lists,
)
from swarm.runs.verdict import Verdict, read_verdict
from swarm.tasks.base import (
    Score,
    Task,
    metric_task,
    prompt_form,
)
from swarm.trackers import Tracker

log = logging.getLogger(__name__)

DERIVE_S = 3.0
"""Minimum interval in seconds between two writes of the files derived from the state."""


class Run:
    """A search over one run folder. Construction is cheap; `search` does the work.

    Args:
        name: Name of the run's folder below `folder`; an existing run is resumed.
        task, model, pool, optimizer, engine, executor, tracker: Components of the search.
        job: Batching of the work into jobs.
        seed: Seed of all randomness.
        test: Whether to compare the best positions on the test split at the end.
        ensemble: Number of personal bests that vote on the test split; 0 disables the vote.
        folder: Parent folder of the runs.
        racing: Early stopping of particles before their last item; `None` disables it.
        budget: Maximum number of dev prompts that the optimizer may spend; `None` is no limit.
        minutes: Maximum duration of the search with its test, see `TimeLimit`.
        shared: Folder of a score cache shared with other searches; `None` disables it.
        confirm: Share of dev that is held out from the search, to confirm the result.
        choose: Items on which the best position is selected: those that the search saw
            ("searched"), or, among ten finalists and the best static recipe, the held-out items
            ("kept").
        noise_floor: Whether to score the best position on dev once more, in other batches.
        front: Number of points of the Pareto front to score on test, for multi-objective
            optimizers.
        baselines: Baselines that are compared with the best position on test, names of
            `swarm.loop.search_inputs.BASELINE_LABELS`; "auto" as in `resolve_baselines` there.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        model: BaseModel,
        pool: ExpertPool,
        optimizer: Optimizer,
        engine: Engine,
        executor: Executor,
        tracker: Tracker,
        job: Batching,
        seed: int = 42,
        test: bool = True,
        ensemble: int = 10,
        folder: str = "search",
        racing: Racing | None = None,
        budget: int | None = None,
        minutes: float | str | None = None,
        shared: str | None = None,
        confirm: float = 0.0,
        noise_floor: bool = True,
        front: int = 10,
        choose: str = "searched",
        baselines: str | Sequence[str] = (),
    ) -> None:
        name = str(name) if type(name) is int else name  # Hydra parses name=2 as a number
        switches = {"test": test, "noise_floor": noise_floor}
        check_run_settings(
            name, folder, seed, {"ensemble": ensemble, "front": front}, confirm, switches
        )
        if not isinstance(job, Batching):
            raise UserError(f"job={job}: must have keys, e.g. job.particles=5 job.items=50", 2)
        self.task, self.model, self.pool, self.optimizer = task, model, pool, optimizer
        self.engine, self.executor, self.tracker = engine, executor, tracker
        self.seed, self.test, self.ensemble, self.front = seed, test, ensemble, front
        self.racing = racing or Racing()
        self.record = RunRecord(Path(folder) / name)
        if choose not in ("searched", "kept") or (choose == "kept" and not confirm):
            raise UserError(
                f"choose={choose}: must be searched, or kept together with confirm, e.g. "
                "confirm=0.3"
            )
        self.confirm, self.noise_floor, self.job, self.choose = confirm, noise_floor, job, choose
        self.baselines = validate_baselines(baselines)
        self.budget, self.limit = Budget(budget), TimeLimit(minutes, budget)
        self._evaluate = Evaluator(task, executor, job, shared)
        self._searched: list[int] = []
        self._kept: list[int] = []
        self._known = EvaluatedPositions(self.record)
        self._item_routes: np.ndarray | None = None
        self._derive_at = self._iteration_began = self._scoring_seconds = 0.0
        self._tested: Counter[str] = Counter()
        self.differentiating = False
        self.notes: list[str] = []

    def search(
        self,
        config: Mapping[str, Any] | None = None,
        arguments: Sequence[str] | None = None,
        show: bool = True,
    ) -> Verdict:
        """Run the search, resume it, or show the verdict on a finished one again.

        Args:
            config: The configuration, stored in the folder and compared on resume.
            arguments: Command-line arguments, stored as well; `None` if there was no command line.
            show: Whether to show progress on the terminal.

        Returns:
            The verdict.

        Raises:
            UserError: An input is invalid; nothing has been written in that case.
        """
        self._iteration_began = time.monotonic()
        self.reporter = RunReporter(
            self.record,
            self.tracker,
            self.optimizer.max_iterations,
            show,
            self.budget.prompts,
            self.limit.seconds,
        )
        try:
            self._setup(config or {})
            if arguments is not None:
                self.record.save_command(arguments)
            with (
                self.reporter.view,
                self.reporter.search_tracker.track_search(self.record.state, config or {}),
            ):
                if self.record.state["finished"] is None:
                    self._run_iterations()
                verdict = self._finalize()
                self.reporter.search_tracker.log_verdict(verdict)
        finally:
            self.executor.close()
            self.reporter.close()
        self.reporter.on_run_end(verdict, self.pool.groups, self.pool.saves)
        return verdict

    def _setup(self, config: Mapping[str, Any]) -> None:
        """Check everything that can be checked before the first byte is written."""
        held = buffer_log()
        dev = self.check_inputs()
        self.tracker.check()
        self.pool.check()
        if self.fit_items_to_context(self.engine.check(self.model, self.pool)):
            dev = self.check_inputs()
        identity = search_identity(config, self.seed, self.task, self.model, self.pool)
        self.executor.open(Worker(self.model, self.pool, self.task, self.engine))
        if self._evaluate.cache:
            context = shared_score_context(identity, config, self.task, self.test)
            self._evaluate.cache.set_context(context)
        self.record.load_state(identity)  # a folder with another search is not even locked
        self.reporter.acquire_lock()
        resumed = self.record.open_or_resume(
            identity, self.pool.names, self.pool.groups, self.pool.expert_count
        )
        if self.limit.was_raised(self.record.state):
            self.record.reopen()
        self.record.note = {"prompt_form": prompt_form(self.task)}
        flush_log_to(self.record.folder, held)
        if config:
            self.record.save_config(resolve_groups(config, self.pool))
        if resumed and self.record.iterations:
            self._restore()
        base = self.model.describe_substitute()
        if changed := self.record.record_versions(engine_versions()):
            log.warning("%s: answers may differ from earlier ones by rounding", changed)
        self.reporter.on_run_start(
            resumed,
            {
                "task": self.task.name,
                "dev": dev,
                "kept": len(self._kept),
                "base": f"{self.model.path} as {base}" if base else None,
                "notes": self.notes,
                "final_items": self.final_items(),
            },
        )

    def fit_items_to_context(self, tokenizer: Any) -> bool:
        """Check that prompts fit into the model's context; return whether dev items were left out.

        Raises:
            UserError: They do not fit.
        """
        before = len(self.task.items("dev"))
        splits = ("dev", "test") if self.test else ("dev",)
        check_context(self.task, tokenizer, self.engine.context, splits)
        return len(self.task.items("dev")) < before

    def check_inputs(self) -> int:
        """Read items and pool, start the optimizer; return the number of dev items it will see."""
        dev = self.task.items("dev")
        if self.test:
            self.task.items("test")
        self._searched, self._kept = split_dev_holdout(dev, self.confirm, self.seed)
        self.task.check()
        self.optimizer, missing, self.notes, self._item_routes = start_optimizer(
            self.optimizer,
            self.task,
            self.pool,
            self.model,
            self.engine,
            self.budget,
            self._searched,
            self.seed,
        )
        self._known = EvaluatedPositions(self.record, self._item_routes, self._routes)
        self.differentiating = missing is None and self.optimizer.needs_gradients is not None
        check_objectives(self.optimizer, self.task)
        self.racing.check_raceable(self.task, self.optimizer)
        return len(self._searched)

    def _restore(self) -> None:
        self.optimizer.load_state_dict(self.record.state["optimizer"])
        for number, entry in enumerate(self.record.iterations):
            self._known.add_iteration(number, entry["positions"], entry["utilities"])
        if scale := self.record.state["scale"]:
            self.task.restore_scale(scale)
        self.record.write_outputs(self.pool)

    def _run_iterations(self) -> None:
        try:
            while (reason := self.optimizer.stop_reason() or self._limit_reason()) is None:
                self._run_iteration(len(self.record.iterations))
        except KeyboardInterrupt:
            # A killed process may leave files that are some seconds old; the next start repairs
            # them.
            with contextlib.suppress(UserError):
                if self.record.iterations:
                    self._derive()
            raise
        self.record.state["finished"] = reason
        self.record.save_state()
        self.reporter.on_search_end(reason)

    @property
    def _routes(self) -> int:
        router = getattr(self.pool, "router", None)
        return len(router.names) if router else 1

    def _limit_reason(self) -> str | None:
        """Return why budget or time ends the search; a position with known answers is free."""
        if self.optimizer.composes_next:
            return None
        if reason := self.budget.exhausted_reason(self.record):
            return reason
        if reason := self.limit.exhausted_reason(self.record, self.final_items()):
            self.record.state["minutes"] = self.limit.minutes
        return reason

    def _run_iteration(self, number: int) -> None:
        began, shared = time.monotonic(), self._evaluate.shared
        taken = self._answer_gradient_requests(number)
        positions = self.optimizer.ask()
        self._evaluate.names = name_positions(positions, number)
        experts = 0 if number else len(self.pool.names)
        groups = len(self.pool.groups)
        wanted = rows_to_evaluate(positions, self.optimizer.evaluate, experts, groups)
        asked, wanted = (
            wanted,
            self.budget.affordable_rows(
                self.record, positions, wanted, self._known, _gradient_cost(taken)
            ),
        )
        new = [i for i in wanted if positions[i] not in self._known]
        self.reporter.on_dev_start(number, len(new), len(self._searched))
        raced = self.racing.race_particles(
            self._score_dev,
            {i: positions[i] for i in new},
            self.racing.find_incumbents(self.record),
            len(self._searched),
            self.seed,
            number,
        )
        self._known.fill_known_scores(raced.scores, positions, wanted)
        if number == 0:
            self.record.state["scale"] = calibrate_scale(
                self.task, raced.scores, self.pool.expert_count
            )
        utilities = np.full(len(positions), np.nan)
        for i, scores in raced.complete_scores().items():
            utilities[i] = self.task.utility(scores)
        objectives = compute_objectives(self.task, raced.complete_scores(), len(positions))
        if self._item_routes is not None:
            self.optimizer.tell_routes(
                mean_by_route(
                    raced.complete_scores(), self._item_routes, self._routes, len(positions)
                )
            )
        stopped = np.isin(np.arange(len(utilities)), raced.stopped)
        self.optimizer.tell(utilities, stopped, objectives)
        dev = [self.task.items("dev")[index] for index in self._searched]
        rows = {
            i: scores_to_records([dev[p] for p in s], [*s.values()])
            for i, s in raced.scores.items()
        }
        facts = (
            raced.to_record(len(positions)) | {"beyond_budget": len(asked) - len(wanted)} | taken
        )
        facts |= {"prompts_shared": self._evaluate.shared - shared} if self._evaluate.cache else {}
        if objectives is not None:
            facts["objectives"] = objectives_to_lists(objectives)
            scores = next(iter(raced.complete_scores().values()))
            self.record.state.setdefault("objectives", count_items_by_subtask(self.task, scores))
        facts |= self._take_seconds()
        self.reporter.on_write("answers")
        self.record.add_iteration(positions, utilities, rows, self.optimizer.state_dict(), facts)
        if time.monotonic() >= self._derive_at:
            self._derive()
        entry = self.record.iterations[-1]
        self._known.add_iteration(number, entry["positions"], entry["utilities"])
        self.reporter.on_iteration_end(number, time.monotonic() - began)

    def _derive(self) -> None:
        """Write scratchpad, new bests and front, whose cost grows with the number of iterations.

        Not repeated within `DERIVE_S` seconds, or within ten times the duration of the last write.
        """
        began = time.monotonic()
        self.reporter.on_write("new bests")
        self.record.write_outputs(self.pool)
        self.record.write_json("front.json", describe_front(self.record.state))
        ended = time.monotonic()
        self._derive_at = ended + max(DERIVE_S, 10 * (ended - began))

    def _answer_gradient_requests(self, number: int) -> dict[str, int]:
        """Answer the optimizer's gradient requests; return the number of examples used, by kind."""
        taken = {"losses_computed": 0, "gradients_computed": 0}
        if not self.differentiating or number == 0:
            return {}
        plan = self.optimizer.plan_descent(len(self._searched))
        descent = self.optimizer.descend(len(self._searched))
        answers: list[Any] | None = None
        while True:
            try:
                # The first value sent to a generator must be None.
                wanted = descent.send(answers)  # type: ignore[arg-type]
            except StopIteration:
                return taken
            if not self.budget.allows_gradients(
                self.record, _gradient_cost(taken) + sum(w.prompt_cost for w in wanted)
            ):
                descent.close()
                return taken
            if not any(taken.values()):
                examples = plan.examples if plan else sum(len(one.items) for one in wanted)
                self.reporter.on_gradients_start(number, plan, examples)
            for one in wanted:
                taken["gradients_computed" if one.slope else "losses_computed"] += len(one.items)
            answers = self._evaluate.compute_gradients(
                wanted,
                self._searched,
                self.reporter.on_job_done,
                iteration=number,
            )

    def _score_dev(
        self, positions: Sequence[Sequence[float]], *, items: Sequence[int]
    ) -> list[list[Score]]:
        chosen = [self._searched[index] for index in items]
        done, began = self.reporter.on_job_done, time.monotonic()
        found = self._evaluate.score_positions(positions, "dev", done, chosen)
        self._scoring_seconds += time.monotonic() - began
        return found

    def _take_seconds(self) -> dict[str, float]:
        """Return the seconds since the last iteration and those of scoring, for a time limit."""
        now, began, scoring = time.monotonic(), self._iteration_began, self._scoring_seconds
        self._iteration_began, self._scoring_seconds = now, 0.0
        found = {"seconds": now - began, "scoring_seconds": scoring}
        return found if self.limit.minutes is not None else {}

    def _score_positions(
        self, positions: Sequence[Sequence[float]], split: str, items: Sequence[int]
    ) -> list[list[Score]]:
        return self._evaluate.score_positions(positions, split, self.reporter.on_job_done, items)

    def _finalize(self) -> Verdict:
        items = digest_items(self.task, "test") if self.test else None
        settings: dict[str, Any] = {
            "ensemble": self.ensemble,
            "test_items": items,
            "noise_floor": self.noise_floor,
        }
        # Only multi-objective searches test a front; the key is absent elsewhere, as in older runs.
        front = self.front if self.optimizer.has_objectives else 0
        settings |= {"front": front} if front else {}
        baselines = self._tested_baselines()
        settings |= {"baselines": baselines} if baselines else {}
        verdict = read_verdict(self.record.state)
        if verdict is None or verdict.settings != settings:
            ending = FinalEvaluation(
                self.record,
                self.task,
                self._score_positions,
                self._score_rebatched(),
                self._start_evaluation,
                self._searched,
                self._kept,
                self.optimizer.items_without_gradient(len(self._searched)),
                self.choose == "kept",
                self._item_routes,
                self._routes,
            )
            ending.choose_bests()
            self.record.write_outputs(self.pool)
            verdict = final_metrics(
                ending, self.test, self.ensemble, self.noise_floor, front, baselines, settings
            )
            self.record.state["verdict"] = verdict.to_dict()
            self.record.save_state()
            for name, value in verdict.original_names().items():
                log.info("%s: %s", name, value)
        self.record.write_json("front.json", describe_front(self.record.state))
        # Full models store their personal bests as notes only, so there is nothing to vote with.
        if not hasattr(self.pool, "save_note"):
            self.record.write_file("ensemble.yaml", encode_ensemble(verdict.vote))
        return verdict

    def applicable_baselines(self) -> list[str]:
        """Return those of `baselines` that are applicable to this pool and task."""
        return resolve_baselines(self.baselines, self.task, self.pool)

    def _tested_baselines(self) -> list[str]:
        return self.applicable_baselines() if self.test else []

    def max_tested_models(self) -> int:
        """Return the maximum number of models scored on test.

        Those are both bests, the baselines, the voters and points of the front.
        """
        front = self.front if self.optimizer.has_objectives else 0
        voters = self.ensemble if metric_task(self.task).votes else 0
        return 2 + len(self.applicable_baselines()) + voters + front

    def count_recipes(self) -> int:
        """Return the number of static merges among which the baseline "recipe" is chosen on dev."""
        tested = "recipe" in self._tested_baselines()
        return count_static_merges(self.pool.expert_count) if tested else 0

    def final_items(self) -> int:
        """Return the maximum number of items to evaluate after the search, on test and on dev."""
        again = self.noise_floor + self.count_recipes()
        if metric_task(self.task) is not self.task:
            again += self.pool.expert_count + FINALIST_COUNT
        kept = len(self._kept) * (FINALIST_COUNT + 1 if self.choose == "kept" else 2)
        tested = self.max_tested_models() * self._test_items
        return tested + again * len(self._searched) + kept

    @property
    def _test_items(self) -> int:
        return len(self.task.items("test")) if self.test else 0

    def _start_evaluation(self, kind: str, items: int, name: str) -> None:
        """Report the evaluation of a model of this kind (`FinalEvaluation`) after the search."""
        activity, to_come = FINAL_ACTIVITIES[kind], 0
        if kind == "test":
            self._tested[name] += items
            number = list(self._tested).index(name) + 1
            limit = max(len(self._tested), self.max_tested_models())
            activity = f"{activity}: {name} ({number} of at most {limit})"
            to_come = max(0, limit * self._test_items - self._tested.total())
        self.reporter.on_final_evaluation_start(kind, activity, items, to_come)

    def _score_rebatched(self) -> ScoreFn:
        """Return a function that scores as the search does, without cache, in other batches."""
        other = Batching(1, (self.job.items or len(self._searched)) // 2 + 1)
        ask = Evaluator(self.task, self.executor, other).score_positions
        return lambda positions, split, items: ask(
            positions, split, self.reporter.on_job_done, items
        )


FINAL_ACTIVITIES = {
    "test": "test",
    "judged": "evaluating dev",
    "confirm": "evaluating held-out dev items",
    "again": "evaluating dev once more in other batches",
}
"""Activities after the search by kind of stored answers (`FinalEvaluation`)."""

MAX_COEFFICIENT = 1e6
"""Largest absolute coefficient; no model gives useful answers beyond it."""


def name_positions(positions: np.ndarray, iteration: int) -> dict[tuple[float, ...], str]:
    """Return the name of each of the positions [N, G * K] for messages.

    Raises:
        UserError: A coefficient is not finite or exceeds `MAX_COEFFICIENT`.
    """
    found: dict[tuple[float, ...], str] = {}
    for i, row in enumerate(positions):
        name = f"particle {i} of iteration {iteration}"
        if not (np.isfinite(row).all() and np.abs(row).max(initial=0.0) <= MAX_COEFFICIENT):
            worst = float(np.abs(row).max())
            raise UserError(
                f"{name}: a coefficient of {worst:.3g} exceeds the limit of "
                f"{MAX_COEFFICIENT:g}: the optimizer's steps are too long "
                "(optimizer.step_length, sigma or the like)"
            )
        found.setdefault(tuple(row.tolist()), name)
    return found


def _gradient_cost(taken: Mapping[str, int]) -> int:
    """Return the cost in prompt-equivalents of the counts of `Run._answer_gradient_requests`."""
    return taken.get("losses_computed", 0) + 3 * taken.get("gradients_computed", 0)
