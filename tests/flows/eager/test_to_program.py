"""Eager models in the graph engine: the scales of their observers, the specs of their qconfigs, and the same results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.flows import eager
from quantc.flows.eager.to_program import OUTSIDE
from tests.support.eager_models import CASES, QUANTC, grids
from tests.support.eager_small import Small, X, run, small, with_qconfig

HANDED_OVER = ["mlp", "linear-bn", "convnet", "residual", "depthwise", "branches", "conv1d", "conv3d", "gate"]


def handed_over(name: str) -> tuple[nn.Module, nn.Module, qc.Program]:
    """The model with its observers, the converted one and the program."""
    case = CASES[name]
    model = case.made(QUANTC).eval()
    prepared = QUANTC.calibrated(copy.deepcopy(model), case.fuse, case.data(), eager.get_default_qconfig("fbgemm"))
    return prepared, QUANTC.converted(prepared), eager.to_program(prepared, (case.data()[0],))


@pytest.mark.parametrize("name", HANDED_OVER)
def test_a_program_has_the_scales_of_the_observers(name: str) -> None:
    prepared, _, program = handed_over(name)
    found = [observer.calculate_qparams() for observer in eager.get_observer_dict(prepared).values()]
    known = {(scale.item(), zero_point.item()) for scale, zero_point in found}
    quantized = qc.convert(program)
    groups = [group.name for group in quantized.plan.groups if group.source.value == "data"]
    assert groups
    for group in groups:
        qparams = quantized.plan.qparams[group]
        assert (qparams.scale.item(), qparams.zero_point.item()) in known


@pytest.mark.parametrize("name", HANDED_OVER)
def test_a_program_computes_what_the_eager_model_does(name: str) -> None:
    prepared, converted, program = handed_over(name)
    x = CASES[name].data()[1]
    step = [scale for scale, _ in grids(converted).values()][-1]
    quantized = qc.convert(program)
    with torch.no_grad():
        expected, plain = converted(x), prepared(x)
    noise = float((expected - plain).abs().max())
    for made in (quantized(x), qc.lower(quantized, "x86")(x)):
        assert float((made - plain).abs().max()) <= noise + 2 * step
        assert float((made - expected).abs().max()) <= noise + 2 * step


def test_weights_are_quantized_as_the_qconfig_says() -> None:
    for qconfig, by_channel in ((eager.default_qconfig, False), (eager.default_per_channel_qconfig, True)):
        prepared = run(eager.prepare(with_qconfig(small(), qconfig)))
        program = qc.convert(eager.to_program(prepared, (X,)))
        converted: Any = eager.convert(prepared)
        found = {name: value.scale for name, value in program.plan.qparams.items() if name.endswith("in1")}
        assert all(scale.dim() == int(by_channel) for scale in found.values())
        weight = converted.fc.weight()
        expected = weight.q_per_channel_scales() if by_channel else torch.tensor(weight.q_scale())
        assert torch.equal(found["linear:in1"].double(), expected.double())


def test_what_is_outside_of_the_stubs_stays_float() -> None:
    class Outside(Small):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Conv2d(3, 3, 1), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return torch.softmax(self.after(super().forward(self.before(x))), -1)

    model: Any = with_qconfig(eager.fuse_modules(Outside().eval(), [["conv", "bn", "relu"]]))
    model.before.qconfig = model.after.qconfig = None
    prepared = run(eager.prepare(model))
    program = eager.to_program(prepared, (X,))
    why = {node.name: reason for node, reason in program.plan.left_float.rows.items()}
    assert [name for name, reason in why.items() if reason == OUTSIDE] == ["conv2d", "linear_1", "softmax"]
    assert {node.name for node in program.plan.claims} >= {"conv2d_1", "linear"}
    assert (qc.convert(program)(X) - eager.convert(prepared)(X)).abs().max() < 0.02


def test_a_program_says_whose_observer_it_took() -> None:
    program = eager.to_program(run(eager.prepare(small())), (X,))
    assert program.stage is qc.Stage.CALIBRATED
    assert "as quant observed it" in str(program.log[-1])


def test_the_model_is_not_changed_and_can_be_handed_over_again() -> None:
    prepared = run(eager.prepare(small()))
    before = {name: value.clone() for name, value in prepared.state_dict().items()}
    first, second = (qc.convert(eager.to_program(prepared, (X,))) for _ in range(2))
    assert torch.equal(first(X), second(X))
    assert all(torch.equal(value, before[name]) for name, value in prepared.state_dict().items())
    eager.convert(prepared)


def test_a_program_is_saved_and_loaded(tmp_path: Any) -> None:
    quantized = qc.convert(eager.to_program(run(eager.prepare(small())), (X,)))
    quantized.save(tmp_path / "model.qc")
    loaded: Any = qc.load(tmp_path / "model.qc")
    assert torch.equal(loaded(X), quantized(X))


def test_a_trained_model_is_handed_over() -> None:
    model = eager.fuse_modules_qat(Small().train(), [["conv", "bn", "relu"]])
    trained = eager.prepare_qat(with_qconfig(model, eager.get_default_qat_qconfig("fbgemm")))
    optimizer = torch.optim.SGD(trained.parameters(), 0.01)
    for _ in range(5):
        optimizer.zero_grad()
        trained(X).square().mean().backward()
        optimizer.step()
    trained.eval()
    converted: Any = eager.convert(trained)
    program = qc.convert(eager.to_program(trained, (X,)))
    found = program.plan.qparams["linear:in1"].scale
    assert torch.equal(found.double(), converted.fc.weight().q_per_channel_scales().double())
    assert (program(X) - converted(X)).abs().max() <= 2 * converted.fc.scale


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: eager.prepare(small()), eager.NotObservedError),
        (small, eager.NothingQuantizedError),
        (lambda: run(eager.prepare(with_qconfig(Small().eval()))), eager.EagerError),
    ],
    ids=["no data", "not prepared", "norm apart"],
)
def test_what_cannot_be_handed_over_is_refused(make: Any, expected: type[Exception]) -> None:
    with pytest.raises(expected):
        eager.to_program(make(), (X,))
