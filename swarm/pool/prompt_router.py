"""A router of prompts: which of R sets of coefficients answers a prompt.

Questions of several kinds need several models: no single combination of nine adapters does what
each of them does. A router divides prompts by the base model's hidden states, where that pays
(`choose_kinds`), so that each kind can have separate coefficients while all share one base and one
pool. Task-level routing as in c-BTM (arXiv 2303.14177) and LORAUTER (arXiv 2601.21795), with
clusters chosen by the cross-validated utility of given experts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, FiniteFloat, StringConstraints, TypeAdapter, ValidationError

from swarm._util.files import short_digest
from swarm._util.settings import Count, Positive
from swarm.errors import UserError

AUTO = "auto"
MAX_ROUTES = 16
"""Maximum number of routes."""

MAX_CLUSTERS = 12
"""Maximum number of clusters that `routes=auto` tries."""

MIN_PROMPTS = 3
"""Least number of dev prompts of a kind; smaller clusters join the nearest one."""

MIN_ITEMS = 10
"""Least number of dev items from which `routes=auto` considers kinds."""

FOLDS = 5
"""Folds of the cross-validation by which a division is chosen."""

FOLD_SEED = 17

PRIOR_ITEMS = 1.0
"""Weight of an expert's mean over all prompts in its mean over those of a kind, in items."""

LLOYD_STEPS = 20

MAX_NAME = 32
"""Maximum number of letters of a route's name, which is that of a folder."""

RouteName = Annotated[str, StringConstraints(pattern=r"^\w{1,40}$")]

States = Mapping[int, np.ndarray]
"""Mean hidden states [T, D] of T prompts after some layers of the base, by number of layers."""


@dataclass(frozen=True)
class PromptRouter:
    """Routes a prompt by the nearest of C centroids of the base's mean hidden states.

    Attributes:
        layer: Number of layers of the base: index of transformers' `hidden_states`, whose mean over
            a prompt's tokens is its vector.
        mean: [D], subtracted from a vector.
        centroids: [C][D], unit vectors.
        names: The R routes' names, a piece of a prompt each.
        examples: [R], the most central prompt of each route.
        routes: [C], the route of each centroid; several may share one.
    """

    layer: Positive
    mean: list[FiniteFloat]
    centroids: list[list[FiniteFloat]]
    names: Annotated[list[RouteName], Field(min_length=2)]
    examples: list[str]
    routes: list[Count]

    def assign(self, states: States) -> np.ndarray:
        """Return the route of each of T prompts, [T]."""
        vectors = states[self.layer] - np.array(self.mean)
        return np.array(self.routes)[(vectors @ np.array(self.centroids).T).argmax(axis=1)]

    def merge(self, owners: Sequence[int]) -> "PromptRouter":
        """Return the router in which some routes are one, by the name of the first of them.

        Args:
            owners: [R], the first route of each route's union; at least two differ.
        """
        kept = sorted(set(owners))
        routes = [kept.index(owners[route]) for route in self.routes]
        names, examples = ([each[one] for one in kept] for each in (self.names, self.examples))
        return replace(self, names=names, examples=examples, routes=routes)

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
        count = len(router.names)
        fits = len(router.routes) == len(router.centroids) and len(router.examples) == count
        fits = fits and all(len(row) == len(router.mean) for row in router.centroids)
        if fits and len({*router.names}) == count and {*router.routes} == {*range(count)}:
            return router
    raise UserError("pool.routes: not a router as a search writes it; use auto or 1")


class KindChoice(NamedTuple):
    """Whether prompts are divided into kinds, and what that is based on.

    Attributes:
        router: The router; `None` where one model for all prompts is as good.
        each: Cross-validated mean value of the best start of each kind.
        single: That of the best start for all prompts.
        error: Standard error of the difference.
    """

    router: PromptRouter | None
    each: float
    single: float
    error: float


