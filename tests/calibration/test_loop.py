"""`qc.calibrate`: what is observed, how batches are given, and what happens when something is wrong."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.ao.quantization.observer import MinMaxObserver, MovingAverageMinMaxObserver

import quantc as qc
from quantc.errors import CalibrationError, DataError, InputError, QuantcError, UnknownNameError
from quantc.ir.decisions import FLOAT
from quantc.observe import MinMax
from quantc.support.progress import show_progress
from tests.support.calibration import batch, data, digest, eager_activations, observing, prepared, small

# -- what is observed ------------------------------------------------------------------------------------------


def scales(program: qc.Program) -> dict[str, tuple[float, int]]:
    """Scale and zero point by the node whose tensor they are for."""
    found = qc.convert(program).plan
    names = {site.node: group.name for group in found.groups for site in group.values}
    return {
        node: (float(found.qparams[name].scale), int(found.qparams[name].zero_point))
        for node, name in names.items()
        if found.qparams[name].scale.dim() == 0
    }


@torch.no_grad()
def test_minmax_qparams_are_those_of_torchs_observers_on_eager_activations() -> None:
    model, program = small(), prepared("minmax")
    qc.calibrate(program, data())
    observers: dict[str, Any] = {}
    for x in data():
        for name, value in eager_activations(model, x).items():
            observers.setdefault(name, MinMaxObserver(dtype=torch.quint8, eps=2**-12))(value)
    found = scales(program)
    for name, observer in observers.items():
        scale, zero_point = observer.calculate_qparams()
        assert found[name] == (float(scale), int(zero_point)), name


@torch.no_grad()
def test_moving_averages_follow_the_batches_as_torchs_do() -> None:
    model, program = small(), prepared("moving-average{rate=0.1}")
    qc.calibrate(program, data(4))
    qc.calibrate(program, data()[4:])  # a second call goes on from the first
    observer = MovingAverageMinMaxObserver(averaging_constant=0.1, dtype=torch.quint8, eps=2**-12)
    for x in data():
        observer(eager_activations(model, x)["add"])
    scale, zero_point = observer.calculate_qparams()
    assert scales(program)["add"] == pytest.approx((float(scale), int(zero_point)), rel=1e-6)


def test_repeated_calls_add_up() -> None:
    whole, parts = prepared(), prepared()
    qc.calibrate(whole, data())
    first = qc.calibrate(parts, data()[:4])
    second = qc.calibrate(parts, data()[4:])
    assert (first.batches, second.batches, second.total) == (4, 5, 9)
    assert digest(whole) == digest(parts)


def test_the_order_of_batches_does_not_matter() -> None:
    forward, backward = prepared(), prepared()
    qc.calibrate(forward, data())
    qc.calibrate(backward, reversed(data()))
    assert digest(forward) == digest(backward)


def test_empty_tensors_are_no_data_but_no_fault() -> None:
    dynamic = {"x": {0: torch.export.Dim("n", min=0)}}
    program = qc.prepare(qc.capture(small(), (batch(0),), dynamic_shapes=dynamic), observing("mse"))
    alone = qc.prepare(qc.capture(small(), (batch(0),), dynamic_shapes=dynamic), observing("mse"))
    qc.calibrate(program, [batch(0), torch.zeros(0, 3, 8, 8), batch(1)])
    qc.calibrate(alone, [batch(0), batch(1)])
    assert digest(program) == digest(alone)


# -- how batches are given -------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return self.fc(left) + self.fc(right)


def pairs() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)) for _ in range(3)]


SPELLINGS: dict[str, Any] = {
    "tuples": pairs,
    "lists": lambda: [list(pair) for pair in pairs()],
    "dicts": lambda: [{"left": left, "right": right} for left, right in pairs()],
    "dicts in another order": lambda: [{"right": right, "left": left} for left, right in pairs()],
    "a generator": lambda: (pair for pair in pairs()),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("by", ["position", "name"])
def test_batches_are_what_the_model_takes(spelling: str, by: str) -> None:
    torch.manual_seed(0)
    model, (left, right) = TwoInputs().eval(), pairs()[0]
    captured = (
        qc.capture(model, (left, right))
        if by == "position"
        else qc.capture(model, (left,), example_kwargs={"right": right})
    )
    program = qc.prepare(captured, observing("minmax"))
    report = qc.calibrate(program, SPELLINGS[spelling]())
    assert report.samples == 6
    lows = [min(float(pair[side].min()) for pair in pairs()) for side in (0, 1)]
    rows = {row.where.partition(" ")[0]: row.low for row in report.groups}
    assert (rows["left"], rows["right"]) == tuple(lows)


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, items: dict[str, Tensor]) -> Any:
        return self.fc(items["a"]) + items["b"]


def test_a_model_that_takes_one_dict_takes_dicts_as_batches() -> None:
    items = {"a": torch.randn(2, 4), "b": torch.randn(2, 4)}
    program = qc.prepare(qc.capture(TakesDict().eval(), (items,)), observing("mse"))
    assert qc.calibrate(program, [items, items]).batches == 2


MISFITS: dict[str, tuple[list[Any], str]] = {
    "labels": ([(batch(0),), (batch(1), torch.tensor([1, 2]))], "batch 1 does not fit"),
    "another size": ([batch(0), torch.zeros(2, 3, 9, 8)], "batch 1 does not fit"),
    "another dtype": ([torch.zeros(2, 3, 8, 8, dtype=torch.float64)], "batch 0 does not fit"),
    "another name": ([{"image": batch(0)}], "it has image, and the model takes x"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_batch_the_model_does_not_take_is_named(misfit: str) -> None:
    batches, message = MISFITS[misfit]
    with pytest.raises(InputError, match=message) as found:
        qc.calibrate(prepared("minmax"), batches)
    assert "batch" in str(found.value.where)
    assert found.value.advice


@pytest.mark.parametrize("given", [batch(0), {"x": batch(0)}, 3, "batches"], ids=["tensor", "dict", "int", "str"])
def test_what_is_no_iterable_of_batches_is_refused(given: Any) -> None:
    with pytest.raises(CalibrationError, match="batches is a"):
        qc.calibrate(prepared("minmax"), given)


def test_never_more_than_one_batch_is_held() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def stream() -> Iterator[Tensor]:
        nonlocal most
        for index in range(5):
            most = max(most, sum(reference() is not None for reference in alive))
            fresh = batch(index)
            alive.append(weakref.ref(fresh))
            yield fresh
            del fresh

    qc.calibrate(prepared(), stream())
    assert len(alive) == 5
    assert most == 0  # when one is made, all before it are gone


# -- what can be wrong -----------------------------------------------------------------------------------------


def test_zero_batches() -> None:
    program = prepared("minmax")
    with pytest.raises(CalibrationError, match="zero batches") as found:
        qc.calibrate(program, iter(()))
    assert found.value.advice
    assert program.stage is qc.Stage.SHARED
    with pytest.raises(CalibrationError, match="not calibrated"):
        qc.convert(program)


@pytest.mark.parametrize("observe", ["minmax", "mse", "moving-average"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_named_with_node_and_batch_at_once(observe: str, bad: float) -> None:
    program, before = prepared(observe), prepared(observe)
    qc.calibrate(before, data(2))
    poisoned = batch(2)
    poisoned[0, 0, 0, 0] = bad
    later = iter([batch(0), batch(1), poisoned, batch(3)])
    with pytest.raises(DataError, match="1 of 384 values are NaN or infinite") as found:
        qc.calibrate(program, later)
    assert str(found.value.where).startswith("batch 2, x")
    assert len(list(later)) == 1  # it stopped right there
    assert program.plan.batches == 2
    assert program.stage is qc.Stage.SHARED
    program.stage = qc.Stage.CALIBRATED
    assert digest(program) == digest(before)  # the whole batches, and nothing of the bad one


class Divides(nn.Module):
    """The NaN is made by an op that is not observed."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.fc((x / x).log())


