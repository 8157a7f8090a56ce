"""Every tensor comes back bit for bit from the form it is stored in, and no form unfolds without bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantc.errors import LoadError
from quantc.ir.types import DTYPE_NAMES
from quantc.store import stored_tensors as forms
from quantc.store.stored_tensors import AnyRecord, Filled, Narrow, Packed, Plain, TensorReader, TensorWriter
from tests.support.stored_tensors import again, all_again, assert_same, bits, random_bits, written

DTYPES = sorted(DTYPE_NAMES, key=str)
SHAPES = [(), (1,), (0,), (7,), (2, 0, 3), (4, 1, 3, 3), (2, 3, 4, 5), (1, 1, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, shape, seed=1)
    back = again(tensor)
    assert_same(back, tensor)
    assert back.stride() == tensor.stride()
    same = random_bits(dtype, (1,), seed=2).expand(math.prod(shape)).reshape(shape)
    assert_same(again(same), same)


@settings(max_examples=200)
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


def fewest_bytes(values: list[int], own: int) -> int:
    """Of so many integers, the smallest of: their own width, a narrower type, whole fields of fewer bits."""
    signed = max(max(values).bit_length(), (~min(values)).bit_length()) + 1
    unsigned = max(values).bit_length() if min(values) >= 0 else 99
    if signed < 8:
        fields = [field for field in (4, 2, 1) if max(signed, 2) & field]
        return sum(math.ceil(len(values) * field / 8) for field in fields)
    width = 8 if min(signed, unsigned) <= 8 else 1 << (signed - 1).bit_length()
    return min(width, own) // 8 * len(values)


@settings(max_examples=300)
@given(
    values=INTEGERS,
    scale=st.sampled_from([1, 2**31, 2**32, 2**47, 2**48, 2**55, 2**56, 2**58, 2**60, 2**61, 2**62]),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8]),
    lift=st.sampled_from([0, 128]),
)
def test_integers_take_no_more_than_they_need(values: list[int], scale: int, dtype: torch.dtype, lift: int) -> None:
    limits = torch.iinfo(dtype)
    numbers = [min(max(value // scale + lift, limits.min), limits.max) for value in values]
    tensor = torch.tensor(numbers, dtype=dtype)
    record, stored = written(tensor)
    assert_same(again(tensor), tensor)
    if isinstance(record, Filled):
        assert len(set(numbers)) == 1
        return
    assert stored is not None
    assert stored.nbytes == fewest_bytes(numbers, limits.bits)


@pytest.mark.parametrize(
    ("low", "high", "bits"), [(-2, 1, 2), (-4, 3, 3), (-8, 7, 4), (-9, 7, 5), (-8, 8, 5), (-31, 31, 6), (-64, 0, 7)]
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_of_few_bits_are_packed(low: int, high: int, bits: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(low, high + 1, dtype=dtype).repeat(24).reshape(8, -1)
    record, stored = written(tensor)
    assert record.form == "packed"
    assert stored is not None
    assert stored.numel() == math.ceil(tensor.numel() * bits / 8)
    assert_same(again(tensor), tensor)


# -- floats that are exact in fewer bits -----------------------------------------------------------------------

SHORT = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_floats_that_are_exact_in_two_bytes_take_two(dtype: torch.dtype, wide: torch.dtype) -> None:
    """Every bit pattern of the short type in one tensor; NaNs are another matter."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    finite = every[torch.isfinite(every)].to(wide)
    record, stored = written(finite)
    assert record.form == "narrow"
    assert stored is not None
    assert stored.dtype == dtype
    assert_same(again(finite), finite)
    assert_same(again(every.to(wide)), every.to(wide))


@pytest.mark.parametrize("place", [0, 3, 999])
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_one_float_that_is_not_exact_is_enough(place: int, dtype: torch.dtype) -> None:
    tensor = torch.rand(1000).to(dtype).float()
    tensor[place] = torch.nextafter(tensor[place], torch.tensor(9.0))
    record, stored = written(tensor)
    assert record.form == "plain"
    assert stored is not None
    assert stored.dtype == torch.float32
    assert_same(again(tensor), tensor)


@settings(max_examples=200)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 600), masked=st.integers(0, 23), wide=st.booleans())
def test_floats_of_any_bits_come_back(seed: int, count: int, masked: int, wide: bool) -> None:
    """The lower bits cleared: some tensors are exact in fewer bytes, some are not, some are NaN in places."""
    if wide:
        tensor = (random_bits(torch.int64, (count,), seed) & -(1 << (masked * 2))).view(torch.float64)
    else:
        tensor = (random_bits(torch.int32, (count,), seed) & -(1 << masked)).view(torch.float32)
    assert_same(again(tensor), tensor)


def test_zero_and_minus_zero_are_not_the_same() -> None:
    tensor = torch.tensor([0.0, -0.0])
    assert isinstance(written(tensor)[0], Narrow)
    assert bits(again(tensor)) == bits(tensor)
    assert isinstance(written(torch.full((3,), -0.0))[0], Filled)


