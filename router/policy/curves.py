"""What a ranking of prompts is worth for routing: performance gap recovered over the share of strong calls. Pure.

PGR = (r - weak) / (strong - weak) where r is the mean outcome when that share of the prompts, those with the highest
score, goes to the strong model and the rest to the weak one (RouteLLM, Ong et al. 2024, section 4).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.floating]


def recovered(score: Numbers, weak: Numbers, strong: Numbers) -> Numbers:
    """[N + 1] PGR when the k prompts of highest score go to the strong model, k = 0..N.

    Prompts of equal score count as their mean: their order says nothing.
    """
    order = np.argsort(-score, kind="stable")
    gains = (strong - weak).astype(np.float64)[order]
    _, places, counts = np.unique(-score[order], return_inverse=True, return_counts=True)
    gains = (np.bincount(places, weights=gains) / counts)[places]
    return np.concatenate([[0.0], np.cumsum(gains)]) / gains.sum()


def apgr(score: Numbers, weak: Numbers, strong: Numbers) -> float:
    """Mean PGR over the share of strong calls; 0.5 for a random order."""
    return float(recovered(score, weak, strong).mean())


def cpt(score: Numbers, weak: Numbers, strong: Numbers, target: float) -> float:
    """Call-performance threshold: least share of strong calls that recovers `target` of the gap; 1 when none does."""
    curve = recovered(score, weak, strong)
    reached = np.flatnonzero(curve >= target)
    return float(reached[0] / (len(curve) - 1)) if len(reached) else 1.0
