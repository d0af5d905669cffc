"""Token Swarms: full models mixed token by token, as an engine and as one model."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swarm.engine.base import ExpertPool
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import BATCH_CPU, BATCH_GPU, HFEngine
from swarm.engine.token_ensemble.members import MIXTURE_FILE, ModelEnsemble
from swarm.engine.tokenization import apply_chat_template, context_length_of, end_token_ids
from swarm.errors import UserError
from swarm.models.base import Completion, Request

PROBE_TEXT = "Question: is 3 + 4 = 7?\n(A) yes (B) no\nAnswer:"
"""A text that all tokenizers have to encode alike."""


class TokenEnsembleEngine(HFEngine):
    """Answers with mixtures of a panel's next-token distributions (arXiv 2410.11163, figure 5).

    The next token's probabilities are sum_k w_k p_k, negative ones clipped to zero; greedy decoding
    takes the likeliest. Prompts use the first model's tokenizer and chat template, and a text ends
    where any of the models would end it.

    Args:
        max_tokens: Maximum number of padded prompt and new tokens in one batch of a model; `None`
            chooses 4,096 on a CPU and 65,536 on a GPU. Halved permanently when the device runs out
            of memory.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        # A mixed model runs all particles at once, as a stacked one does.
        super().__init__("stacked", max_tokens)

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """See `swarm.engine.base.Engine`."""
        models, tokenizer, _ = collect_compatible(as_model_ensemble(pool).load_members("meta"))
        self.context = min(map(context_length_of, models))
        return tokenizer

    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """See `swarm.engine.base.Engine`; the panel's members define their own bases."""
        from swarm.engine.token_ensemble.model import EnsembleModel

        models, self._tokenizer, width = collect_compatible(
            as_model_ensemble(pool).load_members(device)
        )
        self._model = self._stack = EnsembleModel(models, width)
        self._count = len(models)
        self._budget = self.max_tokens or (BATCH_CPU if device == "cpu" else BATCH_GPU)
        self._ends = frozenset().union(*(end_token_ids(model, self._tokenizer) for model in models))
        self._context = min(map(context_length_of, models))

    def generate_weighted(
        self, weights: np.ndarray, requests: Sequence[Request]
    ) -> list[Completion]:
        """Answer each of R requests with a separate mixture, with weights [R, K].

        A model reads only the requests in which it has a weight. To the mixed model each request is
        a particle, so that finished ones stay in their batch until its end.
        """
        import torch

        cost = [self._count_row_tokens(request) for request in requests]
        completions: dict[int, Completion] = {}
        order = sorted(range(len(requests)), key=lambda i: (-cost[i], i))
        for scored in (False, True):
            waiting = [i for i in order if bool(requests[i].choices) == scored]
            while waiting:
                chosen = waiting[: max(1, self._budget // cost[waiting[0]])]
                self._stack.set_positions(torch.from_numpy(weights[chosen]))
                try:
                    rows = self._generate_batch([[requests[i]] for i in chosen])
                except torch.OutOfMemoryError:
                    self._reduce_batch(len(chosen), cost[waiting[0]])
                    continue
                completions |= {i: row[0] for i, row in zip(chosen, rows, strict=True)}
                waiting = waiting[len(chosen) :]
        return [completions[i] for i in range(len(requests))]

    def log_perplexities(self, prompts: Sequence[Any]) -> tuple[np.ndarray, int]:
        """Return each model's log perplexity of each prompt, [R, K], and the tokens read.

        It is the mean negative natural log probability of a prompt's tokens; turns are formatted
        with the chat template.
        """
        texts = [prompt_to_text(self._tokenizer, prompt) for prompt in prompts]
        different = list(dict.fromkeys(texts))
        requests = [[Request("", 0, (text,)) for text in different]] * self._count
        rows = self.generate(np.eye(self._count), requests)
        found = {
            text: [
                -completion.logprobs[0] / max(1, completion.choice_tokens[0])
                for completion in column
            ]
            for text, column in zip(different, zip(*rows, strict=True), strict=True)
        }
        tokens = sum(
            completion.prompt_tokens + completion.new_tokens for row in rows for completion in row
        )
        return np.array([found[text] for text in texts]), tokens


class TokenEnsembleModel:
    """The mixture that a search has saved, as a model (`swarm.models.base.Model`).

    Args:
        folder: With a mixture.json, such as search/NAME/global_best.
        device: "cpu", "cuda:0" and so on.
        trust_remote_code: Whether code that comes with the models may run.

    Raises:
        UserError: There is no mixture in the folder, or one of its models is missing.
    """

    def __init__(
        self, folder: str | Path, device: str = "cpu", trust_remote_code: bool = False
    ) -> None:
        self.panel, weights = read_mixture(folder, trust_remote_code)
        self.weights = weights[None]
        self._engine = TokenEnsembleEngine()
        self._engine.open(self.panel.base, self.panel, device)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `swarm.models.base.Model`."""
        return self._engine.generate(self.weights, [requests])[0]


def read_mixture(
    folder: str | Path, trust_remote_code: bool = False
) -> tuple[ModelEnsemble, np.ndarray]:
    """Return the open panel of a saved mixture, and its weights [K].

    Raises:
        UserError: There is no mixture in the folder, or one of its models is missing.
    """
    file = Path(folder) / MIXTURE_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        weights = np.array(content["weights"], dtype=np.float64)
        settings = {key: content["base"][key] for key in ("path", "name", "dtype")}
        base = BaseModel(**settings, trust_remote_code=trust_remote_code)
        return ModelEnsemble(content["models"], base).open(), weights
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a readable mixture: {error!r}") from None


def prompt_to_text(tokenizer: Any, prompt: Any) -> str:
    """Return a request's prompt as text, without the beginning-of-text token."""
    if isinstance(prompt, str):
        return prompt
    text = apply_chat_template(tokenizer, prompt, tokenize=False)
    return str(text).removeprefix(tokenizer.bos_token or "")


def as_model_ensemble(pool: ExpertPool) -> ModelEnsemble:
    """Return the pool as a `ModelEnsemble`.

    Raises:
        UserError: It is of another kind.
    """
    if isinstance(pool, ModelEnsemble):
        return pool
    raise UserError(
        "engine=token mixes complete models and needs pool=models; for adapters use engine=hf"
    )


def collect_compatible(members: Iterable[tuple[str, Any, Any]]) -> tuple[list[Any], Any, int]:
    """Return the models, the first one's tokenizer, and the size of their shared vocabulary.

    Args:
        members: Name, model and tokenizer of each.

    Raises:
        UserError: They share none; the message names two models and their difference.
    """
    opened = list(members)
    first, _, tokenizer = opened[0]
    width = max(tokenizer.get_vocab().values()) + 1
    for name, model, other in opened:
        if difference := describe_tokenizer_difference(tokenizer, other):
            raise UserError(
                f"pool.models: {first} and {name} do not share a tokenizer: {difference}; "
                "only models with the same vocabulary can be mixed token by token"
            )
        rows = model.config.get_text_config().vocab_size
        if rows < width:
            raise UserError(
                f"pool.models: {name} has {rows} embeddings and its tokenizer {width} tokens: "
                "its embedding was not resized"
            )
    return [model for _, model, _ in opened], tokenizer, width


def describe_tokenizer_difference(one: Any, other: Any) -> str | None:
    """Describe how two tokenizers differ; `None` if both encode a text to the same tokens.

    Which tokens begin, end and pad a text may differ, as between a base model and its chat version,
    as long as `PROBE_TEXT` is encoded alike.
    """
    ours, theirs = one.get_vocab(), other.get_vocab()
    if differ := [word for word in {**ours, **theirs} if ours.get(word) != theirs.get(word)]:
        word = differ[0]
        numbers = " and ".join(str(words.get(word, "none")) for words in (ours, theirs))
        return f"{len(differ)} tokens differ, e.g. {word!r}, whose ids are {numbers}"
    special = [
        {str(token) for token in words.added_tokens_decoder.values() if token.special}
        for words in (one, other)
    ]
    if differ := sorted(special[0] ^ special[1]):
        return f"{differ[0]!r} is a special token of only one"
    if one(PROBE_TEXT).input_ids != other(PROBE_TEXT).input_ids:
        return "they split or start a text differently"
    return None
