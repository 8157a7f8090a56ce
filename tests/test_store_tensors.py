"""Every tensor comes back bit for bit from the form it is stored in, and no form unfolds without bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantc.errors import LoadError
from quantc.store import tensors as forms
from quantc.store.tensors import Filled, Narrow, Packed, Plain, TensorReader, TensorWriter
from quantc.types import DTYPE_NAMES

DTYPES = sorted(DTYPE_NAMES, key=str)
SHAPES = [(), (1,), (0,), (7,), (2, 0, 3), (4, 1, 3, 3), (2, 3, 4, 5), (1, 1, 1)]


def written(tensor: Tensor) -> tuple[Any, Tensor | None]:
    writer = TensorWriter()
    writer.add("t", tensor)
    return writer.records["t"], writer.stored.get("t")


def again(tensor: Tensor) -> Tensor:
    record, stored = written(tensor)
    reader = TensorReader({"t": record}, {} if stored is None else {"t": stored})
    back = reader.take("t")
    reader.finish()
    return back


def bits(tensor: Tensor) -> bytes:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(back: Tensor, tensor: Tensor) -> None:
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert bits(back) == bits(tensor)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int, low: int = 0, high: int = 256) -> Tensor:
    """Any bits at all: NaNs of every kind, infinities, both zeros."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    if dtype is torch.bool:
        return (raw > 127).reshape(shape)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, shape, seed=1)
    back = again(tensor)
    assert_same(back, tensor)
    assert back.stride() == tensor.stride()
    same = random_bits(dtype, (1,), seed=2).expand(math.prod(shape)).reshape(shape)
    assert_same(again(same), same)


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=5).map(tuple),
    dtype=st.sampled_from([torch.int8, torch.int64, torch.float32]),
    top=st.integers(1, 256),
    data=st.data(),
)
def test_layouts_and_small_values_come_back(
    shape: tuple[int, ...], dtype: torch.dtype, top: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    tensor = random_bits(dtype, shape, seed=top, high=top).permute(order)
    back = again(tensor)
    assert_same(back, tensor)
    assert back.stride() == tensor.stride() or not tensor.numel() or _is_ambiguous(tensor)


def _is_ambiguous(tensor: Tensor) -> bool:
    """Dimensions of size 1 may have any stride, and one order in memory does not tell which."""
    return 1 in tensor.shape


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (8, 1, 3, 3), (8, 4, 1, 1), (1, 4, 3, 3)], ids=str)
def test_channels_last_is_kept_even_where_it_hardly_shows(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(memory_format=torch.channels_last)
    assert again(tensor).stride() == tensor.stride()


def test_views_come_back_as_tensors_of_their_own() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    for view in (
        base[1:3],
        base[:, ::2],
        base.expand(3, 4, 6),
        base.diagonal(),
        torch.view_as_complex(base.reshape(-1, 2)).conj(),
    ):
        assert_same(again(view), view.resolve_conj())


INTEGERS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=9)


