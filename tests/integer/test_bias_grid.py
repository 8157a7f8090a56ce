"""Biases in the integer form: int32 on the accumulator's scale, and what is done where they do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.errors import SpecError
from quantc.ir.program import Program
from quantc.spec.formats import PerGroup
from quantc.spec.spec import INT8_TENSOR_WEIGHT, INT8_WEIGHT, INT32_BIAS, QuantSpec
from tests.support.biased_backend import backend

FINE = INT8_WEIGHT.but(eps=2.0**-60)
"""Scales small enough for biases to become too large."""
SPECS = {"per channel": FINE, "per tensor": INT8_TENSOR_WEIGHT.but(eps=2.0**-60), "affine": FINE.but(scheme="affine")}


def prepared(model: nn.Module, x: Tensor, to: Backend) -> Program:
    program = qc.prepare(qc.capture(model.eval(), (x,)), to)
    qc.calibrate(program, [x])
    return program


def integer_op(program: Program) -> fx.Node:
    (found,) = [node for node in program.nodes() if str(node.target).startswith("quantc.")]
    return found


def bias_of(program: Program) -> Tensor:
    value = program.tensor(integer_op(program).args[4])  # type: ignore[arg-type]
    assert isinstance(value, Tensor)
    return value


def quantizers(program: Program) -> list[tuple[float, int]]:
    nodes = [node for node in program.nodes() if ".quantize_per_tensor" in str(node.target)]
    return [(float(node.args[1]), int(node.args[2])) for node in nodes]  # type: ignore[arg-type]


def notes(program: Program) -> str:
    return " ".join(note for entry in program.log for note in entry.notes)


def tiny(seed: int = 1) -> nn.Linear:
    """Channels whose weights are ever smaller beside a bias of the same size."""
    torch.manual_seed(seed)
    layer = nn.Linear(16, 6)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(6, 16) * torch.tensor([1.0, 1e-3, 1e-6, 1e-9, 1e-12, 1e-14]).unsqueeze(1))
        layer.bias.copy_(torch.tensor([0.5, -0.7, 0.9, -1.0, 0.8, -0.6]))
    return layer


def inputs() -> Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(2))


# -- biases that fit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "conv", "transposed"])
def test_a_bias_is_rounded_to_steps_of_the_accumulator(kind: str) -> None:
    torch.manual_seed(3)
    layers = {"linear": nn.Linear(8, 5), "conv": nn.Conv1d(8, 5, 3), "transposed": nn.ConvTranspose1d(8, 5, 3)}
    layer: Any = layers[kind]
    spec = INT8_WEIGHT.but(granularity={"kind": "per-channel", "axis": 1 if kind == "transposed" else 0})
    x = torch.randn(4, 8) if kind == "linear" else torch.randn(2, 8, 9)
    program = prepared(layer, x, backend(weight=spec))
    quantized, integer = qc.convert(program), qc.convert(program, to="integer")
    (scale, _), _ = quantizers(quantized)
    (weight,) = [node for node in quantized.nodes() if "dequantize_per_channel" in str(node.target)]
    w_scale = quantized.tensor(weight.args[1])  # type: ignore[arg-type]
    assert isinstance(w_scale, Tensor)
    steps = np.float64(scale) * w_scale.double().numpy()
    expected = np.rint(layer.bias.detach().double().numpy() / steps)
    assert bias_of(integer).dtype == torch.int32
    np.testing.assert_array_equal(bias_of(integer).numpy(), expected)
    assert "raised" not in notes(integer)


# -- biases that do not --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_weight_scales_are_raised_until_the_bias_fits(spec: QuantSpec) -> None:
    layer, x = tiny(), inputs()
    if spec is SPECS["per tensor"]:
        with torch.no_grad():
            layer.weight.mul_(1e-14)
    program = prepared(layer, x, backend(weight=spec))
    quantized, integer = qc.convert(program), qc.convert(program, to="integer")
    integer.verify()
    assert "weight scales raised so that the bias fits 32 bits" in notes(integer)
    bias = bias_of(integer)
    assert bias.abs().max() <= 2**30
    assert bias.abs().max() > 2**29  # no more than was needed
    (_, _), (step, _) = quantizers(quantized)
    assert (integer(x) - quantized(x)).abs().max() <= step * 1.001
    only_bias = (integer(x) - layer(x))[:, 3:]
    assert only_bias.abs().max() <= step * 0.501


def test_only_the_channels_that_need_it_are_changed() -> None:
    layer, x = tiny(), inputs()
    program = prepared(layer, x, backend(weight=FINE))
    quantized, integer = qc.convert(program), qc.convert(program, to="integer")
    old = next(node for node in quantized.nodes() if str(node.target) == "weight_quantized")
    before, after = quantized.tensor(old), integer.tensor(integer_op(integer).args[2])  # type: ignore[arg-type]
    assert isinstance(before, Tensor)
    assert isinstance(after, Tensor)
    (scale, _), _ = quantizers(quantized)
    tops = layer.weight.detach().abs().amax(dim=1).double() / 127.5
    too_large = (layer.bias.detach().double() / (scale * tops)).abs() > 2**30
    assert 0 < too_large.sum() < 6
    assert f"{int(too_large.sum())} weight scales raised" in notes(integer)
    assert torch.equal((before == after).all(dim=1), ~too_large)
    largest = bias_of(integer).abs()[too_large]
    assert (largest <= 2**30).all()
    assert (largest > 2**30 - 2**8).all()  # the scale is a float32: no more than was needed


def test_what_is_computed_then_is_what_numpy_says() -> None:
    layer, x = tiny(4), inputs()
    program = prepared(layer, x, backend(weight=FINE))
    quantized, integer = qc.convert(program), qc.convert(program, to="integer")
    args: Any = integer_op(integer).args
    w, bias, multiplier = (integer.tensor(args[index]).numpy() for index in (2, 4, 6))  # type: ignore[union-attr]
    (scale, zero), (out_scale, out_zero) = quantizers(quantized)
    levels = np.clip(np.rint(x.numpy() * np.float32(1 / scale)) + zero, 0, 255).astype(np.int64)
    acc = (levels - zero) @ w.astype(np.int64).T + bias.astype(np.int64)
    assert np.abs(acc).max() < 2**31
    level = np.clip(np.rint(acc.astype(np.float64) * multiplier) + out_zero, 0, 255)
    expected = (level - out_zero).astype(np.float32) * np.float32(out_scale)
    np.testing.assert_array_equal(integer(x).numpy(), expected)
    # the multipliers hold the raised scales: the bias is still the bias
    errors = bias.astype(np.float64) * multiplier * out_scale - layer.bias.detach().double().numpy()
    assert (np.abs(errors) <= 0.5001 * multiplier * out_scale).all()


# -- biases that the rule quantizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_bias_that_is_stored_quantized_is_taken_as_it_is(kind: str) -> None:
    torch.manual_seed(5)
    layer = nn.Linear(8, 5) if kind == "linear" else nn.Conv1d(8, 5, 3)
    x = torch.randn(4, 8) if kind == "linear" else torch.randn(2, 8, 9)
    program = prepared(layer, x, backend(weight=INT8_WEIGHT, bias=INT32_BIAS))
    quantized, integer = qc.convert(program), qc.convert(program, to="integer")
    stored = next(node for node in quantized.nodes() if str(node.target) == "bias_quantized")
    levels = quantized.tensor(stored)
    assert isinstance(levels, Tensor)
    assert torch.equal(bias_of(integer), levels)
    (_, _), (step, _) = quantizers(quantized)
    assert (integer(x) - quantized(x)).abs().max() <= step * 1.001


def test_a_bias_cannot_have_the_scales_of_groups() -> None:
    grouped = INT8_WEIGHT.but(granularity=PerGroup(axis=1, size=4))
    program = prepared(nn.Linear(8, 5), torch.randn(4, 8), backend(weight=grouped, bias=INT32_BIAS))
    with pytest.raises(SpecError, match="a bias is one number a channel"):
        qc.convert(program)
