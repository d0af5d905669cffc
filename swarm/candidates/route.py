"""Routing by similarity: a prompt goes to the experts that did well on dev prompts like it."""

import hashlib
from collections.abc import Sequence

import numpy as np

from swarm.candidates import JobUsage
from swarm.candidates.similarity import TfidfSimilarity, prompt_text
from swarm.candidates.start import InitialAnswers, load_initial_answers
from swarm.candidates.weighed import TokenEnsembleCandidate, softmax_rows, validate_temperature
from swarm.engine import ExpertPool
from swarm.engine.base import BaseModel
from swarm.errors import UserError
from swarm.executors.worker import run_tasks_lockstep
from swarm.models import Request
from swarm.tasks import Item, Score, Task


class RoutingCandidate(TokenEnsembleCandidate):
    """The `top` experts that did best on the dev prompts most like a prompt answer it together.

    With s_i the cosine (tf-idf) of the prompt with its `neighbours` nearest dev prompts and u_ik
    expert k's value on dev item i, expert k's claim is (sum_i s_i u_ik + m_k) / (sum_i s_i + 1),
    where m_k is its mean over dev: one more neighbour, which decides where nothing is alike. The
    weights are softmax(claim / temperature) over the `top` largest claims.

    After cBTM (arXiv 2303.14177), with these differences: there experts are trained, one on each
    cluster of a corpus, and a cluster's distance is its expert's weight; here experts are given,
    nobody knows what they were trained on, and dev answers say what they are good at; there are no
    clusters, each dev prompt stands for itself; and weights are found once a prompt, not at every
    token.

    A dev prompt is never its own neighbour, so that a utility on dev is not flattered by it.

    Args:
        base, pool, experts, max_tokens: See `Weighed`.
        top: How many experts answer; 1 sends a prompt to one of them.
        neighbours: How many dev prompts a prompt is compared with.
        temperature: Of no effect with `top` 1.
        run: A run folder with the experts' dev answers; `None` asks dev now.
    """

    def __init__(
        self,
        base: BaseModel,
        pool: ExpertPool,
        experts: Sequence[str] | None = None,
        top: int = 1,
        neighbours: int = 16,
        temperature: float = 0.1,
        run: str | None = None,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(base, pool, experts, max_tokens)
        for key, value in (("top", top), ("neighbours", neighbours)):
            if type(value) is not int or value < 1:
                raise UserError(f"candidate.{key}={value}: must be a whole number above 0")
        self.top, self.neighbours = top, neighbours
        self.temperature, self.run = validate_temperature(temperature), run
        self._start: InitialAnswers | None = None
        self._texts: list[str] = []
        self._values = np.zeros((0, 0))

    def check(self, task: Task) -> None:
        """See `Candidate.check`."""
        super().check(task)
        if self.top > len(self.members):
            raise UserError(f"candidate.top={self.top}: there are {len(self.members)} experts")
        if self.run is not None:
            self.fit_dev_answers(task, load_initial_answers(self.run, self.members, task))

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        """See `Candidate.answers`."""
        if self._start is None:
            dev = task.items("dev")
            unit = np.eye(len(self.members))
            scores = run_tasks_lockstep(task, self.engine, unit, dev, meter)
            self.fit_dev_answers(task, InitialAnswers(list(dev), scores))
        return super().score_items(task, items, meter)

    def fit_dev_answers(self, task: Task, start: InitialAnswers) -> None:
        """Take dev prompts and what each member's answers to them were worth."""
        self._start = start
        self._texts = [first_prompt(task, item) for item in start.items]
        self._similarity = TfidfSimilarity(self._texts)
        self._values = np.array([[s.value for s in mine] for mine in start.scores]).T

    def fingerprint(self) -> str:
        """Of all members, with a digest of the dev answers that were read from a run."""
        if self.run is None:
            return super().fingerprint()
        learnt = repr((self._texts, self._values.tolist())).encode()
        return f"{super().fingerprint()} {hashlib.sha256(learnt).hexdigest()[:16]}"

    def compute_weights(self, requests: Sequence[Request]) -> np.ndarray:
        """See `Weighed.weights`."""
        assert self._start, "dev has to be learnt first: Route.learn(), or the key run"
        texts = [prompt_text(request) for request in requests]
        # A later round's prompt begins with the first's.
        others = np.array([[not text.startswith(dev) for dev in self._texts] for text in texts])
        claims = expected_values(self._similarity.cosine_with(texts), others, self._values, self.neighbours)
        return top_weights(claims, self.top, self.temperature)


def expected_values(
    similar: np.ndarray, others: np.ndarray, values: np.ndarray, neighbours: int
) -> np.ndarray:
    """What each of K experts is expected to be worth on each of R prompts, [R, K].

    Args:
        similar: [R, D], of the prompts with dev's.
        others: [R, D], False where the two are the same.
        values: [D, K], of the experts' dev answers.
        neighbours: How many dev prompts count.
    """
    near = np.where(others, similar, 0.0)
    far = np.argsort(-near, axis=1, kind="stable")[:, neighbours:]
    np.put_along_axis(near, far, 0.0, axis=1)
    means = (others @ values) / np.maximum(others.sum(axis=1, keepdims=True), 1)
    found: np.ndarray = (near @ values + means) / (near.sum(axis=1, keepdims=True) + 1)
    return found


def top_weights(claims: np.ndarray, top: int, temperature: float) -> np.ndarray:
    """Weights [R, K] of the `top` largest claims of each row; of equal ones the first."""
    order = np.argsort(-claims, axis=1, kind="stable")[:, top:]
    kept = claims / temperature
    np.put_along_axis(kept, order, -np.inf, axis=1)
    return softmax_rows(kept)


def first_prompt(task: Task, item: Item) -> str:
    """What a task asks in its first round about one item."""
    game = task.run([item])
    requests = next(game)
    game.close()
    return "\n".join(map(prompt_text, requests))
