"""Positions of a pool as candidates: single experts, or a mixture by its coefficients."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from swarm.engine.base import Engine, ExpertPool
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.evaluation.base import JobUsage
from swarm.executors.worker import run_tasks_lockstep
from swarm.tasks.base import Item, Score, Task


class PositionsCandidate:
    """Several positions [P, G * K] of one pool, one voter each; answered together on one base.

    Args:
        base: The model that the pool's experts belong to.
        pool: The experts.
        engine: An engine for this kind of pool.
    """

    def __init__(self, base: BaseModel, pool: ExpertPool, engine: Engine) -> None:
        self.base, self.pool, self.engine = base, pool, engine
        self.names: list[str] = []
        self._rows = np.zeros((0, 0))
        self._tokenizer: Any = None
        self._opened = False

    def build_positions(self) -> dict[str, np.ndarray]:
        """Return the positions of the open pool by name.

        Raises:
            UserError: The pool does not have a named expert.
        """
        raise NotImplementedError

    def check(self, task: Task) -> None:
        """See `Candidate.check`."""
        self.pool.open(self.base)
        rows = self.build_positions()
        self.names, self._rows = list(rows), np.stack(list(rows.values()))
        self.pool.check()
        self._tokenizer = self.engine.check(self.base, self.pool)

    def model_contexts(self) -> list[tuple[Any, float]]:
        """See `HasModelContexts`."""
        return [(self._tokenizer, self.engine.context)]

    def open(self, device: str) -> None:
        """See `Candidate.open`."""
        if not self._opened:
            self.engine.open(self.base, self.pool, device)
        self._opened = True

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        """See `Candidate.score_items`."""
        return run_tasks_lockstep(task, self.engine, self._rows, items, meter)

    def fingerprint(self) -> str:
        """Return the fingerprints of the base and of the pool."""
        return f"{self.base.fingerprint()} {self.pool.fingerprint()}"

    def expert_index(self, name: object) -> int:
        """Return an expert's index in the open pool."""
        if name not in self.pool.names:
            have = ", ".join(self.pool.names)
            raise UserError(f"candidate: the pool has no expert {name!r}; it has: {have}")
        return self.pool.names.index(str(name))


class SingleExpertsCandidate(PositionsCandidate):
    """Unmodified experts of the pool.

    Args:
        base, pool, engine: See `PositionsCandidate`.
        names: Of one, or of several; `None` is all of the pool.
    """

    def __init__(
        self,
        base: BaseModel,
        pool: ExpertPool,
        engine: Engine,
        names: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(base, pool, engine)
        self.requested_names = [names] if isinstance(names, str) else names

    def build_positions(self) -> dict[str, np.ndarray]:
        """See `PositionsCandidate.build_positions`."""
        names = self.pool.names if self.requested_names is None else list(self.requested_names)
        unit = np.tile(np.eye(len(self.pool.names)), len(self.pool.groups))
        return {name: unit[self.expert_index(name)] for name in names}


class MixedPositionCandidate(PositionsCandidate):
    """One position by its coefficients.

    Args:
        base, pool, engine: See `PositionsCandidate`.
        coefficients: Of experts by name, the others' are 0; or a list of all G * K, group by group,
            as in state.json and swarm.json of a run.
    """

    def __init__(
        self,
        base: BaseModel,
        pool: ExpertPool,
        engine: Engine,
        coefficients: Mapping[str, float] | Sequence[float] | None,
    ) -> None:
        super().__init__(base, pool, engine)
        if not coefficients:
            raise UserError(
                "candidate.coefficients is missing: give coefficients by expert, e.g. "
                "candidate.coefficients='{rooms: 0.5, logic: 0.5}'"
            )
        values = list(coefficients.values() if isinstance(coefficients, Mapping) else coefficients)
        if not all(type(c) in (int, float) and np.isfinite(c) for c in values):
            raise UserError(f"candidate.coefficients={values}: must be finite numbers")
        self.coefficients = coefficients

    def build_positions(self) -> dict[str, np.ndarray]:
        """See `PositionsCandidate.build_positions`."""
        count, groups = len(self.pool.names), len(self.pool.groups)
        if isinstance(self.coefficients, Mapping):
            row = np.zeros(count)
            for name, value in self.coefficients.items():
                row[self.expert_index(name)] = value
            return {"position": np.tile(row, groups)}
        if len(self.coefficients) != count * groups:
            raise UserError(
                f"candidate.coefficients: {len(self.coefficients)} numbers, and the pool has "
                f"{count} experts in {groups} groups: {count * groups} are needed"
            )
        return {"position": np.array(self.coefficients, dtype=np.float64)}