def test_tensors_that_share_memory_are_stored_apart() -> None:
    base = torch.randn(6)
    writer = TensorWriter()
    for index, part in enumerate((base, base, base[:3], base[3:])):
        writer.add(str(index), part)
    assert list(writer.stored) == ["0", "2", "3"]
    assert len({tensor.untyped_storage().data_ptr() for tensor in writer.stored.values()}) == 3


# -- bounds ----------------------------------------------------------------------------------------------------


def test_large_tensors_are_filled() -> None:
    """Zero points of a large layer: 4 MiB of zeros, and no byte in the file."""
    zeros = torch.zeros(4096, 128, dtype=torch.int64)
    record, stored = written(zeros)
    assert isinstance(record, Filled)
    assert stored is None
    assert_same(again(zeros), zeros)


def test_all_tensors_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written keeps it, so what is written can be read; a file that does not is refused."""
    monkeypatch.setattr(forms, "MAX_UNFOLDED", 100)
    writer, back = all_again({str(index): torch.zeros(10) for index in range(3)})
    assert [record.form for record in writer.records.values()] == ["filled", "filled", "narrow"]
    assert all(bits(tensor) == bytes(40) for tensor in back.values())
    reader = TensorReader({str(index): Filled(type="f32[10]", value="00" * 4) for index in range(3)}, {})
    reader.take("0")
    reader.take("1")
    with pytest.raises(LoadError, match="too large"):
        reader.take("2")


def test_a_content_is_stored_again_where_too_much_is_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MAX_UNFOLDED", 0)
    one = torch.rand(100)
    writer, back = all_again({str(index): one for index in range(30)})
    assert list(writer.stored) == ["0", "8", "16", "24"]
    assert all(bits(tensor) == bits(one) for tensor in back.values())


@settings(max_examples=100)
@given(data=st.data(), room=st.sampled_from([0, 7, 100, 5000]))
def test_whatever_is_written_keeps_the_bound(data: st.DataObject, room: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "MAX_UNFOLDED", room)
        tensors = {
            str(index): random_bits(
                data.draw(st.sampled_from([torch.int8, torch.int64, torch.float32])),
                (data.draw(st.integers(0, 90)),),
                data.draw(st.integers(0, 1)),
                high=data.draw(st.sampled_from([1, 2, 128])),
            )
            for index in range(data.draw(st.integers(1, 9)))
        }
        writer, back = all_again(tensors)
    for name, tensor in tensors.items():
        assert_same(back[name], tensor)
    stored = sum(tensor.nbytes for tensor in writer.stored.values())
    assert sum(tensor.nbytes for tensor in tensors.values()) <= room + 8 * stored


BAD: dict[str, tuple[AnyRecord, Tensor | None, str]] = {
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
    "packed float": (
        Packed(type="f32[4]", bits=4),
        torch.zeros(2, dtype=torch.uint8),
        "only signed integers are packed",
    ),
    "packed length": (Packed(type="i8[5]", bits=4), torch.zeros(2, dtype=torch.uint8), "3 bytes"),
    "packed kind": (Packed(type="i8[4]", bits=4), torch.zeros(2), "2 bytes"),
    "packed overflow": (
        Packed(type=f"i8[0,{2**70}]", bits=4),
        torch.zeros(0, dtype=torch.uint8),
        "no tensor is i8",
    ),
    "packed of no sign": (Packed(type="u8[4]", bits=4), torch.zeros(2, dtype=torch.uint8), "only signed integers"),
    "packed fields": (Packed(type="i8[5]", bits=6), torch.zeros(4, dtype=torch.uint8), "are 5 bytes"),
    "packed and wide": (Packed(type=f"i64[{10**12}]", bits=2), torch.zeros(2, dtype=torch.uint8), "too large"),
    "narrow float": (Narrow(type="i64[2]"), torch.zeros(2), "and torch.float32 [2] is stored"),
    "narrow that is as wide": (Narrow(type="f32[2]"), torch.zeros(2), "and torch.float32 [2] is stored"),
    "narrow that is wider": (Narrow(type="i16[2]"), torch.zeros(2, dtype=torch.int32), "torch.int32 [2] is stored"),
    "narrow of another kind": (Narrow(type="f32[2]"), torch.zeros(2, dtype=torch.int8), "torch.int8 [2] is stored"),
    "narrow shape": (Narrow(type="f32[3]"), torch.zeros(2, dtype=torch.bfloat16), "torch.bfloat16 [2] is stored"),
    "at nobody": (Plain(type="f32[2]", at="u"), torch.zeros(2), "at: no tensor 'u' is stored"),
    "at nothing": (Plain(type="f32[2]", at=""), torch.zeros(2), "at: no tensor '' is stored"),
    "at a record": (Narrow(type="f32[2]", at="t/t"), torch.zeros(2, dtype=torch.float16), "at: no tensor 't/t'"),
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
