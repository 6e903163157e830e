"""Prompts that are the same but for a few words belong on one side of a split: clusters of near-duplicates. Pure."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SHINGLE = 3  # words
HASHES, BANDS = 64, 16  # of 4 hashes each: a pair with Jaccard similarity 0.8 is found with probability 0.9998
SIMILAR = 0.8  # Jaccard similarity of the sets of shingles

_WORD = re.compile(r"\w+")


def clusters(texts: Sequence[str]) -> npt.NDArray[np.intp]:
    """[N] for each text the place of the first of its near-duplicates, itself where there is none.

    MinHash (Broder 1997) with banding proposes pairs, their Jaccard similarity decides; similar pairs are joined.
    Case, punctuation and spacing do not count.
    """
    shingles = [_shingles(text) for text in texts]
    signatures = np.stack([_signature(each) for each in shingles]) if texts else np.zeros((0, HASHES), np.uint64)
    parents = list(range(len(texts)))

    def root(place: int) -> int:
        while parents[place] != place:
            parents[place] = parents[parents[place]]
            place = parents[place]
        return place

    for band in np.split(signatures, BANDS, axis=1):
        buckets: dict[bytes, list[int]] = defaultdict(list)
        for place, part in enumerate(band):
            buckets[part.tobytes()].append(place)
        for places in buckets.values():
            # Each is held against the first of every cluster in its bucket, so that a bucket of equals costs n, not n².
            heads: list[int] = []
            for place in places:
                if any(root(place) == root(head) for head in heads):
                    continue
                like = next((head for head in heads if _jaccard(shingles[head], shingles[place]) >= SIMILAR), None)
                if like is None:
                    heads.append(place)
                else:
                    low, high = sorted((root(like), root(place)))
                    parents[high] = low
    return np.array([root(place) for place in range(len(texts))], dtype=np.intp)


def _shingles(text: str) -> npt.NDArray[np.uint64]:
    words = _WORD.findall(text.lower())
    found = {" ".join(words[start : start + SHINGLE]) for start in range(max(1, len(words) - SHINGLE + 1))}
    hashes = [zlib.crc32(shingle.encode("utf-8", "replace")) for shingle in found]
    return np.unique(np.array(hashes, dtype=np.uint64))


_generator = np.random.default_rng(0)
_FACTORS = _generator.integers(1, 1 << 63, HASHES, dtype=np.uint64) | np.uint64(1)
_SUMMANDS = _generator.integers(0, 1 << 63, HASHES, dtype=np.uint64)


def _signature(shingles: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """[HASHES] the least of each hash; its low bits, which mix worst, are dropped."""
    return ((shingles[:, None] * _FACTORS + _SUMMANDS) >> np.uint64(16)).min(0)


def _jaccard(one: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64]) -> float:
    common = len(np.intersect1d(one, other, assume_unique=True))
    return common / (len(one) + len(other) - common)
