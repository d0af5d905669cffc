"""K models of one vocabulary as one model, which returns each particle's mixture of their outputs.

It is called as transformers' models are, so that all code for those works on it. As a model's
output for a text is the same for every particle, each model reads a text once: prompts, and the
answers for as long as they agree.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from swarm.engine.decode import can_share_prefix, copy_cache

MIN_PROBABILITY = torch.finfo(torch.float32).tiny
"""Lower bound of a token's probability in a mixture; negative ones are raised to it too."""


class EnsembleOutput(NamedTuple):
    """Output of a mixed model, with transformers' names."""

    logits: torch.Tensor
    past_key_values: Any


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

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self.indices = [[index for index in row for _ in range(repeats)] for row in self.indices]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Select these rows of the batch; the models' own caches are reduced at the next call."""
        chosen = indices.tolist()
        self.indices = [[row[i] for i in chosen] for row in self.indices]

    def __copy__(self) -> "EnsembleCache":
        copied = EnsembleCache(0, 0)
        copied.caches = [None if cache is None else copy_cache(cache) for cache in self.caches]
        copied.indices, copied.sizes = [*self.indices], [*self.sizes]
        return copied


class EnsembleModel:
    """K causal language models; particle p's next token has the probabilities sum_k w[p, k] p_k.

    A negative probability, which negative weights can lead to, counts as zero. The logits are the
    natural logs of the probabilities (their softmax renormalizes them); for a particle that is a
    single model, they are the model's own.

    Args:
        models: Models of transformers, on one device.
        width: The size of the vocabulary; further columns of a model are padding.
    """

    def __init__(self, models: Sequence[Any], width: int) -> None:
        self._models = models
        self._width = width
        self._weights = torch.eye(1, len(models), dtype=torch.float64).tolist()
        # Prefix sharing is possible only if all models allow it: expose the most restrictive
        # config.
        self.config = next((m.config for m in models if not can_share_prefix(m)), models[0].config)

    @property
    def device(self) -> Any:
        """The models' device."""
        return self._models[0].device

    def set_positions(self, coefficients: torch.Tensor, merge: bool = False) -> None:
        """Set P positions, [P, K]; the next calls have R = P * b rows, particle by particle."""
        self._weights = coefficients.tolist()

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: EnsembleCache | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
    ) -> EnsembleOutput:
        """Read [R, t] more tokens; logits [R, w, vocabulary] of the last w positions, 0 for all."""
        rows, length = input_ids.shape
        cache = (
            EnsembleCache(len(self._models), rows) if past_key_values is None else past_key_values
        )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        given = {"input_ids": input_ids, "attention_mask": mask, "position_ids": position_ids}
        fresh = [tuple(row) for row in torch.cat([input_ids, mask[:, -length:]], dim=1).tolist()]
        logits: list[Any] = []
        for number, model in enumerate(self._models):
            chosen = self._share_rows(cache, number, fresh)
            if not chosen:
                logits.append(None)
                continue
            out = model(
                **{name: value[chosen] for name, value in given.items() if value is not None},
                past_key_values=cache.caches[number],
                use_cache=use_cache,
                logits_to_keep=logits_to_keep,
            )
            cache.caches[number] = out.past_key_values
            logits.append(out.logits[..., : self._width].float())
        return EnsembleOutput(self._mix_logits(logits, cache.indices), cache)

    def _models_of_particle(self, particle: int) -> list[int]:
        """Return the models with a nonzero weight in a particle; the first if there is none."""
        return [k for k, weight in enumerate(self._weights[particle]) if weight] or [0]

    def _share_rows(
        self, cache: EnsembleCache, number: int, fresh: Sequence[tuple[int, ...]]
    ) -> list[int]:
        """Return one row of the batch for each text that a model has to read, and adapt its cache.

        Args:
            fresh: The new tokens and mask of each row: rows with the same cache index and the same
                new tokens are the same text.
        """
        size = len(fresh) // len(self._weights)
        needed = [number in self._models_of_particle(p) for p in range(len(self._weights))]
        before, after = cache.indices[number], [-1] * len(fresh)
        chosen: list[int] = []
        known: dict[tuple[int, ...], int] = {}
        for row, tokens in enumerate(fresh):
            if not needed[row // size]:
                continue
            text = (before[row], *tokens)
            if text not in known:
                known[text] = len(chosen)
                chosen.append(row)
            after[row] = known[text]
        parents = [before[row] for row in chosen]
        if cache.caches[number] is not None and parents != list(range(cache.sizes[number])):
            cache.caches[number].batch_select_indices(torch.tensor(parents, device=self.device))
        cache.indices[number], cache.sizes[number] = after, len(chosen)
        return chosen

    def _mix_logits(
        self, logits: Sequence[torch.Tensor], row_indices: Sequence[list[int]]
    ) -> torch.Tensor:
        """Return each particle's logits, [R, w, vocabulary], mixed from the models' logits."""
        size = len(row_indices[0]) // len(self._weights)
        shares: dict[int, torch.Tensor] = {}
        mixed = []
        for particle, weights in enumerate(self._weights):
            uses = self._models_of_particle(particle)
            members = [row_indices[k][particle * size : (particle + 1) * size] for k in uses]
            if len(uses) == 1 and weights[uses[0]] > 0:
                mixed.append(logits[uses[0]][members[0]])
                continue
            total = torch.zeros(())
            for k, rows in zip(uses, members, strict=True):
                if k not in shares:
                    shares[k] = logits[k].softmax(-1)
                total = weights[k] * shares[k][rows] + total
            mixed.append(total.clamp(min=MIN_PROBABILITY).log())
        return torch.cat(mixed)
