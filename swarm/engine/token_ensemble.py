"""Token Swarms: full models that share a tokenizer, mixed token by token (engine=token)."""

import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from swarm._util import files
from swarm._util.files import parse_json, write_json
from swarm.engine.base import Mixer, as_pool
from swarm.engine.base_model import BaseModel, find_in_hub_cache
from swarm.engine.hf import HFEngine
from swarm.engine.tokenization import apply_chat_template, context_length_of, end_token_ids
from swarm.errors import UserError
from swarm.models.base import Completion, Request
from swarm.pool.adapter import CONFIG_FILE, Adapter, read_adapter
from swarm.pool.pool import ExpertPool

if TYPE_CHECKING:
    import torch

    from swarm.pool.discovery import NamedModel

MIXTURE_FILE = "mixture.json"

PROBE_TEXT = "Question: is 3 + 4 = 7?\n(A) yes (B) no\nAnswer:"
"""A text that all tokenizers have to encode alike."""

MIN_PROBABILITY = 2.0**-126
"""Lower bound of a token's probability in a mixture, the smallest normal float32; negative ones are
raised to it too.
"""


class EnsembleMember(NamedTuple):
    """One model of a panel."""

    name: str
    """The name in results."""
    base: BaseModel
    """The model, or the base of its adapter."""
    adapter: Adapter | None = None
    """A LoRA; `None` if the base is the model."""


class ModelPanel(ExpertPool):
    """Complete models; a position has a coefficient for each.

    Their names are the last parts of their paths, or the full paths if these are not unique.

    Args:
        models: Two or more folders or hub ids.
        base: How they are opened; `None` is the first one, opened with the defaults.

    Raises:
        UserError: Fewer than two models, or one of them twice.
    """

    def __init__(self, models: Sequence[str] | None, base: BaseModel | None = None) -> None:
        given = [] if models is None or isinstance(models, str) else list(models)
        texts = all(isinstance(one, str) and one.strip() for one in given)
        if len(given) < 2 or not texts or len(set(given)) < len(given):
            raise UserError(
                f"pool.models={models}: give two or more folders or hub ids of models, each once, "
                "e.g. pool.models='[models/mine,models/other]'"
            )
        last = [Path(one).name for one in given]
        self.models, self.names = given, last if len(set(last)) == len(last) else given
        self.expert_count = len(self.names)
        self.base = base or BaseModel(self.models[0])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the panel as its settings, closed; a worker opens its own files."""
        return type(self), (self.models, self.base)

    def members(self) -> list[EnsembleMember]:
        """Return the models."""
        pairs = zip(self.names, self.models, strict=True)
        return [EnsembleMember(name, base_model_like(self.base, path)) for name, path in pairs]

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits of the search's models: names, order and weights."""
        digest = hashlib.sha256()
        for name, base, adapter in self.members():
            digest.update(f"{name}\n{base.fingerprint()}\n".encode())
            if adapter:
                digest.update(adapter.identity_bytes())
        return digest.hexdigest()[:16]

    def position(self, coefficients: Iterable[float]) -> list[float]:
        """Return the coefficients as a list.

        Raises:
            UserError: They are not K finite numbers.
        """
        vector = [float(value) for value in coefficients]
        if len(vector) != len(self.models) or not all(map(math.isfinite, vector)):
            raise UserError(f"expected {len(self.models)} finite numbers, one per model: {vector}")
        return vector


