"""Quantized modules with a weight: how they are made of float modules, and what they multiply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as ao_quantized
import torch.ao.nn.quantized.reference as ao_reference
from torch import nn
from torch.nn import functional

from quantc.errors import QuantcError, SpecError
from quantc.nn import intrinsic, observers, quantize_per_tensor, quantized
from quantc.nn import qconfig as qconfigs
from quantc.nn.intrinsic import quantized as intrinsic_quantized
from quantc.nn.quantized import dynamic
from quantc.nn.weighted_module import fold_batch_norm, has_relu
from tests.support.nn_cases import CASES, both, converted, engine, steps_apart


@pytest.mark.parametrize("engine_name", ["x86", "qnnpack"])
@pytest.mark.parametrize("name", ["Conv2d", "Linear"])
def test_signed_activations(name: str, engine_name: str) -> None:
    """Shifting levels and zero points by 128 changes no number."""
    with engine(engine_name):
        torch.manual_seed(0)
        module = nn.Conv2d(4, 6, 3) if name == "Conv2d" else nn.Linear(8, 6)
        x = torch.randn(2, 4, 8, 8)
        signed = converted(module, getattr(quantized, name), x, torch.qint8)
        unsigned = converted(module, getattr(quantized, name), x)
        found = signed(quantize_per_tensor(x, 0.04, -11, torch.int8))
        wanted = unsigned(quantize_per_tensor(x, 0.04, 117, torch.uint8))
        assert found.dtype is torch.int8
        assert torch.equal(found.dequantize(), wanted.dequantize())
        again = getattr(quantized, name)(*((4, 6, 3) if name == "Conv2d" else (8, 6)))
        again.load_state_dict(signed.state_dict())
        assert again(quantize_per_tensor(x, 0.04, -11, torch.int8)).equals(found)


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


@pytest.mark.parametrize("name", ["Conv2d", "Linear"])
@pytest.mark.parametrize("scheme", [torch.per_tensor_affine, torch.per_channel_affine])
def test_weights_with_zero_points(name: str, scheme: torch.qscheme) -> None:
    """Where the engine has no kernel for them the integer form is run as it is written."""
    kind = observers.MinMaxObserver if scheme is torch.per_tensor_affine else observers.PerChannelMinMaxObserver
    weight = kind.with_args(dtype=torch.qint8, qscheme=scheme)
    module: Any = nn.Conv2d(4, 6, 3) if name == "Conv2d" else nn.Linear(8, 6)
    module.weight.data += 0.1
    module.qconfig = qconfigs.QConfig(activation=observers.MinMaxObserver, weight=weight)
    x = torch.randn(2, 4, 8, 8)
    observer = observers.MinMaxObserver()
    observer(module(x))
    module.activation_post_process = observer
    with engine("fbgemm"):
        ours, theirs = getattr(quantized, name).from_float(module), getattr(ao_quantized, name).from_float(module)
        assert bool((ours.tensor("weight_zero_point") != 0).any())
        ours_x, theirs_x = both(x)
        assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1


def test_a_layer_that_reads_several_grids() -> None:
    """Each is packed for once; of many the oldest are forgotten, and made again."""
    case = next(case for case in CASES if case.name == "Linear")
    x = torch.randn(case.shape)
    ours, theirs = case.pair(x)
    for scale in (0.03, 0.04, 0.05, 0.06, 0.07, 0.03):
        ours_x, theirs_x = both(x, (scale, 120))
        assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1


@pytest.mark.parametrize("kind", ["Linear", "Conv2d", "ConvTranspose2d"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_folded_norm_computes_what_the_layer_and_the_norm_do(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    layer: Any = nn.Linear(3, 4, bias) if kind == "Linear" else getattr(nn, kind)(3, 4, 2, bias=bias)
    norm: Any = (nn.BatchNorm1d if kind == "Linear" else nn.BatchNorm2d)(4).eval()
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)
    x = torch.randn(2, 3) if kind == "Linear" else torch.randn(2, 3, 5, 5)
    wanted = norm(layer(x)).detach()
    weight, added = fold_batch_norm(layer.weight, layer.bias, norm, is_transposed=kind == "ConvTranspose2d")
    function: Any = {"Linear": functional.linear, "Conv2d": functional.conv2d}.get(kind, functional.conv_transpose2d)
    torch.testing.assert_close(function(x, weight, added).detach(), wanted, atol=1e-5, rtol=1e-5)


def test_a_module_that_ends_in_a_relu_is_made_of_one_that_does() -> None:
    fused: Any = intrinsic.LinearReLU(nn.Linear(2, 2), nn.ReLU())
    plain: Any = nn.Linear(2, 2)
    fused.qconfig = plain.qconfig = qconfigs.default_qconfig
    assert has_relu(fused)
    assert not has_relu(plain)
    with pytest.raises(SpecError, match="not end in a ReLU"):
        quantized.Linear.from_float(fused)
    with pytest.raises(SpecError, match="ends in a ReLU"):
        intrinsic_quantized.LinearReLU.from_float(plain)


def test_a_new_module_has_the_settings_of_the_float_one_and_zeros() -> None:
    made = quantized.Conv2d(4, 6, 3, stride=2, groups=2, bias=False)
    like = nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False)
    for name in ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"):
        assert getattr(made, name) == getattr(like, name)
    assert made.weight().shape == like.weight.shape
    assert not bool(made.weight().int_repr().any())
    assert made.bias() is None
    assert "bias" not in made.state_dict()


def test_another_weight_is_computed_with_at_once() -> None:
    layer, x = quantized.Linear(2, 1), quantize_per_tensor(torch.tensor([[1.0, 2.0]]), 1.0, 0)
    assert layer(x).dequantize().tolist() == [[0.0]]
    layer.set_weight_bias(quantize_per_tensor(torch.tensor([[3.0, 4.0]]), 1.0, 0, torch.int8), torch.tensor([5.0]))
    assert layer(x).dequantize().tolist() == [[16.0]]