@settings(max_examples=200, deadline=None)
@given(values=INTEGERS, scale=st.sampled_from([1, 2**8, 2**16, 2**32, 2**48, 2**62]))
def test_int64_takes_no_more_than_it_needs(values: list[int], scale: int) -> None:
    tensor = torch.tensor([value // scale for value in values])
    record, stored = written(tensor)
    assert_same(again(tensor), tensor)
    if isinstance(record, Filled):
        assert len(set(tensor.tolist())) == 1
        return
    assert stored is not None
    needed = max(value.bit_length() for value in (int(tensor.max()), ~int(tensor.min()))) + 1
    assert stored.element_size() * 8 == max(8, 1 << (needed - 1).bit_length())


@pytest.mark.parametrize(("low", "high", "per_byte"), [(-2, 1, 4), (-8, 7, 2), (-9, 7, 1), (-8, 8, 1)])
def test_int8_is_packed_where_its_values_fit(low: int, high: int, per_byte: int) -> None:
    tensor = torch.arange(low, high + 1, dtype=torch.int8).repeat(24).reshape(8, -1)
    _, stored = written(tensor)
    assert stored is not None
    assert stored.numel() == tensor.numel() // per_byte
    assert_same(again(tensor), tensor)


def test_zero_and_minus_zero_are_not_the_same() -> None:
    tensor = torch.tensor([0.0, -0.0])
    assert isinstance(written(tensor)[0], Plain)
    assert bits(again(tensor)) == bits(tensor)
    assert isinstance(written(torch.full((3,), -0.0))[0], Filled)


def test_tensors_that_share_memory_are_stored_apart() -> None:
    base = torch.randn(6)
    writer = TensorWriter()
    for index, part in enumerate((base, base, base[:3], base[3:])):
        writer.add(str(index), part)
    assert len({tensor.untyped_storage().data_ptr() for tensor in writer.stored.values()}) == 4


# -- bounds ----------------------------------------------------------------------------------------------------


def test_large_tensors_are_not_filled() -> None:
    assert isinstance(written(torch.zeros(forms.LARGEST_FILLED))[0], Filled)
    assert isinstance(written(torch.zeros(forms.LARGEST_FILLED + 1))[0], Plain)


def test_all_filled_tensors_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written keeps it, so what is written can be read; a file that does not is refused."""
    monkeypatch.setattr(forms, "MOST_FILLED", 100)
    writer = TensorWriter()
    for index in range(3):
        writer.add(str(index), torch.zeros(10))
    assert [record.form for record in writer.records.values()] == ["filled", "filled", "plain"]
    reader = TensorReader(writer.records, writer.stored)
    assert all(bits(reader.take(str(index))) == bytes(40) for index in range(3))
    reader = TensorReader({str(index): Filled(type="f32[10]", value="00" * 4) for index in range(3)}, {})
    reader.take("0")
    reader.take("1")
    with pytest.raises(LoadError, match="too large"):
        reader.take("2")


BAD: dict[str, tuple[Plain | Filled | Packed | Narrow, Tensor | None, str]] = {
    "huge": (Filled(type="f32[1000000000000]", value="00" * 4), None, "too large"),
    "huger": (Filled(type=f"f32[{'9' * 5000}]", value="00" * 4), None, "not the type of a tensor"),
    "product": (Filled(type="f32[65536,65536,65536,65536]", value="00" * 4), None, "too large"),
    "negative": (Filled(type="f32[-1]", value="00" * 4), None, "not a count"),
    "two negatives": (Plain(type="f32[-2,-2]"), torch.zeros(4), "not a count"),
    "symbol": (Plain(type="f32[s0]"), torch.zeros(4), "not a count"),
    "tuple": (Plain(type="(f32[4], f32[4])"), torch.zeros(4), "not the type of a tensor"),
    "deep": (Plain(type="(" * 5000 + ")" * 5000), torch.zeros(4), "not the type of a tensor"),
    "dtype": (Plain(type="f33[4]"), torch.zeros(4), "not the type of a tensor"),
    "other dtype": (Plain(type="i32[4]"), torch.zeros(4), "and torch.float32 [4] is stored"),
    "other shape": (Plain(type="f32[2,2]"), torch.zeros(4), "and torch.float32 [4] is stored"),
    "many dimensions": (Plain(type=f"f32[{','.join(['1'] * 65)}]"), torch.zeros(1), "not the type of a tensor"),
    "empty filled": (Filled(type="f32[0]", value="00" * 4), None, "too small"),
    "value too short": (Filled(type="f32[4]", value="00"), None, "has 4 bytes"),
    "value no hex": (Filled(type="f32[4]", value="zz" * 4), None, "no tensor is f32[4]"),
    "missing": (Plain(type="f32[4]"), None, "the tensor is missing"),
    "order too short": (Plain(type="f32[2,2]", order=(0,)), torch.zeros(2, 2), "not an order of 2 dimensions"),
    "order twice": (Plain(type="f32[2,2]", order=(0, 0)), torch.zeros(2, 2), "not an order of 2 dimensions"),
    "packed float": (Packed(type="f32[4]", bits=4), torch.zeros(2, dtype=torch.uint8), "only int8 is packed"),
    "packed length": (Packed(type="i8[5]", bits=4), torch.zeros(2, dtype=torch.uint8), "3 bytes"),
    "packed kind": (Packed(type="i8[4]", bits=4), torch.zeros(2), "2 bytes"),
    "packed overflow": (
        Packed(type=f"i8[0,{2**70}]", bits=4),
        torch.zeros(0, dtype=torch.uint8),
        "no tensor is i8",
    ),
    "narrow float": (Narrow(type="i64[2]"), torch.zeros(2), "and torch.float32 [2] is stored"),
    "complex": (Plain(type="c128[2]"), torch.zeros(2, 3, dtype=torch.float64), "no tensor is c128"),
}


@pytest.mark.parametrize("case", BAD)
def test_records_that_make_no_sense_are_refused_by_name(case: str) -> None:
    record, stored, told = BAD[case]
    with pytest.raises(LoadError) as caught:
        TensorReader({"t": record}, {} if stored is None else {"t": stored}).take("t")
    assert told in str(caught.value)
    assert caught.value.where == "records.t"


def test_what_nobody_asks_for_is_refused() -> None:
    with pytest.raises(LoadError, match="'t' belongs to nothing"):
        TensorReader({"t": Plain(type="f32[1]")}, {}).finish()
    with pytest.raises(LoadError, match="'t' belongs to nothing"):
        TensorReader({}, {"t": torch.zeros(1)}).finish()
    with pytest.raises(LoadError, match="nothing is known of the tensor 't'"):
        TensorReader({}, {}).take("t")
