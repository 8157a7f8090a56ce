"""Whether a QConfig asks for a format that a BackendConfig has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantc.flows.fx.backend_config import BackendPatternConfig, DTypeConfig, DTypeWithConstraints
from quantc.flows.fx.custom_config import CustomConfigError, QuantType
from quantc.flows.fx.formats import check_dtypes, kinds_of, why_not_format
from quantc.nn.observers import FixedQParamsObserver, MinMaxObserver, PlaceholderObserver
from quantc.nn.qconfig import QConfig, default_dynamic_qconfig

SIGNED = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
STATIC = QConfig(MinMaxObserver, SIGNED)


def static(**constraints: Any) -> DTypeConfig:
    """A format for activations of quint8, held to some constraints."""
    wanted = DTypeWithConstraints(dtype=torch.quint8, **constraints)
    return DTypeConfig(input_dtype=wanted, output_dtype=wanted, weight_dtype=torch.qint8, bias_dtype=torch.float)


def dynamic() -> DTypeConfig:
    return DTypeConfig(
        input_dtype=torch.quint8,
        output_dtype=torch.float,
        weight_dtype=torch.qint8,
        bias_dtype=torch.float,
        is_dynamic=True,
    )


def reason(formats: tuple[DTypeConfig, ...], qconfig: Any, kind: QuantType = QuantType.STATIC) -> str:
    return why_not_format(formats, qconfig, kind, True) or ""


def test_any_format_will_do_where_none_is_said() -> None:
    assert why_not_format((), STATIC, QuantType.STATIC, True) is None


def test_one_format_that_fits_is_enough() -> None:
    assert reason((static(),), STATIC) == ""
    assert reason((dynamic(), static()), STATIC) == ""
    assert reason((dynamic(), static()), default_dynamic_qconfig, QuantType.DYNAMIC) == ""


def test_the_kind_of_scales_must_be_that_of_the_format() -> None:
    assert "as it runs" in reason((dynamic(),), STATIC)
    assert "beforehand" in reason((static(),), default_dynamic_qconfig, QuantType.DYNAMIC)


def test_bytes_with_and_without_q_are_one_format() -> None:
    assert reason((static(),), QConfig(MinMaxObserver.with_args(dtype=torch.uint8), SIGNED)) == ""
    signed = QConfig(MinMaxObserver.with_args(dtype=torch.int8), SIGNED)
    assert "activations are to be torch.quint8, not torch.int8" in reason((static(),), signed)


def test_weights_count_only_where_there_are_any() -> None:
    unsigned = QConfig(MinMaxObserver, MinMaxObserver)
    assert "weights are to be torch.qint8" in reason((static(),), unsigned)
    assert why_not_format((static(),), unsigned, QuantType.STATIC, False) is None


@pytest.mark.parametrize(("ends", "is_inside"), [((0, 127), True), ((0, 100), True), ((0, 128), False)])
def test_the_range_must_lie_inside(ends: tuple[int, int], is_inside: bool) -> None:
    low, high = ends
    qconfig = QConfig(MinMaxObserver.with_args(quant_min=low, quant_max=high), SIGNED)
    found = reason((static(quant_min_lower_bound=0, quant_max_upper_bound=127),), qconfig)
    assert found == "" if is_inside else "0..127, not 0..128" in found


def test_an_observer_without_a_range_is_refused_where_one_is_said() -> None:
    qconfig = QConfig(PlaceholderObserver.with_args(dtype=torch.quint8), SIGNED)
    bounded = static(quant_min_lower_bound=0, quant_max_upper_bound=255)
    assert "no range" in reason((bounded,), qconfig)


@pytest.mark.parametrize(("eps", "is_taken"), [(2.0**-12, True), (2.0**-11, True), (2.0**-13, False)])
def test_scales_must_not_be_able_to_be_smaller(eps: float, is_taken: bool) -> None:
    found = reason((static(scale_min_lower_bound=2.0**-12),), QConfig(MinMaxObserver.with_args(eps=eps), SIGNED))
    assert (found == "") is is_taken


@pytest.mark.parametrize(
    ("scale", "zero_point", "words"), [(1 / 256, 0, ""), (1 / 128, 0, "scale"), (1 / 256, 1, "zero_point")]
)
def test_fixed_scales_must_be_those(scale: float, zero_point: int, words: str) -> None:
    qconfig = QConfig(FixedQParamsObserver.with_args(scale=scale, zero_point=zero_point), SIGNED)
    found = reason((static(scale_exact_match=1 / 256, zero_point_exact_match=0),), qconfig)
    assert found == words if not words else f"the {words} of" in found
    exact = static(scale_exact_match=1 / 256, zero_point_exact_match=0)
    assert "not None" in reason((exact,), STATIC)


def test_kinds_of_formats() -> None:
    weights = DTypeConfig(input_dtype=torch.float, output_dtype=torch.float, weight_dtype=torch.quint4x2)
    half = DTypeConfig(input_dtype=torch.float, output_dtype=torch.float, weight_dtype=torch.float16)
    assert kinds_of((static(), dynamic(), weights, static())) == (
        QuantType.STATIC,
        QuantType.DYNAMIC,
        QuantType.WEIGHT_ONLY,
    )
    assert kinds_of((half,)) == ()


def test_formats_that_programs_do_not_have_are_refused_with_the_pattern() -> None:
    config = BackendPatternConfig(torch.nn.Linear)
    check_dtypes(config, (static(), dynamic()))
    with pytest.raises(CustomConfigError, match=r"output_dtype is torch\.bfloat16") as caught:
        check_dtypes(config, (DTypeConfig(input_dtype=torch.quint8, output_dtype=torch.bfloat16),))
    assert "Linear" in str(caught.value.where)
