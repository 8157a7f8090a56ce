"""Quantized activations: functions of one number, softmax, and ReLU with slopes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as ao_quantized
from torch import nn

from quantc.errors import QuantcError
from quantc.nn import QuantizedTensor, observers, quantize_per_tensor, quantized
from quantc.nn import qconfig as qconfigs
from tests.support.nn_cases import both, steps_apart


def test_prelu() -> None:
    torch.manual_seed(0)
    module: Any = nn.PReLU(4)
    module.weight.data = torch.tensor(
        [0.1, 0.6, 1.0, 0.3]
    )  # torch multiplies by 1 on the slopes' grid, which must hold it
    observer = observers.MinMaxObserver.with_args(dtype=torch.quint8)
    module.qconfig = qconfigs.QConfig(activation=observer, weight=observer)
    x = torch.randn(2, 4, 5)
    module.activation_post_process = observer()
    module.activation_post_process(module(x))
    ours = quantized.PReLU.from_float(module)
    theirs: Any = ao_quantized.PReLU.from_float(module)  # type: ignore[no-untyped-call]
    ours_x, theirs_x = both(x)
    assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1
    other = quantized.PReLU(num_parameters=4)
    other.load_state_dict(ours.state_dict())
    assert other(ours_x).equals(ours(ours_x))


CURVES: dict[str, Any] = {
    "Hardswish": nn.Hardswish,
    "ELU": lambda: nn.ELU(0.7),
    "CELU": lambda: nn.CELU(0.7),
    "LeakyReLU": lambda: nn.LeakyReLU(0.3),
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
}
EVERY_LEVEL = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("name", CURVES)
def test_a_function_of_one_number_is_torchs_of_every_level(name: str) -> None:
    source = CURVES[name]()
    made = getattr(quantized, name).from_reference(source, 0.03, 20)
    x = QuantizedTensor(EVERY_LEVEL, 0.03, 120)
    assert made(x).equals(quantize_per_tensor(source(x.dequantize()), 0.03, 20))
    assert made._FLOAT_MODULE is type(source)


def test_settings_are_taken_over_and_shown() -> None:
    made = quantized.LeakyReLU.from_reference(nn.LeakyReLU(0.3), 0.03, 20)
    assert made.negative_slope == 0.3
    assert repr(made) == "QuantizedLeakyReLU(negative_slope=0.3, scale=0.03, zero_point=20)"
    by_place = quantized.LeakyReLU(0.03, 20, 0.3)
    by_name = quantized.LeakyReLU(output_scale=0.03, output_zero_point=20, negative_slope=0.3)
    assert repr(by_place) == repr(by_name) == repr(made)


@pytest.mark.parametrize(("kind", "wanted"), [("ReLU", [0.0, 0.0, 2.0, 9.0]), ("ReLU6", [0.0, 0.0, 2.0, 6.0])])
@pytest.mark.parametrize("inplace", [False, True])
def test_relu_keeps_the_grid_and_writes_in_place_where_told(kind: str, wanted: list[float], inplace: bool) -> None:
    x = quantize_per_tensor(torch.tensor([-3.0, 0.0, 2.0, 9.0]), 0.5, 20)
    source: Any = getattr(nn, kind)(inplace=inplace)
    made = getattr(quantized, kind).from_float(source)(x)
    assert made.dequantize().tolist() == wanted
    assert made.grid == x.grid
    assert (made is x) == inplace


def test_softmax_is_along_its_axis() -> None:
    x = quantize_per_tensor(torch.randn(3, 5), 0.05, 120)
    for dim in (0, 1):
        made = quantized.Softmax.from_reference(nn.Softmax(dim), 1 / 256, 0)
        assert made(x).equals(quantize_per_tensor(torch.softmax(x.dequantize(), dim), 1 / 256, 0))
    assert "dim=1" in repr(made)


def test_slopes_by_channel_share_one_scale() -> None:
    """A qconfig with scales by channel has one for each slope, which would leave nothing of it."""
    source: Any = nn.PReLU(3)
    source.weight.data = torch.tensor([0.1, 0.5, 1.0])
    source.qconfig = qconfigs.get_default_qconfig("x86")
    made = quantized.PReLU.from_reference(source, 0.05, 100)
    assert made.weight.q_scale() == pytest.approx(1 / 255)
    torch.testing.assert_close(made.weight.dequantize(), source.weight.detach(), atol=0.002, rtol=0)


@pytest.mark.parametrize("kind", ["Sigmoid", "Softmax", "PReLU"])
def test_results_that_nobody_observed_are_refused(kind: str) -> None:
    source: Any = getattr(nn, kind)()
    source.qconfig = qconfigs.default_qconfig
    with pytest.raises(QuantcError, match=kind):
        getattr(quantized, kind).from_float(source)
