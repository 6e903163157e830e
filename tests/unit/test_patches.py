"""Patches: whatever the bits, applying a difference gives the new weights; whatever the bytes, a patch harms nobody."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import InvalidMessage
from contracts.policies import TensorSpec
from contracts.tensors import ITEM_SIZES
from infra import patches
from infra.patches import BLOCK_HEADER, HEADER, apply, diff

HEAD = HEADER.pack(b"TRWP", 1, 0, 400)
SPECS = [TensorSpec("a", "float32", [10], 0), TensorSpec("b", "bfloat16", [180], 40)]  # 400 bytes, two blocks


def layout(tensors: list[tuple[str, int]]) -> list[TensorSpec]:
    """Specs of one-dimensional tensors, widest items first as `infra.weights.pack` does."""
    specs, offset = [], 0
    for number, (dtype, length) in enumerate(sorted(tensors, key=lambda tensor: -ITEM_SIZES[tensor[0]])):
        specs.append(TensorSpec(f"t{number}", dtype, [length], offset))
        offset += length * ITEM_SIZES[dtype]
    return specs


def size_of(specs: list[TensorSpec]) -> int:
    return sum(spec.shape[0] * ITEM_SIZES[spec.dtype] for spec in specs)


def patched(old: bytes, patch: bytes, specs: list[TensorSpec]) -> bytes:
    weights = bytearray(old)
    apply(weights, patch, specs)
    return bytes(weights)


@settings(deadline=None, max_examples=200)
@given(
    tensors=st.lists(st.tuples(st.sampled_from(sorted(ITEM_SIZES)), st.integers(0, 700)), max_size=5),
    seed=st.integers(0, 2**32 - 1),
    changed=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]),
    block=st.sampled_from([1, 7, 64, 1 << 20]),
)
def test_any_change_of_any_bits_is_restored(
    tensors: list[tuple[str, int]], seed: int, changed: float, block: int
) -> None:
    specs = layout(tensors)
    random = np.random.default_rng(seed)
    old = random.bytes(size_of(specs))  # NaNs, infinities and negative zeros among them
    mask = random.random(len(old)) < changed
    new = np.where(mask, np.frombuffer(random.bytes(len(old)), np.uint8), np.frombuffer(old, np.uint8)).tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patches, "BLOCK", block)
        assert patched(old, diff(old, new, specs), specs) == new


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0x0000, 0x8000),  # 0.0 and -0.0
        (0x7FC0, 0x7FC1),  # NaNs of different payload
        (0x7F80, 0xFF80),  # infinities
        (0xFFFF, 0x0000),  # the difference wraps
        (0x3F80, 0x3F81),
        (0x3F80, 0x3F7F),
    ],
)
@pytest.mark.parametrize("position", [0, 254, 255, 256, 509, 510, 999])  # around what one gap byte holds
def test_values_and_positions_at_the_edges(before: int, after: int, position: int) -> None:
    specs = [TensorSpec("w", "bfloat16", [1000], 0)]
    old = np.full(1000, before, "<u2")
    new = old.copy()
    new[position] = after
    assert patched(old.tobytes(), diff(old.tobytes(), new.tobytes(), specs), specs) == new.tobytes()


def test_a_patch_takes_the_bytes_of_what_changed() -> None:
    specs = [TensorSpec("w", "bfloat16", [1 << 20], 0)]
    random = np.random.default_rng(1)
    old = random.integers(0, 1 << 16, 1 << 20, dtype=np.uint16)
    new = old.copy()
    new[random.random(1 << 20) < 0.01] += 1
    assert len(diff(old.tobytes(), old.tobytes(), specs)) == HEADER.size
    assert len(diff(old.tobytes(), new.tobytes(), specs)) < 0.01 * old.nbytes


def test_the_same_difference_is_the_same_patch() -> None:
    old, new = bytes(400), bytes(range(200)) * 2
    assert diff(old, new, SPECS) == diff(bytearray(old), memoryview(new), SPECS)


def test_buffers_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="the layout has 400 bytes, the buffers 400 and 399"):
        diff(bytes(400), bytes(399), SPECS)


def block(content: bytes, changed: int, gaps: int, number: int = 1) -> bytes:
    frame = zstandard.compress(content)
    return BLOCK_HEADER.pack(number, changed, gaps, len(frame)) + frame


def lying_frame(size: int) -> bytes:
    """A frame of 300 bytes that claims to hold `size`."""
    frame = bytearray(zstandard.compress(bytes(300)))
    assert frame[4] >> 6 == 1, "two bytes of content size follow the descriptor"
    frame[5:7] = struct.pack("<H", size - 256)
    return bytes(frame)


LIE = lying_frame(297)
ONE = zstandard.compress(b"\0\2\0")
BOMB = zstandard.compress(bytes(1 << 28))

HOSTILE = {
    "nothing": (b"", "less than its header"),
    "something else": (b"GIF89a" + bytes(100), "begins with"),
    "a later format": (HEADER.pack(b"TRWP", 2, 0, 400), "begins with"),
    "another size": (HEADER.pack(b"TRWP", 1, 0, 401), "is for 401 bytes"),
    "half a block header": (HEAD + b"\0" * 5, "ends inside a block header"),
    "a block cut short": (HEAD + block(b"\0\2\0", 1, 1)[:-1], "ends behind the patch"),
    "a block that does not exist": (HEAD + block(b"\0\2\0", 1, 1, number=2), "block 2 does not exist"),
    "a block twice": (HEAD + 2 * block(b"\0\2\0", 1, 1), "out of order"),
    "blocks out of order": (HEAD + block(b"\0\2\0", 1, 1) + block(b"\0\2\0\0\0", 1, 1, number=0), "out of order"),
    "a block without a change": (HEAD + block(b"", 0, 0), "0 changes in 0 bytes of gaps do not fit"),
    "more changes than items": (HEAD + block(bytes(3 * 181), 181, 181), "do not fit 180 items"),
    "more gaps than items": (HEAD + block(bytes(4), 1, 2), "do not fit 180 items"),
    "fewer gaps than changes": (HEAD + block(bytes(5), 2, 1), "do not fit"),
    "a position behind the block": (HEAD + block(b"\xb4\2\0", 1, 1), "do not lead to 1 of 180 items"),
    "gaps that end in a run": (HEAD + block(b"\xff\2\0", 1, 1), "do not lead to 1 of 180 items"),
    "content larger than announced": (HEAD + block(bytes(4), 1, 1), "does not hold 3 bytes"),
    "content smaller than announced": (HEAD + block(bytes(2), 1, 1), "does not hold 3 bytes"),
    "a bomb": (HEAD + BLOCK_HEADER.pack(1, 1, 1, len(BOMB)) + BOMB, "does not hold 3 bytes"),
    "a frame that claims less": (HEAD + BLOCK_HEADER.pack(1, 99, 99, len(LIE)) + LIE, "block 1"),
    "no frame": (HEAD + BLOCK_HEADER.pack(1, 1, 1, 9) + b"\x28\xb5\x2f\xfdjunk!", "block 1"),
    "two frames": (HEAD + BLOCK_HEADER.pack(1, 1, 1, 2 * len(ONE)) + 2 * ONE, "block 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_patch_of_these_weights_is_refused(name: str) -> None:
    patch, complaint = HOSTILE[name]
    with pytest.raises(InvalidMessage, match=complaint):
        apply(bytearray(400), patch, SPECS)


def test_weights_of_another_size_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="the weights 401"):
        apply(bytearray(401), HEAD, SPECS)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_damaged_patches_are_refused_or_change_nothing_but_the_weights(data: st.DataObject) -> None:
    random = np.random.default_rng(3)
    old, new = random.bytes(400), random.bytes(400)
    patch = bytearray(diff(old, new, SPECS))
    for _ in range(data.draw(st.integers(1, 4))):
        patch[data.draw(st.integers(0, len(patch) - 1))] = data.draw(st.integers(0, 255))
    patch = patch[: data.draw(st.integers(0, len(patch)))]
    weights = bytearray(old)
    with contextlib.suppress(InvalidMessage):
        apply(weights, bytes(patch), SPECS)
    assert len(weights) == 400