def choose_kinds(
    states: States,
    texts: Sequence[str],
    values: np.ndarray,
    routes: int | str = AUTO,
    labels: Sequence[str] | None = None,
) -> KindChoice:
    """Divide prompts into kinds if the best start of each kind is better than the best for all.

    Divisions are clusters of the vectors of each layer and, where items have labels, the labels.
    Five-fold cross-validation decides: layer and number of clusters are chosen on four folds (by
    the same on these), and so is the start of each kind; the fifth tells what they are worth. Kinds
    with the same best start are one.

    Args:
        states: Of T dev prompts.
        texts: The prompts, for names.
        values: [S, T], values of the answers of S starts (experts, soups).
        routes: "auto", or the number of kinds to divide into in any case.
        labels: Domains of the T items; `None` if there are none.

    Raises:
        UserError: The prompts cannot be divided into so many kinds.
    """
    divisions: list[tuple[int, np.ndarray]] = []
    counts = range(2, MAX_CLUSTERS + 1) if routes == AUTO else [int(routes)]
    for layer, vectors in states.items():
        directions = _normalize_rows(vectors - vectors.mean(axis=0))
        least = MIN_PROMPTS if routes == AUTO else 1
        tree = _link(directions)
        found = [_cluster(directions, tree, one, least) for one in counts if one <= len(texts)]
        if labels is not None and routes == AUTO:
            found.append(_nearest(directions, np.unique(labels, return_inverse=True)[1]))
        for one in found:
            count = int(one.max()) + 1
            if 1 < count <= MAX_ROUTES and (routes in (AUTO, count)):
                divisions.append((layer, one))
    if not divisions and routes != AUTO:
        raise UserError(
            f"pool.routes={routes}: the {len(texts)} dev prompts do not divide into {routes} "
            "different kinds; use fewer, or auto"
        )
    order = np.random.default_rng(FOLD_SEED).permutation(len(texts))
    folds = np.empty(len(texts), int)
    folds[order] = np.arange(len(texts)) % FOLDS
    single = _held_out_values(values, np.zeros(len(texts), int), folds)
    if not divisions:
        return KindChoice(None, float(single.mean()), float(single.mean()), 0.0)
    divided = np.empty(len(texts))
    for fold in range(FOLDS):
        kept = folds != fold
        chosen = _best_division(values[:, kept], [one[kept] for _, one in divisions], folds[kept])
        kinds = divisions[chosen][1]
        divided[~kept] = values[_best_starts(values, kinds, kept)[kinds[~kept]], ~kept]
    gain = divided - single
    error = float(gain.std(ddof=1) / len(gain) ** 0.5)
    layer, kinds = divisions[_best_division(values, [one for _, one in divisions], folds)]
    router = None
    if routes != AUTO or gain.mean() > error:
        router = _build_router(layer, states[layer], kinds, texts)
    if router and routes == AUTO:
        starts = _best_starts(values, kinds, np.ones(len(texts), bool)).tolist()
        owners = [starts.index(one) for one in starts]
        router = router.merge(owners) if len(set(owners)) > 1 else None
    return KindChoice(router, float(divided.mean()), float(single.mean()), error)


def _best_division(values: np.ndarray, divisions: Sequence[np.ndarray], folds: np.ndarray) -> int:
    """Return the division with the highest cross-validated value; the first of equal ones."""
    found = [_held_out_values(values, kinds, folds).mean() for kinds in divisions]
    return int(np.argmax(np.round(found, 9)))


