"""How a node reads its operands, 8-bit integers or floats: by the plan, the Q/DQ form and the integer form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import quantc as qc
from quantc.annotate.operand_forms import Forms
from quantc.ir.dialect import is_op
from quantc.ir.plan import Plan
from quantc.ir.program import Program
from quantc.passes.share import Share
from quantc.spec.formats import Timing
from quantc.spec.spec import INT8_WEIGHT_ONLY, INT16, UINT8_DYNAMIC
from tests.support.hand_quantizers import LINEAR, annotated, table
from tests.support.pattern_graphs import Build
from tests.support.small_backend import SMALL


def node_of(program: Program, op: str) -> fx.Node:
    return next(node for node in program.nodes() if is_op(node, op))


class Mixed(nn.Module):
    """A linear layer on bytes, then a tanh and an exponential that no rule takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(torch.tanh(self.layer(x)))


def forms_of(act: qc.QuantSpec) -> dict[str, Program]:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    prepared = qc.prepare(qc.capture(Mixed().eval(), (x,)), table("one", LINEAR, act=act))
    qc.calibrate(prepared, [x], progress="silent")
    return {"plan": prepared, "qdq": qc.convert(prepared), "integer": qc.convert(prepared, to="integer")}


def test_bytes_are_seen_in_every_form() -> None:
    for form, program in forms_of(qc.UINT8).items():
        forms = Forms(program)
        if form == "integer":
            node = next(node for node in program.nodes() if str(node.target) == "quantc.linear.default")
        else:
            node = node_of(program, "linear")
        assert forms.reads_bytes(node, node.all_input_nodes[0]), form
        assert forms.reads_bytes(node, node.all_input_nodes[1]), form
        exp = node_of(program, "exp")
        assert not forms.reads_bytes(exp, exp.all_input_nodes[0]), form
        assert not forms.reads_bytes(node, None)


def test_sixteen_bits_are_not_bytes() -> None:
    forms = forms_of(INT16)
    for form in ("plan", "qdq"):
        node = node_of(forms[form], "linear")
        x, weight, *_ = node.all_input_nodes
        assert not Forms(forms[form]).reads_bytes(node, x)
        assert Forms(forms[form]).reads_bytes(node, weight)


def test_the_decision_of_the_reader_counts_before_that_of_the_producer() -> None:
    build = Build()
    sigmoid = build("sigmoid", build.input("x", 2, 4))
    left, right = build("add", sigmoid, sigmoid), build("tanh", sigmoid)
    program = annotated(build.done(left, right), SMALL.but(act=qc.INT16))
    Share().run(program)
    forms = Forms(program)
    assert forms.reads_bytes(right, sigmoid)  # a fixed uint8 grid, which every reader without a decision gets
    assert not forms.reads_bytes(left, sigmoid)
    assert not forms.reads_bytes(right, left)


@pytest.mark.parametrize(
    ("spec", "timing"),
    [(None, Timing.STATIC), (UINT8_DYNAMIC.but(qmax=127), Timing.DYNAMIC), (INT8_WEIGHT_ONLY, Timing.WEIGHT_ONLY)],
)
def test_the_graph_tells_the_technique(spec: qc.QuantSpec | None, timing: Timing) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    config = qc.QuantConfig() if spec is None else qc.QuantConfig().set_all(spec)
    program = qc.quantize(Mixed().eval(), (x,), [x], backend="x86", config=config).program
    program.plan = Plan()  # as when it was read from text
    forms = Forms(program)
    linear = node_of(program, "linear")
    assert forms.timing(linear) is timing
    assert forms.is_quantized(linear)
    assert not forms.is_quantized(node_of(program, "exp"))