class ModelEnsemble(ModelPanel):
    """K models; a position is their weights in the mixture of their next-token distributions.

    Args:
        models: Folders or hub ids of models, or folders with a PEFT LoRA adapter of one.
        base: How models are opened (dtype, trust_remote_code), and the base of the adapters that
            name it or none; `None` is the first model, opened with the defaults.
    """

    saves = "mixture"

    _members: Sequence[EnsembleMember] = ()

    def open(self, base: "str | NamedModel | None" = None) -> "ModelEnsemble":
        """Resolve each member, from configurations alone, and return the panel itself.

        Args:
            base: Ignored: models need no common base.

        Raises:
            UserError: An adapter cannot be read, or its base is unknown.
        """
        if is_adapter_folder(self.base.path):
            raise UserError(
                f"pool.models: the first, {self.base.path}, is an adapter: set its base model, "
                "e.g. model=local model.path=BASE"
            )
        self._members = [self._build_member(*one) for one in zip(self.names, self.models)]  # noqa: B905
        return self

    def _build_member(self, name: str, path: str) -> EnsembleMember:
        if not is_adapter_folder(path):
            return EnsembleMember(name, base_model_like(self.base, path))
        adapter = read_adapter(files.find_path(path))
        known = {Path(one).name for one in (self.base.path, self.base.name) if one}
        if adapter.base_model is None or Path(adapter.base_model).name in known:
            return EnsembleMember(name, self.base, adapter)
        return EnsembleMember(name, base_model_like(self.base, adapter.base_model), adapter)

    def members(self) -> list[EnsembleMember]:
        """Return the models, once the panel is open."""
        assert self._members, "the models are not open: call ModelEnsemble.open first"
        return list(self._members)

    def check(self) -> None:
        """Resolve every model's files on this disk, and read every weight of the adapters once.

        Raises:
            UserError: A model is missing and cannot be downloaded, or a weight is not finite.
        """
        for member in self.members():
            with name_pool_models_key():
                member.base.resolve()
            if member.adapter:
                for module in member.adapter.shapes:
                    member.adapter.load_factors(module)

    def load_members(self, device: str) -> Iterator[tuple[str, Any, Any]]:
        """Yield name, model and tokenizer of each member on `device`; "meta" is without weights.

        Adapters of one base share its weights.

        Raises:
            UserError: A model cannot be opened, or an adapter does not fit its base.
        """
        opened: dict[BaseModel, tuple[Any, Any]] = {}
        for name, base, adapter in self.members():
            with name_pool_models_key():
                if base not in opened:
                    meta = device == "meta"
                    opened[base] = base.load_without_weights() if meta else base.load(device)
            model, tokenizer = opened[base]
            if adapter:
                model = with_adapter(model, adapter, f"pool.models: {name} on {base.path}")
            yield name, model, tokenizer

    def save(
        self, coefficients: Iterable[float], folder: str | Path, extra: dict[str, Any] | None = None
    ) -> None:
        """Write the mixture at a position [K] as a mixture.json, for `TokenEnsembleModel`.

        A swarm.json with its components and `extra` is written last.

        Raises:
            UserError: The vector is not K finite numbers, or the folder cannot be written.
        """
        vector = self.position(coefficients)
        base = {"path": _portable_path(self.base), "name": self.base.name or self.base.path}
        models = [
            str(adapter.folder.absolute()) if adapter else _portable_path(own)
            for _, own, adapter in self.members()
        ]
        content = {"models": models, "weights": vector, "base": base | {"dtype": self.base.dtype}}
        write_json(Path(folder) / MIXTURE_FILE, content)
        note = {"experts": self.names, "coefficients": vector, "space": "tokens"}
        write_json(Path(folder) / "swarm.json", {**(extra or {}), **note})


def base_model_like(base: BaseModel, path: str) -> BaseModel:
    """Return the model at `path`, opened with the settings of `base`."""
    if path in (base.path, base.name):
        return base
    # The wheel replaces the base alone.
    return BaseModel(path, None, base.dtype, base.trust_remote_code)


def is_adapter_folder(path: str | None) -> bool:
    """Return whether `path` is a folder with an adapter and no model."""
    folder = files.find_path(path or "")
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


def with_adapter(model: Any, adapter: Adapter, where: str) -> Any:
    """Return a copy of the model with an adapter in its layers; weights are shared.

    Args:
        where: Names of the adapter and of the model, for the error.
    """
    import torch

    from swarm.engine.lora import LoraLayers

    shared = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    basis = {}
    for module in adapter.shapes:
        down, up = adapter.load_factors(module)
        basis[module] = (down.float(), up.float(), torch.zeros(len(down), dtype=torch.long))
    LoraLayers(twin, basis, where).set_positions(torch.ones(1, 1))
    return twin


