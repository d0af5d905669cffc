"""How alike prompts are: the cosine of their words, each weighed by how rare it is (tf-idf)."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from swarm.models import Request

WORD_PATTERN = re.compile(r"\w+")


class TfidfSimilarity:
    """D texts that others are compared with.

    A word that all of them have tells nothing and is left out, so that what a task says in every
    prompt does not count. A word's weight is its count times log(D / texts that have it).
    """

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [_count_words(text) for text in texts]
        having = Counter(word for count in counts for word in count)
        rare = {word: np.log(len(texts) / n) for word, n in having.items() if n < len(texts)}
        self._places = {word: place for place, word in enumerate(rare)}
        self._rarity = np.array([*rare.values()], dtype=np.float32)
        self._vectors = self._embed_counts(counts)

    def cosine_with(self, texts: Sequence[str]) -> np.ndarray:
        """The cosines of R texts with the D, [R, D], from 0 to 1."""
        cosines: np.ndarray = self._embed_counts([_count_words(text) for text in texts]) @ self._vectors.T
        return cosines.astype(np.float64)

    def _embed_counts(self, counts: Sequence[Counter[str]]) -> np.ndarray:
        """Unit vectors, or zero where no word is known."""
        vectors = np.zeros((len(counts), len(self._places)), dtype=np.float32)
        for row, count in enumerate(counts):
            for word, n in count.items():
                if word in self._places:
                    vectors[row, self._places[word]] = n
        vectors *= self._rarity
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        scaled: np.ndarray = vectors / np.where(lengths == 0, 1, lengths)
        return scaled


def prompt_text(request: Request) -> str:
    """A request's prompt without the roles of its turns."""
    if isinstance(request.prompt, str):
        return request.prompt
    return "\n".join(turn.content for turn in request.prompt)


def _count_words(text: str) -> Counter[str]:
    return Counter(WORD_PATTERN.findall(text.lower()))
