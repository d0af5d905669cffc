"""Routing by similarity: a prompt is answered by the experts that did well on similar dev prompts.

The similarity of prompts is the cosine of their tf-idf vectors.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hydra.utils import instantiate

from swarm._util.files import short_digest
from swarm._util.settings import Positive, PositiveNumber, checked
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.evaluation.base import JobUsage
from swarm.evaluation.logit_ensemble import TokenEnsembleCandidate, softmax_rows
from swarm.executors.worker import run_tasks_lockstep
from swarm.loop.evaluator import records_to_scores
from swarm.models.base import Request, prompt_text
from swarm.pool.pool import ExpertPool
from swarm.runs.folder import RunFolder
from swarm.tasks.base import Item, Score, Task, first_prompts


class TfidfSimilarity:
    """Tf-idf similarity to D reference texts.

    A word that occurs in all of them is uninformative and left out, so that a task's fixed prompt
    text does not count. A word's weight is its count times log(D / texts that contain it).
    """

    def __init__(self, texts: Sequence[str]) -> None:
        having = Counter(word for text in texts for word in _count_words(text))
        rare = {word: np.log(len(texts) / n) for word, n in having.items() if n < len(texts)}
        self._columns = {word: index for index, word in enumerate(rare)}
        self._rarity = np.array([*rare.values()], dtype=np.float32)
        self._vectors = self._embed(texts)

    def cosine_with(self, texts: Sequence[str]) -> np.ndarray:
        """Return the cosines of R texts with the D, [R, D], from 0 to 1."""
        return (self._embed(texts) @ self._vectors.T).astype(np.float64)

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors, or zero if no word is known."""
        vectors = np.zeros((len(texts), len(self._columns)), dtype=np.float32)
        for row, text in enumerate(texts):
            for word, n in _count_words(text).items():
                if word in self._columns:
                    vectors[row, self._columns[word]] = n
        vectors *= self._rarity
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        scaled: np.ndarray = vectors / np.where(lengths == 0, 1, lengths)
        return scaled


def _count_words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


@dataclass(frozen=True, slots=True)
class InitialAnswers:
    """Dev answers of several experts at the start of a run.

    Attributes:
        items: Items of dev, all or those that the search used.
        scores: One list per expert, in the order of the items.
    """

    items: list[Item]
    scores: list[list[Score]]


def load_initial_answers(folder: str, names: Sequence[str], task: Task) -> InitialAnswers:
    """Return the answers of the named experts at the start of a run, by the task's metric.

    Raises:
        UserError: The run has other experts or other items, or its answers are not graded by the
            task's metric.
    """
    run = RunFolder(folder)
    if missing := [name for name in names if name not in run.experts]:
        have = ", ".join(run.experts)
        raise UserError(f"candidate.run={folder}: it has no expert {missing[0]}; it has: {have}")
    known = {item["id"]: item for item in task.metric_task.items("dev")}
    rows = [run.load_answers((0, run.experts.index(name))) for name in names]
    if unknown := [row["id"] for row in rows[0] if row["id"] not in known]:
        raise UserError(f"""candidate.run={folder}: its dev item {unknown[0]!r} is not an item of
            the task""")
    scores = [records_to_scores(mine) for mine in rows]
    if not run.verdict or run.verdict.signal is not None:  # it may have maximized another signal
        searched = instantiate(run.config["task"], _convert_="all")
        scores = [[_rescore_answer(run, searched, score) for score in mine] for mine in scores]
    return InitialAnswers([known[row["id"]] for row in rows[0]], scores)


def _rescore_answer(run: RunFolder, task: Task, score: Score) -> Score:
    """Return one score by the metric of its part, in a mixture."""
    for part in score.part.split("/") if score.part else ():
        task = task.tasks[part]
    if task.metric_task is task:
        return score
    if "correct" not in score.measures:
        raise UserError(f"""candidate.run={run.path}: it was searched by log probability, so its dev
            answers are not graded; use candidate.run=null to evaluate dev now""")
    return Score(score.measures["correct"], score.answer, score.text, score.part)


