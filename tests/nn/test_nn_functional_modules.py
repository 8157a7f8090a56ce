"""Ops as modules, beside torch.ao's; and modules in other number formats than the usual ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as ao_quantized
import torch.ao.nn.quantized.reference as ao_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quantc.errors import QuantcError, SpecError
from quantc.nn import observers, quantize_per_tensor, quantized
from quantc.nn import qconfig as qconfigs
from quantc.nn.quantized import dynamic
from tests.support.nn_cases import both, engine, steps_apart


def _pair() -> tuple[Any, Any]:
    ours, theirs = quantized.QFunctional(), ao_quantized.QFunctional()
    ours.scale, ours.zero_point = theirs.scale, theirs.zero_point = 0.06, 101
    return ours, theirs


@pytest.mark.parametrize("name", ["add", "mul", "add_relu", "cat", "matmul"])
@pytest.mark.parametrize("engine_name", ["x86", "qnnpack"])
def test_two_tensors(name: str, engine_name: str) -> None:
    with engine(engine_name):
        torch.manual_seed(0)
        ours, theirs = _pair()
        (x, their_x), (y, their_y) = both(torch.randn(6, 6)), both(torch.randn(6, 6), (0.05, 90))
        given_to: Any = ((x, y), (their_x, their_y))
        mine, other = (([*pair],) if name == "cat" else pair for pair in given_to)
        assert steps_apart(getattr(ours, name)(*mine), getattr(theirs, name)(*other)) <= 1


NUMBERS = st.one_of(st.just(0.0), st.floats(1e-6, 40), st.floats(-40, -1e-6))
"""Products with smaller ones have scales that float32 does not hold."""


@settings(max_examples=80)
@given(number=NUMBERS, zero=st.integers(0, 255), name=st.sampled_from(["add_scalar", "mul_scalar"]))
def test_a_number(number: float, zero: int, name: str) -> None:
    with engine("x86"):
        ours, theirs = _pair()
        x, their_x = both(torch.randn(50, generator=torch.Generator().manual_seed(zero)), (0.04, zero))
        found, wanted = getattr(ours, name)(x, number), getattr(theirs, name)(their_x, number)
        step = max(found.q_scale(), wanted.q_scale())
        assert float((found.dequantize() - wanted.dequantize()).abs().max()) <= step * 1.001
        exact = x.dequantize() + number if name == "add_scalar" else x.dequantize() * number
        assert float((found.dequantize() - exact).abs().max()) <= step * 1.001


def test_broadcast_and_signed() -> None:
    ours, _ = _pair()
    x, y = torch.randn(3, 4), torch.randn(4)
    for dtype in (torch.quint8, torch.qint8):
        ours.zero_point = 101 if dtype is torch.quint8 else -20
        grid = (0.05, 100 if dtype is torch.quint8 else 3)
        a, b = quantize_per_tensor(x, *grid, dtype), quantize_per_tensor(y, *grid, dtype)
        for name, function in (("add", torch.add), ("mul", torch.mul)):
            wanted = quantize_per_tensor(function(a.dequantize(), b.dequantize()), ours.scale, ours.zero_point, dtype)
            assert steps_apart(getattr(ours, name)(a, b), wanted) == 0
        assert float(ours.add_relu(a, b).dequantize().min()) >= 0


def test_float_functional_shows_results_to_its_observer() -> None:
    module = quantized.FloatFunctional()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for name, args in (
        ("add", (x, y)),
        ("mul", (x, y)),
        ("cat", ([x, y],)),
        ("add_relu", (x, y)),
        ("matmul", (x, y.t())),
    ):
        observer = observers.MinMaxObserver()
        module.activation_post_process = observer
        made = getattr(module, name)(*args)
        assert observer.max_val == made.max(), name
    assert torch.equal(module.add_scalar(x, 2.0), x + 2)
    assert torch.equal(module.mul_scalar(x, 2.0), x * 2)
    converted = quantized.QFunctional.from_float(module)
    assert converted.scale == float(observer.calculate_qparams()[0])
    with pytest.raises(QuantcError, match="not called itself"):
        module(x)
    with pytest.raises(QuantcError, match="add_relu"):
        converted(x)


def _converted(module: Any, kind: Any, x: torch.Tensor, dtype: torch.dtype = torch.quint8) -> Any:
    weight = observers.MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    activation = observers.MinMaxObserver.with_args(dtype=dtype)
    module.qconfig = qconfigs.QConfig(activation=activation, weight=weight)
    module.activation_post_process = module.qconfig.activation()
    module.activation_post_process(module(x))
    return kind.from_float(module)


@pytest.mark.parametrize("engine_name", ["x86", "qnnpack"])
@pytest.mark.parametrize("name", ["Conv2d", "Linear"])
def test_signed_activations(name: str, engine_name: str) -> None:
    """Shifting levels and zero points by 128 changes no number."""
    with engine(engine_name):
        torch.manual_seed(0)
        module = nn.Conv2d(4, 6, 3) if name == "Conv2d" else nn.Linear(8, 6)
        x = torch.randn(2, 4, 8, 8)
        signed = _converted(module, getattr(quantized, name), x, torch.qint8)
        unsigned = _converted(module, getattr(quantized, name), x)
        found = signed(quantize_per_tensor(x, 0.04, -11, torch.int8))
        wanted = unsigned(quantize_per_tensor(x, 0.04, 117, torch.uint8))
        assert found.dtype is torch.int8
        assert torch.equal(found.dequantize(), wanted.dequantize())
        again = getattr(quantized, name)(*((4, 6, 3) if name == "Conv2d" else (8, 6)))
        again.load_state_dict(signed.state_dict())
        assert again(quantize_per_tensor(x, 0.04, -11, torch.int8)).equals(found)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [2, "same"])
def test_padding(mode: Any, padding: Any) -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(3, 5, (3, 4), padding=padding, padding_mode=mode)
    x = quantize_per_tensor(torch.randn(2, 3, 9, 9), 0.03, 120)
    made = _converted(module, quantized.Conv2d, x.dequantize())
    module.weight.data.copy_(made.weight().dequantize())
    wanted = module(x.dequantize())
    assert made(x).shape == wanted.shape
    assert float((made(x).dequantize() - wanted).abs().max()) <= made.scale * 1.01


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


def test_a_channel_of_zeros_with_a_large_bias() -> None:
    """Its scale is the smallest there is, in steps of which the bias would overflow the accumulator."""
    torch.manual_seed(0)
    module = nn.Linear(8, 3)
    module.weight.data[1] = 0
    module.bias.data[1] = 500.0
    x = torch.randn(4, 8)
    module.qconfig = qconfigs.get_default_qconfig("x86")  # type: ignore[assignment]
    observer = observers.MinMaxObserver()
    observer(module(x))
    module.activation_post_process = observer
    made = quantized.Linear.from_float(module)
    found = made(quantize_per_tensor(x, 0.0005, 117)).dequantize()
    assert found[:, 1].tolist() == pytest.approx([500.0] * 4, abs=made.scale)


def test_what_a_module_is_not_made_of() -> None:
    module: Any = nn.Conv2d(1, 1, 1)
    with pytest.raises(SpecError, match="no qconfig"):
        quantized.Conv2d.from_float(module)
    with pytest.raises(SpecError, match="made of Linear, not of Conv2d"):
        quantized.Linear.from_float(module)
    module.qconfig = qconfigs.get_default_qconfig("x86")
    with pytest.raises(QuantcError, match="not observed"):
        quantized.Conv2d.from_float(module)
    per_channel = nn.ConvTranspose2d(2, 2, 1)
    per_channel.qconfig = qconfigs.get_default_qconfig("x86")  # type: ignore[assignment]
    per_channel.activation_post_process = observers.MinMaxObserver()
    with pytest.raises(SpecError, match="ch_axis=1"):
        quantized.ConvTranspose2d.from_float(per_channel)


def test_engines_without_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = quantize_per_tensor(torch.randn(3, 4), 0.1, 5)
    assert quantized.Linear(4, 2)(x).shape == (3, 2)
    monkeypatch.setattr("quantc.nn.kernel_ops.TARGETS", {})
    with pytest.raises(QuantcError, match="no kernels for the engine"):
        quantized.Linear(4, 2)(x)


@pytest.mark.parametrize("name", ["Conv2d", "Linear"])
def test_from_reference(name: str) -> None:
    """torch.ao's reference modules say how a float weight is to be quantized."""
    torch.manual_seed(0)
    module = nn.Conv2d(4, 6, 3) if name == "Conv2d" else nn.Linear(8, 6)
    how = {"qscheme": torch.per_tensor_affine, "dtype": torch.qint8, "scale": 0.01, "zero_point": 0}
    how |= {"is_decomposed": False, "axis": 0}
    reference: Any = getattr(ao_reference, name).from_float(module, how)
    with engine("fbgemm"):
        ours = getattr(quantized, name).from_reference(reference, 0.05, 120)
        theirs = getattr(ao_quantized, name).from_reference(reference, 0.05, 120)
        ours_x, theirs_x = both(torch.randn(2, 4, 8, 8))
        assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1
        ours.set_weight_bias(*theirs._weight_bias())
        assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1
        dynamic_theirs = dynamic.Linear.from_reference(reference) if name == "Linear" else None
        if dynamic_theirs is not None:
            assert torch.equal(dynamic_theirs.weight().int_repr(), theirs.weight().int_repr())


