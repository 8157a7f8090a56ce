"""Functions of one number and softmax, from a model to integers: within a step of their float form, or float."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quantc as qc
from quantc.integer.match_lowering import NotIntegerError
from quantc.integer.semantics import semantics_of
from tests.support.curves import Of, lone_match
from tests.support.integer_matches import calibrated, floats_inside, integer_ops

aten = torch.ops.aten


LONE: dict[str, Callable[[Tensor], Tensor]] = {
    "hardswish": F.hardswish,
    "silu": F.silu,
    "mish": F.mish,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 2.0),
    "softplus": lambda x: F.softplus(x, 2.0),
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.1, -0.4, 0.0])),
    "prelu with one slope": lambda x: F.prelu(x, torch.tensor([0.25])),
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "tanh": torch.tanh,
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax over channels": lambda x: torch.softmax(x, 1),
}


def _lone(name: str) -> tuple[qc.Program, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 7) * 3
    return calibrated(qc.capture(Of(LONE[name]).eval(), (x,)), "qnnpack", [x]), x


def _out_scale(program: qc.Program) -> float:
    """The scale of what the last node dequantizes."""
    last = next(node for node in reversed(program.graph.nodes) if node.op == "call_function")
    return float(last.args[1])


@pytest.mark.parametrize("name", LONE)
def test_a_lone_op_is_within_a_step_of_its_float_form(name: str) -> None:
    prepared, x = _lone(name)
    converted, lowered = qc.convert(prepared), qc.convert(prepared, to="integer")
    assert len(integer_ops(lowered)) == 1
    assert not floats_inside(lowered)
    steps = (lowered(x) - converted(x)) / _out_scale(converted)
    assert float(steps.abs().max()) <= 1.001
    assert float((steps.abs() > 0.5).double().mean()) < 0.02
    assert torch.equal(qc.convert(prepared, to="integer", style="decomposed")(x), lowered(x))
    assert torch.equal(qc.convert(prepared, to="integer", multiplier="fixed")(x), lowered(x))
    exported = torch.export.export(lowered.module, (x,)).module()
    assert torch.equal(exported(x), lowered(x))


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["silu", "softmax"])
def test_a_result_that_is_read_in_float_has_no_table(name: str) -> None:
    task, quantizer = lone_match(name, LONE[name], "qnnpack")
    (dequantizer,) = quantizer.users
    task.program.replace(dequantizer, task.core)
    row = semantics_of(task.core)
    assert row is not None
    with pytest.raises(NotIntegerError, match="read in float"):
        row.write(task)
