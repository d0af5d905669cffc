"""The search over one run folder: ask, evaluate, tell, record, show; at the end the verdict.

Read `Run.search` first, then `Run._run_iteration`.
"""

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from swarm._util.secrets import clean, clean_words
from swarm._util.settings import Count, Positive, PositiveNumber, Settings, parse_settings
from swarm._util.terminal import pluralize
from swarm.engine.base import Engine
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.executors import Executor, Worker
from swarm.loop.context import check_context
from swarm.loop.descents import Descents, choose_signal
from swarm.loop.evaluator import (
    Batching,
    EvaluatedPositions,
    Evaluator,
    calibrate_scale,
    mean_by_route,
    name_positions,
    rows_to_evaluate,
    scores_to_records,
    split_dev_holdout,
)
from swarm.loop.final_evaluation import (
    FINALIST_COUNT,
    Baseline,
    FinalEvaluation,
    ScoreFn,
    encode_ensemble,
    resolve_baselines,
)
from swarm.loop.identity import (
    check_run_path,
    digest_items,
    engine_versions,
    search_identity,
    selection_identity,
    shared_score_context,
)
from swarm.loop.limits import Budget, TimeLimit
from swarm.loop.prompt_form import (
    both_forms,
    describe_form,
    measure_forms,
    stored_form,
    with_form,
)
from swarm.loop.racing import RaceResult, Racing
from swarm.loop.selection import Selection, spaced_items
from swarm.loop.terminal import Progress, SearchView, buffer_log, flush_log_to
from swarm.optimizers.base import DescentPlan, Optimizer, SearchResources
from swarm.optimizers.static_merges import count_static_merges
from swarm.optimizers.swarm import NORM_LIMIT, MemeticSwarm
from swarm.pool.pool import ExpertPool, Pool
from swarm.pool.prompt_router import AUTO, MIN_ITEMS, KindChoice, choose_kinds, read_router
from swarm.runs.folder import COMMAND_FILE, CONFIG_FILE, RunRecord, prompt_cost
from swarm.runs.overview import Overview, survey_experts
from swarm.runs.pareto_front import (
    check_objectives,
    compute_objectives,
    count_items_by_subtask,
    describe_front,
    objectives_to_lists,
)
from swarm.runs.verdict import (
    CONTROL,
    Verdict,
    describe_kinds,
    describe_selection,
    read_verdict,
)
from swarm.tasks.base import Score, Task, first_prompts, prompt_form
from swarm.tasks.metrics import item_domain
from swarm.trackers import Tracker

log = logging.getLogger(__name__)

DERIVE_S = 3.0
"""Minimum interval in seconds between two writes of the files derived from the state."""

FINAL_ACTIVITIES = {
    "test": "test",
    "judged": "answering dev items",
    "confirm": "answering held-out dev items",
    "again": "answering dev items once more, in other batches",
}
"""Activities after the search by kind of stored answers (`FinalEvaluation`)."""


class SearchSettings(Settings):
    """The plain settings of a search.

    Attributes:
        seed: Seed of all randomness.
        budget: Maximum number of dev prompts that the optimizer may spend; `None` is no limit.
        minutes: Maximum duration of the search with its test, see `TimeLimit`.
        test: Whether to compare the best positions on the test split at the end.
        ensemble: Number of personal bests that vote on the test split; 0 disables the vote.
        confirm: Share of dev that is held out from the search, to confirm the result.
        choose: Items on which the best position is selected: those that the search saw, or, among
            ten finalists and the best static recipe, the held-out items.
        noise_floor: Whether to score the best position on dev once more, in other batches.
        look: Whether to stop after the first iteration, which shows what the experts have.
        front: Number of points of the Pareto front to score on test, with several objectives.
        baselines: Models to compare with on test; "auto" as in `resolve_baselines`.
    """

    seed: Count = 42
    budget: Positive | None = None
    minutes: Literal["auto"] | PositiveNumber | None = None
    test: bool = True
    ensemble: Count = 10
    confirm: Annotated[float, Field(ge=0, lt=1)] = 0.0
    choose: Literal["searched", "kept"] = "searched"
    noise_floor: bool = True
    look: bool = False
    front: Count = 10
    baselines: Literal["auto"] | Sequence[Baseline] = ()


