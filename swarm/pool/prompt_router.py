"""A router of prompts: which of R sets of coefficients answers a prompt.

Questions of several kinds need several models: no single combination of nine adapters does what
each of them does. A router divides prompts by their words, without labels, so that each kind can
have separate coefficients while all share one base and one pool.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from swarm._util.files import short_digest
from swarm.errors import UserError

AUTO = "auto"
MAX_ROUTES = 16
"""Maximum number of routes."""

MIN_SILHOUETTE = 0.5
"""Mean silhouette from which `routes=auto` divides prompts.

Prompts of one kind stay below .4 (hellaswag, truthfulqa, reasoning-gym), mixtures of templates are
above .7 (benchmarks/notes/decisions.md).
"""

MIN_SHARE = 0.03
"""Smallest share of the prompts that contain a word that counts, and that form a route."""

LEAST_WORDS, LEAST_PROMPTS = 2, 2
"""Least number of prompts that contain a word that counts, and that form a route."""

WORD_PATTERN = re.compile(r"[^\W\d_]{2,}")

MAX_NAME = 24
"""Maximum number of letters of a route's name, which is that of a folder."""

NO_WORDS = "other"
"""Name of the route of prompts without any word that counts."""


@dataclass(frozen=True)
class PromptRouter:
    """Routes a prompt by the nearest of C centroids of word vectors.

    Attributes:
        words: The W words that count.
        weights: [W], log(D / number of the D prompts that contain the word).
        centroids: [C][W + 1], the mean unit vector of a cluster of prompts; the last number is the
            share of prompts without any of the words.
        names: The R routes' names, a characteristic word each.
        routes: [C], the route of each centroid; several may share one.
    """

    words: tuple[str, ...]
    weights: tuple[float, ...]
    centroids: tuple[tuple[float, ...], ...]
    names: tuple[str, ...]
    routes: tuple[int, ...]

    def assign(self, texts: Sequence[str]) -> np.ndarray:
        """Return the route of each of T prompts, [T]."""
        vectors = _embed_prompts(texts, self._columns, self._scale)
        return np.array(self.routes)[(vectors @ self._directions.T).argmax(axis=1)]

    def merge(self, owners: Sequence[int]) -> "PromptRouter":
        """Return the router in which some routes are one, by the name of the first of them.

        Args:
            owners: [R], the first route of each route's union; at least two differ.
        """
        kept = sorted(set(owners))
        routes = tuple(kept.index(owners[route]) for route in self.routes)
        return replace(self, names=tuple(self.names[one] for one in kept), routes=routes)

    def split(self, texts: Sequence[str]) -> dict[int, list[int]]:
        """Return the indices of the prompts on each route that has any, by route."""
        found: dict[int, list[int]] = {}
        for index, route in enumerate(self.assign(texts).tolist()):
            found.setdefault(route, []).append(index)
        return dict(sorted(found.items()))

    @cached_property
    def _columns(self) -> dict[str, int]:
        return {word: column for column, word in enumerate(self.words)}

    @cached_property
    def _scale(self) -> np.ndarray:
        return np.array(self.weights)

    @cached_property
    def _directions(self) -> np.ndarray:
        return _normalize_rows(np.array(self.centroids))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; see `read_router`."""
        return {
            "names": list(self.names),
            "words": list(self.words),
            "weights": list(self.weights),
            "centroids": [list(row) for row in self.centroids],
            "routes": list(self.routes),
        }

    def digest(self) -> str:
        """Return 16 hexadecimal digits that change with the router."""
        return short_digest(self.to_dict())


def read_router(values: Mapping[str, Any]) -> PromptRouter:
    """Return the router of `PromptRouter.to_dict`.

    Raises:
        UserError: The values are not those of a router.
    """
    try:
        router = PromptRouter(
            tuple(map(str, values["words"])),
            tuple(map(float, values["weights"])),
            tuple(tuple(map(float, row)) for row in values["centroids"]),
            tuple(map(str, values["names"])),
            tuple(map(int, values["routes"])),
        )
        width = len(router.words) + 1
        fits = len(router.weights) == width - 1 and len(router.names) > 1
        fits = fits and len(router.routes) == len(router.centroids)
        fits = fits and set(router.routes) == set(range(len(router.names)))
        safe = all(re.fullmatch(r"\w{1,40}", name) for name in router.names)
        safe = safe and len(set(router.names)) == len(router.names)
        safe = safe and bool(np.isfinite([*router.weights, *sum(router.centroids, ())]).all())
        if not fits or not safe or any(len(row) != width for row in router.centroids):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise UserError("pool.routes: not a router as a search writes it; use auto or 1") from None
    return router


def fit_router(texts: Sequence[str], routes: int | str = AUTO) -> PromptRouter | None:
    """Divide prompts into routes by average linkage of their word vectors.

    Words in too few or in all prompts do not count, nor do numbers and single letters: templates
    decide more than contents, but frequent words of the content, such as months, decide as well.

    Args:
        texts: Prompts, without labels.
        routes: Number of routes; "auto" is the number with the highest mean silhouette (Rousseeuw,
            1987), or 1 if that is below `MIN_SILHOUETTE`.

    Returns:
        The router; `None` for a single route.

    Raises:
        UserError: The prompts cannot be divided into so many routes.
    """
    if routes == 1:
        return None
    vectors, words, weights = _fit_words(texts)
    found = _divide(vectors, routes) if len(np.unique(vectors, axis=0)) > 1 else None
    if found is None and routes != AUTO:
        raise UserError(
            f"pool.routes={routes}: the words of {len(texts)} dev prompts do not divide them into "
            f"{routes} kinds of {_least_prompts(len(texts))} or more; use fewer, or auto"
        )
    if found is None:
        return None
    centroids = np.array([vectors[found == route].mean(axis=0) for route in range(found.max() + 1)])
    rows = tuple(tuple(round(float(value), 4) for value in row) for row in centroids)
    rounded = tuple(round(weight, 4) for weight in weights)
    names = _name_routes(centroids, words)
    return PromptRouter(tuple(words), rounded, rows, names, tuple(range(len(names))))


def _fit_words(texts: Sequence[str]) -> tuple[np.ndarray, list[str], list[float]]:
    """Return unit vectors [D, W + 1] of D prompts, their words and the words' weights."""
    counts = Counter(word for text in texts for word in _words_of(text))
    least = max(LEAST_WORDS, round(MIN_SHARE * len(texts)))
    words = sorted(word for word, count in counts.items() if least <= count < len(texts))
    weights = [float(np.log(len(texts) / counts[word])) for word in words]
    columns = {word: column for column, word in enumerate(words)}
    return _embed_prompts(texts, columns, np.array(weights)), words, weights