@contextmanager
def name_pool_models_key() -> Iterator[None]:
    """Replace the base model's key in errors by pool.models, which the member was set with."""
    try:
        yield
    except UserError as error:
        message = str(error.args[0]).replace("model.path=", "pool.models: ", 1)
        raise UserError(message, error.code) from None


def _portable_path(base: BaseModel) -> str:
    """Return a model's location valid from any folder: its hub id, or an absolute path."""
    path, folder = str(base.path), Path(base.resolve())
    hub = not files.find_path(path).is_dir() and folder == find_in_hub_cache(path)
    return path if hub else str(folder.absolute())


class TokenEnsembleEngine(HFEngine):
    """Answers with mixtures of a panel's next-token distributions (arXiv 2410.11163, figure 5).

    The next token's probabilities are sum_k w_k p_k, negative ones clipped to zero; greedy decoding
    takes the likeliest. Prompts use the first model's tokenizer and chat template, and a text ends
    where any of the models would end it.

    Args:
        max_tokens: See `swarm.engine.hf.HFEngine`; of a batch of one model.
    """

    embeds = differentiable = exchanges = False

    def __init__(self, max_tokens: int | None = None) -> None:
        # A mixed model runs all positions at once, as a stacked one does.
        super().__init__("stacked", max_tokens)

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """See `swarm.engine.base.Engine`."""
        panel = as_pool(pool, ModelEnsemble, "token")
        models, tokenizer, _ = collect_compatible(panel.load_members("meta"))
        self.context = min(context_length_of(model.config) for model in models)
        return tokenizer

    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """See `swarm.engine.base.Engine`; the panel's members define their own bases."""
        panel = as_pool(pool, ModelEnsemble, "token")
        models, tokenizer, width = collect_compatible(panel.load_members(device))
        ends = (end_token_ids(model.generation_config, tokenizer) for model in models)
        context = min(context_length_of(model.config) for model in models)
        mixed = EnsembleModel(models, width)
        self._hold_model(mixed, tokenizer, frozenset().union(*ends), context)
        self._count = len(models)
        self._set_mixer(mixed)

    def log_perplexities(self, prompts: Sequence[Any]) -> tuple[np.ndarray, int]:
        """Return each model's log perplexity of each prompt, [R, K], and the tokens read.

        It is the mean negative natural log probability of a prompt's tokens; turns are formatted
        with the chat template, without the beginning-of-text token.
        """
        texts = [
            prompt
            if isinstance(prompt, str)
            else apply_chat_template(self._tokenizer, prompt, tokenize=False).removeprefix(
                self._tokenizer.bos_token or ""
            )
            for prompt in prompts
        ]
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        requests = [[Request("", 0, (text,)) for text in places]] * self._count
        rows = self.generate(np.eye(self._count), requests)
        found = np.array(
            [[-one.logprobs[0] / max(1, one.choice_tokens[0]) for one in row] for row in rows]
        )
        tokens = sum(one.prompt_tokens + one.new_tokens for row in rows for one in row)
        return found.T[[places[text] for text in texts]], tokens


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
        copied.caches = [copy_cache(cache) for cache in self.caches]
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
        from swarm.engine.decode import can_share_prefix

        self._models, self._width, self.device = models, width, models[0].device
        # Prefixes are shared only if all models allow it: expose the most restrictive config.
        self.config = next((m.config for m in models if not can_share_prefix(m)), models[0].config)

    def set_positions(self, coefficients: "torch.Tensor", merge: bool = False) -> None:
        """See `swarm.engine.base.Mixer`."""
        self._positions = coefficients.float().to(self.device)

    def route_rows(self, particles: "torch.Tensor") -> None:
        """See `swarm.engine.base.Mixer`."""
        self._weights = self._positions[particles.to(self.device)]

    def forward(
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

    __call__ = forward

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
            if used[row]:
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