def _held_out_values(values: np.ndarray, kinds: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Return each item's value [T] by the start that is best for its kind on the other folds."""
    found = np.empty(len(kinds))
    for fold in np.unique(folds):
        kept = folds != fold
        best = _best_starts(values, kinds, kept)
        found[~kept] = values[best[kinds[~kept]], np.flatnonzero(~kept)]
    return found


def _best_starts(values: np.ndarray, kinds: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return the best start of each kind by the kept items, [R].

    A start's mean on a kind is shrunk to its mean over all kinds, as for `PRIOR_ITEMS` more items.
    """
    members = np.eye(int(kinds.max()) + 1)[kinds[kept]]
    overall = values[:, kept].mean(axis=1, keepdims=True)
    sums, counts = values[:, kept] @ members, members.sum(axis=0)
    means = (sums + PRIOR_ITEMS * overall) / (counts + PRIOR_ITEMS)
    return np.asarray(np.round(means, 9).argmax(axis=0))


def _link(directions: np.ndarray) -> np.ndarray:
    """Return the tree of T unit vectors by Ward's method."""
    from scipy.cluster.hierarchy import linkage

    squares = np.clip(2 - 2 * directions @ directions.T, 0, None)
    return np.asarray(linkage(np.sqrt(squares[np.triu_indices(len(squares), 1)]), "ward"))


def _cluster(directions: np.ndarray, tree: np.ndarray, count: int, least: int) -> np.ndarray:
    """Return the cluster of each of T unit vectors by spherical k-means, started from a tree.

    Args:
        least: Size below which a cluster joins the nearest one.
    """
    from scipy.cluster.hierarchy import fcluster

    kinds = fcluster(tree, count, "maxclust")
    kinds = np.unique(kinds, return_inverse=True)[1]
    for _ in range(LLOYD_STEPS):
        sizes = np.bincount(kinds)
        small = int(sizes.argmin())
        if sizes[small] < least and len(sizes) > 1:
            means = _cluster_directions(directions, kinds)
            others = np.delete(np.arange(len(sizes)), small)
            near = others[(directions @ means[others].T).argmax(axis=1)]
            kinds = np.unique(np.where(kinds == small, near, kinds), return_inverse=True)[1]
            continue
        moved = _nearest(directions, kinds)
        if moved.max() < kinds.max() or np.array_equal(moved, kinds):
            break
        kinds = moved
    return kinds


def _nearest(directions: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Return the nearest of the kinds' centroids of each vector, numbered without gaps."""
    found = (directions @ _cluster_directions(directions, kinds).T).argmax(axis=1)
    return np.unique(found, return_inverse=True)[1]


def _cluster_directions(directions: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    return _normalize_rows(np.eye(int(kinds.max()) + 1)[kinds].T @ directions)


def _normalize_rows(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths == 0, 1.0, lengths))


def _build_router(
    layer: int, vectors: np.ndarray, kinds: np.ndarray, texts: Sequence[str]
) -> PromptRouter:
    mean = np.round(vectors.mean(axis=0), 4)
    directions = _normalize_rows(vectors - mean)
    centroids = np.round(_cluster_directions(directions, kinds), 5)
    examples = []
    for kind, centroid in enumerate(centroids):
        mine = np.flatnonzero(kinds == kind)
        examples.append(texts[mine[(directions[mine] @ centroid).argmax()]])
    names = _name_kinds(examples, kinds, texts)
    count = list(range(len(names)))
    return PromptRouter(layer, mean.tolist(), centroids.tolist(), names, examples, count)


def _name_kinds(examples: Sequence[str], kinds: np.ndarray, texts: Sequence[str]) -> list[str]:
    """Return the three words in a row of each example that distinguish its kind most, joined."""
    words = [re.findall(r"[^\W_]+", text.lower()) for text in texts]
    found: list[str] = []
    for kind, example in enumerate(examples):
        own = [set(words[i]) for i in np.flatnonzero(kinds == kind)]
        others = [set(words[i]) for i in np.flatnonzero(kinds != kind)]

        def share(word: str, among: Sequence[set[str]]) -> float:
            return sum(word in one for one in among) / max(1, len(among))

        mine = re.findall(r"[^\W_]+", example.lower())
        gains = [share(word, own) - share(word, others) for word in mine]
        sums = [sum(gains[start : start + 3]) for start in range(max(1, len(mine) - 2))]
        start = int(np.argmax(sums))
        name = "_".join(mine[start : start + 3])[:MAX_NAME].strip("_") or "kind"
        while name in found:
            name = f"{name}_{kind + 1}"
        found.append(name)
    return found
