"""Observers in the graph: whoever runs the module calibrates, with the numbers that `qc.calibrate` gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import quantc as qc
from quantc.calibration.graph_observers import remove_observers
from quantc.errors import CalibrationError, DataError
from quantc.hooks import Guard, Verify
from quantc.ir.program import Program
from quantc.observe import ObserverModule, observers_in, observers_off
from quantc.observe.module import observer_nodes
from quantc.passes.insert_observers import InsertObservers
from quantc.pipeline.pipeline import Pipeline
from tests.support.calibration import batch, data, digest, observing, prepared
from tests.support.chains import star
from tests.support.growth import calls as calls_of
from tests.support.growth import exponent
from tests.support.small_backend import SMALL
from tests.zoo import BY_NAME
from tests.zoo.case import Case

NAMES = ("resnet_block", "dense_block", "two_towers", "gpt_masked", "lstm_cell_loop", "shared_module", "containers")


def observed(observe: str = "mse") -> Program:
    return Pipeline((InsertObservers(),)).run_on_copy(prepared(observe))


def calls(case: Case) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [case.example(seed) for seed in range(3)]


@pytest.mark.parametrize("name", NAMES)
def test_running_the_module_gives_the_numbers_of_calibrate(name: str) -> None:
    case = BY_NAME[name]
    args, kwargs = case.example()
    captured = qc.capture(case.model(), args, example_kwargs=kwargs)
    plain = qc.prepare(captured, "x86")
    with_observers = qc.pipelines.prepare("x86").then(InsertObservers()).run_on_copy(captured, [Verify(), Guard()])
    assert with_observers.stage is qc.Stage.OBSERVED
    assert not any(kwargs for _, kwargs in calls(case))
    qc.calibrate(plain, [args for args, _ in calls(case)])
    for args, kwargs in calls(case):
        with_observers.module(*args, **kwargs)  # gradients may be on
    left, right = qc.convert(plain), qc.convert(with_observers)
    right.verify()
    assert left.dump(plan=False) == right.dump(
        plan=False
    )  # scales and zero points are constants of the program, with digests


@pytest.mark.parametrize("observe", ["minmax", "mse", "moving-average", "recording"])
def test_calibrate_takes_a_program_with_observers_and_counts_nothing_twice(observe: str) -> None:
    plain, program = prepared(observe), observed(observe)
    for x in data()[:3]:
        program.module(x)
    report = qc.calibrate(program, data()[3:6])
    for x in data()[6:]:
        program.module(x)
    qc.calibrate(plain, data())
    assert digest(program) == digest(plain)
    before = {row.group: row.seen for row in report.groups}
    assert all(seen.seen == before[name] // 6 * 9 for name, seen in qc.convert(program).plan.statistics.items())


class Flattened(nn.Module):
    """A tensor is rearranged on its way: its elements count once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(144, 2)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.conv(x).relu().unsqueeze(1).flatten(1))


def test_what_is_only_rearranged_counts_once_with_and_without_observers() -> None:
    torch.manual_seed(0)
    plain = qc.prepare(qc.capture(Flattened().eval(), (batch(0),)), observing("minmax"))
    program = Pipeline((InsertObservers(),)).run_on_copy(plain)
    assert not InsertObservers().run(program)
    reports = [qc.calibrate(program, data(2)), qc.calibrate(plain, data(2))]
    rows = [{row.where.partition(" ")[0]: row.seen for row in report.groups} for report in reports]
    assert rows[0] == rows[1]
    assert rows[0]["relu"] == 2 * 2 * 4 * 6 * 6


def test_a_group_has_one_observation_and_the_module_keeps_its_numbers() -> None:
    program = observed()
    by_group: dict[str, set[int]] = {}
    for observer in observer_nodes(program).values():
        by_group.setdefault(observer.group, set()).add(id(observer.observation))
    assert all(len(identities) == 1 for identities in by_group.values())
    assert torch.equal(program.module(batch(0)), prepared().module(batch(0)))


