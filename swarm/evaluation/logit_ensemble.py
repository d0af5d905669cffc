"""Pack of LLMs: the next token by all models together, weighted by perplexity of the prompt."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from swarm._util.files import find_path
from swarm._util.settings import Positive, PositiveNumber, checked
from swarm.engine.base_model import BaseModel
from swarm.engine.token_ensemble import EnsembleMember, ModelEnsemble, TokenEnsembleEngine
from swarm.errors import UserError
from swarm.evaluation.base import JobUsage, run_task
from swarm.evaluation.positions import PoolCandidate
from swarm.models.base import Completion, Request
from swarm.pool.adapter import read_adapter
from swarm.pool.pool import ExpertPool
from swarm.tasks.base import Item, Score, Task


@checked("candidate")
class PackLLM(PoolCandidate):
    """PackLLM-sim (arXiv 2404.11531): w_k = softmax_k(-log perplexity_k(prompt) / temperature).

    One voter: the next token's probabilities are sum_k w_k p_k, and greedy decoding takes the
    likeliest token. The model with the lowest perplexity of a prompt has the largest weight.
    Adapters of one base share its weights. It is also a model (`swarm.models.base.Model`), by
    `generate`, once it is open. Choices left open by paper and authors' code, and differences:

    - The probabilities of the next token are mixed; the authors mix logits.
    - The weights depend on the prompt alone and are fixed; the authors' code recomputes them from
      prompt and answer at every token.
    - A prompt's first token counts if the tokenizer has a beginning-of-text token.
    - The greedy search for weights (PackLLM-opt) and the alignment of different tokenizers are not
      implemented: all members share one tokenizer.

    Every member reads each prompt twice, for its weight and to answer; a prompt counts once for
    each member, tokens count both times.

    Args:
        base: The base of the adapters.
        pool: Adapters in folders, or a panel of full models.
        experts: Names of some of them; `None` is all.
        temperature: 1.0 in the authors' code; near 0 the model of lowest perplexity answers alone.
        max_tokens: See `swarm.engine.token_ensemble.TokenEnsembleEngine`.
    """

    def __init__(
        self,
        base: BaseModel,
        pool: ExpertPool,
        experts: Sequence[str] | None = None,
        temperature: PositiveNumber = 1.0,
        max_tokens: Positive | None = None,
    ) -> None:
        super().__init__(base, pool, TokenEnsembleEngine(max_tokens))
        self.experts, self.temperature = experts, temperature
        self.names = ["packllm"]
        self.members: list[str] = []
        self._meter = JobUsage()

    def compute_weights(self, requests: Sequence[Request]) -> np.ndarray:
        """Return the mixing weights of each request, [R, K]: nonnegative, with sum 1."""
        found, tokens = self.engine.log_perplexities([request.prompt for request in requests])
        self._meter.prompt_tokens += tokens
        return softmax_rows(-found / self.temperature)

    def check(self, task: Task) -> None:
        if not self.members:
            self.pool = open_expert_ensemble(self.pool, self.base, self.experts)
            self.members = self.pool.names
        super().check(task)

    def score_items(self, task: Task, items: Sequence[Item], meter: JobUsage) -> list[list[Score]]:
        """See `Candidate.score_items`; a prompt counts once for each member with a weight in it."""
        self._meter = meter
        return [run_task(task, items, self.generate)]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `swarm.models.base.Model`.

        A completion's tokens are those of all members with a weight in it.
        """
        if not requests:
            return []
        weights = self.compute_weights(requests)
        found = []
        for row, (one,) in zip(
            weights, self.engine.generate(weights, [[one] for one in requests]), strict=True
        ):
            heard = int(np.count_nonzero(row))
            tokens = {
                "prompt_tokens": heard * one.prompt_tokens,
                "new_tokens": heard * one.new_tokens,
            }
            found.append(replace(one, **tokens))
            self._meter.calls += heard - 1
        self._meter.add(*found)
        return found

    def fingerprint(self) -> str:
        """Return the fingerprint of all members."""
        return self.pool.fingerprint()


class SharedBaseEnsemble(ModelEnsemble):
    """A panel of adapters of its base, whatever base name they have."""

    def _build_member(self, name: str, path: str) -> EnsembleMember:
        return EnsembleMember(name, self.base, read_adapter(find_path(path)))


def open_expert_ensemble(
    pool: ExpertPool, base: BaseModel, experts: Sequence[str] | None = None
) -> ModelEnsemble:
    """Return the experts of a pool as an open panel of models.

    Raises:
        UserError: The pool does not have an expert, or it is no adapter in a folder; or there are
            fewer than two.
    """
    pool.open(base)
    names = list(pool.names if experts is None else experts)
    if unknown := [name for name in names if name not in pool.names]:
        have = ", ".join(pool.names)
        raise UserError(f"candidate.experts: the pool has no {unknown[0]!r}; it has: {have}")
    if isinstance(pool, ModelEnsemble):
        chosen = [pool.models[pool.names.index(name)] for name in names]
        return ModelEnsemble(chosen, pool.base).open()
    folders = {name: find_path(getattr(pool, "folder", "")) / name for name in names}
    if made := [name for name, folder in folders.items() if not folder.is_dir()]:
        raise UserError(f"""candidate.experts: {made[0]} is not stored as an adapter in its folder;
            name others""")
    if len(names) < 2:
        raise UserError(f"candidate.experts={names}: name two experts or more")
    return SharedBaseEnsemble([str(folder) for folder in folders.values()], base).open()


def softmax_rows(values: np.ndarray) -> np.ndarray:
    """Return softmax weights [R, K] of numbers [R, K], with sum 1 in each row; -inf is weight 0."""
    shares: np.ndarray = np.exp(values - values.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)
