"""After the search: the best positions, and the verdict on them against what needed no search.

Everything scored after the search is stored in the record.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from swarm._util.files import read_gzip_json, short_digest
from swarm.loop.evaluator import data_split, records_to_scores, scores_to_records
from swarm.optimizers.multi_objective import BASE_BOUND
from swarm.optimizers.static_merges import (
    FEW_SCALES,
    static_start_positions,
    utility_start_positions,
)
from swarm.optimizers.swarm import SOUP_SCALES
from swarm.pool.pool import ExpertPool
from swarm.runs.folder import RunRecord
from swarm.runs.pareto_front import ParetoFront, ParticleIndex
from swarm.runs.verdict import (
    EXPERT,
    FOUND,
    MODEL_LABELS,
    Compared,
    Constraint,
    FrontPoint,
    HeldOut,
    NoiseFloor,
    Start,
    Verdict,
    Vote,
    compare_constant_answers,
    describe_kinds,
)
from swarm.tasks.base import Item, Score, Task
from swarm.tasks.metrics import (
    Measured,
    group_items_by_domain,
    item_domain,
    majority_vote,
    measure,
    paired_gain,
)

Baseline = Literal["base", "soup", "recipe", "experts", "routes"]

BASELINE_LABELS = {
    "base": "base model",
    "soup": "mean of all",
    "recipe": "best fixed mixture",
    "experts": "best expert of each domain",
    "routes": "best expert of each kind of prompt",
}
"""Models that the best position is compared with on test: name -> label in tables.

"recipe" is the best on dev of the static recipes (`swarm.optimizers.static_merges`); "experts"
scores each domain's items with the expert that is best in it on dev, as a router that knows the
domain would. "routes" does so with the kinds of prompts that the pool's router knows, for which
nothing is searched.
"""

SPENT_SUFFIXES = ("_tokens", "_cost")
"""Suffixes of measures that are costs of a judgement."""

FINALIST_COUNT = 10
"""Maximum number of personal bests that are scored by the task's own metric."""

ScoreFn = Callable[[Sequence[Sequence[float]], str, Sequence[int]], list[list[Score]]]
"""Scores positions on some indices of a split."""


def resolve_baselines(names: str | Sequence[str], task: Task, pool: ExpertPool) -> list[str]:
    """Return those of the baselines `names` that are applicable to this pool and task.

    A pool of full models has no base among its mixtures, and a single-domain task has no expert per
    domain. "auto" is base, recipe and routes: what can be deployed as the result of a search is.
    """
    missing = {
        "base": pool.saves != "adapter",
        "experts": len(group_items_by_domain(task.items("test"))) < 2,
        "routes": pool.router is None,
    }
    chosen = ("base", "recipe", "routes") if names == "auto" else dict.fromkeys(names)
    return [name for name in chosen if not missing.get(name)]


