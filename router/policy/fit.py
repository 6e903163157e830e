"""Fitting the cold-start model to a table of outcomes. Pure: on one machine the same rows and seed give the same model.

Ridge throughout, because its solutions are unique, cheap, and linear in the outcomes: the difference between the scores
of two LLMs is what a regression on the difference of their outcomes would give, which is what routing ranks by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from sklearn.utils.extmath import randomized_svd

from router.policy.features import BUCKETS, Features
from router.policy.model import Arrays, Matrix, RoutingModel, point_of

PENALTY, GROUP_PENALTY, KERNEL_PENALTY = 12.0, 1.0, 20.0  # of the linear scores of outcomes, of groups, of the kernel
FOLDS = 5
TOPICS = 64
RANK = 64  # of the compressed scores
LANDMARKS = 512
# Mean of the kernel's exponent that is due to outcomes, groups, topics and figures of form; and where there are no
# groups. All constants were chosen on splits with seeds 0 to 14 of the tables that `tailrace route eval` takes.
EXPONENT, EXPONENT_WITHOUT_GROUPS = (0.2, 0.5, 0.3, 0.4), (0.0, 0.0, 1.0, 0.8)
SCARCE = 0.5  # standard deviation of a figure of form below which it counts less: what never varied taught nothing
RARE = 2  # buckets in fewer prompts than this say nothing
STEPS, CONVERGED = 40, 1e-2  # of conjugate gradients: no ranking is better for more
LEAST_GROUP = 20  # rows of a group that is scored

Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Prompts:
    """N prompts as matrices."""

    counts: sp.csr_array  # [N, 2 * BUCKETS] 1 + log count; character n-grams, then words
    shape: Matrix  # [N, len(SHAPE)]

    @classmethod
    def of(cls, features: Sequence[Features]) -> Prompts:
        """Stack the features of texts."""
        rows = [(each.grams, each.words) for each in features]
        ends = np.cumsum([0] + [len(grams.indices) + len(words.indices) for grams, words in rows])
        indices = [part for grams, words in rows for part in (grams.indices, words.indices + np.int32(BUCKETS))]
        values = [part for grams, words in rows for part in (grams.values, words.values)]
        counts = sp.csr_array(
            (np.concatenate(values), np.concatenate(indices), ends), shape=(len(rows), 2 * BUCKETS), dtype=np.float32
        )
        return cls(counts, np.stack([each.shape for each in features]))

    def __getitem__(self, rows: Places) -> Prompts:
        return Prompts(self.counts[rows], self.shape[rows])

    def __len__(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Fitted:
    """A model, and what it says of each training prompt when that one's fold is left out."""

    model: RoutingModel
    out_of_fold: Matrix  # [N, T]


def frequencies(counts: sp.csr_array) -> Matrix:
    """[V] inverse document frequency; 0 where too rare to say anything."""
    documents = np.bincount(counts.indices, minlength=counts.shape[1])
    idf = np.log((1 + counts.shape[0]) / (1 + documents)) + 1
    return np.where(documents < RARE, 0, idf).astype(np.float32)


def weighted(counts: sp.csr_array, idf: Matrix) -> sp.csr_array:
    """TF-IDF, both halves of each row of length 1."""
    halves = []
    for half in (slice(None, BUCKETS), slice(BUCKETS, None)):
        block = sp.csr_array(counts[:, half])
        block.data = block.data * idf[half][block.indices]
        norms = np.sqrt(np.add.reduceat(np.append(block.data, 0) ** 2, block.indptr[:-1]) * (np.diff(block.indptr) > 0))
        block.data = block.data / np.repeat(np.where(norms > 0, norms, 1), np.diff(block.indptr)).astype(np.float32)
        halves.append(block)
    return sp.csr_array(sp.hstack(halves, format="csr"))


def ridge(inputs: sp.csr_array, targets: Matrix, penalty: float) -> Matrix:
    """[V, T] minimum of |XW - Y|² + penalty |W|², by conjugate gradients on the dual (XXᵀ + penalty I)A = Y."""
    transposed = sp.csr_array(inputs.T)
    dual = np.zeros_like(targets)
    residual = targets.copy()
    direction = residual.copy()
    squares = (residual**2).sum(0)
    enough = CONVERGED**2 * squares
    for _ in range(STEPS):
        product = inputs @ (transposed @ direction) + penalty * direction
        step = squares / np.maximum((direction * product).sum(0), 1e-30)
        dual += step * direction
        residual -= step * product
        before, squares = squares, (residual**2).sum(0)
        if (squares <= enough).all():
            break
        direction = residual + squares / np.maximum(before, 1e-30) * direction
    return transposed @ dual


