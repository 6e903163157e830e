"""The cold-start model: from a text alone, how likely each kind of language model is to answer it well.

A prompt becomes a point: its linear scores (ridge on hashed n-grams with TF-IDF weights) for each outcome and for each
group of the training data (subjects, sources), its place among topics (latent semantic analysis), and figures of form.
Ridge regression with a Gaussian kernel on these points foretells the outcomes (1 = right, 0 = wrong). With the Nyström
method (Williams & Seeger 2001) it costs a product with a few hundred landmarks. It knows what the mean per subject
knows without being told the subject. Calibrated out of fold, its score is a probability; `logits` gives the log-odds.
router/policy/fit.py trains it.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from infra.errors import UserError
from router.policy.features import BUCKETS, SHAPE, Features, extract

FORMAT = 1
LARGEST = 64 << 20  # bytes of a file
LEAST = 0.02  # probabilities are kept this far from 0 and 1: no text alone makes an outcome certain
COMPACT, STRONG = "compact", "strong"
TIER = "tier:"  # prefix of the outcomes that say how demanding a prompt is

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Arrays:
    """What is learned.

    V = 2 * BUCKETS, R rank, T outcomes, C = T + groups + topics, D = C + len(SHAPE), L landmarks.
    """

    idf: Matrix  # [V] inverse document frequency of character n-grams, then of words
    basis: npt.NDArray[np.int8]  # [V, R] in units of `scale`
    scale: Matrix  # [R]
    mix: Matrix  # [R, C] basis -> scores of outcomes, of groups, of topics
    topics: Matrix  # [C] 1 for topics, 0 for the others
    centre: Matrix  # [len(SHAPE)] mean of each figure of form
    spread: Matrix  # [len(SHAPE)] its standard deviation
    weights: Matrix  # [D] what a coordinate counts in the kernel
    landmarks: Matrix  # [L, D] points, by their weights
    dual: Matrix  # [L, T]
    calibration: Matrix  # [2, T] constant and slope


class RoutingModel:
    """A trained model; immutable. `version` is a digest of its content."""

    def __init__(self, arrays: Arrays, outcomes: list[str], card: dict[str, Any]) -> None:
        self.arrays = arrays
        self.outcomes = outcomes  # [T]
        self.card = card  # what it was trained on and how well it does; JSON-able
        self._mix = arrays.scale[:, None] * arrays.mix
        self._norms = (arrays.landmarks**2).sum(1)
        self._tiers = [place for place, name in enumerate(outcomes) if name.startswith(TIER)]

    @cached_property
    def version(self) -> str:
        """16 hexadecimal digits."""
        return hashlib.sha256(self._packed()).hexdigest()[:16]

    def logits(self, text: str) -> dict[str, float]:
        """Log-odds of a right answer: by `compact` and `strong`, and by the name of each LLM of the training data."""
        return self.predict(text)[0]

    def tiers(self, text: str) -> dict[str, float]:
        """Probability of each tier of demand, in ascending order; empty when the training data named none."""
        return self.predict(text)[1]

    def predict(self, text: str) -> tuple[dict[str, float], dict[str, float]]:
        """`logits` and `tiers` for the price of one."""
        chances = np.clip(self.chances(extract(text)), LEAST, 1 - LEAST)
        logits = {
            name: math.log(chance / (1 - chance))
            for name, chance in zip(self.outcomes, chances.tolist(), strict=True)
            if not name.startswith(TIER)
        }
        total = float(chances[self._tiers].sum())
        tiers = {self.outcomes[place].removeprefix(TIER): float(chances[place]) / total for place in self._tiers}
        return logits, tiers

    def chances(self, features: Features) -> Matrix:
        """[T] probability of each outcome, not yet kept within bounds."""
        arrays = self.arrays
        scores = np.zeros(len(arrays.scale), dtype=np.float32)
        for offset, block in ((0, features.grams), (BUCKETS, features.words)):
            rows = block.indices + offset
            values = block.values * arrays.idf[rows]
            norm = math.sqrt(float(values @ values))
            if norm:
                scores += (values / norm) @ arrays.basis[rows].astype(np.float32)
        columns = scores @ self._mix
        point = point_of(columns, arrays.topics, features.shape, arrays.centre, arrays.spread) * arrays.weights
        distances = self._norms + point @ point - 2 * (arrays.landmarks @ point)
        return arrays.calibration[0] + arrays.calibration[1] * (np.exp(-np.maximum(distances, 0)) @ arrays.dual)

    def save(self, path: Path) -> None:
        """Write it as safetensors; the card is part of the file."""
        path.write_bytes(self._packed())

    def _packed(self) -> bytes:
        header = {"format": FORMAT, "outcomes": self.outcomes, "card": self.card}
        return save(dict(vars(self.arrays)), metadata={"tailrace": json.dumps(header, sort_keys=True)})

    @classmethod
    def load(cls, path: Path) -> RoutingModel:
        """Read a file that `save` wrote. Raises UserError for any other, and for one with impossible numbers."""
        try:
            if path.stat().st_size > LARGEST:
                raise UserError(f"{path} is larger than a routing model can be ({LARGEST >> 20} MiB); name another")
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: the routing model cannot be read ({error.strerror})") from None
        try:
            return cls._unpacked(data)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is no sound routing model: {error}; train one with `tailrace route train`"
            ) from None

    @classmethod
    def _unpacked(cls, data: bytes) -> RoutingModel:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["tailrace"])
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r}, this release reads {FORMAT}")
        outcomes, card = header["outcomes"], header["card"]
        if not isinstance(card, dict) or not isinstance(outcomes, list) or not {COMPACT, STRONG} <= set(outcomes):
            raise ValueError("its header says neither what it predicts nor where it comes from")
        return cls(_checked(tensors, len(outcomes)), [str(name) for name in outcomes], card)


def point_of(columns: Matrix, topics: Matrix, shape: Matrix, centre: Matrix, spread: Matrix) -> Matrix:
    """[..., D] where prompts lie: their scores, those of topics scaled to length 1, and their figures of form."""
    length = np.sqrt((columns**2 * topics).sum(-1, keepdims=True)) + np.float32(1e-6)
    form = np.clip((shape - centre) / spread, -3, 3)
    return np.concatenate([columns / np.where(topics > 0, length, 1), form], axis=-1)


def _checked(tensors: dict[str, npt.NDArray[Any]], outcomes: int) -> Arrays:
    """The arrays, each of the shape and type that the others demand, and finite."""
    rank, columns = tensors["mix"].shape
    landmarks = len(tensors["landmarks"])
    vocabulary, form = 2 * BUCKETS, len(SHAPE)
    shapes: dict[str, tuple[int, ...]] = {
        "idf": (vocabulary,), "basis": (vocabulary, rank), "scale": (rank,), "mix": (rank, columns),
        "topics": (columns,), "centre": (form,), "spread": (form,), "weights": (columns + form,),
        "landmarks": (landmarks, columns + form), "dual": (landmarks, outcomes), "calibration": (2, outcomes),
    }  # fmt: skip
    for name, shape in shapes.items():
        array = tensors[name]
        kind = np.int8 if name == "basis" else np.float32
        if array.shape != shape or array.dtype != kind:
            raise ValueError(f"`{name}` is {array.dtype} {list(array.shape)}, not {np.dtype(kind)} {list(shape)}")
        if not np.isfinite(array).all():
            raise ValueError(f"`{name}` holds numbers that are not finite")
    if columns < outcomes or not (tensors["spread"] > 0).all():
        raise ValueError("its arrays contradict each other")
    return Arrays(**{name: tensors[name] for name in shapes})


def cold_start() -> RoutingModel:
    """The model that is shipped with this package."""
    with resources.as_file(resources.files("router.policy") / "cold_start.safetensors") as path:
        return RoutingModel.load(path)