@dataclass
class FinalEvaluation:
    """The scores that a verdict rests on, by the task's own metric.

    Attributes:
        record: Record of a run whose search is over.
        task: The run's task.
        ask: Scores as the search did.
        ask_again: Scores in other batches than the search did.
        begin: Callback before each scoring, with its kind, its number of items, and the name of the
            model where it is on test.
        searched, held_out: Dev indices that the search saw, and held-out ones.
        without_gradient: Numbers of the searched items that no gradient used, if others were used.
        by_kept: Whether the held-out items decide among the finalists.
        item_routes: The route of each searched item; `None` without routes.
        routes: Number of routes.
    """

    record: RunRecord
    task: Task
    ask: ScoreFn
    ask_again: ScoreFn
    begin: Callable[[str, int, str], None]
    searched: Sequence[int]
    held_out: Sequence[int]
    without_gradient: Sequence[int] = ()
    by_kept: bool = False
    item_routes: np.ndarray | None = None
    routes: int = 1
    _dev: dict[ParticleIndex, list[Score]] = field(default_factory=dict)

    @property
    def metric_task(self) -> Task:
        """The task with its own metric, whatever signal was searched on."""
        return self.task.metric_task

    @property
    def pareto_front(self) -> ParetoFront | None:
        """The Pareto front by the objectives of the search; `None` for a task without parts."""
        return ParetoFront.from_state(self.record.state)

    # Choosing the best

    def choose_bests(self) -> tuple[ParticleIndex, ParticleIndex]:
        """Return the best expert and the best position, by the task's own metric.

        Ties are broken by the searched signal. With constraints, feasible positions (or those with
        the smallest violation) come first. With `by_kept`, the best position is the finalist that
        is best on the held-out items. Where the strongest start is better on items that no gradient
        used, it replaces the best position (`_keep_start`). The choice is stored in the record.
        """
        record, front = self.record, self.pareto_front
        if "chosen" in record.state:
            return record.best_expert(), record.find_best()
        bound = front if front and front.constraints else None
        own_metric = self.metric_task is self.task
        before, after = record.best_expert(), record.find_best()
        experts = [(0, i) for i in range(record.state["own"])]
        finalists = record.personal_bests(FINALIST_COUNT)
        if bound:
            points = bound.evenly_spaced_points(FINALIST_COUNT)
            finalists += [bound.front_indices[number] for number in points]
        if self.by_kept:
            before = max(experts, key=self._rank_key)
            after = self._race_finalists([*finalists, *self._best_static_merge(finalists)])
        elif bound and own_metric:
            before, after = bound.best_index(len(experts)), bound.best_index()
        elif bound or not own_metric:
            before = max(experts, key=self._rank_key)
            after = max([*experts, *finalists], key=self._rank_key)
        found, after = after, self._keep_start(before, after)
        if bound or self.by_kept or not own_metric or after != found:
            record.state["chosen"] = {"starting": list(before), "ending": list(after)}
            record.save_state()
        return record.best_expert(), record.find_best()

    def _rank_key(self, index: ParticleIndex) -> tuple[float, float, float]:
        signal = self.record.utility_at(index)
        bounds = self.constraint_values(index).values()
        below = sum(max(0.0, bound - value) for bound, value in bounds)
        return -below, self.search_utility(index), float("-inf") if signal is None else signal

    def _best_static_merge(self, finalists: Sequence[ParticleIndex]) -> list[ParticleIndex]:
        """Return the best static merge of the first iteration, if it is not a finalist."""
        first, experts = self.record.iterations[0]["utilities"], len(self.record.state["experts"])
        known = {i: u for i, u in enumerate(first) if i >= experts and u is not None}
        best = [(0, max(known, key=lambda i: known[i]))] if known else []
        return [index for index in best if index not in finalists]

    def _race_finalists(self, finalists: Sequence[ParticleIndex]) -> ParticleIndex:
        """Return the best finalist on the held-out items, by successive halving.

        The better half survives each third of the items (Jamieson and Talwalkar, 2016, arXiv
        1502.07943). A task with parts needs items of each, so its finalists are scored on all
        items. Ties are broken by the result of the search.
        """
        live = sorted(finalists, key=self._rank_key, reverse=True)
        scores: dict[ParticleIndex, list[Score]] = {index: [] for index in live}
        order = sorted(self.held_out, key=lambda index: short_digest(["kept", index]))
        third = len(order) if self.task.tasks else -(-len(order) // 3)
        for start in range(0, len(order), third):
            for index in live:
                position, items = self.record.position_at(index), order[start : start + third]
                scores[index] += self._load_or_score("confirm", position, "judged", items)
            live.sort(key=lambda index: -self.metric_task.utility(scores[index]))
            live = live[: -(-len(live) // 2)]
        return live[0]

    def _keep_start(self, before: ParticleIndex, after: ParticleIndex) -> ParticleIndex:
        """Return the best found, or the strongest start if that is above it.

        The start is the best position of the first iteration on the searched items, of each kind of
        prompt; where the search asked by another signal, the best expert, as the others
        would have to be scored again. The two are compared on the items that no gradient used
        (`without_gradient`; those of the race with `by_kept`), where the best found does not profit
        from having been trained on them. A Pareto front is left as it is.
        """
        if after[0] == 0 or self.pareto_front is not None:
            return after
        first = self.record.iterations[0]["utilities"]
        starts = [(0, i) for i, utility in enumerate(first) if utility is not None]
        if self.metric_task is not self.task:
            starts = [before]
        whole = self.by_kept or self.item_routes is None
        kinds, item_kinds = np.zeros(self.routes, int), np.zeros(len(self.searched), int)
        if not whole and self.item_routes is not None:  # equal coefficients are one kind
            rows = np.reshape(self.record.position_at(after), (self.routes, -1))
            kinds = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
            item_kinds = kinds[self.item_routes]
        best = dict[int, ParticleIndex]()
        for kind in np.unique(item_kinds).tolist():
            mine = np.flatnonzero(item_kinds == kind).tolist()

            def rank(index: ParticleIndex, mine: Sequence[int] = mine) -> tuple[float, Any]:
                known = 0.0 if whole else self._utility_of(self.dev_scores(index), mine)
                return known, self._rank_key(index)

            best[kind] = max(starts, key=rank)
        if self.by_kept:
            found, other = (self.holdout_scores(index) for index in (after, best[0]))
        else:
            unused = self.without_gradient or range(len(self.searched))
            found = [self.dev_scores(after)[i] for i in unused]
            other = [self.dev_scores(best[item_kinds[i]])[i] for i in unused]
        every = range(len(found))
        if self._utility_of(found, every) >= self._utility_of(other, every):
            return after
        routes = np.flatnonzero(np.isin(kinds, list(best))).tolist()
        return self._compose_routes(after, {route: best[int(kinds[route])] for route in routes})

    def _utility_of(self, scores: Sequence[Score], items: Iterable[int]) -> float:
        """Return the utility of some of the scores; of a part of a mixture, their mean."""
        some = [scores[index] for index in items]
        if self.item_routes is None and not self.task.tasks:
            return self.metric_task.utility(some)
        return float(np.mean([score.value for score in some])) if some else 0.0

    def _compose_routes(
        self, after: ParticleIndex, kept: Mapping[int, ParticleIndex]
    ) -> ParticleIndex:
        """Return the index of a position with other coefficients on some routes.

        A new position is recorded as one more round: all its answers are known, as an answer
        depends on the coefficients of its route alone.
        """
        record, particle = self.record, after[1]
        parts = np.reshape(record.position_at(after), (self.routes, -1))
        for route, start in kept.items():
            parts[route] = np.reshape(record.position_at(start), parts.shape)[route]
        position = parts.reshape(-1).tolist()
        if index := self._find_measured(position):
            return index
        assert self.item_routes is not None
        answers = {index: record.load_answers(index) for index in {after, *kept.values()}}
        rows = [answers[kept.get(r, after)][i] for i, r in enumerate(self.item_routes.tolist())]
        positions = np.array(record.iterations[-1]["positions"])
        positions[particle] = position
        utilities = np.full(len(positions), np.nan)
        utilities[particle] = self.task.utility(records_to_scores(rows))
        scored = [len(rows) if i == particle else None for i in range(len(positions))]
        facts = {"items_scored": scored, "prompts_scored": 0, "prompts_saved": 0}
        facts["after_search"] = True
        optimizer = record.state["optimizer"]
        record.add_iteration(positions, utilities, {particle: rows}, optimizer, facts)
        return len(record.iterations) - 1, particle

    def _find_measured(self, position: Sequence[float]) -> ParticleIndex | None:
        """Return the first index at which the search has measured a position."""
        for number, entry in enumerate(self.record.iterations):
            for i, row in enumerate(entry["positions"]):
                if row == list(position) and entry["utilities"][i] is not None:
                    return number, i
        return None

    # Scores, from the record where they are stored there

    def constraint_values(self, index: ParticleIndex) -> dict[str, tuple[float, float]]:
        """Return each constrained part's bound and its value on the searched part of dev."""
        front, task = self.pareto_front, self.metric_task
        if front is None or not front.constraint_bounds:
            return {}
        values = task.subtask_utilities(self.dev_scores(index))  # type: ignore[attr-defined]
        bounds = front.constraint_bounds
        if front.base_index is not None and task is not self.task:
            # Another signal allows only `base` bounds: compute the base by the task's own metric.
            bounds = task.subtask_utilities(self.dev_scores(front.base_index))  # type: ignore[attr-defined]
        return {name: (bounds[name], values[name]) for name in front.constraint_bounds}

    def search_utility(self, index: ParticleIndex) -> float:
        """Return the utility on the searched part of dev."""
        return self.metric_task.utility(self.dev_scores(index))

    def dev_scores(self, index: ParticleIndex) -> list[Score]:
        """Return the scores of a particle on the searched part of dev."""
        if index not in self._dev:
            scores = records_to_scores(self.record.load_answers(index))
            if self.metric_task is not self.task:
                if all("correct" in score.measures for score in scores):
                    scores = [replace(s, value=s.measures["correct"], measures={}) for s in scores]
                else:
                    position = self.record.position_at(index)
                    scores = self._load_or_score("judged", position, "judged", self.searched)
            self._dev[index] = scores
        return self._dev[index]

    def holdout_scores(self, index: ParticleIndex) -> list[Score]:
        """Return the scores on the part of dev that the search did not see."""
        position = self.record.position_at(index)
        return self._load_or_score("confirm", position, "judged", self.held_out)

    def test_scores(self, index: ParticleIndex, name: str = "model") -> list[Score]:
        """Return the scores on the test split; `name` is that of the model, for messages."""
        return self.score_position_on_test(self.record.position_at(index), name=name)

    def score_position_on_dev(self, position: Sequence[float]) -> list[Score]:
        """Score a position, possibly new to the search, on the searched part of dev.

        The search's own answers count where it has evaluated the position: in another batch they
        may differ by rounding, and one position would have two numbers.
        """
        if index := self._find_measured(position):
            return self.dev_scores(index)
        return self._load_or_score("judged", position, "judged", self.searched)

    def score_position_on_test(
        self,
        position: Sequence[float],
        indices: Sequence[int] | None = None,
        name: str = "model",
    ) -> list[Score]:
        """Score a position on the test split, or on some indices of it.

        Indices of a split that was scored as a whole are taken from there, for the reason given in
        `score_position_on_dev`.

        Args:
            name: Name of the model, for messages.
        """
        items = self._items("test")
        if indices is not None:
            whole = self.record.load_extra_answers("test", position, _digest(items))
            if whole is not None:
                return [records_to_scores(whole)[i] for i in indices]
        chosen = range(len(items)) if indices is None else indices
        return self._load_or_score("test", position, "test", chosen, name=name)

    def _load_or_score(
        self,
        kind: str,
        position: Sequence[float],
        split: str,
        indices: Sequence[int],
        ask: ScoreFn | None = None,
        name: str = "",
    ) -> list[Score]:
        """Return one position's scores, from the record if they are stored there."""
        items = [self.task.items(data_split(split))[index] for index in indices]
        rows = self.record.load_extra_answers(kind, position, _digest(items))
        if rows is None:
            self.begin(kind, len(items), name)
            rows = scores_to_records(items, (ask or self.ask)([position], split, indices)[0])
            self.record.save_answers(kind, position, _digest(items), rows)
        return records_to_scores(rows)

    def _items(self, split: str) -> Sequence[Item]:
        """Return the items of test, or those of dev that the search saw."""
        items = self.task.items(split)
        return items if split == "test" else [items[index] for index in self.searched]

    # The verdict

    def compare_models(
        self,
        test: bool,
        ensemble: int,
        noise_floor: bool,
        front: int = 0,
        baselines: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> Verdict:
        """Compare the result of the search with its start and with models that need no search.

        Args:
            test: Whether to use the test split.
            ensemble: Maximum number of personal bests that vote; 0 for no vote.
            noise_floor: Whether to score the best position on dev again, in other batches.
            front: Number of points of the front to score on test.
            baselines: Names of `BASELINE_LABELS` to score on test.
            settings: Stored in the verdict.
        """
        record, task = self.record, self.metric_task
        before, after = self.choose_bests()
        expert, position = record.state["experts"][before[1]], record.position_at(after)
        start = self.test_scores(before, MODEL_LABELS[0]) if test else []
        end = self.test_scores(after, MODEL_LABELS[1]) if test else []
        rows = [(EXPERT, f"{MODEL_LABELS[0]} ({expert})", self.dev_scores(before), start)]
        alternatives = [self._compare(*rows[0], end, record.position_at(before))]
        if test:
            alternatives += [self._compare_baseline(name, end) for name in baselines]
        tested = self._items("test") if test else []
        if constant := compare_constant_answers(task, self._items("dev"), tested, end):
            alternatives.append(constant)
        alternatives.sort(key=lambda one: -one.test.utility if one.test else 0.0)
        pareto = self.pareto_front
        volumes = pareto.hypervolume_history if pareto else [0.0]
        found = self._compare(FOUND, MODEL_LABELS[1], self.dev_scores(after), end, [], position)
        return Verdict(
            found=found,
            expert=expert,
            alternatives=alternatives,
            in_points=task.highest == 1.0,
            places=(before, after),
            start=self._describe_start(after),
            signal=None if task is self.task else self.task.signal,
            held_out=self._compare_held_out(before, after) if self.held_out else None,
            no_gradient=self._measure_without_gradient(after),
            noise_floor=self._measure_noise_floor(after) if noise_floor else None,
            constraints=self._check_constraints(after, end),
            vote=self._measure_vote(ensemble, test) if ensemble and task.votes else None,
            front_size=len(pareto.front_indices) if pareto else 0,
            hypervolume=(volumes[0], volumes[-1]),
            front=self._measure_front(pareto, front) if pareto and test and front else [],
            costs=record.count_prompts(),
            kinds=describe_kinds(record.state.get("kinds", {})),
            scoring_costs=sum_scoring_costs(record),
            settings=dict(settings or {}),
        )

    def _compare(
        self,
        name: str,
        label: str,
        dev: Sequence[Score],
        test: Sequence[Score],
        end: Sequence[Score],
        position: list[float] | None,
        choices: Mapping[str, str] | None = None,
    ) -> Compared:
        """Measure a model by its scores on both splits; without scores, it has no result there.

        Args:
            end: Test scores of the best found, to pair with; empty leaves the gain out.
        """
        task = self.metric_task
        return Compared(
            name,
            label,
            measure(task, dev, self._items("dev")) if dev else None,
            measure(task, test, self._items("test")) if test else None,
            paired_gain(task, end, test) if end else None,
            position,
            dict(choices or {}),
        )

    def _compare_baseline(self, name: str, end: Sequence[Score]) -> Compared:
        """Choose a baseline on dev, where it is chosen at all, and measure it on test."""
        label, state = BASELINE_LABELS[name], self.record.state
        own, rows, groups = state["own"], len(state["experts"]), len(state["groups"])
        if name == "experts":
            dev, test, choices = self._best_expert_by_domain()
            return self._compare(name, label, dev, test, end, None, choices)
        dev = []
        if name == "recipe":
            chosen, position, dev = self._best_merge_or_expert()
            label += f" ({chosen})"
        elif name == "routes":
            position, dev = self._best_expert_by_route()
        else:
            # Extra rows that are not the user's experts, such as noise, are not part of a soup.
            share = 0.0 if name == "base" else 1 / own
            position = [share * (row < own) for row in range(rows)] * groups
        test = self.score_position_on_test(position, name=label)
        return self._compare(name, label, dev, test, end, position)

    def _best_merge_or_expert(self) -> tuple[str, list[float], list[Score]]:
        """Return the static recipe or expert that is best on the searched part of dev.

        Returns:
            Its label, its position and its scores there.
        """
        state = self.record.state
        own, names, groups = state["own"], state["experts"], len(state["groups"])
        known = np.array([self.search_utility((0, i)) for i in range(own)])
        labels, rows = static_start_positions(len(names), groups, FEW_SCALES, among=own)
        more = utility_start_positions(known, len(names), groups, FEW_SCALES, among=own)
        recipes = dict(zip([*labels, *more[0]], np.vstack([rows, more[1]]).tolist(), strict=True))
        scores = {label: self.score_position_on_dev(row) for label, row in recipes.items()}
        utilities = {label: self.metric_task.utility(mine) for label, mine in scores.items()}
        best, alone = max(utilities, key=lambda label: utilities[label]), int(np.argmax(known))
        if known[alone] >= utilities[best]:
            return names[alone], self.record.position_at((0, alone)), self.dev_scores((0, alone))
        return best, recipes[best], scores[best]

    def _best_expert_by(self, keys: Sequence[Hashable]) -> tuple[dict[Any, int], list[Score]]:
        """Return the best expert for the searched items of each key, and its scores on them.

        Args:
            keys: The key of each item.
        """
        answers = [self.dev_scores((0, i)) for i in range(self.record.state["own"])]
        values = np.array([[score.value for score in mine] for mine in answers])
        best = {}
        for key in dict.fromkeys(keys):
            mine = [index for index, one in enumerate(keys) if one == key]
            best[key] = int(values[:, mine].sum(axis=1).argmax())
        return best, [answers[best[key]][index] for index, key in enumerate(keys)]

    def _best_expert_by_domain(self) -> tuple[list[Score], list[Score], dict[str, str]]:
        """Return dev and test scores, and names, of the best expert of each domain on its items."""
        best, dev = self._best_expert_by([item_domain(item) for item in self._items("dev")])
        overall = max(range(self.record.state["own"]), key=lambda i: self.search_utility((0, i)))
        test: dict[int, Score] = {}
        for domain, indices in group_items_by_domain(self._items("test")).items():
            position = self.record.position_at((0, best.get(domain, overall)))
            scores = self.score_position_on_test(position, indices, BASELINE_LABELS["experts"])
            test |= dict(zip(indices, scores, strict=True))
        choices = {domain: self.record.state["experts"][i] for domain, i in best.items()}
        return dev, [test[index] for index in sorted(test)], choices

    def _best_expert_by_route(self) -> tuple[list[float], list[Score]]:
        """Return the position with the best expert of each route on dev, and its scores there."""
        assert self.item_routes is not None
        best, dev = self._best_expert_by(self.item_routes.tolist())
        parts = []
        for route in range(self.routes):
            expert = self.record.position_at((0, best.get(route, 0)))  # the first without items
            parts.append(np.reshape(expert, (self.routes, -1))[route])
        return np.concatenate(parts).tolist(), dev

    def _describe_start(self, after: ParticleIndex) -> Start:
        """Describe how much of the best position is what the search started from."""
        state, position = self.record.state, np.array(self.record.position_at(after))
        first, shape = self.record.iterations[0], (-1, self.routes, len(position) // self.routes)
        known = [utility is not None for utility in first["utilities"]]
        starts = np.array(first["positions"])[known].reshape(shape)
        same = (starts == position.reshape(shape)).all(axis=2).any(axis=0)
        label = "best of the first round" + " for each kind of prompt" * (self.routes > 1)
        experts, groups = len(state["experts"]), len(state["groups"])
        soups, rows = static_start_positions(experts, groups, SOUP_SCALES, among=state["own"])
        named = np.vstack([np.tile(np.eye(experts), groups), rows])
        matching = np.flatnonzero(np.isclose(named, position).all(axis=1))
        if len(matching):
            label = f"{label}: {[*state['experts'], *soups][matching[0]]}"
        searched = [not entry.get("after_search") for entry in self.record.iterations]
        return Start(bool(same.all()), label, sum(searched) - 1, state["finished"])

    def _compare_held_out(self, before: ParticleIndex, after: ParticleIndex) -> HeldOut:
        """Compare both bests on the part of dev that the search did not see."""
        task = self.metric_task
        start, end = self.holdout_scores(before), self.holdout_scores(after)
        gain = paired_gain(task, end, start)
        return HeldOut(measure(task, start), measure(task, end), gain, self.by_kept)

    def _measure_without_gradient(self, after: ParticleIndex) -> Measured | None:
        """Measure the best position on the dev items that no gradient used.

        `None` if no gradient came before it, or for a task with parts, whose utility needs items
        of each.
        """
        before = self.record.iterations[: after[0] + 1]
        descended = any(entry.get("gradients_computed") for entry in before)
        if not self.without_gradient or not descended or self.task.tasks:
            return None
        scores = self.dev_scores(after)
        return measure(self.metric_task, [scores[index] for index in self.without_gradient])

    def _measure_noise_floor(self, after: ParticleIndex) -> NoiseFloor:
        """Measure the effect of rounding alone: the same position and items, in other batches."""
        first, position = self.dev_scores(after), self.record.position_at(after)
        again = self._load_or_score("again", position, "judged", self.searched, self.ask_again)
        changed = sum(a.answer != b.answer for a, b in zip(first, again, strict=True))
        difference = self.metric_task.utility(again) - self.metric_task.utility(first)
        return NoiseFloor(len(first), changed, difference)

    def _check_constraints(
        self, after: ParticleIndex, end: Sequence[Score]
    ) -> dict[str, Constraint]:
        """Return the bound and value of each constrained part, paired with the base on test."""
        front, found = self.pareto_front, {}
        for name, (bound, value) in self.constraint_values(after).items():
            assert front is not None
            base, part = front.constraints[name] == BASE_BOUND, self.metric_task.tasks[name]
            on_test = on_base = gain = None
            if end:
                mine = self._subtask_scores(name, end)
                on_test = measure(part, mine)
            if end and base and front.base_index is not None:
                scores = self.test_scores(front.base_index, BASELINE_LABELS["base"])
                theirs = self._subtask_scores(name, scores)
                on_base, gain = measure(part, theirs), paired_gain(part, mine, theirs)
            found[name] = Constraint(bound, base, value, value >= bound, on_test, on_base, gain)
        return found

    def _measure_front(self, front: ParetoFront, limit: int) -> list[FrontPoint]:
        """Measure points of the front on dev and test, part by part, by the task's own metric."""
        task, found = self.metric_task, []
        for number in front.evenly_spaced_points(limit):
            index = front.front_indices[number]
            name = f"point {number} of the front"
            both = self.dev_scores(index), self.test_scores(index, name)
            parts = [
                {name: measure(part, self._subtask_scores(name, scores))
                 for name, part in task.tasks.items()}
                for scores in both
            ]  # fmt: skip
            dev, test = (measure(task, scores) for scores in both)
            found.append(FrontPoint(index, dev, test, *parts))
        return found

    def _subtask_scores(self, name: str, scores: Sequence[Score]) -> list[Score]:
        """Return the scores of one part, as given by the part itself."""
        return self.metric_task.scores_by_subtask(scores)[name]  # type: ignore[attr-defined]

    def _measure_vote(self, limit: int, test: bool) -> Vote | None:
        """Measure the vote of the top k; k is the best on dev, where all answers are known."""
        task, members = self.metric_task, self.record.personal_bests(limit)
        if task is not self.task:
            members = self.record.personal_bests(FINALIST_COUNT)
            members = sorted(members, key=self._rank_key, reverse=True)[:limit]
        if len(members) < 2:
            return None
        weights = [self.search_utility(member) for member in members]

        def vote(split: str, answers: Sequence[Sequence[Score]]) -> list[Score]:
            return majority_vote(task, self._items(split), answers, weights[: len(answers)])

        answers = [self.dev_scores(member) for member in members]
        sizes = range(1, len(members) + 1)
        by_size = [task.utility(vote("dev", answers[:size])) for size in sizes]
        size = by_size.index(max(by_size)) + 1
        voted = None
        if test:
            names = [f"voter {number}" for number in sizes[:size]]
            voters = [self.test_scores(*one) for one in zip(members, names, strict=False)]
            voted = measure(task, vote("test", voters), self._items("test"))
        voting = [(*members[i], weights[i]) for i in range(size)]
        return Vote(voting, by_size, voted)


def _digest(items: Sequence[Item]) -> str:
    return short_digest([dict(item) for item in items])


def sum_scoring_costs(record: RunRecord) -> dict[str, dict[str, float]]:
    """Sum the costs of scoring over dev and test: the measures named *_tokens and *_cost.

    "first" is for texts that appeared for the first time, "again" for texts that an earlier
    position had written: a scorer with a cache does not pay for these, nor for what an earlier run
    paid.
    """
    seen: set[tuple[str, Any, str]] = set()
    found: dict[str, dict[str, float]] = {}
    for path in sorted((record.folder / "answers").glob("*.json.gz")):
        content = read_gzip_json(path)
        split = "test" if path.name.startswith("test_") else "dev"
        parts = content.values() if isinstance(content, dict) else [content]
        for row in [row for part in parts for row in part]:
            measures = row.get("measures", {}).items()
            taken = {name: value for name, value in measures if name.endswith(SPENT_SUFFIXES)}
            text = (split, row["id"], row["text"])
            when = "again" if text in seen else "first"
            seen |= {text} if taken else set()
            for name, value in taken.items():
                found.setdefault(name, {"first": 0.0, "again": 0.0})[when] += value
        if not found:
            return {}
    return found


def encode_ensemble(vote: Vote | None) -> bytes | None:
    """Return ensemble.yaml, a model for `python -m swarm.evaluate`; `None` without a vote."""
    import yaml

    if vote is None:
        return None
    members = [
        {"folder": f"particle_{particle}/personal_best", "utility": utility}
        for _, particle, utility in vote.members
    ]
    content = {"rule": "majority", "members": members}
    head = "# The vote of the best personal bests; how many was chosen on dev.\n"
    return (head + yaml.safe_dump(content, sort_keys=False)).encode()