def masked_ridge(inputs: sp.csr_array, targets: Matrix, penalty: float) -> tuple[Matrix, Matrix]:
    """[V, T] weights and [T] means where some outcomes are unknown (NaN): those known for the same rows go together."""
    known = ~np.isnan(targets)
    weights = np.zeros((inputs.shape[1], targets.shape[1]), dtype=np.float32)
    means = np.zeros(targets.shape[1], dtype=np.float32)
    _, alike = np.unique(known, axis=1, return_inverse=True)
    for which in range(alike.max() + 1):
        columns = np.flatnonzero(alike == which)
        rows = np.flatnonzero(known[:, columns[0]])
        if len(rows):
            values = targets[np.ix_(rows, columns)]
            means[columns] = values.mean(0)
            weights[:, columns] = ridge(inputs[rows], values - means[columns], penalty)
    return weights, means


@dataclass(frozen=True)
class Linear:
    """The linear stage: [V, C] weights of outcomes and groups, and the outcomes' means."""

    weights: Matrix
    means: Matrix  # [T]

    @classmethod
    def fit(cls, inputs: sp.csr_array, outcomes: Matrix, groups: Matrix) -> Linear:
        """Both kinds of targets; a group's is 1 for its rows, less the mean."""
        weights, means = masked_ridge(inputs, outcomes, PENALTY)
        if groups.shape[1]:
            weights = np.hstack([weights, ridge(inputs, groups - groups.mean(0), GROUP_PENALTY)])
        return cls(weights, means)


def one_hot(labels: Sequence[str]) -> Matrix:
    """[N, G] membership of the groups that are large enough; none when there are fewer than two."""
    _, places, sizes = np.unique(np.array(labels), return_inverse=True, return_counts=True)
    kept = np.flatnonzero(sizes >= LEAST_GROUP)
    if len(kept) < 2:
        return np.zeros((len(places), 0), dtype=np.float32)
    return (places[:, None] == kept[None, :]).astype(np.float32)


def folds_of(clusters: Places, seed: int) -> Places:
    """[N] fold of each row; near-duplicates share one."""
    names, places = np.unique(clusters, return_inverse=True)
    return np.random.default_rng(seed).permutation(len(names))[places] % FOLDS


def gaussian(points: Matrix, landmarks: Matrix) -> Doubles:
    """[N, L] exp(-|p - l|²)."""
    squares = (points**2).sum(1)[:, None] + (landmarks**2).sum(1)[None, :] - 2 * points @ landmarks.T
    return np.exp(-np.maximum(squares, 0)).astype(np.float64)


def kernel_ridge(similar: Doubles, among: Doubles, outcomes: Matrix) -> Doubles:
    """[L, T] Nyström weights: minimises |KA - Y|² + penalty AᵀK_LL A over the rows where an outcome is known."""
    known = ~np.isnan(outcomes)
    weights = np.zeros((len(among), outcomes.shape[1]))
    _, alike = np.unique(known, axis=1, return_inverse=True)
    for which in range(alike.max() + 1):
        columns = np.flatnonzero(alike == which)
        rows = known[:, columns[0]]
        if rows.any():
            part = similar[rows]
            system = part.T @ part + KERNEL_PENALTY * among + 1e-6 * len(among) * np.eye(len(among))
            weights[:, columns] = np.linalg.solve(system, part.T @ outcomes[np.ix_(rows, columns)])
    return weights


def calibrated(total: Matrix, outcomes: Matrix) -> Matrix:
    """[2, T] constant and slope that make a score a probability: least squares out of fold.

    Outcomes known for the same rows share a slope, so that their differences rank prompts as the scores' do.
    """
    known = ~np.isnan(outcomes)
    _, alike = np.unique(known, axis=1, return_inverse=True)
    calibration = np.zeros((2, outcomes.shape[1]), dtype=np.float32)
    for which in range(alike.max() + 1):
        columns = np.flatnonzero(alike == which)
        rows = np.flatnonzero(known[:, columns[0]])
        if len(rows):
            inputs, targets = (values[np.ix_(rows, columns)].astype(np.float64) for values in (total, outcomes))
            middle, mean = inputs.mean(0), targets.mean(0)
            product, square = ((inputs - middle) * (targets - mean)).sum(), ((inputs - middle) ** 2).sum()
            slope = max(product / max(square, 1e-9), 0.0)
            calibration[:, columns] = [mean - slope * middle, np.full(len(columns), slope)]
    return calibration


def topics_of(inputs: sp.csr_array, seed: int) -> Matrix:
    """[V, TOPICS] right singular vectors: latent semantic analysis (Deerwester et al. 1990) of the training prompts."""
    count = min(TOPICS, inputs.shape[0] - 1)
    _, _, vectors = randomized_svd(sp.csr_matrix(inputs), count, n_iter=2, random_state=seed)
    return np.ascontiguousarray(vectors.T, dtype=np.float32)


