"""What is no number is found: NaN, infinity, rows of masks, and scales."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quantc.errors import DataError
from quantc.support.finite_tensors import EMPTY_ROW, check_scales, count_not_finite, why_not_finite

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_one_element_is_enough(dtype: torch.dtype) -> None:
    for place in range(3):
        x = torch.ones(3, dtype=dtype)
        assert why_not_finite(x) is None
        x[place] = INF
        assert why_not_finite(x) == "infinity"
        x[(place + 1) % 3] = NAN
        assert why_not_finite(x) == "NaN"


def test_infinities_that_cancel_are_found() -> None:
    assert why_not_finite(torch.tensor([INF, -INF])) == "infinity"


def test_a_sum_that_overflows_is_no_fault() -> None:
    assert why_not_finite(torch.full((4,), 3e38)) is None
    assert why_not_finite(torch.full((4,), 60000.0, dtype=torch.float16)) is None


def test_formats_of_one_byte_are_looked_at() -> None:
    assert why_not_finite(torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn)) == "NaN"
    assert why_not_finite(torch.tensor([1.0]).to(torch.float8_e5m2)) is None


def test_what_holds_no_floats_or_no_numbers_is_fine() -> None:
    with FakeTensorMode():
        fake = torch.empty(2)
    for x in (torch.tensor([1]), torch.tensor([True]), torch.empty(2, device="meta"), fake, torch.empty(0)):
        assert why_not_finite(x) is None


ROWS: dict[str, tuple[list[list[float]], str | None]] = {
    "a mask": ([[0.0, -INF], [-INF, 0.0]], None),
    "an empty row": ([[0.0, 0.0], [-INF, -INF]], EMPTY_ROW),
    "upwards": ([[0.0, INF], [0.0, 0.0]], "infinity"),
    "NaN": ([[0.0, NAN], [-INF, -INF]], "NaN"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_mask_of_rows_may_hold_minus_infinity_beside_something_else(name: str) -> None:
    values, expected = ROWS[name]
    x = torch.tensor(values)
    assert why_not_finite(x, may_be_infinite=True, masks_rows=True) == expected
    softmax_fails = bool(x.softmax(-1).isnan().any())
    assert softmax_fails == (expected is not None), "what is refused is what softmax makes NaN of"
    assert why_not_finite(x, may_be_infinite=True) == ("NaN" if name == "NaN" else None)


def test_values_are_seen_through_vmap_and_not_while_tracing() -> None:
    seen: list[str | None] = []

    def look(x: Tensor) -> Tensor:
        seen.append(why_not_finite(x))
        return x

    torch.vmap(look)(torch.tensor([[1.0], [NAN]]))
    assert seen == ["NaN"]
    seen.clear()
    trace: Any = torch.jit.trace
    trace(look, torch.tensor([NAN]), check_trace=False)
    assert seen == [None]


def test_elements_that_are_no_numbers_are_counted() -> None:
    assert count_not_finite(torch.tensor([1.0, NAN, INF, -INF])) == 3
    assert count_not_finite(torch.ones(3, requires_grad=True)) == 0


def test_the_first_bad_scale_is_named_and_the_others_counted() -> None:
    with pytest.raises(DataError, match=r"linear is -1\.0, and 1 more") as caught:
        check_scales(torch.tensor([1.0, -1.0, 0.0]), "linear", "somewhere")
    assert caught.value.where == "somewhere"


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0, -1.0])
def test_a_scale_is_a_positive_number(scale: float) -> None:
    with pytest.raises(DataError, match="the scale of x is"):
        check_scales(torch.tensor([1.0, scale]), "x")
    check_scales(torch.tensor([1.0, 1e-40]), "x")
