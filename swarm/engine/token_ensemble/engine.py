"""Token Swarms: full models mixed token by token, as an engine and as one model."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from swarm._util.files import parse_json
from swarm.engine.base import Mixer
from swarm.engine.base_model import BaseModel
from swarm.engine.hf import BATCH_CPU, BATCH_GPU, HFEngine
from swarm.engine.token_ensemble.members import MIXTURE_FILE, ModelEnsemble
from swarm.engine.tokenization import apply_chat_template, context_length_of, end_token_ids
from swarm.errors import UserError
from swarm.models.base import Completion, Request
from swarm.pool.pool import ExpertPool

if TYPE_CHECKING:
    import torch

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
        # A mixed model runs all positions at once, as a stacked one does.
        super().__init__("stacked", max_tokens)

    routes = differentiable = False

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """See `swarm.engine.base.Engine`."""
        models, tokenizer, _ = collect_compatible(as_model_ensemble(pool).load_members("meta"))
        self.context = min(map(context_length_of, models))
        return tokenizer

    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """See `swarm.engine.base.Engine`; the panel's members define their own bases."""
        models, self._tokenizer, width = collect_compatible(
            as_model_ensemble(pool).load_members(device)
        )
        self._model = EnsembleModel(models, width)
        self._count = len(models)
        self._budget = self.max_tokens or (BATCH_CPU if device == "cpu" else BATCH_GPU)
        self._ends = frozenset().union(*(end_token_ids(model, self._tokenizer) for model in models))
        self._context = min(map(context_length_of, models))
        self._set_mixer(self._model)

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
        content = parse_json(file.read_text(encoding="utf-8"))
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


MIN_PROBABILITY = 2.0**-126
"""Lower bound of a token's probability in a mixture, the smallest normal float32; negative ones are
raised to it too.
"""


class EnsembleOutput(NamedTuple):
    """Output of a mixed model, with transformers' names."""

    logits: "torch.Tensor"
    cache: Any


class EnsembleCache:
    """The K models' caches, and the mapping of the batch's rows to theirs.

    Attributes:
        caches: Each model's own cache; `None` if it has read nothing.
        indices: For each model the index in its cache of each row of the batch; -1 for a row whose
            particle does not use the model.
        sizes: Number of rows of each model's own cache.
    """

    def __init__(self, models: int, rows: int) -> None:
        self.caches: list[Any] = [None] * models
        self.indices: list[list[int]] = [[-1] * rows for _ in range(models)]
        self.sizes = [0] * models

    def batch_select_indices(self, indices: "torch.Tensor") -> None:
        """Select these rows of the batch; the models' own caches are reduced at the next call."""
        chosen = indices.tolist()
        self.indices = [[row[i] for i in chosen] for row in self.indices]

    def __copy__(self) -> "EnsembleCache":
        from swarm.engine.decode import copy_cache

        copied = EnsembleCache(0, 0)
        copied.caches = [None if cache is None else copy_cache(cache) for cache in self.caches]
        copied.indices, copied.sizes = [*self.indices], [*self.sizes]
        return copied


class EnsembleModel(Mixer):
    """K causal language models; position p's next token has the probabilities sum_k w[p, k] p_k.

    It is called as transformers' models are, so that all code for those works on it. As a model's
    output for a text is the same at every position, each model reads a text once: prompts, and the
    answers for as long as they agree.

    A negative probability, which negative weights can lead to, counts as zero. The logits are the
    natural logs of the probabilities (their softmax renormalizes them); at a position that is a
    single model, they are the model's own.

    Args:
        models: Models of transformers, on one device.
        width: The size of the vocabulary; further columns of a model are padding.
    """

    def __init__(self, models: Sequence[Any], width: int) -> None:
        self._models, self._width = models, width
        from swarm.engine.decode import can_share_prefix

        # Prefix sharing is possible only if all models allow it: expose the most restrictive
        # config.
        self.config = next((m.config for m in models if not can_share_prefix(m)), models[0].config)
        self.device = models[0].device

    def set_positions(self, coefficients: "torch.Tensor", merge: bool = False) -> None:
        """See `swarm.engine.base.Mixer`."""
        self._positions = coefficients.float().to(self.device)

    def route_rows(self, particles: "torch.Tensor") -> None:
        """See `swarm.engine.base.Mixer`."""
        self._weights = self._positions[particles.to(self.device)]

    def __call__(
        self,
        input_ids: "torch.Tensor",
        attention_mask: "torch.Tensor | None" = None,
        position_ids: "torch.Tensor | None" = None,
        cache: EnsembleCache | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
    ) -> EnsembleOutput:
        """Read [R, t] more tokens; logits [R, w, vocabulary] of the last w positions, 0 for all."""
        import torch

        from swarm.engine.decode import cache_argument, output_cache

        rows, length = input_ids.shape
        cache = cache or EnsembleCache(len(self._models), rows)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        given = {"input_ids": input_ids, "attention_mask": mask, "position_ids": position_ids}
        fresh = [tuple(row) for row in torch.cat([input_ids, mask[:, -length:]], dim=1).tolist()]
        uses = self._weights.bool()
        uses[~uses.any(dim=1), 0] = True
        used = uses.tolist()
        single = (self._weights.count_nonzero(dim=1) == 1) & (self._weights > 0).any(dim=1)
        mixed: torch.Tensor | None = None
        alone: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, model in enumerate(self._models):
            chosen = self._share_rows(cache, number, fresh, [row[number] for row in used])
            if not chosen:
                continue
            out = model(
                **{name: value[chosen] for name, value in given.items() if value is not None},
                use_cache=use_cache,
                logits_to_keep=logits_to_keep,
                **cache_argument(model, cache.caches[number]),
            )
            cache.caches[number] = output_cache(out)
            logits = out.logits[..., : self._width].float()
            where = torch.tensor(cache.indices[number], device=self.device)
            mine = (where >= 0).nonzero()[:, 0]
            if mixed is None:
                mixed = logits.new_zeros(rows, *logits.shape[1:])
            weights = self._weights[mine, number][:, None, None]
            mixed[mine] += weights * logits.softmax(-1)[where[mine]]
            mine = mine[single[mine]]
            alone.append((mine, logits[where[mine]]))
        assert mixed is not None
        mixed = mixed.clamp_(min=MIN_PROBABILITY).log_()
        for mine, logits in alone:
            mixed[mine] = logits
        return EnsembleOutput(mixed, cache)

    def _share_rows(
        self, cache: EnsembleCache, number: int, fresh: Sequence[tuple[int, ...]], used: list[bool]
    ) -> list[int]:
        """Return one row of the batch for each text that a model has to read, and adapt its cache.

        Args:
            fresh: The new tokens and mask of each row: rows with the same cache index and the same
                new tokens are the same text.
            used: Whether the model has a weight in each row.
        """
        import torch

        before, after = cache.indices[number], [-1] * len(fresh)
        chosen: list[int] = []
        known: dict[tuple[int, ...], int] = {}
        for row, tokens in enumerate(fresh):
            if not used[row]:
                continue
            text = (before[row], *tokens)
            if text not in known:
                known[text] = len(chosen)
                chosen.append(row)
            after[row] = known[text]
        parents = [before[row] for row in chosen]
        if cache.caches[number] is not None and parents != list(range(cache.sizes[number])):
            index = torch.tensor(parents, dtype=torch.long, device=self.device)
            cache.caches[number].batch_select_indices(index)
        cache.indices[number], cache.sizes[number] = after, len(chosen)
        return chosen