def fit(
    prompts: Prompts,
    outcomes: dict[str, Matrix],
    groups: Sequence[str],
    clusters: Places,
    seed: int = 0,
) -> Fitted:
    """Train on N prompts: outcomes by name, [N] each, NaN where unknown; `clusters` tell near-duplicates."""
    targets = np.stack([values.astype(np.float32) for values in outcomes.values()], axis=1)
    members = one_hot(groups)
    idf = frequencies(prompts.counts)
    inputs = weighted(prompts.counts, idf)
    folds = folds_of(clusters, seed)
    columns = targets.shape[1] + members.shape[1]
    scores = np.zeros((len(prompts), columns), dtype=np.float32)
    for fold in range(FOLDS):
        inside, outside = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        scores[outside] = inputs[outside] @ Linear.fit(inputs[inside], targets[inside], members[inside]).weights
    whole = Linear.fit(inputs, targets, members)
    directions = topics_of(inputs, seed)
    topics = np.repeat(np.array([0, 1], np.float32), [columns, directions.shape[1]])
    centre, spread = prompts.shape.mean(0), prompts.shape.std(0) + np.float32(1e-3)
    points = point_of(np.hstack([scores, inputs @ directions]), topics, prompts.shape, centre, spread)
    weights = kernel_weights(points, (targets.shape[1], members.shape[1], directions.shape[1], len(centre)))
    points *= weights
    landmarks = points[np.sort(np.random.default_rng(seed).permutation(len(points))[:LANDMARKS])]
    similar, among = gaussian(points, landmarks), gaussian(landmarks, landmarks)
    centred = targets - whole.means
    total = np.zeros_like(targets)
    for fold in range(FOLDS):
        inside, outside = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        total[outside] = similar[outside] @ kernel_ridge(similar[inside], among, centred[inside])
    calibration = calibrated(total, targets)
    length = np.linalg.norm(inputs @ directions, axis=1).mean()  # that point_of scales topics by
    importance = (weights[: len(topics)] / np.where(topics > 0, length, 1)).astype(np.float32)
    basis, scale, mix = compressed(inputs, np.hstack([whole.weights, directions]), importance)
    arrays = Arrays(
        idf=idf,
        basis=basis,
        scale=scale,
        mix=mix,
        topics=topics,
        centre=centre,
        spread=spread,
        weights=weights,
        landmarks=landmarks,
        dual=kernel_ridge(similar, among, centred).astype(np.float32),
        calibration=calibration,
    )
    return Fitted(RoutingModel(arrays, list(outcomes), {}), calibration[0] + calibration[1] * total)


def kernel_weights(points: Matrix, sizes: tuple[int, int, int, int]) -> Matrix:
    """[D] so that each part of a point contributes its share to the mean of the kernel's exponent.

    Outcomes and figures of form count alike among themselves, groups and topics as much as they vary.
    """
    spread = points.std(0).astype(np.float64) + 1e-6
    parts = np.split(spread, np.cumsum(sizes)[:-1])
    outcomes, groups, topics, form = (
        # The mean square distance of two points is twice the variance.
        np.sqrt(share / 2) * np.ones_like(part)
        for share, part in zip(EXPONENT if sizes[1] else EXPONENT_WITHOUT_GROUPS, parts, strict=True)
    )
    outcomes /= np.sqrt(len(outcomes)) * parts[0]
    groups /= np.linalg.norm(parts[1]) if len(groups) else 1
    topics /= np.linalg.norm(parts[2])
    form *= np.minimum(parts[3] / SCARCE, 1)
    form /= np.sqrt(len(form)) * np.maximum(parts[3], SCARCE)
    return np.concatenate([outcomes, groups, topics, form]).astype(np.float32)


def compressed(
    inputs: sp.csr_array, weights: Matrix, importance: Matrix
) -> tuple[npt.NDArray[np.int8], Matrix, Matrix]:
    """The basis, its scale and the mix that keep most of what XW tells: reduced-rank regression, then eight bits.

    A column counts as much as in the kernel, so that what is lost there is least; the loss of the rest is of noise.
    """
    units = np.maximum(importance, importance.max() * 1e-3)
    weights = weights * units
    fitted = inputs @ weights
    _, vectors = np.linalg.eigh((fitted.T @ fitted).astype(np.float64))
    mix = vectors[:, ::-1][:, :RANK].astype(np.float32)
    basis = weights @ mix
    scale = np.maximum(np.abs(basis).max(0), 1e-12) / 127
    return np.round(basis / scale).astype(np.int8), scale, np.ascontiguousarray(mix.T / units)
