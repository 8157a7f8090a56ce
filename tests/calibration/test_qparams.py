"""Qparams of every group from statistics, constants and other groups, and what has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.calibration.qparams import find_qparams
from quantc.errors import CalibrationError, SpecError
from quantc.ir.program import Program
from quantc.observe.minmax import MinMax
from quantc.observe.observation_registry import OBSERVATIONS
from quantc.observe.trained import Trained
from quantc.patterns import aten
from quantc.patterns.operand_patterns import const
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.formats import PerGroup, PerTensor
from quantc.spec.numerics import QParams, qparams_of
from quantc.spec.spec import INT8_WEIGHT, INT32_BIAS, UINT8, QuantSpec
from tests.support.calibration import batch, data, prepared


def calibrated(observe: str = "minmax") -> Program:
    program = prepared(observe)
    qc.calibrate(program, data(2))
    return program


def test_every_group_has_those_of_its_numbers() -> None:
    program = calibrated()
    found, notes = find_qparams(program)
    assert sorted(found) == sorted(group.name for group in program.plan.groups)
    assert found["conv2d:in0"].equals(qparams_of(torch.cat(data(2)), UINT8))
    weight = dict(program.named_parameters())["conv1.weight"]
    assert found["conv2d:in1"].equals(qparams_of(weight.detach(), INT8_WEIGHT))
    assert notes == []


def test_a_group_without_data_is_refused_by_name() -> None:
    with pytest.raises(CalibrationError, match=r"conv2d:in0 was never observed") as caught:
        find_qparams(prepared("minmax"))
    assert "qc.calibrate" in str(caught.value.advice)


def test_a_branch_that_no_batch_took_is_told_as_such() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return torch.cond(x.sum() > 0, lambda x: self.up(x) + 0.0, lambda x: self.down(x) + 0.0, (x,))

    program = qc.prepare(qc.capture(Branch().eval(), (torch.ones(2, 4),), dynamic_shapes=None), "x86")
    qc.calibrate(program, [torch.ones(2, 4)])
    with pytest.raises(CalibrationError, match="no batch entered false_graph_0") as caught:
        find_qparams(program)
    assert "false_graph_0/*" in str(caught.value.advice)


def test_what_training_found_comes_before_statistics_and_constants() -> None:
    program = calibrated()
    own = QParams(torch.tensor(0.125), torch.tensor(7))
    program.plan.statistics["conv2d:in0"] = Trained(PerTensor(), own)
    assert find_qparams(program)[0]["conv2d:in0"].equals(own)


def test_fixed_outcomes_are_as_they_were_given() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.conv(x))

    torch.manual_seed(0)
    program = qc.prepare(qc.capture(Net().eval(), (batch(0),)), "small")
    qc.calibrate(program, data(1))
    assert find_qparams(program)[0]["sigmoid:out0"].one == (1 / 256, 0)


def test_a_constant_among_activations_widens_their_range() -> None:
    class Shifted(nn.Module):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.tensor([[-50.0, 1.0, 0.0, 0.0]]))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, self.table]) + 1.0

    program = qc.prepare(qc.capture(Shifted().eval(), (torch.ones(2, 4),)), "small")
    qc.calibrate(program, [torch.full((2, 4), 2.0)])
    found = find_qparams(program)[0]
    group = next(group.name for group in program.plan.groups if group.name.startswith("cat"))
    assert found[group].equals(qparams_of(torch.tensor([-50.0, 2.0]), UINT8))


BIASED = Backend(
    "biased",
    RuleTable(
        "biased",
        (
            Rule(
                "linear",
                aten.linear("x", const("w"), const("b")),
                {"x": "act", "w": "weight", "b": "bias", "out": "act"},
            ),
        ),
    ),
    roles={"act": UINT8, "weight": INT8_WEIGHT.but(eps=2.0**-60), "bias": INT32_BIAS},
    summary="a linear whose bias is added to integers",
)


def biased(bias: float, **roles: QuantSpec) -> Program:
    """A linear of tiny weights, calibrated; its first channel has the bias that is given."""
    linear = nn.Linear(4, 2)
    with torch.no_grad():
        linear.weight.fill_(1e-6)
        linear.bias.copy_(torch.tensor([bias, 0.0]))
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    program = qc.prepare(qc.capture(linear.eval(), (x,)), BIASED.but(**roles))
    qc.calibrate(program, [x])
    return program


def test_a_bias_has_the_product_of_its_parents_scales() -> None:
    found, notes = find_qparams(biased(1e-3))
    x, weight, bias = (found[f"linear:in{operand}"] for operand in range(3))
    assert torch.equal(bias.scale.double(), (x.scale.double() * weight.scale.double()).float().double())
    assert bias.zero_point.tolist() == [0, 0]
    assert not any("raised" in note for note in notes)


def test_weight_scales_are_raised_until_the_bias_fits() -> None:
    small, large = find_qparams(biased(1e-3))[0], find_qparams(biased(1e3))
    assert any("1 weight scales raised" in note for note in large[1])
    scale = large[0]["linear:in2"].scale.double()
    assert 1e3 / float(scale[0]) < 2**31
    assert float(large[0]["linear:in1"].scale[1]) == float(small["linear:in1"].scale[1])  # the other channel stays


def test_biases_of_weights_in_groups_are_refused() -> None:
    with pytest.raises(SpecError, match="linear:in2"):
        find_qparams(biased(1e-3, weight=INT8_WEIGHT.but(granularity=PerGroup(axis=1, size=2))))


def test_weights_below_the_smallest_scale_are_told() -> None:
    notes = find_qparams(biased(1e-9, weight=INT8_WEIGHT.but(eps=2.0**-12)))[1]
    assert any(note.startswith("warning: ") and "2 of 2 scales" in note for note in notes)


class Unrounded(MinMax):
    """An observation from outside that does not look at scale_bits."""

    statistics = "unrounded"

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        return super().qparams(spec.but(scale_bits=24), where=where)


@pytest.mark.parametrize("observe", ["fixed{scale=0.01 zero_point=0}", "unrounded"])
@pytest.mark.parametrize("qat", [False, True])
def test_scales_with_more_bits_than_the_spec_has_are_refused(
    observe: str, qat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBSERVATIONS.session, "unrounded", Unrounded)
    if qat and observe == "unrounded":
        return  # training follows ranges that it knows alone
    act = UINT8.but(scale_bits=1, observe=observe)
    linear = Rule("linear", aten.linear("x", const("w")), {"x": "act", "w": "weight"}, supports={"qdq"})
    backend = Backend("own", RuleTable("own", (linear,)), roles={"act": act, "weight": INT8_WEIGHT})
    x = torch.randn(4, 4)
    program = qc.prepare(
        qc.capture(nn.Linear(4, 4), (x,)) if qat else qc.capture(nn.Linear(4, 4).eval(), (x,)), backend, qat=qat
    )
    if qat:
        program.train()
        program(x)
        program.eval()
    else:
        qc.calibrate(program, [x])
    with pytest.raises(SpecError, match="no power of two, and the spec asks for that") as caught:
        qc.convert(program)
    assert "linear:in0" in caught.value.what
    assert observe in str(caught.value.where)


def test_room_for_a_bias_is_made_in_scales_that_the_spec_allows() -> None:
    linear = Rule(
        "linear", aten.linear("x", const("w"), const("b")), {"x": "act", "w": "weight", "b": "bias"}, supports={"qdq"}
    )
    roles = {"act": UINT8.but(scale_bits=1), "weight": INT8_WEIGHT.but(scale_bits=1), "bias": INT32_BIAS}
    backend = Backend("own", RuleTable("own", (linear,)), roles=roles)
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    with torch.no_grad():
        module.weight.mul_(1e-7)
        module.bias.fill_(3.0)
    x = torch.randn(4, 4)
    program = qc.prepare(qc.capture(module.eval(), (x,)), backend)
    qc.calibrate(program, [x])
    converted = qc.convert(program)
    assert any("raised so that the bias fits" in note for entry in converted.log for note in entry.notes)
    scale = converted.plan.qparams["linear:in1"].scale
    assert bool((torch.frexp(scale).mantissa == 0.5).all())
