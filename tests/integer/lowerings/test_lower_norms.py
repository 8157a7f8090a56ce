"""Norms from a model to integers: each within a step of its float form, and what stays float."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.ir.dialect import op_name
from tests.support.integer_matches import (
    calibrated,
    floats_inside,
    integer_ops,
    less,
    onto_grid,
    values_of,
)


def _filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 1.0, 0.5, generator=generator)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.3, 2.0, generator=generator)
    return module.eval()


class NormRelu(nn.Module):
    """A batch norm with a relu, that nothing comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x))


NORMS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "layer": ("normalize", lambda: nn.LayerNorm(8)),
    "layer over two axes": ("normalize", lambda: nn.LayerNorm([5, 8], eps=1e-3)),
    "layer without gamma": ("normalize", lambda: nn.LayerNorm(8, elementwise_affine=False)),
    "layer without beta": ("normalize", lambda: nn.LayerNorm(8, bias=False)),
    "rms": ("normalize", lambda: nn.RMSNorm(8)),
    "rms with eps": ("normalize", lambda: nn.RMSNorm([5, 8], eps=1e-2)),
    "group": ("normalize", lambda: nn.GroupNorm(3, 6)),
    "group without gamma": ("normalize", lambda: nn.GroupNorm(1, 6, affine=False)),
    "instance": ("normalize", lambda: nn.InstanceNorm2d(6, affine=True)),
    "instance without gamma": ("normalize", lambda: nn.InstanceNorm2d(6)),
    "instance with statistics": ("sum", lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
    "batch": ("sum", lambda: nn.BatchNorm2d(6)),
    "batch without gamma": ("sum", lambda: nn.BatchNorm2d(6, affine=False)),
    "batch and relu": ("sum", NormRelu),
}


def _prepared(name: str) -> tuple[qc.Program, Tensor]:
    x = torch.randn(3, 6, 5, 8, generator=torch.Generator().manual_seed(0)) * 2 + 0.5
    return calibrated(qc.capture(_filled(NORMS[name][1]()), (x,)), "qnnpack", [x]), x


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_within_a_step_of_its_float_form(name: str) -> None:
    prepared, x = _prepared(name)
    converted, lowered = qc.convert(prepared), qc.convert(prepared, to="integer")
    assert [str(node.target) for node in integer_ops(lowered)] == [f"quantc.{NORMS[name][0]}.default"]
    assert not floats_inside(lowered)
    last = next(node for node in reversed(converted.graph.nodes) if node.op == "call_function")
    steps = (lowered(x) - converted(x)).detach() / float(last.args[1])
    assert float(steps.abs().max()) <= 1.001
    assert float((steps.abs() > 0.5).double().mean()) <= 0.002
    assert torch.equal(qc.convert(prepared, to="integer", style="decomposed")(x), lowered(x))
    fixed = (qc.convert(prepared, to="integer", multiplier="fixed")(x) - lowered(x)) / float(last.args[1])
    assert float(fixed.abs().max()) <= 1.001
    assert float((fixed.abs() > 0.5).double().mean()) <= 0.002
    exported = torch.export.export(lowered.module, (x,)).module()
    assert torch.equal(exported(x), lowered(x))


def test_a_batch_norm_is_its_formula_to_the_bit() -> None:
    prepared, x = _prepared("batch and relu")
    converted, lowered = qc.convert(prepared), qc.convert(prepared, to="integer")
    (norm,) = [node for node in converted.graph.nodes if op_name(node) == "batch_norm"]
    (relu,) = norm.users
    (quantizer,) = relu.users
    values = values_of(converted, [x])
    source, scale, zero_point = norm.args[0].args[:3]
    gamma, beta, mean, var = (values[node.name].detach().double().numpy() for node in norm.args[1:5])
    factor = gamma / np.sqrt(var + 1e-5)
    step, out_step = np.float64(np.float32(scale)), np.float64(np.float32(quantizer.args[1]))
    shape = (1, -1, 1, 1)
    steps = less(values[source.name], zero_point) * (step * factor / out_step).reshape(shape)
    steps = steps + ((beta - mean * factor) / out_step).reshape(shape)
    wanted = onto_grid(np.maximum(steps, 0), *quantizer.args[2:])
    (made,) = integer_ops(lowered)
    assert torch.equal(values_of(lowered, [x])[made.name], wanted)


def test_any_number_of_rows() -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    generator = torch.Generator().manual_seed(0)
    x, more = (torch.randn(size, 4, 8, generator=generator) for size in (5, 11))
    program = qc.capture(_filled(nn.LayerNorm(8)), (x,), dynamic_shapes=({0: batch},))
    prepared = calibrated(program, "qnnpack", [x])
    lowered = qc.convert(prepared, to="integer")
    assert [str(node.target) for node in integer_ops(lowered)] == ["quantc.normalize.default"]
    for rows in (x, more):
        assert torch.equal(lowered(rows), qc.convert(prepared, to="integer", style="decomposed")(rows))
    assert torch.equal(lowered(torch.cat([x, x])), torch.cat([lowered(x), lowered(x)]))


@pytest.mark.parametrize("make", [lambda: nn.InstanceNorm1d(4), lambda: nn.GroupNorm(2, 4)])
def test_rows_of_unknown_length_stay_float(make: Callable[[], nn.Module]) -> None:
    x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))
    sizes = torch.export.Dim("length", min=2, max=64)
    program = qc.capture(_filled(make()), (x,), dynamic_shapes=({2: sizes},))
    lowered = qc.convert(calibrated(program, "qnnpack", [x]), to="integer")
    assert not integer_ops(lowered)
    (reason,) = lowered.plan.left_float.rows.values()
    assert reason == "how many elements it normalizes together is not known before it runs"


def test_a_computed_gamma_keeps_a_norm_float() -> None:
    class Computed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (8,), x[0, 0].abs())

    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    lowered = qc.convert(calibrated(qc.capture(Computed().eval(), (x,)), "qnnpack", [x]), to="integer")
    assert any("is not a constant" in reason for reason in lowered.plan.left_float.rows.values())
