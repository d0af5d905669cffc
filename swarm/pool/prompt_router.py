"""A router of prompts: which of R sets of coefficients answers a prompt.

Questions of several kinds need several models: no single combination of nine adapters does what
each of them does. A router divides prompts by their words, without labels, so that each kind can
have separate coefficients while all share one base and one pool.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import Field, FiniteFloat, StringConstraints, TypeAdapter, ValidationError

from swarm._util.files import short_digest
from swarm._util.settings import Count
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

LEAST_PROMPTS = 2
"""Least number of prompts that contain a word that counts, and that form a route."""

WORD_PATTERN = re.compile(r"[^\W\d_]{2,}")

MAX_NAME = 24
"""Maximum number of letters of a route's name, which is that of a folder."""

NO_WORDS = "other"
"""Name of the route of prompts without any word that counts."""

RouteName = Annotated[str, StringConstraints(pattern=r"^\w{1,40}$")]


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

    words: list[str]
    weights: list[FiniteFloat]
    centroids: list[list[FiniteFloat]]
    names: Annotated[list[RouteName], Field(min_length=2)]
    routes: list[Count]

    def assign(self, texts: Sequence[str]) -> np.ndarray:
        """Return the route of each of T prompts, [T]."""
        vectors = _embed_prompts(texts, self.words, self.weights)
        return np.array(self.routes)[(vectors @ self._directions.T).argmax(axis=1)]

    def merge(self, owners: Sequence[int]) -> "PromptRouter":
        """Return the router in which some routes are one, by the name of the first of them.

        Args:
            owners: [R], the first route of each route's union; at least two differ.
        """
        kept = sorted(set(owners))
        routes = [kept.index(owners[route]) for route in self.routes]
        return replace(self, names=[self.names[one] for one in kept], routes=routes)

    def split(self, texts: Sequence[str]) -> dict[int, list[int]]:
        """Return the indices of the prompts on each route that has any, by route."""
        assigned = self.assign(texts)
        return {int(r): np.flatnonzero(assigned == r).tolist() for r in np.unique(assigned)}

    @cached_property
    def _directions(self) -> np.ndarray:
        return _normalize_rows(np.array(self.centroids))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; see `read_router`."""
        return asdict(self)

    def digest(self) -> str:
        """Return 16 hexadecimal digits that change with the router."""
        return short_digest(self.to_dict())


def read_router(values: Mapping[str, Any]) -> PromptRouter:
    """Return the router of `PromptRouter.to_dict`.

    Raises:
        UserError: The values are not those of a router.
    """
    try:
        router = TypeAdapter(PromptRouter).validate_python(values)
    except ValidationError:
        router = None
    if router:
        width, count = len(router.words) + 1, len(router.names)
        fits = len(router.weights) == width - 1 and len(router.routes) == len(router.centroids)
        fits = fits and all(len(row) == width for row in router.centroids)
        if fits and len({*router.names}) == count and {*router.routes} == {*range(count)}:
            return router
    raise UserError("pool.routes: not a router as a search writes it; use auto or 1")


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
    counts = Counter(word for text in texts for word in _words_of(text))
    least = _least_prompts(len(texts))
    words = sorted(word for word, count in counts.items() if least <= count < len(texts))
    weights = [float(np.log(len(texts) / counts[word])) for word in words]
    vectors = _embed_prompts(texts, words, weights)
    found = _divide(vectors, routes) if len(np.unique(vectors, axis=0)) > 1 else None
    if found is None and routes != AUTO:
        raise UserError(
            f"pool.routes={routes}: the words of {len(texts)} dev prompts do not divide them into "
            f"{routes} kinds of {least} or more; use fewer, or auto"
        )
    if found is None:
        return None
    centroids = _cluster_means(vectors, found)
    rows = [[round(value, 4) for value in row] for row in centroids.tolist()]
    names = _name_routes(centroids, words)
    rounded = [round(weight, 4) for weight in weights]
    return PromptRouter(words, rounded, rows, names, list(range(len(names))))


def _words_of(text: str) -> set[str]:
    return set(WORD_PATTERN.findall(text.lower()))


def _least_prompts(count: int) -> int:
    return max(LEAST_PROMPTS, round(MIN_SHARE * count))


def _embed_prompts(
    texts: Sequence[str], words: Sequence[str], weights: Sequence[float]
) -> np.ndarray:
    """Return unit vectors [T, W + 1]; the last number is 1 where no word counts."""
    columns = {word: column for column, word in enumerate(words)}
    vectors, scale = np.zeros((len(texts), len(words) + 1)), np.array(weights)
    for row, text in enumerate(texts):
        known = [columns[word] for word in _words_of(text) if word in columns]
        vectors[row, known] = scale[known] if known else 0.0
        vectors[row, -1] = not known
    return _normalize_rows(vectors)


def _normalize_rows(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths == 0, 1.0, lengths))


def _cluster_means(vectors: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.array([vectors[labels == one].mean(axis=0) for one in np.unique(labels)])


def _divide(vectors: np.ndarray, routes: int | str) -> np.ndarray | None:
    """Return the route of each prompt, [D]; `None` if there is no such division."""
    from scipy.cluster.hierarchy import fcluster, linkage

    tree = linkage(vectors, "average", metric="cosine")
    distances = 1 - vectors @ vectors.T
    candidates: list[tuple[float, np.ndarray]] = []
    # Small clusters join others, so a finer cut of the tree may have as many routes as asked for.
    for count in range(2, min(2 * MAX_ROUTES, len(vectors)) + 1):
        found = _merge_small(vectors, fcluster(tree, count, "maxclust"))
        number = int(found.max()) + 1
        if 1 < number <= MAX_ROUTES and routes in (AUTO, number):
            candidates.append((_silhouette(distances, found), found))
    if not candidates:
        return None
    quality, chosen = max(candidates, key=lambda one: one[0])
    return None if routes == AUTO and quality < MIN_SILHOUETTE else chosen


def _merge_small(vectors: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Join clusters with too few prompts to the nearest one; return labels from 0, [D]."""
    labels = labels.copy()
    while True:
        kinds, counts = np.unique(labels, return_counts=True)
        if len(kinds) == 1 or counts.min() >= _least_prompts(len(labels)):
            return np.unique(labels, return_inverse=True)[1]
        small = int(counts.argmin())
        means = _normalize_rows(_cluster_means(vectors, labels))
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


def _name_routes(centroids: np.ndarray, words: Sequence[str]) -> list[str]:
    """Return a characteristic word of each route, with a number where it is not unique.

    The longest of three: the shortest are mostly function words.
    """
    columns = [*words, NO_WORDS]
    others = (centroids.sum(axis=0) - centroids) / max(1, len(centroids) - 1)
    found: list[str] = []
    for row, rest in zip(centroids, others, strict=True):
        best = [columns[i] for i in np.argsort(rest - row, kind="stable")[:3] if row[i] > rest[i]]
        word = (best[0] if best[0] == NO_WORDS else max(best, key=len))[:MAX_NAME]
        same = sum(name.partition("_")[0] == word for name in found)
        found.append(f"{word}_{same + 1}" if same else word)
    return found
