"""A small text classifier: logistic regression on words, and on their pairs with a prompt's."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from zlib import crc32

import numpy as np

from swarm._util.files import find_path, hash_file_cached
from swarm._util.settings import Text, checked
from swarm.errors import UserError
from swarm.tasks.base import Item, Score
from swarm.tasks.free_text import Scorer

WORD = re.compile(r"[\w'-]+")


def hash_features(prompt: str, text: str, size: int) -> Iterator[int]:
    """Yield the indices below `size` of the bias, the text's different words, and their pairs with
    each different word of the prompt."""
    yield 0
    asked = sorted({*WORD.findall(prompt.lower()), ""})
    for word in sorted({*WORD.findall(text.lower())}):
        for other in asked:
            yield 1 + crc32(f"{other} {word}".encode("utf-8", "replace")) % (size - 1)


@checked("task.scorer")
@dataclass(eq=False)
class WordPairClassifier(Scorer):
    """Scores texts by the probability of a logistic regression on hashed words and pairs of words.

    Args:
        weights: A safetensors file with "weights" [features]; scripts/make_scored_tasks.py trains
            one. The first is the bias.
        question: The field of an item with the prompt.
    """

    weights: Text
    question: Text = "prompt"

    highest = 1.0
    needs_setup = True

    @cached_property
    def _weights(self) -> Any:
        from safetensors.numpy import load_file

        try:
            return load_file(find_path(self.weights))["weights"].astype(np.float64)
        except (OSError, KeyError, ValueError) as error:
            raise UserError(
                f"task.scorer.weights={self.weights}: cannot be read: {error}"
            ) from None

    def check(self) -> None:
        self.source_digests()
        len(self._weights)

    def source_digests(self) -> Mapping[str, str]:
        """See `Setup.source_digests`: the weights, by content."""
        if not (path := find_path(self.weights)).is_file():
            raise UserError(f"task.scorer.weights={self.weights}: no such file")
        return {"scorer.weights": hash_file_cached(path)[:16]}

    def score(self, items: Sequence[Item], texts: Sequence[str]) -> list[Score]:
        scores = []
        for item, text in zip(items, texts, strict=True):
            features = list(hash_features(item[self.question], text, len(self._weights)))
            logit = float(self._weights[features].sum())
            value = 1 / (1 + np.exp(-np.clip(logit, -50, 50)))
            scores.append(Score(float(value), text if text.strip() else None, text))
        return scores