class Run:
    """A search over one run folder. Construction is cheap; `search` does the work.

    Args:
        name: Name of the run's folder below `folder`; an existing run is resumed.
        task, model, pool, optimizer, engine, executor, tracker: Components of the search.
        job: Batching of the work into jobs.
        racing: Early stopping of particles before their last item; `None` disables it.
        folder: Parent folder of the runs.
        shared: Folder of a score cache shared with other searches; `None` disables it.
        **settings: Those of `SearchSettings`.

    Raises:
        UserError: A value is not allowed.
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
        racing: Racing | None = None,
        folder: str = "search",
        shared: str | None = None,
        **settings: Any,
    ) -> None:
        name = str(name) if type(name) is int else name  # Hydra parses name=2 as a number
        check_run_path(name, folder)
        self.settings = parse_settings(SearchSettings, settings)
        if self.settings.choose == "kept" and not self.settings.confirm:
            raise UserError("choose=kept: needs held-out items, e.g. confirm=0.3")
        if not isinstance(job, Batching):
            raise UserError(f"job={job}: must have keys, e.g. job.particles=5 job.items=50", 2)
        self.task, self.model, self.pool, self.optimizer = task, model, pool, optimizer
        self.engine, self.executor, self.tracker, self.job = engine, executor, tracker, job
        self.racing = racing or Racing()
        self.record = RunRecord(Path(folder) / name)
        self.budget = Budget(self.settings.budget)
        self.limit = TimeLimit(self.settings.minutes, self.settings.budget)
        self.descents: Descents | None = None
        self.notes = list[str]()
        self._evaluator = Evaluator(task, executor, job, shared)
        self.pool.learned = self._evaluator.learned
        self._known: EvaluatedPositions  # by `_set_kinds`
        self._config: Mapping[str, Any] = {}
        self.searched, self.held_out = list[int](), list[int]()  # indices of dev items
        self._kinds: dict[str, np.ndarray] = {}  # of all items of a split, by split
        self._surveyed: dict[tuple[float, ...], dict[int, Score]] = {}
        self._embedded = 0  # prompts
        self._candidates: Pool | None = None  # the pool before `_select_experts`
        self.selected: dict[str, Any] = {}
        self._derive_at = 0.0
        self._tested: Counter[str] = Counter()

    def search(
        self,
        config: Mapping[str, Any] | None = None,
        arguments: Sequence[str] | None = None,
        show: bool = True,
    ) -> Verdict | None:
        """Run the search, resume it, or show the verdict on a finished one again.

        Args:
            config: The configuration, stored in the folder and compared on resume.
            arguments: Command-line arguments, stored as well; `None` if there was no command line.
            show: Whether to show progress on the terminal.

        Returns:
            The verdict; `None` if `look` stopped it before its end.

        Raises:
            UserError: An input is invalid; nothing has been written in that case.
        """
        self.limit.begin()
        progress = Progress(self.optimizer.max_iterations, self.budget.prompts, self.limit.seconds)
        self.view = SearchView(self.record, self.tracker, progress, show)
        self._evaluator.on_job = self.view.show_job
        try:
            self._open_folder(config or {}, arguments)
            with self.view:
                if not self.record.iterations:
                    self._choose_kinds()
                with self.view.tracker.track_search(self.record.state, config or {}):
                    if self.record.state["finished"] is None:
                        self._run_iterations()
                    if self.record.state["finished"] is None:
                        return None
                    verdict = self._conclude()
                    self.view.tracker.log_verdict(verdict)
        finally:
            self.executor.close()
            self.view.close()
        self.view.show_verdict(verdict, self.pool.saves)
        return verdict

    def _run_iterations(self) -> None:
        try:
            if self.settings.look and self.record.iterations:
                return self.view.show_overview(Overview.from_state(self.record.state))
            while (reason := self.optimizer.stop_reason() or self._limit_reason()) is None:
                number = len(self.record.iterations)
                self._run_iteration(number)
                self.view.show_iteration(number)
                if not number:
                    self.view.show_overview(Overview.from_state(self.record.state))
                if self.settings.look:
                    return self._derive_files()
                if time.monotonic() >= self._derive_at:
                    self._derive_files()
        except KeyboardInterrupt:
            # A killed process may leave derived files that are some seconds old; the next start
            # repairs them.
            with contextlib.suppress(UserError):
                if self.record.iterations:
                    self._derive_files()
            raise
        self.record.state["finished"] = reason
        self.record.save_state()
        self.view.show_end(reason)

    def _run_iteration(self, number: int) -> None:
        """Run one iteration: descend, ask, evaluate, tell, record."""
        shared, before = self._evaluator.shared if number else 0, self.optimizer.positions
        facts: dict[str, Any] = {}
        if number == 0 and self._embedded:
            facts["prompts_embedded"] = self._embedded
        self._descend(number)
        positions = self.optimizer.ask()  # [N, G * K]
        if number and self.descents:
            facts |= self.descents.assign(self.optimizer.origins(before), positions)
        self._evaluator.names = name_positions(positions, number, self.pool.names)
        experts, groups = 0 if number else len(self.pool.names), len(self.pool.groups)
        wanted = rows_to_evaluate(positions, self.optimizer.evaluate, experts, groups)
        cost = prompt_cost(facts)
        rows = self.budget.affordable_rows(self.record, positions, wanted, self._known, cost)
        raced = self._evaluate(positions, rows, number)
        utilities, objectives = self._tell(raced, len(positions))

        dev, counts = self.task.items("dev"), list[int | None]([None] * len(positions))
        answers: dict[int, list[dict[str, Any]]] = {}
        for i, scores in sorted(raced.scores.items()):
            counts[i] = len(scores)
            items = map(dev.__getitem__, map(self.searched.__getitem__, scores))
            answers[i] = scores_to_records(items, scores.values())
            if self.descents and self.descents.signal == "scores":
                self.descents.candidates.add(scores.items())
        if self.descents:
            answers |= self.descents.records(len(positions))
        facts |= {"items_scored": counts, "prompts_scored": raced.prompts_scored}
        facts |= {"prompts_saved": raced.saved, "beyond_budget": len(wanted) - len(rows)}
        if self._evaluator.cache:
            facts["prompts_shared"] = self._evaluator.shared - shared
        if objectives is not None:
            facts["objectives"] = objectives_to_lists(objectives)
        facts |= self.limit.take_seconds()
        if number == 0:
            self._survey_experts(raced)
        self.record.add_iteration(positions, utilities, answers, self.optimizer.state_dict(), facts)
        entry = self.record.iterations[-1]
        self._known.add_iteration(number, entry["positions"], entry["utilities"])
        self.record.drop_learned(self.optimizer.positions)

    def _survey_experts(self, raced: RaceResult) -> None:
        """Note what each expert has on each kind of items, unless one has not answered all."""
        own = range(self.pool.expert_count)
        if all(i in raced.scores and i not in raced.stopped for i in own):
            dev = self.task.items("dev")
            every = range(len(self.searched))
            experts = {self.pool.names[i]: [raced.scores[i][n] for n in every] for i in own}
            found = survey_experts(self.task, [dev[index] for index in self.searched], experts)
            self.record.state["overview"] = asdict(found)

    def _descend(self, number: int) -> None:
        """Answer the optimizer's requests for gradients before an iteration."""
        if self.descents is None:
            return
        self.descents.begin()
        if number == 0:
            return
        items = len(self.searched)
        plan, descent = self.optimizer.plan_descent(items), self.optimizer.descend(items)
        answers: list[Any] | None = None  # the first value sent to a generator
        with contextlib.suppress(StopIteration):
            while True:
                wanted = descent.send(answers)  # type: ignore[arg-type]
                if answers is None and plan:
                    plan = plan._replace(particles=max(1, min(plan.particles, len(wanted))))
                    size = plan.gradients + plan.forwards
                    activity = f"round {number}: training"
                    words = f"training {describe_descent(plan)}"
                    self.view.start("gradients", words, activity, size)
                # At least one position has to be evaluated afterwards.
                left = self.budget.remaining_prompts(self.record) - self.descents.cost - items
                answers = self.descents.answer(number, wanted, left)
                if not answers:
                    descent.close()
                    break

    def _evaluate(self, positions: np.ndarray, rows: Sequence[int], number: int) -> RaceResult:
        """Score rows on dev; the known ones are read from the record."""
        known, new = dict[int, dict[int, Score]](), dict[int, np.ndarray]()
        for i in rows:
            if positions[i] in self._known:
                known[i] = self._known.load_scores(positions[i])
            elif number == 0 and (scores := self._find_surveyed(positions[i])):
                known[i] = dict(scores)
            else:
                new[i] = positions[i]
        items = len(self.searched)
        self._show_dev_evaluation(number, len(new))
        raced = self.racing.race_particles(
            self._score_dev,
            new,
            self.racing.find_incumbents(self.record),
            items,
        )
        raced.scores.update(known)
        if number == 0:
            asked = raced.prompts_scored + len(self._surveyed) * items
            raced = replace(raced, prompts_scored=asked)
            scale = calibrate_scale(self.task, raced.scores, self.pool.expert_count)
            self.record.state["scale"] = scale
        return raced

    def _show_dev_evaluation(self, number: int, count: int) -> None:
        """Show that `count` positions are evaluated on dev."""
        items = len(self.searched)
        each = f"{items} dev items by {pluralize(count, 'mixture')}"
        activity = f"round {number}: answering"
        self.view.start("dev", f"answering {each}", activity, count * items)

    def _score_dev(
        self, positions: Sequence[Sequence[float]], items: Sequence[int]
    ) -> list[list[Score]]:
        began = time.monotonic()
        indices = list(map(self.searched.__getitem__, items))
        scores = self._evaluator.score_positions(positions, "dev", indices)
        self.limit.scoring += time.monotonic() - began
        return scores

    def _tell(self, raced: RaceResult, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Give the optimizer the numbers of N = `count` positions.

        Returns:
            Their utilities [N], NaN where not every item was scored, and their objectives.
        """
        complete: dict[int, list[Score]] = {}
        utilities = np.full(count, np.nan)
        for i, scores in raced.scores.items():
            if i not in raced.stopped:
                complete[i] = list(scores.values())
                utilities[i] = self.task.utility(complete[i])
        objectives = compute_objectives(self.task, complete, count)
        if objectives is not None and "objectives" not in self.record.state:
            parts = count_items_by_subtask(self.task, next(iter(complete.values())))
            self.record.state["objectives"] = parts
        if (kinds := self._searched_kinds) is not None:
            self.optimizer.tell_routes(mean_by_route(complete, kinds, self.pool.routes, count))
        self.optimizer.tell(utilities, np.isin(np.arange(count), raced.stopped), objectives)
        return utilities, objectives

    def _limit_reason(self) -> str | None:
        """Return why budget or time ends the search; a position with known answers is free."""
        if self.optimizer.composes_next:
            return None
        if reason := self.budget.exhausted_reason(self.record):
            return reason
        if reason := self.limit.exhausted_reason(self.record, self.final_items()):
            self.record.state["minutes"] = self.limit.minutes
        return reason

    def _derive_files(self) -> None:
        """Write scratchpad, new bests and front, whose cost grows with the number of iterations.

        Not repeated within `DERIVE_S` seconds, or within ten times the duration of the last write.
        """
        began = time.monotonic()
        self.record.write_outputs(self.pool)
        self.record.write_json("front.json", describe_front(self.record.state))
        ended = time.monotonic()
        self._derive_at = ended + max(DERIVE_S, 10 * (ended - began))

    # Before the first iteration

    def _open_folder(self, config: Mapping[str, Any], arguments: Sequence[str] | None) -> None:
        """Check everything that can be checked before the first byte is written, then begin."""
        held, record, pool = buffer_log(), self.record, self.pool
        self.check_inputs()
        self.tracker.check()
        tokenizer = self.engine.check(self.model, pool)
        self.fit_items_to_context(tokenizer)
        decided = self._choose_form(tokenizer)
        self._select_experts(config)
        pool.check()
        identity = search_identity(config, self.settings.seed, self.task, self.model, pool)
        if not self._evaluator.experts:  # else the workers hold the base already
            self.executor.open(Worker(self.model, pool, self.task, self.engine))
        if self._evaluator.cache:
            context = shared_score_context(identity, config, self.task, self.settings.test)
            self._evaluator.cache.set_context(context)
        record.load_state(identity)  # a folder with another search is not even locked
        self.view.acquire_lock()
        names = pool.names, pool.groups, pool.expert_count
        resumed = record.open_or_resume(identity, *names, self.selected)
        if self.limit.was_raised(record.state):
            record.reopen()
        record.note = {"prompt_form": prompt_form(self.task)}
        flush_log_to(record.folder, held)
        if resumed and (kinds := record.state.get("kinds")) and "router" in kinds:
            pool.router = read_router(kinds["router"])
            self._start_optimizer()
            self._adopt_kinds()
        self._config = config
        self._write_config()
        if arguments is not None:
            command = {"arguments": clean_words(arguments), "directory": os.getcwd()}
            record.write_json(COMMAND_FILE, command)
        if resumed:
            self.optimizer.load_state_dict(record.state["optimizer"])
            for number, entry in enumerate(record.iterations):
                self._known.add_iteration(number, entry["positions"], entry["utilities"])
            self._evaluator.learned |= record.learned_files()
            learned = self._evaluator.learned and not self.engine.differentiable
            if learned or (pool.router and not self.engine.embeds):
                raise UserError(
                    f"{record.folder}: the search has learned adapters or kinds of prompts, which "
                    "this engine does not answer; resume with engine=hf"
                )
            if scale := record.state["scale"]:
                self.task.restore_scale(scale)
            if self.descents:
                self.descents.restore()
            record.write_outputs(pool)
        if changed := record.record_versions(engine_versions()):
            log.warning("%s: answers may differ from earlier ones by rounding", changed)
        base = self.model.describe_substitute()
        notes = [f"base: {self.model.path}, by {base}"] if base else []
        notes += [decided] if decided else []
        notes += [describe_selection(self.selected)] if self.selected else []
        self.view.progress.final_items = self.final_items()
        items = len(self.searched), len(self.held_out)
        self.view.show_start(resumed, self.task.name, *items, [*notes, *self.notes])

    def _write_config(self) -> None:
        if self._config:
            resolved = {**self._config.get("pool", {}), **self.pool.resolved_settings}
            config = with_form({**self._config, "pool": resolved}, self.task.chat)
            self.record.write_json(CONFIG_FILE, clean(config))

    def fit_items_to_context(self, tokenizer: Any) -> None:
        """Check that prompts fit into the model's context; dev items may be left out.

        Raises:
            UserError: They do not fit.
        """
        before = len(self.task.items("dev"))
        splits = ("dev", "test") if self.settings.test else ("dev",)
        check_context(self.task, tokenizer, self.engine.context, splits)
        if len(self.task.items("dev")) < before:
            self.check_inputs()

    def check_inputs(self) -> None:
        """Read items and pool, and start the optimizer.

        Raises:
            UserError: An input is invalid, or the inputs do not go together.
        """
        dev, settings = self.task.items("dev"), self.settings
        if settings.test:
            self.task.items("test")
        self.searched, self.held_out = split_dev_holdout(dev, settings.confirm, settings.seed)
        self.task.check()
        self._start_optimizer()
        if self.pool.router is None:
            self._considers_kinds()  # or an error
        elif reason := self._kinds_error():
            raise UserError(f"pool.routes: {reason}, or pool.routes=1")
        self._known = EvaluatedPositions(self.record)
        check_objectives(self.optimizer, self.task)
        self.racing.check_raceable(self.task, self.optimizer)

    def _start_optimizer(self) -> None:
        """Divide and open the pool, and start the optimizer with what the task offers."""
        optimizer, pool, items = self.optimizer, self.pool, len(self.searched)
        signal, missing = choose_signal(optimizer.signal, self.task)
        if not self.engine.differentiable:
            signal, missing = None, "gradients need engine=hf and a pool of adapters"
        optimizer.set_resources(
            SearchResources(
                gradients=signal is not None,
                draws_texts=signal == "scores",
                positions=self.budget.prompts // items if self.budget.prompts else None,
                norms=pool.update_norms,
                routes=pool.routes,
            )
        )
        teacher = None if optimizer.needs_gradients is None else signal
        pool.divide(teacher is not None, teacher is not None and optimizer.learns)
        pool.open(self.model)
        if isinstance(pool, Pool) and pool.most is not None and pool.expert_count > pool.most:
            # The first ones stand for those that `_select_experts` chooses.
            self._candidates = pool.subset(pool.names[: pool.expert_count]).open(self.model)
            pool.experts = pool.names[: pool.most]
            pool.open(self.model)
        self.budget.check_experts_fit(len(pool.names), items)
        optimizer.start(len(pool.names), self.settings.seed, len(pool.groups))
        if missing and optimizer.needs_gradients:
            raise UserError(f"optimizer: {missing}; use optimizer=pso, cmaes or nes")
        if teacher is not None:
            prompts = self.budget.prompts
            self.descents = Descents(
                self._evaluator,
                self.record,
                pool,
                self.task,
                self.searched,
                self._routes_of_searched,
                teacher,
                self.settings.seed,
                prompts and max(1, prompts - len(optimizer.positions) * items),
            )
        self.notes = self._describe_optimizer(missing)

    def _choose_form(self, tokenizer: Any) -> str:
        """Decide task.chat=auto by the experts, once; return the line that says so."""
        task, pool, line = self.task, self.pool, ""
        if task.chat != "auto":
            return line
        chat = stored_form(self.record.folder)
        if chat is None and getattr(tokenizer, "chat_template", None):
            by_loss = task.gold_error is None and self.engine.differentiable
            self.view.start("form", "comparing prompts with and without chat template", "form", 0)
            self.executor.open(Worker(self.model, pool, both_forms(task), self.engine))
            groups = len(pool.groups)
            found = measure_forms(task, self.executor, len(pool.names), groups, by_loss)
            self.executor.close()
            task.chat = found[1] < found[0] if by_loss else found[1] > found[0]
            line = describe_form(task, found, "loss" if by_loss else "score")
        else:
            task.chat = bool(chat)
        if task.chat:
            self.fit_items_to_context(tokenizer)
        return line

    # Large pools

    @property
    def selection(self) -> Selection | None:
        """The choice of the experts among the pool's adapters; `None` if it has not too many."""
        if self._candidates is None or self.pool.most is None:
            return None
        has_gold = self.task.gold_error is None and self.optimizer.signal != "scores"
        by_loss = has_gold and self.engine.differentiable
        return Selection(self._candidates, self.pool.most, spaced_items(self.searched), by_loss)

    def load_selection(self, config: Mapping[str, Any], model: BaseModel) -> dict[str, Any]:
        """Mix the experts that were chosen in the record, if they were; return what it knows.

        Raises:
            UserError: The folder contains another search.
        """
        if (selection := self.selection) is None:
            return {}
        task, seed = self.task, self.settings.seed
        identity = selection_identity(config, seed, task, model, selection.pool)
        known = {**self.record.load_selection(identity), "identity": identity}
        if "chosen" in known:
            self._adopt_experts(known)
        return known

    def _adopt_experts(self, known: dict[str, Any]) -> None:
        self.selected, self.pool.experts = known, known["chosen"]
        self.check_inputs()

    def _select_experts(self, config: Mapping[str, Any]) -> None:
        """Cut a pool of too many adapters to the best by dev loss, with one in memory at a time."""
        known, selection = self.load_selection(config, self.model), self.selection
        if selection is None:
            return
        if "chosen" not in known:
            count = len(selection.names)
            if not self.engine.exchanges:
                raise UserError(
                    f"pool.most={selection.most}: this engine cannot load the {count} adapters of "
                    "the pool one by one to choose among them; use engine=hf, name fewer in "
                    "pool.experts, or set pool.most=null"
                )
            self.engine.check(self.model, selection.pool)
            self.view.acquire_lock()
            values = self.record.begin_selection(known["identity"])
            left = [name for name in selection.names if name not in values]
            line = f"choosing {selection.most} of {count} adapters on {len(selection.items)} items"
            self.view.start("selection", line, line, len(left) * len(selection.items))
            self.executor.open(Worker(self.model, selection.pool, self.task, self.engine))
            for name, value, result in selection.measure(left, self.executor):
                values[name] = value
                self.record.save_selected(name, value)
                self.view.show_job(result)
            self._adopt_experts({**known, **selection.choose(values)})
            self._evaluator.experts = tuple(self.selected["chosen"])

    # Kinds of prompts

    def _kinds_error(self) -> str | None:
        """Return why prompts cannot be divided into kinds with coefficients of their own."""
        task = self.task
        dev = task.items("dev")
        prompts = first_prompts(task, [dev[index] for index in self.searched])
        if task.rounds > 1 or any(len(mine) != 1 for mine in prompts):
            return f"task {task.name} sends several prompts about an item"
        if not self.engine.embeds:
            return "the engine does not embed prompts; use engine=hf"
        return None

    def _considers_kinds(self) -> bool:
        """Return whether prompts may have kinds, besides those of a given router."""
        pool, optimizer, wanted = self.pool, self.optimizer, self.pool.wanted_routes
        if wanted == 1 or not isinstance(pool, Pool):
            return False
        reason = self._kinds_error()
        if wanted != AUTO:
            if reason:
                raise UserError(f"pool.routes: {reason}, or pool.routes=1")
            if len(self.searched) < int(wanted):
                raise UserError(f"pool.routes={wanted}: there are {len(self.searched)} dev items")
            return True
        # Another position has to fit besides the experts and the embedded prompts.
        items = len(self.searched)
        least = (len(pool.names) + 1) * items + len(self.task.items("dev"))
        fits = self.budget.prompts is None or self.budget.prompts >= least
        composes = optimizer.kinds_start > 0 and pool.space == "delta"
        return composes and reason is None and fits and items >= MIN_ITEMS

    def _choose_kinds(self) -> None:
        """Divide the prompts into kinds where that pays, and start the optimizer with them.

        The experts, soups and starts are scored first: their scores choose the kinds, and are those
        of the first iteration.
        """
        pool, given, shown = self.pool, self.pool.router is not None, self.notes
        if not given and not self._considers_kinds():
            return
        dev = len(self.task.items("dev"))
        if not given:
            self._survey()
        self._embedded, states = dev, self._embed_prompts("dev")
        found: dict[str, Any] = {}
        if not given:
            choice = self._divide_prompts(states)
            pool.router = choice.router
            numbers = {"each": choice.each, "single": choice.single, "error": choice.error}
            found = {"numbers": numbers, "asked": pool.wanted_routes}
        if router := pool.router:
            self._start_optimizer()
            routes = {digest_items(self.task, "dev"): router.assign(states).tolist()}
            found |= {"router": router.to_dict(), "routes": routes}
        self.record.state |= {"kinds": found, "groups": list(pool.groups)}
        self.record.save_state()
        self._adopt_kinds()
        self._write_config()
        for line in [describe_kinds(found), *(one for one in self.notes if one not in shown)]:
            log.info(line)
            self.view.print_line(line)

    def _survey(self) -> None:
        """Score the experts, soups and starts on dev."""
        items, count = len(self.searched), len(self.pool.names)
        positions = self.optimizer.ask()[: max(count, self.optimizer.kinds_start)]
        if self.budget.prompts is not None:
            affordable = (self.budget.prompts - len(self.task.items("dev"))) // items
            positions = positions[: max(count, affordable)]
        self._evaluator.names = name_positions(positions, 0, self.pool.names)
        self._show_dev_evaluation(0, len(positions))
        scores = self._score_dev(positions.tolist(), range(items))
        keys = [tuple(row[:count].tolist()) for row in positions]
        self._surveyed = {
            key: dict(enumerate(mine)) for key, mine in zip(keys, scores, strict=True)
        }

    def _find_surveyed(self, position: np.ndarray) -> dict[int, Score] | None:
        """Return the scores of a position that is surveyed, in any groups and routes."""
        rows = position.reshape(-1, len(self.pool.names))
        same = bool((rows == rows[0]).all())
        return self._surveyed.get(tuple(rows[0].tolist())) if same else None

    def _divide_prompts(self, states: Mapping[int, np.ndarray]) -> KindChoice:
        """Choose the kinds by the surveyed scores."""
        items = [self.task.items("dev")[index] for index in self.searched]
        texts = [prompts[0] for prompts in first_prompts(self.task, items)]
        values = [[score.value for score in mine.values()] for mine in self._surveyed.values()]
        searched = {layer: rows[self.searched] for layer, rows in states.items()}
        labels = [item_domain(item) for item in items]
        return choose_kinds(searched, texts, np.array(values), self.pool.wanted_routes, labels)

    def _embed_prompts(self, split: str) -> dict[int, np.ndarray]:
        items = range(len(self.task.items(split)))
        activity = f"reading {split} prompts"
        self.view.start("embed", f"{activity}: {len(items)}", activity, len(items))
        return self._evaluator.embed_prompts(split, items)

    def _adopt_kinds(self) -> None:
        """Score positions by the kinds of the items from now on."""
        if self.pool.router:
            self._evaluator.set_kinds(self._kinds_of, self.pool.routes)
        self._known = EvaluatedPositions(self.record, self._searched_kinds, self.pool.routes)

    def _kinds_of(self, split: str) -> np.ndarray:
        """Return the kind of each item of a split, stored in the record; embeds them if needed."""
        if split not in self._kinds:
            digest, router = digest_items(self.task, split), self.pool.router
            kinds = self.record.state["kinds"]
            if digest not in kinds["routes"]:
                assert router is not None
                routes = {**kinds["routes"]}
                routes[digest] = router.assign(self._embed_prompts(split)).tolist()
                self.record.state["kinds"] = {**kinds, "routes": routes}
                self.record.save_state()
            self._kinds[split] = np.array(self.record.state["kinds"]["routes"][digest])
        return self._kinds[split]

    @property
    def _searched_kinds(self) -> np.ndarray | None:
        return self._kinds_of("dev")[self.searched] if self.pool.router else None

    def _routes_of_searched(self) -> list[int]:
        kinds = self._searched_kinds
        return [0] * len(self.searched) if kinds is None else kinds.tolist()

    def _describe_optimizer(self, missing: str) -> list[str]:
        """Return the lines to print about the optimizer before a search."""
        optimizer, notes = self.optimizer, list[str]()
        if self.pool.control:
            notes.append(f"a control: {CONTROL}, of the same shapes and norms (pool.control)")
        if missing and optimizer.needs_gradients is False:
            notes.append(f"the search does without training: {missing}")
        elif self.descents and optimizer.needs_gradients is not None:
            notes.append(self.descents.describe())
        if damped := optimizer.damped_experts:
            notes.append(
                f"the updates of {', '.join(self.pool.names[k] for k in damped)} are more than "
                f"{NORM_LIMIT:.0f} times as large as the pool's median: they count less in soups "
                "and move less (python -m swarm.pool check; pool.experts leaves experts out)"
            )
        if self.pool.routes > 1 and isinstance(optimizer, MemeticSwarm) and not optimizer.composed:
            notes.append(
                "no particle is composed of the best for each kind of prompt: optimizer.particles "
                "is below one for each expert, soup and start and one more; null is enough"
            )
        return notes

    # After the last iteration

    def _conclude(self) -> Verdict:
        """Return the verdict, from the record if it is of the same settings."""
        given, test, front = self.settings, self.settings.test, self._tested_points()
        baselines = self.baselines() if test else []
        settings: dict[str, Any] = {
            "ensemble": given.ensemble,
            "test_items": digest_items(self.task, "test") if test else None,
            "noise_floor": given.noise_floor,
            **({"front": front} if front else {}),
            **({"baselines": baselines} if baselines else {}),
            **({"control": self.pool.control} if self.pool.control else {}),
        }
        verdict = read_verdict(self.record.state)
        if verdict is None or verdict.settings != settings:
            ending = FinalEvaluation(
                self.record,
                self.task,
                self._evaluator.score_positions,
                self._score_rebatched(),
                self._show_final_evaluation,
                self.searched,
                self.held_out,
                self.optimizer.items_without_gradient(len(self.searched)),
                given.choose == "kept",
                self._searched_kinds,
                self.pool.routes,
            )
            ending.choose_bests()
            self.record.write_outputs(self.pool)
            verdict = ending.compare_models(
                test, given.ensemble, given.noise_floor, front, baselines, settings
            )
            self.record.state["verdict"] = verdict.to_dict()
            self.record.save_state()
            for name, value in verdict.original_names().items():
                log.info("%s: %s", name, value)
        self.record.write_json("front.json", describe_front(self.record.state))
        if self.pool.saves_personal_bests:  # else nothing can vote
            self.record.write_file("ensemble.yaml", encode_ensemble(verdict.vote))
        return verdict

    def baselines(self) -> list[str]:
        """Return those of the baselines that are applicable to this pool and task."""
        return resolve_baselines(self.settings.baselines, self.task, self.pool)

    def _tested_points(self) -> int:
        return self.settings.front if self.optimizer.has_objectives else 0

    def max_tested_models(self) -> int:
        """Return the maximum number of models scored on test.

        Those are both bests, the baselines, the voters and points of the front.
        """
        voters = self.settings.ensemble if self.task.metric_task.votes else 0
        return 2 + len(self.baselines()) + voters + self._tested_points()

    def final_items(self) -> int:
        """Return the maximum number of items to evaluate after the search, on test and on dev."""
        settings, again, tested = self.settings, int(self.settings.noise_floor), 0
        if settings.test:
            tested = self.max_tested_models() * len(self.task.items("test"))
            if "recipe" in self.baselines():
                again += count_static_merges(self.pool.expert_count)
        if self.task.metric_task is not self.task:
            again += self.pool.expert_count + FINALIST_COUNT
        kept = len(self.held_out) * (FINALIST_COUNT + 1 if settings.choose == "kept" else 2)
        return tested + again * len(self.searched) + kept

    def _show_final_evaluation(self, kind: str, items: int, name: str) -> None:
        """Show the evaluation of a model of this kind (`FinalEvaluation`) after the search."""
        activity, to_come = FINAL_ACTIVITIES[kind], 0
        if kind == "test":
            self._tested[name] += items
            number = list(self._tested).index(name) + 1
            limit = max(len(self._tested), self.max_tested_models())
            activity = f"{activity}: {name} ({number} of at most {limit})"
            to_come = max(0, limit * len(self.task.items("test")) - self._tested.total())
        self.view.start(kind, f"{activity}, {items} items", activity, items, to_come)

    def _score_rebatched(self) -> ScoreFn:
        """Return a function that scores as the search does, without cache, in other batches."""
        other = Batching(1, (self.job.items or len(self.searched)) // 2 + 1)
        evaluator = Evaluator(self.task, self.executor, other)
        evaluator.on_job, evaluator.experts = self.view.show_job, self._evaluator.experts
        evaluator.learned = self._evaluator.learned
        if self.pool.router:
            evaluator.set_kinds(self._kinds_of, self.pool.routes)
        return evaluator.score_positions


def describe_descent(plan: DescentPlan) -> str:
    """Describe the gradient steps before an iteration: "1 mixture, 20 steps of 8 items"."""
    each = " each" * (plan.particles > 1)
    count = pluralize(plan.particles, "mixture")
    return f"{count}, {plan.steps} steps{each} of {plan.batch} items"
