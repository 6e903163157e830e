"""Policy weights as one run of bytes: tensors back to back, described by `TensorSpec`s.

The bytes are little-endian, as torch keeps them on every machine it is built for here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from contracts.errors import InvalidMessage
from contracts.policies import TensorSpec
from contracts.tensors import ITEM_SIZES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pack(state: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> tuple[memoryview, list[TensorSpec]]:
    """Lay out a state dict in one new buffer; floating tensors are cast to `dtype`.

    Tensors that share their memory (an embedding tied to the output head) are written once, under the first name.
    Raises `ValueError` on a dtype that the contract does not carry.
    """
    kept = _untied(state)
    # Widest items first: every tensor then lies at a multiple of its item size.
    kept.sort(key=lambda item: -(dtype if item[1].is_floating_point() else item[1].dtype).itemsize)
    specs: list[TensorSpec] = []
    offset = 0
    for name, tensor in kept:
        target = dtype if tensor.is_floating_point() else tensor.dtype
        if target not in NAMES:
            raise ValueError(f"tensor {name}: {target} is not one of {', '.join(ITEM_SIZES)}")
        specs.append(TensorSpec(name=name, dtype=NAMES[target], shape=list(tensor.shape), offset=offset))
        offset += tensor.numel() * target.itemsize
    buffer = torch.empty(offset, dtype=torch.uint8)
    for (_, tensor), spec in zip(kept, specs, strict=True):
        _view(buffer, spec).copy_(tensor.detach())
    return buffer.numpy().data, specs


def unpack(data: bytearray | memoryview, tensors: list[TensorSpec]) -> dict[str, torch.Tensor]:
    """The tensors inside `data`, as views without a copy: `data` must be writable, outlive them and stay as it is.

    Raises `InvalidMessage`, naming the tensor, unless names are unique, dtypes known and the layout covers the buffer
    back to back.
    """
    end = 0
    names: set[str] = set()
    for spec in tensors:
        if spec.dtype not in DTYPES:
            raise InvalidMessage(f"tensor {spec.name}: dtype {spec.dtype!r} is not one of {', '.join(ITEM_SIZES)}")
        if any(size < 0 for size in spec.shape):
            raise InvalidMessage(f"tensor {spec.name}: shape {spec.shape} has a negative dimension")
        if spec.name in names:
            raise InvalidMessage(f"tensor {spec.name}: occurs twice")
        if spec.offset != end:
            raise InvalidMessage(f"tensor {spec.name}: starts at byte {spec.offset}, the one before it ends at {end}")
        if spec.offset % ITEM_SIZES[spec.dtype]:
            raise InvalidMessage(f"tensor {spec.name}: byte {spec.offset} is not aligned for {spec.dtype}")
        names.add(spec.name)
        end += math.prod(spec.shape) * ITEM_SIZES[spec.dtype]
    if end != len(data):
        raise InvalidMessage(f"weights: the tensors end at byte {end}, the data has {len(data)} bytes")
    if not end:
        return {}
    buffer = torch.frombuffer(data, dtype=torch.uint8)
    return {spec.name: _view(buffer, spec) for spec in tensors}


def _view(buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    size = math.prod(spec.shape) * ITEM_SIZES[spec.dtype]
    return buffer[spec.offset : spec.offset + size].view(DTYPES[spec.dtype]).view(spec.shape)


def _untied(state: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    seen: set[tuple[object, ...]] = set()
    kept = []
    for name, tensor in state.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        kept.append((name, tensor))
    return kept
