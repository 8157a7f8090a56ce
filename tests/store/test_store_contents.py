"""A content is stored once, whoever has it, and each tensor comes back in memory of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantc.store.stored_tensors import TensorReader, TensorWriter
from tests.support.stored_tensors import all_again, assert_same, bits, random_bits


def alike(dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.rand(4, 6).to(dtype)
    return torch.arange(24).reshape(4, 6).sub(12).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [2, 5])
def test_a_content_is_stored_once_and_comes_back_in_memory_of_its_own(dtype: torch.dtype, count: int) -> None:
    one = alike(dtype)
    tensors = {str(index): one if index % 2 else one.clone() for index in range(count)}
    writer, back = all_again(tensors)
    assert list(writer.stored) == ["0"]
    assert all(bits(tensor) == bits(one) for tensor in back.values())
    for name, tensor in back.items():
        tensor.zero_()
        others = [bits(other) for key, other in back.items() if key > name]
        assert others == [bits(one)] * (count - 1 - int(name))
    assert len({tensor.untyped_storage().data_ptr() for tensor in back.values()}) == count


def test_what_is_read_in_another_order_is_the_same() -> None:
    """What is stored is kept until the last that is made of it, whoever that is."""
    one = torch.rand(9)
    writer = TensorWriter()
    for name in "abc":
        writer.add(name, one)
    for order in ("abc", "cab", "bca"):
        reader = TensorReader(writer.records, writer.stored)
        back = [reader.take(name) for name in order]
        reader.finish()
        assert all(bits(tensor) == bits(one) for tensor in back)


def test_only_what_is_the_same_in_every_bit_is_shared() -> None:
    one = torch.rand(4, 6)
    other = one.clone()
    other[3, 5] = torch.nextafter(other[3, 5], torch.tensor(2.0))
    tensors = {
        "one": one,
        "other": other,
        "reshaped": one.reshape(6, 4),
        "as integers": one.view(torch.int32),
        "turned": one.t(),
        "channels last": one.reshape(1, 4, 2, 3).to(memory_format=torch.channels_last),
        "zero": torch.tensor([0.1, 0.0]),
        "minus zero": torch.tensor([0.1, -0.0]),
    }
    writer, back = all_again(tensors)
    for name, tensor in tensors.items():
        assert_same(back[name], tensor)
        assert back[name].stride() == tensor.stride()
    assert list(writer.stored) == list(tensors)


def test_integers_of_two_types_may_share_what_is_stored() -> None:
    """Zero points are int64 in the plan and int32 in a kernel: both pack to the same bytes."""
    wide = torch.randint(-8, 8, (3, 50))
    tensors = {"plan": wide, "graph": wide.to(torch.int32), "levels": wide.to(torch.int8)}
    writer, back = all_again(tensors)
    assert list(writer.stored) == ["plan"]
    for name, tensor in tensors.items():
        assert_same(back[name], tensor)


@settings(max_examples=100)
@given(data=st.data())
def test_any_collection_comes_back(data: st.DataObject) -> None:
    """Tensors drawn from few contents, types, shapes and orders, so that many are alike."""
    tensors: dict[str, Tensor] = {}
    for index in range(data.draw(st.integers(1, 12))):
        seed, top = data.draw(st.integers(0, 2)), data.draw(st.sampled_from([1, 3, 8, 256]))
        dtype = data.draw(st.sampled_from([torch.int8, torch.int64, torch.float32, torch.bool, torch.complex64]))
        shape = data.draw(st.sampled_from([(6,), (2, 3), (3, 2), (), (0, 2)]))
        order = data.draw(st.permutations(range(len(shape))))
        tensors[str(index)] = random_bits(dtype, shape, seed, high=top).permute(order)
    writer, back = all_again(tensors)
    for name, tensor in tensors.items():
        assert_same(back[name], tensor)
    kinds = {(tensor.dtype, tuple(tensor.shape), bits(tensor)) for tensor in writer.stored.values()}
    assert len(kinds) == len(writer.stored)
