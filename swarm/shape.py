"""The shape of a decoder, read from its configuration alone: how many weights, and where."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import UserError

# A decoder of these kinds has four attention and three feed-forward matrices a layer.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "smollm3")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a decoder of the Llama, Qwen or Gemma kind; sizes in numbers of weights."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool

    @property
    def layer_shapes(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one decoder layer, (in, out) each."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, key),
            "v_proj": (self.hidden, key),
            "o_proj": (query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def linear_weights(self) -> int:
        """Weights of all linear layers but the head."""
        return self.adapted_weights(tuple(self.layer_shapes))

    @property
    def head_weights(self) -> int:
        """Weights of the output layer, as many as of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def parameter_count(self) -> int:
        """All weights but biases and norms, which are below 0.1 % of a real model."""
        return self.linear_weights + self.head_weights * (1 if self.tied else 2)

    @property
    def kv_cache_width(self) -> int:
        """Numbers in the key-value cache a token; sliding windows, which save some, left aside."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def adapted_weights(self, targets: Sequence[str]) -> int:
        """Weights of the linear layers of these names."""
        return self.layers * sum(i * o for i, o in self._target_shapes(targets))

    def adapter_weights(self, rank: int, targets: Sequence[str]) -> int:
        """D, the weights of a LoRA adapter: rank x (in + out) a layer (arXiv 2106.09685)."""
        return self.layers * sum(rank * (i + o) for i, o in self._target_shapes(targets))

    def _target_shapes(self, targets: Sequence[str]) -> list[tuple[int, int]]:
        if unknown := sorted(set(targets) - set(self.layer_shapes)):
            raise UserError(f"{unknown[0]} is no linear layer; allowed: {', '.join(self.layer_shapes)}")
        return [self.layer_shapes[name] for name in targets]


def read_model_shape(config: str | Path | Mapping[str, Any]) -> ModelShape:
    """The shape that a transformers config.json, its folder, or its content describes.

    Raises:
        UserError: No such file, another kind of model, or a size is missing.
    """
    where = "the configuration"
    if not isinstance(config, Mapping):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        where = str(path)
        try:
            config = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UserError(f"{where} cannot be read as JSON: {error}") from None
    sizes: Mapping[str, Any] = config.get("text_config", config)
    if (kind := sizes.get("model_type")) not in MODEL_TYPES:
        raise UserError(
            f"{where}: the cost of a model of the type {kind} is unknown; it is known of "
            f"{', '.join(MODEL_TYPES)}"
        )
    try:
        return _shape_from_config(sizes)
    except KeyError as error:
        raise UserError(f"{where} has no {error.args[0]}") from None


def _shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    # Gemma and SmolLM3 are tied without saying so.
    silent = config["model_type"].startswith(("gemma", "smollm3"))
    return ModelShape(
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", silent)),
    )