def test_inserting_twice_changes_nothing_and_converting_takes_them_out() -> None:
    program = observed()
    before = program.dump()
    assert not InsertObservers().run(program)
    assert program.dump() == before
    program.module(batch(0))
    converted = qc.convert(program)
    assert not list(observers_in(converted.root))
    assert observer_nodes(program)  # the prepared program keeps its own


def test_a_copy_has_observers_of_its_own() -> None:
    program = observed()
    program.module(batch(0))
    twin = copy.deepcopy(program.module)
    clone = program.clone()
    seen = {observer.group: observer.observation.seen for observer in observers_in(program.module)}
    twin(batch(1))
    clone.module(batch(1))
    for observer in observers_in(program.module):
        assert observer.observation.seen == seen[observer.group]
    for module in (twin, clone.module):
        assert {o.group: o.observation.seen for o in observers_in(module)} == {g: 2 * n for g, n in seen.items()}
    both = prepared()
    qc.calibrate(both, data(2))
    assert digest(clone) == digest(both)


def test_without_data_there_is_nothing_to_convert() -> None:
    with pytest.raises(CalibrationError, match="not calibrated"):
        qc.convert(observed())


def test_observers_can_be_switched_off() -> None:
    program = observed()
    with observers_off(program.module):
        program.module(batch(0))
    assert all(observer.observation.seen == 0 for observer in observers_in(program.module))
    program.module(batch(0))
    assert all(observer.observation.seen > 0 for observer in observers_in(program.module))


@pytest.mark.parametrize("state", ["on", "off"])
def test_an_exported_module_has_no_observers_and_the_same_numbers(state: str) -> None:
    program = observed()
    if state == "off":
        with observers_off(program.module):
            exported = torch.export.export(program.module, (batch(0),))
    else:
        exported = torch.export.export(program.module, (batch(0),))
    targets = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert all(target.startswith("aten.") for target in targets)
    assert torch.equal(exported.module()(batch(1)), prepared().module(batch(1)))
    assert all(observer.observation.seen == 0 for observer in observers_in(program.module))


def test_torchs_own_dead_code_elimination_keeps_observers() -> None:
    program = observed()
    module = copy.deepcopy(program.module)
    count = len(list(observers_in(module)))
    module.graph.eliminate_dead_code()
    module.recompile()
    module(batch(0))
    assert sum(observer.observation.seen > 0 for observer in observers_in(module)) == count


def test_gradients_pass_through() -> None:
    x = batch(0).requires_grad_()
    program = observed("minmax")
    program.module(x).sum().backward()
    y = batch(0).requires_grad_()
    prepared("minmax").module(y).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)


def test_nan_is_refused_at_once_with_the_node() -> None:
    program = observed("minmax")
    with pytest.raises(DataError, match="NaN or infinite") as found:
        program.module(batch(0) * float("nan"))
    assert str(found.value.where).startswith("x")


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: self.up(x) + 0.0, lambda x: self.down(x) + 0.0, (x,))


@torch.no_grad()
def test_branches_are_observed_too() -> None:
    x = torch.rand(2, 4)
    captured = qc.capture(Branch().eval(), (x,))
    plain = qc.prepare(captured, observing("mse"))
    program = Pipeline((InsertObservers(),)).run_on_copy(plain)
    qc.calibrate(plain, [x, -x])
    program.module(x)
    program.module(-x)
    assert digest(program) == digest(plain)


def test_the_module_holds_observers_as_modules() -> None:
    program = observed()
    module = program.module
    assert isinstance(module, fx.GraphModule)
    called = [module.get_submodule(str(node.target)) for node in module.graph.find_nodes(op="call_module")]
    assert called
    assert all(isinstance(child, ObserverModule) for child in called)
    assert "0 seen" in repr(called[0])


def test_inserting_and_removing_grow_linearly() -> None:
    """A join that reads all observed tensors is changed once, not once for each of them."""
    costs: dict[int, float] = {}
    for width in (50, 100, 200, 400):
        program = qc.pipelines.prepare(SMALL).run(star(width))
        costs[width] = float(calls_of(lambda program=program: _in_and_out(program)))  # type: ignore[misc]
    assert exponent(costs) < 1.1


def _in_and_out(program: Program) -> None:
    assert InsertObservers().run(program)
    assert remove_observers(program)