@checked("candidate")
class RoutingCandidate(TokenEnsembleCandidate):
    """A prompt is answered by the `top` experts that did best on the most similar dev prompts.

    With s_i the cosine (tf-idf) of the prompt with its `neighbours` nearest dev prompts and u_ik
    expert k's value on dev item i, expert k's claim is (sum_i s_i u_ik + m_k) / (sum_i s_i + 1),
    where m_k is its mean over dev: one more neighbour, which decides if no prompt is similar. The
    weights are softmax(claim / temperature) over the `top` largest claims.

    After cBTM (arXiv 2303.14177), with these differences: there experts are trained, one on each
    cluster of a corpus, and a cluster's distance is its expert's weight; here experts are given,
    their training data are unknown, and dev answers measure their strengths; there are no clusters,
    each dev prompt counts separately; and weights are computed once per prompt, not at every token.

    A dev prompt is never its own neighbour, so that a utility on dev is not biased by it.

    Args:
        base, pool, experts, max_tokens: See `TokenEnsembleCandidate`.
        top: Number of experts that answer; 1 routes a prompt to one of them.
        neighbours: Number of dev prompts that a prompt is compared with.
        temperature: Of no effect with `top` 1.
        run: A run folder with the experts' dev answers; `None` evaluates dev now.
    """

    def __init__(
        self,
        base: BaseModel,
        pool: ExpertPool,
        experts: Sequence[str] | None = None,
        top: Positive = 1,
        neighbours: Positive = 16,
        temperature: PositiveNumber = 0.1,
        run: str | None = None,
        max_tokens: Positive | None = None,
    ) -> None:
        super().__init__(base, pool, experts, max_tokens)
        self.top, self.neighbours, self.temperature, self.run = top, neighbours, temperature, run
        self._texts: list[str] = []

    def check(self, task: Task) -> None:
        super().check(task)
        if self.top > len(self.members):
            raise UserError(f"candidate.top={self.top}: there are {len(self.members)} experts")
        if self.run is not None:
            self.fit_dev_answers(task, load_initial_answers(self.run, self.members, task))

    @property
    def reads_dev(self) -> bool:  # type: ignore[override]
        """Whether dev answers are not known yet, from a run."""
        return not self._texts

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        if self.reads_dev:
            dev = task.items("dev")
            unit = np.eye(len(self.members))
            scores = run_tasks_lockstep(task, self.engine, unit, dev, meter)
            self.fit_dev_answers(task, InitialAnswers(list(dev), scores))
        return super().score_items(task, items, meter)

    def fit_dev_answers(self, task: Task, start: InitialAnswers) -> None:
        """Set the dev prompts and the value of each member's answers to them."""
        self._texts = ["\n".join(prompts) for prompts in first_prompts(task, start.items)]
        self._similarity = TfidfSimilarity(self._texts)
        self._values = np.array([[s.value for s in mine] for mine in start.scores]).T

    def fingerprint(self) -> str:
        """Return the fingerprint of all members, with a digest of dev answers read from a run."""
        if self.run is None:
            return super().fingerprint()
        return f"{super().fingerprint()} {short_digest([self._texts, self._values.tolist()])}"

    def compute_weights(self, requests: Sequence[Request]) -> np.ndarray:
        assert self._texts, "call fit_dev_answers first, or set candidate.run"
        texts = [prompt_text(request.prompt) for request in requests]
        # A later round's prompt begins with the first round's, so equality would not exclude the
        # item itself.
        others = np.array([[not text.startswith(dev) for dev in self._texts] for text in texts])
        claims = expected_values(
            self._similarity.cosine_with(texts), others, self._values, self.neighbours
        )
        return top_weights(claims, self.top, self.temperature)


def expected_values(
    similar: np.ndarray, others: np.ndarray, values: np.ndarray, neighbours: int
) -> np.ndarray:
    """Return the expected value of each of K experts on each of R prompts, [R, K].

    Args:
        similar: [R, D], similarity of the prompts with dev's.
        others: [R, D], False where the two are the same.
        values: [D, K], values of the experts' dev answers.
        neighbours: Number of dev prompts that count.
    """
    weights = np.where(others, similar, 0.0)
    far = np.argsort(-weights, axis=1, kind="stable")[:, neighbours:]
    np.put_along_axis(weights, far, 0.0, axis=1)
    means = (others @ values) / np.maximum(others.sum(axis=1, keepdims=True), 1)
    found: np.ndarray = (weights @ values + means) / (weights.sum(axis=1, keepdims=True) + 1)
    return found


def top_weights(claims: np.ndarray, top: int, temperature: float) -> np.ndarray:
    """Return weights [R, K] of the `top` largest claims of each row; of equal ones the first."""
    order = np.argsort(-claims, axis=1, kind="stable")[:, top:]
    kept = claims / temperature
    np.put_along_axis(kept, order, -np.inf, axis=1)
    return softmax_rows(kept)
