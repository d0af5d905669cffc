"""Model stock: between the base and the mean, by the angle (Jang et al. 2024, arXiv 2403.19522)."""

import numpy as np


def model_stock_coefficients(gram: np.ndarray) -> np.ndarray:
    """What each task vector is multiplied by, [K], from their inner products [K, K].

    All by t / k: the merge lies at t = k cos / (1 + (k - 1) cos) between the base, whose task
    vector is 0, and the mean. For k > 2 the cosine is the mean over all pairs. From 90 degrees on
    t is 0, the base itself. The paper has one t a layer, here it is one a module; k counts the task
    vectors that are not zero, and one alone is kept as it is.
    """
    there = gram.diagonal() > 0
    k = int(there.sum())
    if k == 0:
        return np.zeros(len(gram))
    lengths = np.sqrt(gram.diagonal()[there])
    cosines = gram[np.ix_(there, there)] / np.outer(lengths, lengths)
    pairs = cosines[np.triu_indices(k, 1)]
    cosine = max(0.0, float(pairs.mean())) if k > 1 else 1.0
    return there / k * interpolation_ratio(cosine, k)


def interpolation_ratio(cosine: float, k: int) -> float:
    """t of the paper, for k models whose task vectors enclose an angle of this cosine, 0 to 1."""
    return k * cosine / (1 + (k - 1) * cosine)
