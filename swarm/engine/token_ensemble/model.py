"""K models of one vocabulary as one model, which says each particle's own mixture of what they say.

It is called as transformers' models are, so all that reads and writes with those works on it. As
what a model says of a text does not depend on who asks, each model reads a text once, for however
many particles: prompts, and the answers for as long as they agree.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from swarm.engine.decode import can_share_prefix

MIN_PROBABILITY = torch.finfo(torch.float32).tiny
"""The least that a token's share of a mixture counts as; a negative share counts as this too."""


class EnsembleOutput(NamedTuple):
    """What a mixed model answers a call with, under transformers' names."""

    logits: torch.Tensor
    past_key_values: Any


class EnsembleCache:
    """The K models' caches, and which of its rows stands for each of the batch's.

    Attributes:
        caches: A model's own cache; `None` where it has read nothing.
        places: For each model the place in its cache of each row of the batch; -1 of a row whose
            particle has no use for the model.
        sizes: How many rows a model's own cache has.
    """

    def __init__(self, models: int, rows: int) -> None:
        self.caches: list[Any] = [None] * models
        self.places: list[list[int]] = [[-1] * rows for _ in range(models)]
        self.sizes = [0] * models

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let so many rows stand where one was."""
        self.places = [[place for place in row for _ in range(repeats)] for row in self.places]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with these rows of the batch; the models' own are chosen when they read on."""
        chosen = indices.tolist()
        self.places = [[row[i] for i in chosen] for row in self.places]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, so many as transformers' negative number says."""
        for cache in self.caches:
            if cache is not None:
                cache.crop(tokens_to_remove)


class EnsembleModel:
    """K causal language models; particle p's next token has the chances sum_k w[p, k] p_k.

    A share below zero, which negative weights can lead to, counts as none. The logits are the
    natural logs of the shares (their softmax renormalises them); of a particle that is one model
    alone, they are the model's own.

    Args:
        models: Of transformers, on one device.
        width: The size of the vocabulary; what a model has beyond it is padding.
    """

    def __init__(self, models: Sequence[Any], width: int) -> None:
        self._models = models
        self._width = width
        self._weights = torch.eye(1, len(models), dtype=torch.float64).tolist()
        # Reading may take a short cut only if all models allow it: the strictest speaks for all.
        self.config = next((m.config for m in models if not can_share_prefix(m)), models[0].config)

    @property
    def device(self) -> Any:
        """Where the models are."""
        return self._models[0].device

    def set_positions(self, coefficients: torch.Tensor, merge: bool = False) -> None:
        """Become P positions, [P, K]; the next calls have R = P * b rows, particle by particle."""
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
        """Read [R, t] tokens on; logits [R, w, vocabulary] of the last w positions, 0 for all."""
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
        return EnsembleOutput(self._mix_logits(logits, cache.places), cache)

    def _models_of_particle(self, particle: int) -> list[int]:
        """The models that a particle is made of; the first, unheard, for one made of none."""
        return [k for k, weight in enumerate(self._weights[particle]) if weight] or [0]

    def _share_rows(
        self, cache: EnsembleCache, number: int, fresh: Sequence[tuple[int, ...]]
    ) -> list[int]:
        """One row of the batch for each text that a model has to read on, its cache made to fit.

        Args:
            fresh: What is new in each row: rows that stood in one place, and have the same new
                tokens, are the same text.
        """
        size = len(fresh) // len(self._weights)
        needed = [number in self._models_of_particle(p) for p in range(len(self._weights))]
        before, after = cache.places[number], [-1] * len(fresh)
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
        cache.places[number], cache.sizes[number] = after, len(chosen)
        return chosen

    def _mix_logits(
        self, logits: Sequence[torch.Tensor], places: Sequence[list[int]]
    ) -> torch.Tensor:
        """Each particle's logits, [R, w, vocabulary], from those of the texts the models read."""
        size = len(places[0]) // len(self._weights)
        shares: dict[int, torch.Tensor] = {}
        mixed = []
        for particle, weights in enumerate(self._weights):
            uses = self._models_of_particle(particle)
            own = [places[k][particle * size : (particle + 1) * size] for k in uses]
            if len(uses) == 1 and weights[uses[0]] > 0:
                mixed.append(logits[uses[0]][own[0]])
                continue
            total = torch.zeros(())
            for k, rows in zip(uses, own, strict=True):
                if k not in shares:
                    shares[k] = logits[k].softmax(-1)
                total = weights[k] * shares[k][rows] + total
            mixed.append(total.clamp(min=MIN_PROBABILITY).log())
        return torch.cat(mixed)
