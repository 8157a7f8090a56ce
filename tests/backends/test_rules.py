"""What backends refuse, and how their rules share, follow and keep out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import quantizer_of
from quantc.errors import AnnotationError
from quantc.ir.decisions import Quantize
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.patterns.table import RuleTable
from quantc.pipeline.registry import BACKENDS
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.spec import (
    INT2_GROUP,
    INT4_WEIGHT,
    INT8,
    INT8_DYNAMIC,
    INT8_NARROW_WEIGHT,
    INT8_TENSOR_WEIGHT,
    INT8_TOKEN,
    INT8_WEIGHT,
    INT8_WEIGHT_ONLY,
    INT16,
    UINT8,
    UINT8_DYNAMIC,
    UINT8_TOKEN,
    QuantSpec,
)
from tests.support.backend_cases import NAMES, Net, captured, image

AFFINE_WEIGHT = INT8_WEIGHT.but(scheme="affine")
GROUPED_WEIGHT = INT8_WEIGHT.but(granularity={"kind": "per-group", "size": 4})
NARROW = INT8_NARROW_WEIGHT.but(eps=2.0**-12)

REFUSED: list[tuple[str, QuantSpec, str]] = [
    *((name, INT8, "dtype must be uint8, not int8") for name in ("x86", "qnnpack")),
    *((name, INT16, "dtype must be uint8, not int16") for name in ("x86", "qnnpack")),
    *((name, INT16.but(timing="dynamic"), "dtype must be") for name in NAMES),
    *((name, AFFINE_WEIGHT, "scheme must be symmetric, not affine") for name in ("x86", "qnnpack")),
    *((name, GROUPED_WEIGHT, "granularity must be per-tensor or per-channel") for name in ("x86", "qnnpack")),
    *((name, INT4_WEIGHT, "dtype must be int8, not int4") for name in ("x86", "qnnpack")),
    *(
        (name, INT4_WEIGHT.but(scheme="affine"), "dtype must be int8, not int4; scheme must be")
        for name in ("x86", "qnnpack")
    ),
    ("executorch", INT4_WEIGHT.but(scheme="affine"), "scheme must be symmetric, not affine"),
    ("executorch", INT2_GROUP, "dtype must be int8 or int4, not int2"),
    *(
        (name, UINT8.but(granularity=PerChannel(axis=1)), "granularity must be per-tensor")
        for name in ("x86", "qnnpack")
    ),
    ("executorch", UINT8, "dtype must be int8, not uint8"),
    ("executorch", UINT8_DYNAMIC, "dtype must be int8, not uint8"),
    ("executorch", INT8_DYNAMIC.but(scheme="symmetric"), "scheme must be affine, not symmetric"),
    ("executorch", INT8.but(eps=1e-6), "eps) must be at least 0.000244140625"),
    ("executorch", INT8_WEIGHT.but(eps=2.0**-12), "the range must lie in -127..127, not be -128..127"),
    ("executorch", INT8_NARROW_WEIGHT, "eps) must be at least 0.000244140625"),
    ("executorch", NARROW.but(scheme="affine"), "scheme must be symmetric"),
]
TAKEN: list[tuple[str, QuantSpec]] = [
    ("x86", UINT8.but(qmax=127)),
    ("x86", UINT8.but(scheme="symmetric", observe="percentile")),
    ("x86", INT8_TENSOR_WEIGHT),
    ("x86", UINT8_DYNAMIC),
    ("x86", INT8_WEIGHT_ONLY),
    ("qnnpack", UINT8_TOKEN),
    ("executorch", INT8_TOKEN),
    ("executorch", INT8_WEIGHT_ONLY),
    ("executorch", INT4_WEIGHT),
    ("x86", INT8_WEIGHT.but(qmin=-64, qmax=63)),
    ("qnnpack", UINT8.but(observe="entropy")),
    ("qnnpack", INT8_NARROW_WEIGHT),
    ("executorch", INT8.but(scheme="symmetric")),
    ("executorch", NARROW.but(granularity=PerTensor())),
]


def linear() -> Program:
    return captured(lambda self, x: self.fc(x), torch.randn(2, 8), fc=nn.Linear(8, 8))


@pytest.mark.parametrize(("name", "spec", "reason"), REFUSED, ids=[f"{row[0]}-{row[1]}" for row in REFUSED])
def test_a_spec_its_kernels_do_not_take_is_refused(name: str, spec: QuantSpec, reason: str) -> None:
    assert reason in str(BACKENDS[name].why_not(spec))
    with pytest.raises(AnnotationError) as caught:
        qc.prepare(linear(), name, config=qc.QuantConfig().set("fc", spec))
    assert reason in caught.value.what
    assert "linear (fc : Linear" in str(caught.value.where)
    assert "FLOAT" in str(caught.value.advice)


@pytest.mark.parametrize(("name", "spec"), TAKEN, ids=[f"{row[0]}-{row[1]}" for row in TAKEN])
def test_specs_its_kernels_take_are_used(name: str, spec: QuantSpec) -> None:
    prepared = qc.prepare(linear(), name, config=qc.QuantConfig().set("fc", spec))
    assert Quantize(spec) in prepared.plan.outcomes.values()


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_with_roles_it_cannot_run_is_refused_by_validate(name: str) -> None:
    wrong = UINT8 if name == "executorch" else INT8
    with pytest.raises(AnnotationError, match="cannot run"):
        qc.prepare(linear(), BACKENDS[name].but(act=wrong))


@pytest.mark.parametrize("name", NAMES)
def test_tables_go_to_json_and_back(name: str) -> None:
    table = BACKENDS[name].table
    assert RuleTable.from_json(table.to_json()) == table


# -- weights ---------------------------------------------------------------------------------------------------


def weight_specs(prepared: Program) -> list[QuantSpec]:
    found = (group.outcome for group in prepared.plan.groups if group.source.value == "constants")
    return [outcome.spec for outcome in found if isinstance(outcome, Quantize)]


@pytest.mark.parametrize("name", NAMES)
def test_transposed_convolutions_have_their_channels_on_axis_1(name: str) -> None:
    program = captured(lambda self, x: self.up(x), image(), up=nn.ConvTranspose2d(4, 6, 3))
    config = qc.QuantConfig().set("up", NARROW)
    for prepared in (qc.prepare(program, name), qc.prepare(program, name, config=config)):
        (spec,) = weight_specs(prepared)
        assert spec.granularity == PerChannel(axis=1)
        qc.calibrate(prepared, [image()])
        scales = [node for node in qc.convert(prepared).graph.nodes if str(node.target).endswith("weight_scale")]
        assert tuple(scales[0].meta["val"].shape) == (6,)


@pytest.mark.parametrize("name", ["x86", "qnnpack"])
def test_grouped_transposed_convolutions_have_one_scale(name: str) -> None:
    program = captured(lambda self, x: self.up(x), image(), up=nn.ConvTranspose2d(4, 6, 3, groups=2))
    (spec,) = weight_specs(qc.prepare(program, name))
    assert spec.granularity == PerTensor()
    with pytest.raises(AnnotationError, match="no axis of channels"):
        qc.prepare(program, name, config=qc.QuantConfig().set("up", INT8_WEIGHT))


@pytest.mark.parametrize("name", NAMES)
def test_a_computed_convolution_weight_is_no_weight(name: str) -> None:
    program = captured(lambda self, x: F.conv2d(x, x[:, :, :3, :3]), image())
    prepared = qc.prepare(program, name, allow_empty=True)
    explained = quantizer_of(name).explain(prepared, "conv2d")
    assert explained.matched is None
    assert any("a constant tensor for w" in row.reason for row in explained.tried)


def test_a_computed_weight_in_a_list_is_refused() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        zeros = x.new_zeros(1, 6, 8)
        weights = [self.w * 2 + x[0, 0, 0], self.w, self.b, self.b]
        return torch.rnn_tanh(x, zeros, weights, True, 1, 0.0, False, False, False)[0]

    net = Net(run, {})
    net.register_parameter("w", nn.Parameter(torch.randn(8, 8)))
    net.register_parameter("b", nn.Parameter(torch.randn(8)))
    program = qc.capture(net.eval(), (torch.randn(3, 6, 8),))
    node = next(node for node in program.graph.nodes if op_name(node) == "rnn_tanh")
    explained = quantizer_of("x86").explain(program, node.name)
    assert "must be a constant to be quantized as a weight" in explained.tried[0].reason


# -- sharing and following --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qnnpack", "executorch"])
def test_what_is_joined_shares_one_scale_with_the_result(name: str) -> None:
    def run(self: Any, x: Tensor) -> Any:
        return self.last(torch.cat([self.a(x), self.b(x), x], 1))

    convs = {"a": nn.Conv2d(4, 4, 1), "b": nn.Conv2d(4, 4, 1), "last": nn.Conv2d(12, 3, 1)}
    prepared = qc.prepare(captured(run, image(), **convs), name)
    (group,) = [group for group in prepared.plan.groups if any(site.node == "cat" for site in group.places)]
    assert {str(site) for site in group.places} >= {"conv2d:out0", "conv2d_1:out0", "cat:out0", "conv2d_2:in0"}


def test_a_follower_needs_everybody_to_want_it_quantized() -> None:
    def run(self: Any, x: Tensor) -> Any:
        pooled = F.max_pool2d(self.a(x), 2)
        return self.b(pooled), pooled.exp()

    convs = {"a": nn.Conv2d(4, 4, 1), "b": nn.Conv2d(4, 4, 1)}
    prepared = qc.prepare(captured(run, image(), **convs), "x86")
    pool = prepared.node("max_pool2d")
    assert pool not in prepared.plan.claims.rows
    assert "not all that reads its result wants it quantized" in str(prepared.plan.left_float.get(pool))
    assert {str(site) for site in prepared.plan.outcomes} == {
        "conv2d:in0",
        "conv2d:in1",
        "conv2d_1:in0",
        "conv2d_1:in1",
    }
    prepared = qc.prepare(captured(run, image(), **convs), "qnnpack")
    assert prepared.node("max_pool2d") in prepared.plan.claims.rows, "what comes quantized is handed on"


def test_a_chain_of_followers_is_one_group() -> None:
    def run(self: Any, x: Tensor) -> Any:
        return self.fc(F.max_pool2d(torch.relu(self.a(x)), 2).permute(0, 2, 3, 1).flatten(1))

    program = captured(run, image(), a=nn.Conv2d(4, 4, 1), fc=nn.Linear(64, 3))
    prepared = qc.prepare(program, "x86")
    (group,) = [group for group in prepared.plan.groups if any(site.node == "permute" for site in group.places)]
    assert [str(site) for site in group.places] == [
        *("max_pool2d:in0", "max_pool2d:out0", "permute:in0", "permute:out0"),
        *("flatten:in0", "flatten:out0", "linear:in0"),
    ]
