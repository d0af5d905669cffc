"""Pack of LLMs: who finds a prompt the least surprising has the most to say about it."""

from collections.abc import Sequence

import numpy as np

from swarm.candidates.weighed import TokenEnsembleCandidate, softmax_rows, validate_temperature
from swarm.engine import ExpertPool
from swarm.engine.base import BaseModel
from swarm.models import Request


class PackLLM(TokenEnsembleCandidate):
    """PackLLM-sim (arXiv 2404.11531): w_k = softmax_k(-log perplexity_k(prompt) / temperature).

    Where paper and authors' code leave a choice, or this differs:

    - The chances of the next token are mixed, sum_k w_k p_k; the authors mix logits.
    - The weights are of the prompt alone and stay; in the authors' code they are found anew from
      prompt and answer at every token.
    - A prompt's first token counts where the tokenizer has a token to begin texts with.
    - The greedy search for weights (PackLLM-opt) and the alignment of different tokenizers are not
      here: all members share one tokenizer.

    Every member reads each prompt twice, for its weight and to answer; a prompt counts once for
    each member, tokens count both times.

    Args:
        base, pool, experts, max_tokens: See `Weighed`.
        temperature: 1.0 in the authors' code; near 0 the least surprised answers alone.
    """

    def __init__(
        self,
        base: BaseModel,
        pool: ExpertPool,
        experts: Sequence[str] | None = None,
        temperature: float = 1.0,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(base, pool, experts, max_tokens)
        self.temperature = validate_temperature(temperature)

    def compute_weights(self, requests: Sequence[Request]) -> np.ndarray:
        """See `Weighed.weights`."""
        found, tokens = self.engine.log_perplexities([request.prompt for request in requests])
        self._meter.tokens += tokens
        return softmax_rows(-found / self.temperature)
