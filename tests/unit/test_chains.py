"""Which blobs a version needs, how somebody gets to it, and when weights are stored whole."""

from __future__ import annotations

import pytest

from contracts.messages import PolicyRef, PolicyVersion
from contracts.policies import TensorSpec, WeightPatch
from infra.chains import Route, blobs_of, extended, may_extend, policies_of, routes, worth_a_patch

SPECS = [TensorSpec("w", "uint8", [1000], 0)]
BUNDLE = "b" * 64


def ref(version: int, generation: int = 1) -> PolicyRef:
    return PolicyRef(generation, version, f"{generation:032x}{version:032x}")


def patch(version: int, size: int = 10) -> WeightPatch:
    return WeightPatch(ref(version), f"{'f' * 32}{version:032x}", size)


def published(version: int, keyframe: int | None = None, size: int = 10) -> PolicyVersion:
    """A version whole, or with one patch of `size` bytes for each version after `keyframe`."""
    steps = [] if keyframe is None else [patch(number, size) for number in range(keyframe + 1, version + 1)]
    return PolicyVersion(
        run="test", policy=ref(version), tensors=SPECS, size=1000, bundle=BUNDLE, parent=None, published_ns=1,
        keyframe=None if keyframe is None else ref(keyframe), patches=steps,
    )  # fmt: skip


WHOLE = published(5)
CHAIN = published(8, keyframe=5)
PATCHES = [patch(6), patch(7), patch(8)]


@pytest.mark.parametrize(
    ("version", "held", "expected"),
    [
        (WHOLE, None, [Route(ref(5), [])]),
        (WHOLE, ref(4), [Route(ref(5), [])]),
        (WHOLE, ref(5), [Route(ref(5), [], held=True), Route(ref(5), [])]),
        (CHAIN, None, [Route(ref(5), PATCHES), Route(ref(8), [])]),
        (CHAIN, ref(4), [Route(ref(5), PATCHES), Route(ref(8), [])]),
        (CHAIN, ref(6, generation=2), [Route(ref(5), PATCHES), Route(ref(8), [])]),
        (CHAIN, ref(5), [Route(ref(5), PATCHES, held=True), Route(ref(5), PATCHES), Route(ref(8), [])]),
        (CHAIN, ref(7), [Route(ref(7), PATCHES[2:], held=True), Route(ref(5), PATCHES), Route(ref(8), [])]),
        (CHAIN, ref(8), [Route(ref(8), [], held=True), Route(ref(5), PATCHES), Route(ref(8), [])]),
    ],
)
def test_the_ways_to_a_version(version: PolicyVersion, held: PolicyRef | None, expected: list[Route]) -> None:
    assert routes(version, held) == expected


def test_the_policies_on_the_way_to_a_version() -> None:
    assert policies_of(WHOLE) == [ref(5)]
    assert policies_of(CHAIN) == [ref(5), ref(6), ref(7), ref(8)]


def test_what_a_version_needs() -> None:
    assert blobs_of(WHOLE) == {ref(5).digest, BUNDLE}
    assert blobs_of(CHAIN) == {ref(5).digest, ref(8).digest, BUNDLE, *(item.digest for item in PATCHES)}


@pytest.mark.parametrize(
    ("last", "generation", "version", "specs", "every", "expected"),
    [
        (WHOLE, 1, 6, SPECS, 4, True),
        (CHAIN, 1, 9, SPECS, 4, False),  # would be the fourth after its keyframe
        (CHAIN, 1, 9, SPECS, 5, True),
        (WHOLE, 1, 6, SPECS, 1, False),
        (WHOLE, 2, 6, SPECS, 4, False),
        (WHOLE, 1, 5, SPECS, 4, False),
        (WHOLE, 1, 6, [TensorSpec("w", "uint8", [999], 0)], 4, False),
    ],
)
def test_what_may_be_a_patch(
    last: PolicyVersion, generation: int, version: int, specs: list[TensorSpec], every: int, expected: bool
) -> None:
    assert may_extend(last, generation, version, specs, every) is expected


@pytest.mark.parametrize(
    ("last", "size", "expected"),
    [
        (WHOLE, 500, True),
        (WHOLE, 501, False),  # more than half
        (published(8, keyframe=5, size=200), 399, True),
        (published(8, keyframe=5, size=200), 400, False),  # the chain weighs as much as a keyframe
    ],
)
def test_what_is_worth_a_patch(last: PolicyVersion, size: int, expected: bool) -> None:
    assert worth_a_patch(last, size) is expected


def test_a_chain_grows_from_its_keyframe() -> None:
    assert extended(WHOLE, patch(6)) == (ref(5), [patch(6)])
    assert extended(CHAIN, patch(9)) == (ref(5), [*PATCHES, patch(9)])
