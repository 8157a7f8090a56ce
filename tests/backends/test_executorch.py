"""ExecuTorch: only what XNNPACK's delegate takes, with the scales that it can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import quantizer_of
from quantc.backends.executorch import EXECUTORCH
from quantc.errors import AnnotationError
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.spec.formats import PerChannel, Timing
from tests.support.backend_cases import captured, decided, image


@pytest.mark.parametrize(
    ("op", "forward", "reason"),
    [
        ("max_pool2d", lambda x: F.max_pool2d(x, 2, 3), "more than its kernel"),
        ("max_pool2d", lambda x: F.max_pool2d(x[0], 2), "wanted rank 4"),
        ("mean", lambda x: x.mean((1, 2), keepdim=True), "has dim = [1, 2]"),
        ("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 2), "wanted output_size == 1"),
        ("cat", lambda x: torch.cat([x, x], 1), "joins a single tensor"),
        ("slice", lambda x: x[:, :, ::2], "wanted step == 1"),
    ],
    ids=[
        "pool with gaps",
        "pool of one image",
        "mean of channels",
        "adaptive pool to 2",
        "cat with itself",
        "steps",
    ],
)
def test_what_the_delegate_does_not_take_is_left_with_the_reason(op: str, forward: Any, reason: str) -> None:
    program = captured(lambda self, x: forward(self.a(x)), image(), a=nn.Conv2d(4, 4, 1))
    prepared = qc.prepare(program, "executorch")
    node = next(node for node in prepared.graph.nodes if op_name(node) == op)
    assert node not in prepared.plan.claims.rows
    assert reason in str(quantizer_of("executorch").explain(prepared, node.name))


def test_images_are_added_in_integers_and_a_residual_stream_only_where_it_comes_so() -> None:
    def run(self: Any, x: Tensor) -> Any:
        return x + self.a(F.layer_norm(x, (8,)))

    rules, _ = decided(captured(run, torch.randn(2, 8), a=nn.Linear(8, 8)), "executorch")
    assert rules == {"linear": "linear"}
    images = captured(lambda self, x: self.a(x) + x.exp(), image(), a=nn.Conv2d(4, 4, 1))
    assert decided(images, "executorch")[0] == {"conv2d": "conv", "add": "add-images"}


def test_a_mean_over_images_is_split_so_that_the_delegate_takes_it() -> None:
    program = captured(
        lambda self, x: self.fc(self.a(x).mean((2, 3))), image(), a=nn.Conv2d(4, 4, 1), fc=nn.Linear(4, 2)
    )
    rules, _ = decided(program, "executorch")
    assert sorted(rules.values()) == ["conv", "linear", "mean", "reshape"]


def test_a_depthwise_convolution_has_fixed_scales_alone() -> None:
    def prepared(groups: int, spec: Any) -> Program:
        program = captured(lambda self, x: self.a(x), image(), a=nn.Conv2d(4, 4, 3, groups=groups))
        return qc.prepare(program, "executorch", config=qc.QuantConfig().set("a", spec), allow_empty=True)

    spec = EXECUTORCH.modes["dynamic"].but(granularity="per-tensor")
    plain = prepared(1, spec).plan.claims
    assert {(claim.rule, claim.timing) for claim in plain.rows.values()} == {("conv", Timing.DYNAMIC)}
    assert {rule.name for rule in EXECUTORCH.table if "several-channels" in rule.conditions} == {"conv"}
    with pytest.raises(AnnotationError, match="conv"):
        prepared(4, spec)
    static = captured(lambda self, x: self.a(x), image(), a=nn.Conv2d(4, 4, 3, groups=4))
    assert decided(static, "executorch")[0] == {"conv2d": "conv-static"}


def test_scales_are_no_smaller_than_the_delegate_holds() -> None:
    weight = EXECUTORCH.outcome("weight").spec
    assert weight.eps == EXECUTORCH.outcome("weight-transposed").spec.eps == 0.000244140625
    assert (weight.qmin, weight.qmax) == (-127, 127)
    assert EXECUTORCH.outcome("weight-transposed").spec.granularity == PerChannel(axis=1)
    assert all(EXECUTORCH.why_not(EXECUTORCH.outcome(role).spec) is None for role in EXECUTORCH.roles)
    assert all(EXECUTORCH.why_not(spec) is None for spec in EXECUTORCH.modes.values())


def test_every_reader_has_a_dequantize_op_of_its_own() -> None:
    program = captured(lambda self, x: (self.a(x), self.b(x)), image(), a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1))
    prepared = qc.prepare(program, "executorch")
    qc.calibrate(prepared, [image()])
    converted = qc.convert(prepared)
    readers = [len(node.users) for node in converted.nodes() if "dequantize" in str(node.target)]
    assert readers
    assert set(readers) == {1}
