"""lower-integer: which matches are written on integers, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.hooks import Guard, Truth, Verify
from quantc.integer.library import op_of
from quantc.integer.match_lowering import Task
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.passes.lower_integer import LowerInteger, lower, matches
from quantc.pipeline.pipeline import Pipeline
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.spec.arithmetic import Arithmetic, Rounding
from quantc.spec.spec import INT8_WEIGHT_ONLY


class Block(nn.Module):
    """Two layers with an op of float between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.sin(torch.relu(self.first(x))))


def folded(model: nn.Module, x: Tensor, backend: str = "qnnpack", **options: Any) -> Program:
    prepared = qc.prepare(qc.capture(model.eval(), (x,), method="fx"), backend, **options)
    qc.calibrate(prepared, [x])
    return qc.convert(prepared)


def lowered(program: Program, **options: Any) -> Program:
    return Pipeline((LowerInteger(**options),)).run_on_copy(program, [Truth(), Verify()])


def integers(program: Program) -> list[str]:
    found = (op_of(node.target) for node in program.nodes())
    return [op.name for op in found if op is not None]


@pytest.fixture
def block() -> tuple[Program, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(16, 6)
    return folded(Block(), x), x


def test_a_match_is_the_nodes_that_one_rule_claims_in_order(block: tuple[Program, Tensor]) -> None:
    program, _ = block
    assert [[node.name for node in nodes] for nodes in matches(program)] == [["linear", "relu"], ["linear_1"]]


def test_matches_become_integer_ops_and_keep_their_names(block: tuple[Program, Tensor]) -> None:
    program, x = block
    after = lowered(program)
    assert integers(after) == ["linear", "linear"]
    assert [node.name for node in after.nodes() if op_of(node.target) is not None] == ["linear", "linear_1"]
    step = float(program.plan.qparams["linear_1:out0"].scale)
    assert (after(x) - program(x)).abs().max() <= step * 1.001, "one step at most"
    assert after.log[-1].notes[0] == "2 matches compute on integers"


def test_what_stays_in_float_has_its_reason(block: tuple[Program, Tensor]) -> None:
    after = lowered(block[0])
    reasons = {node.name: why for node, why in after.plan.left_float.rows.items()}
    assert set(reasons) == {"sin"}
    assert "sin" in reasons["sin"]


@pytest.mark.parametrize(
    ("model", "node", "reason"),
    [
        (nn.Linear(6, 8), "linear", "input_1 does not come quantized"),
        (nn.EmbeddingBag(9, 6), "embedding_bag", "only its weight is quantized"),
    ],
    ids=["a product", "an op without an integer form"],
)
def test_where_the_weight_alone_is_quantized_the_op_stays_in_float(model: nn.Module, node: str, reason: str) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 9, (2, 3)) if isinstance(model, nn.EmbeddingBag) else torch.randn(4, 6)
    captured = qc.capture(model.eval(), (x,), method="fx")
    program = qc.convert(qc.prepare(captured, "x86", config=qc.QuantConfig().set_all(INT8_WEIGHT_ONLY)))
    claimed = next(nodes for nodes in matches(program) if nodes[0].name == node)
    assert lower(Task(program, claimed)) == reason
    after = lowered(program)
    assert integers(after) == []
    assert after.plan.left_float[after.node(node)] == reason
    assert torch.equal(after(x), program(x))


@pytest.mark.parametrize("boundaries", ["spelled", "whole"])
def test_what_is_quantized_at_the_border_is_spelled_out_or_left_whole(
    boundaries: str, block: tuple[Program, Tensor]
) -> None:
    program, x = block
    after = lowered(program, boundaries=boundaries)
    whole = [node for node in after.nodes() if is_quantize(node) or is_dequantize(node)]
    assert len(whole) == (4 if boundaries == "whole" else 0)
    assert torch.equal(after(x), lowered(program)(x))


def test_a_fixed_multiplier_needs_no_float_inside(block: tuple[Program, Tensor]) -> None:
    program, x = block
    fixed = lowered(program, multiplier="fixed")
    step = float(program.plan.qparams["linear_1:out0"].scale)
    assert (fixed(x) - lowered(program)(x)).abs().max() <= step * 1.001
    assert not [name for name, buffer in fixed.root.named_buffers() if buffer.is_floating_point()]
    assert [name for name, buffer in lowered(program).root.named_buffers() if buffer.dtype == torch.float64] == [
        "linear_multiplier",
        "linear_1_multiplier",
    ]


@pytest.mark.parametrize(
    ("join", "steps"),
    [(lambda a, b: torch.cat([a, b], 1), 1), (lambda a, b: a + b, 1)],
    ids=["joined", "summed"],
)
def test_tensors_are_brought_to_another_grid_as_integers(join: Callable[[Tensor, Tensor], Tensor], steps: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return join(self.a(x), torch.sigmoid(self.b(x)))

    torch.manual_seed(0)
    x = torch.randn(16, 6)
    program = folded(Net(), x)
    after = lowered(program, boundaries="whole")
    assert [op_name(node) for node in after.nodes() if is_quantize(node)] == [
        "quantized_decomposed.quantize_per_tensor.default"
    ], "the input alone"
    (name,) = [name for name in program.plan.qparams if name.startswith(("cat", "add:out", "linear:out"))][-1:]
    assert (after(x) - program(x)).abs().max() <= steps * float(program.plan.qparams[name].scale) * 1.001


@pytest.mark.parametrize(("rounding", "saturate"), [("floor", True), ("half-even", False)])
def test_the_guard_knows_the_arithmetic_of_the_target(rounding: Rounding, saturate: bool) -> None:
    """Rounding down stays within a step; where results wrap around, nothing can be promised, and that is said."""
    x = torch.linspace(-2, 2, 32).reshape(4, 8)
    prepared = qc.prepare(qc.capture(nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval(), (x,)), "qnnpack")
    prepared.plan.arithmetic["qnnpack"] = Arithmetic(rounding=rounding, saturate=saturate)
    qc.calibrate(prepared, [x], progress="silent")
    guard = Guard()
    qc.convert(prepared, to="integer", hooks=[guard])
    assert ("lower-integer" in guard.checked) == saturate
    assert saturate or any("wrap around" in reason for reason in guard.skipped)