@pytest.mark.parametrize("engine_name", ["x86", "qnnpack"])
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_with_scales_by_channel(engine_name: str, groups: int) -> None:
    """torch.ao has them on no engine of x86: held to float."""
    with engine(engine_name):
        torch.manual_seed(0)
        module: Any = nn.ConvTranspose2d(4, 6, 3, 2, groups=groups)
        weight = observers.PerChannelMinMaxObserver.with_args(
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=1
        )
        module.qconfig = qconfigs.QConfig(activation=observers.MinMaxObserver, weight=weight)
        x = quantize_per_tensor(torch.randn(2, 4, 7, 7), 0.03, 120)
        observer = observers.MinMaxObserver()
        observer(module(x.dequantize()))
        module.activation_post_process = observer
        made = quantized.ConvTranspose2d.from_float(module)
        module.weight.data.copy_(made.weight().dequantize())
        wanted = module(x.dequantize())
        assert float((made(x).dequantize() - wanted).abs().max()) <= made.scale * 1.01


def test_formats_stay() -> None:
    made = quantized.Linear(4, 2)
    before = made.state_dict()
    for change in (made.half, made.double, made.float):
        change()
        after = made.state_dict()
        assert all(after[name].dtype is tensor.dtype for name, tensor in before.items())


def test_a_bias_that_is_missing_is_missed() -> None:
    for kind in (quantized.Linear, dynamic.Linear):
        made = kind(4, 2)
        with pytest.raises(RuntimeError, match=r"Missing key\(s\).*bias"):
            made.load_state_dict(kind(4, 2, bias_=False).state_dict())
        with pytest.raises(RuntimeError, match="has the shape"):
            made.load_state_dict(kind(5, 2).state_dict())
    bare = {name: value for name, value in dynamic.Linear(4, 2).state_dict().items() if "scale" not in name}
    with pytest.raises(RuntimeError, match="no weight_scale"):
        dynamic.Linear(4, 2).load_state_dict(bare)
    with pytest.raises(RuntimeError, match="Unexpected"):
        quantized.Linear(4, 2).load_state_dict({**quantized.Linear(4, 2).state_dict(), "other": torch.zeros(1)})
