"""Sparse patches of weights: which items changed and by how much, lossless to the bit. Pure.

An optimizer step at the learning rates of reinforcement learning moves few bf16 weights past their next rounding
boundary, and most of those by one unit in the last place. A patch holds their positions as gaps and the differences of
their bit patterns as integers, in blocks that are compressed one by one, so that neither side needs memory beyond one:

    header   "TRWP", format version u16, 0 u16, bytes of the weights u64
    block    number u32, changed items u32, bytes of gaps u32, compressed bytes u32, then one zstandard frame of
             gaps        one byte per changed item: unchanged ones before it; 255 stands for 255 more of them
             differences new - old modulo 2^bits, zigzag (0, -1, 1, -2, …), one plane of bytes per byte of an item

All numbers are little-endian. Neighbouring tensors of one item size are cut into blocks of `BLOCK` items together, the
blocks are numbered from the start, ascend, and those without a change are left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import zstandard

from contracts.errors import InvalidMessage
from contracts.policies import TensorSpec
from contracts.tensors import ITEM_SIZES, byte_count

MAGIC = b"TRWP"
VERSION = 1
BLOCK = 1 << 20  # items: old, new and what lies between fit a processor's cache
LEVEL = 1  # higher ones take several times longer for 1 % fewer bytes
RUN = 255  # unchanged items that the gap byte 255 stands for

HEADER = struct.Struct("<4sHHQ")
BLOCK_HEADER = struct.Struct("<IIII")
ITEM_TYPES = {size: np.dtype(f"<u{size}") for size in set(ITEM_SIZES.values())}

Buffer = bytes | bytearray | memoryview


def diff(old: Buffer, new: Buffer, tensors: list[TensorSpec]) -> bytes:
    """The patch that turns `old` into `new`, two weight buffers laid out as `tensors`: the same for the same inputs.

    Takes about as long as reading both. Raises `ValueError` when a buffer does not have the layout's size.
    """
    size = sum(byte_count(spec.dtype, spec.shape, spec.name) for spec in tensors)
    if not len(old) == len(new) == size:
        raise ValueError(f"the layout has {size} bytes, the buffers {len(old)} and {len(new)}")
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    parts = [HEADER.pack(MAGIC, VERSION, 0, size)]
    blocks = zip(_blocks(old, tensors), _blocks(new, tensors), strict=True)
    for number, (before, after) in enumerate(blocks):
        positions = np.flatnonzero(before != after)
        if len(positions):
            gaps = _gaps(positions)
            content = gaps.tobytes() + _planes(before[positions], after[positions]).tobytes()
            frame = compressor.compress(content)
            parts += [BLOCK_HEADER.pack(number, len(positions), len(gaps), len(frame)), frame]
    return b"".join(parts)


def apply(weights: bytearray, patch: Buffer, tensors: list[TensorSpec]) -> None:
    """Turn the old weights into the new ones, in place.

    A patch from the bus may be anything: it is checked before memory is taken by its word. Raises `InvalidMessage`
    where it is not a patch for this layout; `weights` are then neither the old nor the new ones. Whether they were the
    right old ones only the digest of the result can say.
    """
    view = memoryview(patch).cast("B")
    if len(view) < HEADER.size:
        raise InvalidMessage(f"patch: {len(view)} bytes are less than its header")
    magic, version, _, size = HEADER.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise InvalidMessage(f"patch: begins with {magic!r} {version}, this reader understands {MAGIC!r} {VERSION}")
    expected = sum(byte_count(spec.dtype, spec.shape, spec.name) for spec in tensors)
    if not size == expected == len(weights):
        raise InvalidMessage(f"patch: is for {size} bytes, the layout has {expected}, the weights {len(weights)}")
    offset = HEADER.size
    blocks = enumerate(_blocks(weights, tensors))
    while offset < len(view):
        if offset + BLOCK_HEADER.size > len(view):
            raise InvalidMessage(f"patch: ends inside a block header at byte {offset}")
        number, changed, gaps, length = BLOCK_HEADER.unpack_from(view, offset)
        offset += BLOCK_HEADER.size
        block = next((block for index, block in blocks if index == number), None)
        if block is None:
            raise InvalidMessage(f"patch: block {number} does not exist or is out of order")
        if offset + length > len(view):
            raise InvalidMessage(f"patch: block {number} ends behind the patch")
        _apply_block(block, view[offset : offset + length], changed, gaps, f"patch: block {number}")
        offset += length


def _apply_block(block: np.ndarray, frame: memoryview, changed: int, gaps: int, where: str) -> None:
    if not 1 <= changed <= len(block) or not changed <= gaps <= changed + len(block) // RUN:
        raise InvalidMessage(f"{where}: {changed} changes in {gaps} bytes of gaps do not fit {len(block)} items")
    content = np.frombuffer(_decompress(frame, gaps + changed * block.itemsize, where), np.uint8)
    positions = _positions(content[:gaps])
    if len(positions) != changed or positions[-1] >= len(block):
        raise InvalidMessage(f"{where}: its gaps do not lead to {changed} of {len(block)} items")
    block[positions] += _differences(content[gaps:], block.dtype)


def _decompress(frame: memoryview, size: int, where: str) -> bytes:
    """The content of a frame that must say, and have, exactly `size` bytes: nothing larger is allocated."""
    try:
        if zstandard.get_frame_parameters(frame).content_size != size:
            raise InvalidMessage(f"{where}: its frame does not hold {size} bytes")
        content: bytes = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidMessage(f"{where}: {error}") from error
    if len(content) != size:
        raise InvalidMessage(f"{where}: its frame does not hold {size} bytes")
    return content


def _blocks(data: Buffer, tensors: list[TensorSpec]) -> Iterator[np.ndarray]:
    """The items as unsigned integers: views of `data` of up to `BLOCK` items, none across a change of item size."""
    for size, start, end in _regions(tensors):
        items = np.frombuffer(data, ITEM_TYPES[size], (end - start) // size, start)
        for first in range(0, len(items), BLOCK):
            yield items[first : first + BLOCK]


def _regions(tensors: list[TensorSpec]) -> list[tuple[int, int, int]]:
    """(item size, first byte, end byte) of each stretch of tensors with one item size."""
    regions: list[tuple[int, int, int]] = []
    end = 0
    for spec in tensors:
        start, size = end, ITEM_SIZES[spec.dtype]
        end += byte_count(spec.dtype, spec.shape, spec.name)
        if start == end:
            continue
        if regions and regions[-1][0] == size:
            start = regions.pop()[1]
        regions.append((size, start, end))
    return regions


def _gaps(positions: np.ndarray) -> np.ndarray:
    """Ascending positions as bytes, each the number of unchanged items before a changed one, 255 adding to the next."""
    unchanged = np.diff(positions, prepend=-1) - 1
    runs, rest = np.divmod(unchanged, RUN)
    if not runs.any():
        return rest.astype(np.uint8)
    gaps = np.full(len(positions) + int(runs.sum()), RUN, np.uint8)
    gaps[np.cumsum(runs + 1) - 1] = rest
    return gaps


def _positions(gaps: np.ndarray) -> np.ndarray:
    ends = gaps != RUN
    # A block's gaps sum up to less than 2^32 whatever they are.
    return np.cumsum(gaps + ends.astype(np.uint32), dtype=np.uint32)[ends].astype(np.int64) - 1


def _planes(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """[items] -> uint8 [bytes per item, items], least significant bytes first."""
    signed = (after - before).view(f"<i{before.itemsize}")
    bits = 8 * before.itemsize
    zigzag = (signed << 1) ^ (signed >> (bits - 1))
    return np.ascontiguousarray(zigzag.view(np.uint8).reshape(-1, before.itemsize).T)


def _differences(planes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    zigzag = np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).reshape(-1).view(dtype)
    return (zigzag >> 1) ^ (-(zigzag & 1)).astype(dtype)
