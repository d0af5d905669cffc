"""The engine on one resident model, whose weights are rewritten for every position."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.engine.base import Mixer
from swarm.engine.base_model import BaseModel
from swarm.engine.full.checkpoint import check_settings
from swarm.engine.full.pool import FullModelPool
from swarm.engine.hf import HFEngine
from swarm.engine.tokenization import context_length_of
from swarm.errors import UserError
from swarm.pool.pool import ExpertPool

if TYPE_CHECKING:
    from torch import Tensor


class FullWeightsEngine(HFEngine):
    """Answers with mixtures of full models' weights, one position after the other.

    Its memory is that of one model, independent of the number of experts.

    Args:
        max_tokens: See `swarm.engine.hf.HFEngine`.
    """

    routes = differentiable = fixed_weights = False

    def __init__(self, max_tokens: int | None = None) -> None:
        super().__init__("merged", max_tokens)

    def check(self, base: BaseModel, pool: ExpertPool) -> Any:
        """See `swarm.engine.base.Engine`."""
        models = as_full_model_pool(pool)
        folders = [models.checkpoints[0].folder, Path(base.resolve())]
        check_settings(folders, base.trust_remote_code)
        model, tokenizer = base.load_without_weights()
        ResidentModel(model, models)
        self.context = context_length_of(model)
        return tokenizer

    def open(self, base: BaseModel, pool: ExpertPool, device: str) -> None:
        """See `swarm.engine.base.Engine`."""
        models = as_full_model_pool(pool)
        self.load_base(base, device)
        self._set_mixer(ResidentModel(self._model, models))


class ResidentModel(Mixer):
    """A model in memory that is set to one position after the other.

    Args:
        model: Its weights are overwritten; tied weights once.
        pool: The models to mix.

    Raises:
        UserError: The model has a weight that the pool's models lack, or of another shape.
    """

    def __init__(self, model: Any, pool: FullModelPool) -> None:
        self._pool = pool
        self._weights = named_weights(model, pool)
        self._held: list[float] | None = None

    def set_positions(self, coefficients: "Tensor", merge: bool = False) -> None:
        """Set the position in [1, K], unless it is already set."""
        import torch

        vector = coefficients[0].tolist()
        if vector == self._held:
            return
        # If this is interrupted, the weights are a mixture of two positions.
        self._held = None
        with torch.no_grad():
            for weight, name in self._weights:
                self._pool.fill_tensor(weight, name, vector)
        self._held = vector


def named_weights(model: Any, pool: FullModelPool) -> list[tuple["Tensor", str]]:
    """Return each weight of a model with its tensor's name in the pool; tied ones count once.

    Raises:
        UserError: There is none, or it does not fit.
    """
    known: dict[int, tuple[Any, list[str]]] = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        known.setdefault(id(weight), (weight, []))[1].append(name)
    found = []
    for weight, names in known.values():
        if stored := _find_stored_tensor(weight, names, pool):
            found.append((weight, stored))
    return found


def _find_stored_tensor(weight: Any, names: Sequence[str], pool: FullModelPool) -> str | None:
    """Return the pool's tensor for a weight's names; `None` for a buffer that files leave out."""
    from torch.nn import Parameter

    folder = pool.checkpoints[0].folder
    mine = [name for name in names if name in pool.tensors]
    if not mine:
        if not isinstance(weight, Parameter):
            return None
        raise UserError(
            f"pool.models: {folder} has no tensor {names[0]}, which the loaded model has; "
            "models whose tensors differ between memory and file cannot be mixed"
        )
    if (shape := pool.tensors[mine[0]]) != tuple(weight.shape):
        raise UserError(
            f"pool.models: {mine[0]} has shape {list(shape)} in {folder} and {list(weight.shape)} "
            f"in the base ({pool.base.path})"
        )
    for other in mine[1:]:
        if not pool.are_tensors_equal(mine[0], other):
            raise UserError(
                f"pool.models: {mine[0]} and {other} differ in the files but are tied by "
                "config.json; set tie_word_embeddings to false there"
            )
    return mine[0]


def as_full_model_pool(pool: ExpertPool) -> FullModelPool:
    """Return the pool as a `FullModelPool`.

    Raises:
        UserError: It is of another kind.
    """
    if isinstance(pool, FullModelPool):
        return pool
    raise UserError(
        "engine=full mixes the weights of complete models and needs pool=full_models; for "
        "adapters use engine=hf"
    )