def test_the_op_that_makes_the_first_nan_is_named() -> None:
    x = torch.rand(2, 4) + 1
    program = qc.prepare(qc.capture(Divides().eval(), (x,)), observing("minmax"))
    with pytest.raises(DataError) as found:
        qc.calibrate(program, [x, torch.zeros(2, 4)])
    assert "batch 1, log" in str(found.value.where)
    assert "the first to give one is div" in str(found.value.where)
    assert "set_node('linear', FLOAT)" in str(found.value.advice)
    # and the advice works
    config = qc.QuantConfig().set_op("linear", FLOAT)
    assert (
        qc.prepare(qc.capture(Divides().eval(), (x,)), observing("minmax"), config=config, allow_empty=True).plan.groups
        == ()
    )


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_interruption_leaves_the_whole_batches(kind: type[BaseException]) -> None:
    def stream() -> Iterator[Tensor]:
        yield from data(3)
        raise kind("enough")

    program, before = prepared(), prepared()
    with pytest.raises(kind, match="enough"):
        qc.calibrate(program, stream())
    assert program.plan.batches == 3
    qc.calibrate(program, data()[3:])
    qc.calibrate(before, data())
    assert digest(program) == digest(before)


def test_a_failing_observation_leaves_the_batches_before(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    update = MinMax.update

    def failing(self: MinMax, x: Tensor, *, where: str = "") -> None:
        nonlocal calls
        calls += 1
        if calls == 8:  # in the middle of the second batch
            raise MemoryError("no more")
        update(self, x, where=where)

    program, before = prepared("minmax"), prepared("minmax")
    qc.calibrate(before, data(1))
    monkeypatch.setattr(MinMax, "update", failing)
    with pytest.raises(CalibrationError, match="MemoryError"):
        qc.calibrate(program, data())
    monkeypatch.undo()
    assert program.plan.batches == 1
    program.stage = qc.Stage.CALIBRATED
    assert digest(program) == digest(before)


def test_stages_are_checked() -> None:
    program = qc.capture(small(), (batch(0),))
    with pytest.raises(CalibrationError, match="was not prepared"):
        qc.calibrate(program, data(1))
    done = prepared("minmax")
    qc.calibrate(done, data(1))
    with pytest.raises(CalibrationError, match="converted already"):
        qc.calibrate(qc.convert(done), data(1))


def test_the_program_is_otherwise_unchanged() -> None:
    program = prepared()
    before = program.dump(plan=False)
    state = {name: tensor.clone() for name, tensor in program.root.state_dict().items()}
    qc.calibrate(program, data(2))
    assert program.dump(plan=False).replace("stage=calibrated", "stage=shared") == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in program.root.state_dict().items())


