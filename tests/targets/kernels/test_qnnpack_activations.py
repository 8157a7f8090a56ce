"""Functions of bytes as tables, looked up by translating bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantc.targets.kernels.kernel_table import NoKernelError
from quantc.targets.kernels.qnnpack_activations import ByteTranslation, ChannelLookup, lookup
from tests.support.kernel_calls import by_odd_strides_last, call_of, levels, lying_channels_last, strided

BYTES = (torch.uint8, torch.int8)
DTYPES = [(one, other) for one in BYTES for other in BYTES]


def table(dtype: torch.dtype, *leading: int) -> Tensor:
    """Entries that no other function of bytes has."""
    info, maker = torch.iinfo(dtype), torch.Generator().manual_seed(0)
    return torch.randint(info.min, info.max + 1, (*leading, 256), dtype=dtype, generator=maker)


@pytest.mark.parametrize(("x_dtype", "dtype"), DTYPES)
def test_every_byte_has_its_entry_and_the_least_has_the_first(x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    least = torch.iinfo(x_dtype).min
    x = torch.arange(least, least + 256).to(x_dtype)
    found = ByteTranslation(table(dtype), x_dtype)(x)
    assert found.dtype is dtype
    assert torch.equal(found, table(dtype))


@pytest.mark.parametrize("lay", [lying_channels_last, strided, by_odd_strides_last], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 1, 2), (2, 2, 3, 2, 2), (7,), ()], ids=str)
def test_bytes_may_lie_in_any_order(lay: Any, shape: tuple[int, ...]) -> None:
    x = levels(shape, torch.int8, "any", 0)
    expected = table(torch.uint8)[x.long() + 128]
    kernel = ByteTranslation(table(torch.uint8), torch.int8)
    laid = lay(x)
    before = laid.clone()
    found = kernel(laid)
    assert torch.equal(found, expected)
    assert found.is_contiguous()
    kernel.in_order = False
    assert torch.equal(kernel(laid), expected)
    assert torch.equal(laid, before)


def test_images_that_lie_channels_last_stay_so_where_nobody_asks() -> None:
    kernel = ByteTranslation(table(torch.uint8), torch.uint8)
    kernel.in_order = False
    x = levels((2, 3, 4, 5), torch.uint8, "any", 0).to(memory_format=torch.channels_last)
    assert kernel(x).stride() == x.stride()


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(("x_dtype", "dtype"), DTYPES)
def test_each_channel_has_a_table_of_its_own(axis: int, x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    x = levels((3, 4, 5), x_dtype, "any", 0)
    tables = table(dtype, x.shape[axis])
    place = x.long() - torch.iinfo(x_dtype).min
    channel = torch.arange(x.shape[axis]).reshape([-1 if dim == axis else 1 for dim in range(3)])
    for kernel_order in (True, False):
        kernel = ChannelLookup(tables, x_dtype, axis)
        kernel.in_order = kernel_order
        assert torch.equal(kernel(x), tables[channel, place])


@pytest.mark.parametrize(
    "kernel", [ByteTranslation(table(torch.int8), torch.uint8), ChannelLookup(table(torch.int8, 3), torch.uint8, 1)]
)
def test_nothing_is_nothing_of_the_other_dtype(kernel: ByteTranslation) -> None:
    found = kernel(torch.empty(2, 3, 0, dtype=torch.uint8))
    assert (found.shape, found.dtype) == ((2, 3, 0), torch.int8)


def test_results_are_memory_of_their_own() -> None:
    kernel = ByteTranslation(table(torch.uint8), torch.uint8)
    x = levels((4,), torch.uint8, "any", 0)
    first = kernel(x)
    kept = first.clone()
    kernel(x).zero_()
    first.add_(1)
    assert torch.equal(kernel(x), kept)


def test_the_maker_takes_tables_of_bytes_alone() -> None:
    x = levels((2, 3), torch.uint8, "any", 0)
    sketched, _ = call_of("lookup", x, table(torch.uint8).int(), 0)
    with pytest.raises(NoKernelError, match="for bytes"):
        lookup(sketched)
