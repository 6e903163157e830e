"""Policy weights as bytes: what goes in comes out, and bytes from the bus are never trusted."""

from __future__ import annotations

import pytest
import torch

from contracts.errors import InvalidMessage
from contracts.policies import TensorSpec
from infra.weights import pack, unpack


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(7, 5, generator=generator)
    return {
        "embedding": embedding,
        "counter": torch.tensor([3, 2**40]),
        "norm": torch.randn(3, generator=generator),
        "head": embedding,
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(1.5),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_what_goes_in_comes_out_in_the_asked_precision(dtype: torch.dtype) -> None:
    original = state()
    data, specs = pack(original, dtype)
    restored = unpack(data, specs)
    for name in set(original) - {"head"}:
        expected = original[name].to(dtype) if original[name].is_floating_point() else original[name]
        assert restored[name].dtype == expected.dtype
        assert torch.equal(restored[name], expected), name


def test_tied_tensors_are_written_once() -> None:
    _, specs = pack(state())
    assert "embedding" in {spec.name for spec in specs}
    assert "head" not in {spec.name for spec in specs}


def test_two_views_of_one_memory_are_two_tensors() -> None:
    base = torch.arange(6.0)
    data, specs = pack({"whole": base, "half": base[:3], "folded": base.view(2, 3)}, torch.float32)
    assert [spec.shape for spec in specs] == [[6], [3], [2, 3]]
    assert torch.equal(unpack(data, specs)["half"], base[:3])


def test_the_layout_is_back_to_back() -> None:
    data, specs = pack(state())
    end = 0
    for spec in specs:
        assert spec.offset == end
        end += unpack(data, specs)[spec.name].nbytes
    assert end == len(data)


def test_unpacking_copies_nothing() -> None:
    data, specs = pack({"a": torch.zeros(4)}, torch.float32)
    tensor = unpack(data, specs)["a"]
    tensor[0] = 1.0
    assert bytes(data[:4]) == torch.tensor([1.0]).numpy().tobytes()


def test_gradients_and_the_original_stay_untouched() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    data, specs = pack({"p": parameter}, torch.float32)
    unpack(data, specs)["p"][0] = 5.0
    assert parameter[0] == 1.0 and parameter.grad is None


def test_a_dtype_off_the_wire_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor flags.*bool"):
        pack({"flags": torch.zeros(2, dtype=torch.bool)})


def spec(name: str = "a", dtype: str = "float32", shape: tuple[int, ...] = (2,), offset: int = 0) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=list(shape), offset=offset)


@pytest.mark.parametrize(
    ("size", "specs", "complaint"),
    [
        (8, [spec(dtype="float8")], "dtype 'float8'"),
        (8, [spec(dtype="complex64")], "dtype 'complex64'"),
        (8, [spec(shape=(-1, -2))], "negative dimension"),
        (8, [spec(offset=4)], "starts at byte 4"),
        (8, [spec(offset=-8)], "starts at byte -8"),
        (16, [spec(), spec(offset=8)], "occurs twice"),
        (16, [spec(), spec("b", offset=4)], "starts at byte 4"),
        (9, [spec("a", "uint8", (1,)), spec("b", offset=1)], "not aligned"),
        (7, [spec()], "end at byte 8, the data has 7 bytes"),
        (9, [spec()], "end at byte 8, the data has 9 bytes"),
        (8, [spec(shape=(1 << 40, 1 << 40))], "the data has 8 bytes"),
        (4, [], "the data has 4 bytes"),
    ],
)
def test_a_layout_that_does_not_fit_is_named(size: int, specs: list[TensorSpec], complaint: str) -> None:
    with pytest.raises(InvalidMessage, match=complaint):
        unpack(bytearray(size), specs)


def test_no_tensors_in_no_bytes() -> None:
    assert unpack(bytearray(), []) == {}