# -- reports and progress --------------------------------------------------------------------------------------


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: self.up(x) + 0.0, lambda x: self.down(x) + 0.0, (x,))


def test_each_branch_has_its_own_statistics_and_one_never_taken_is_said() -> None:
    x = torch.rand(2, 4)
    program = qc.prepare(qc.capture(Branch().eval(), (x,)), observing("minmax"))
    report = qc.calibrate(program, [x])
    assert len(report.unseen) == 2  # what the linear there reads and gives
    assert all(group.startswith("false_graph_0/") for group in report.unseen)
    assert "never reached" in str(report)
    with pytest.raises(QuantcError, match="false_graph_0"):
        qc.convert(program)
    report = qc.calibrate(program, [-2 * x])
    rows = {
        row.group.partition("/")[0]: (row.low, row.high) for row in report.groups if row.group.endswith("linear:in0")
    }
    assert rows["true_graph_0"] == (float(x.min()), float(x.max()))
    assert rows["false_graph_0"] == (float(-2 * x.max()), float(-2 * x.min()))
    qc.convert(program)


def test_progress_is_told_and_nothing_is_printed_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[int, int | None]] = []
    program = prepared("minmax")
    qc.calibrate(program, data(3), progress=lambda done, total: told.append((done, total)))
    qc.calibrate(program, iter(data(2)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert capfd.readouterr() == ("", "")
    qc.calibrate(program, data(2), progress="lines")
    out, err = capfd.readouterr()
    assert not out
    assert err.startswith("calibrating Small: 2 of 2 batches")
    with pytest.raises(UnknownNameError, match="unknown progress style 'loud'"):
        qc.calibrate(program, data(1), progress="loud")  # type: ignore[arg-type]


def test_a_terminal_gets_a_bar() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=100)
    with show_progress("calibrating", "auto", console=console) as told:
        told(3, 10)
        told(10, 10)
    assert isinstance(console.file, StringIO)
    assert "10/10" in console.file.getvalue()