def _words_of(text: str) -> set[str]:
    return set(WORD_PATTERN.findall(text.lower()))


def _embed_prompts(
    texts: Sequence[str], columns: Mapping[str, int], weights: np.ndarray
) -> np.ndarray:
    """Return unit vectors [T, W + 1]; the last number is 1 where no word counts."""
    vectors = np.zeros((len(texts), len(columns) + 1))
    for row, text in enumerate(texts):
        known = [columns[word] for word in _words_of(text) if word in columns]
        vectors[row, known] = weights[known] if known else 0.0
        vectors[row, -1] = not known
    return _normalize_rows(vectors)


def _normalize_rows(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    found: np.ndarray = vectors / np.where(lengths == 0, 1.0, lengths)
    return found


def _least_prompts(count: int) -> int:
    return max(LEAST_PROMPTS, round(MIN_SHARE * count))


def _divide(vectors: np.ndarray, routes: int | str) -> np.ndarray | None:
    """Return the route of each prompt, [D]; `None` if there is no such division."""
    from scipy.cluster.hierarchy import fcluster, linkage

    tree = linkage(vectors, "average", metric="cosine")
    distances = 1 - vectors @ vectors.T
    best: tuple[float, np.ndarray] | None = None
    # Small clusters join others, so a finer cut of the tree may have as many routes as asked for.
    for count in range(2, min(2 * MAX_ROUTES, len(vectors)) + 1):
        found = _merge_small(vectors, fcluster(tree, count, "maxclust"))
        number = int(found.max()) + 1
        if number == 1 or number > MAX_ROUTES or routes not in (AUTO, number):
            continue
        quality = _silhouette(distances, found)
        if best is None or quality > best[0]:
            best = quality, found
    if best is None or (routes == AUTO and best[0] < MIN_SILHOUETTE):
        return None
    return best[1]


def _merge_small(vectors: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Join clusters with too few prompts to the nearest one; return labels from 0, [D]."""
    labels = labels.copy()
    while True:
        kinds, counts = np.unique(labels, return_counts=True)
        if len(kinds) == 1 or counts.min() >= _least_prompts(len(labels)):
            return np.unique(labels, return_inverse=True)[1]
        small = int(counts.argmin())
        means = _normalize_rows(np.array([vectors[labels == kind].mean(axis=0) for kind in kinds]))
        likeness = means @ means[small]
        likeness[small] = -np.inf
        labels[labels == kinds[small]] = kinds[int(likeness.argmax())]


def _silhouette(distances: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean of (b - a) / max(a, b) over prompts.

    a is the mean distance to the others of the same route, b that to the nearest other route.
    """
    members = np.eye(int(labels.max()) + 1)[labels]
    sums, counts = distances @ members, members.sum(axis=0)
    row = np.arange(len(labels))
    own = sums[row, labels] / np.maximum(counts[labels] - 1, 1)
    means = sums / counts
    means[row, labels] = np.inf
    other = means.min(axis=1)
    largest = np.maximum(own, other)
    return float(np.mean((other - own) / np.where(largest == 0, 1.0, largest)))


def _name_routes(centroids: np.ndarray, words: Sequence[str]) -> tuple[str, ...]:
    """Return a characteristic word of each route, with a number where it is not unique.

    The longest of three: the shortest are mostly function words.
    """
    columns = [*words, NO_WORDS]
    others = (centroids.sum(axis=0) - centroids) / max(1, len(centroids) - 1)
    found: list[str] = []
    for row, rest in zip(centroids, others, strict=True):
        best = [columns[i] for i in np.argsort(rest - row, kind="stable")[:3] if row[i] > rest[i]]
        word = best[0] if best[0] == NO_WORDS else max(best, key=len)
        word = word[:MAX_NAME]
        same = sum(name.partition("_")[0] == word for name in found)
        found.append(f"{word}_{same + 1}" if same else word)
    return tuple(found)
