"""Slerp: spherical linear interpolation (Shoemake, SIGGRAPH 1985), from one expert to the next."""

import numpy as np

MIN_SINE = 1e-3
"""The sine of an angle below which the arc is taken for a line: one cannot tell, or which arc."""


def slerp_coefficients(gram: np.ndarray) -> np.ndarray:
    """What each task vector is multiplied by, [K], from their inner products [K, K].

    Two meet halfway. With more, the j-th (from 0) pulls the merge of those before it by 1 / (j + 1)
    of the angle, as in a running mean: the result depends on their order. The lengths of the
    vectors are kept and are interpolated too, in proportion to the arcs. A task vector that is zero
    has no direction and is left out.
    """
    merge = np.zeros(len(gram))
    for count, j in enumerate(np.flatnonzero(gram.diagonal() > 0)):
        length = float(merge @ gram @ merge) ** 0.5 * float(gram[j, j]) ** 0.5
        cosine = float(merge @ gram[j]) / length if length > 0 else 1.0
        stay, go = slerp_factors(np.clip(cosine, -1, 1), 1 / (count + 1))
        merge = stay * merge
        merge[j] += go
    return merge


def slerp_factors(cosine: float, t: float) -> tuple[float, float]:
    """The two factors of slerp at t in [0, 1], of vectors that enclose an angle of this cosine.

    Where they are parallel, 1 - t and t: the straight line.
    """
    angle = np.arccos(cosine)
    if (sine := np.sin(angle)) < MIN_SINE:
        return 1 - t, t
    return float(np.sin((1 - t) * angle) / sine), float(np.sin(t * angle) / sine)
