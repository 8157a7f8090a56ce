"""canonicalize: writes in place and shared memory, held against eager PyTorch. The spellings are in tests/golden."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload

import quantc as qc
from quantc.hooks import Guard, Truth, Verify
from quantc.ir.dialect import overload_names, writes
from quantc.ir.program import Program, Stage
from quantc.passes.canonicalize import Canonicalize
from quantc.pipeline.pipeline import Pipeline
from quantc.rewrite.functionalize import functional_overload
from tests.support.agree import assert_same, run
from tests.support.by_hand import Builder, aten

PIPELINE = Pipeline((Canonicalize(),))
Method = Literal["fx", "export"]
METHODS: tuple[Method, ...] = ("fx", "export")


class Body(nn.Module):
    """A model that is one function of x."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


def check(model: nn.Module, x: Tensor, method: Method) -> Program:
    """Capture it; outputs, and what is left in the input, are those of the model."""
    program = qc.capture(model, (x,), method=method)
    eager = copy.deepcopy(model)
    for seed in range(2):
        fresh = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        expected, actual = run(eager, (fresh,)), run(program, (fresh,))
        assert_same(actual.output, expected.output)
        assert_same(actual.arguments, expected.arguments)
    PIPELINE.run(program, [Truth()])
    assert not program.log[-1].changed
    return program


MAY_BE_THE_SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda y: y.contiguous(),
    "reshape": lambda y: y.reshape(2, 4),
    "to": lambda y: y.to(torch.float32),
    "type_as": lambda y: y.type_as(y),
    "dropout": lambda y: F.dropout(y, 0.5, training=False),
    "alpha_dropout": lambda y: F.alpha_dropout(y, 0.5, training=False),
    "einsum": lambda y: torch.einsum("ij->ji", y),
    "atleast_2d": torch.atleast_2d,
    "atleast_3d": torch.atleast_3d,
    "broadcast_tensors": lambda y: torch.broadcast_tensors(y, y)[0],  # type: ignore[no-untyped-call]
    "broadcast_to": lambda y: y.broadcast_to((2, 4)),
    "meshgrid": lambda y: torch.meshgrid(y[0], indexing="ij")[0],
    "sum_to_size": lambda y: y.sum_to_size((2, 4)),
    "conj_physical": torch.conj_physical,
    "pad": lambda y: F.pad(y, (0, 0)),
    "pad_less": lambda y: F.pad(y, (-1, 0)),
    "positive": torch.positive,
    "unsafe_chunk": lambda y: torch.unsafe_chunk(y, 2, 1)[1],
    "flatten": lambda y: y.flatten(0),
    "expand_as": lambda y: y.expand_as(y),
    "identity": nn.Identity(),
    "real": torch.real,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", MAY_BE_THE_SAME)
def test_writes_reach_whatever_shares_the_memory(kind: str, method: Method) -> None:
    def body(x: Tensor) -> Any:
        base = -x
        same = MAY_BE_THE_SAME[kind](base)
        same.add_(1)
        other = -x
        view = MAY_BE_THE_SAME[kind](other)
        other.mul_(3)
        return base, view

    check(Body(body).eval(), torch.randn(2, 4), method)


def in_place_ops() -> list[OpOverload]:
    """Every op of ATen that writes to its first argument and can be called on one float tensor alone."""
    found: list[OpOverload] = []
    for name in sorted(dir(aten)):
        if not name.endswith("_") or name.startswith("_"):
            continue
        packet = getattr(aten, name)
        for overload in (getattr(packet, each) for each in overload_names(packet)):
            needed = [row for row in overload._schema.arguments if not row.has_default_value()]
            if writes(overload) == (0,) and len(needed) == 1 and functional_overload(overload) is not None:
                found.append(overload)
    return found


def with_write(target: OpOverload, *args: Any) -> Program | None:
    """neg, then the write, read under both names; None if torch does not do that to floats."""
    build = Builder()
    x = build.input("x", torch.tensor([[-0.5, 0.25, 0.0], [0.75, -0.125, 1.0]]))
    base = build.call(aten.neg.default, x)
    try:
        write = build.call(target, base, *args)
        return build.program(write, base, stage=Stage.CAPTURED)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def held_to_eager(program: Program) -> None:
    guard = Guard()
    PIPELINE.run(program, [Truth(), Verify(), guard])
    assert guard.checked == ["canonicalize"], guard.skipped


def test_every_write_to_one_tensor_keeps_its_numbers() -> None:
    programs = {str(op): with_write(op) for op in in_place_ops()}
    made = {name: program for name, program in programs.items() if program is not None}
    assert len(made) > 60
    for program in made.values():
        held_to_eager(program)
    functional = [name for name, program in made.items() if not program.opaque()]
    assert {"aten.relu_.default", "aten.sigmoid_.default", "aten.t_.default", "aten.zero_.default"} <= set(functional)
    assert "aten.logical_not_.default" not in functional, "it writes floats, and logical_not gives truth values"


OTHERS = (0.5, 2, torch.tensor(0.5), torch.tensor([0.5, -1.0, 2.0]), torch.tensor(2.0, dtype=torch.float64))
BINARY = (
    "add",
    "sub",
    "mul",
    "div",
    "pow",
    "remainder",
    "fmod",
    "atan2",
    "copysign",
    "eq",
    "gt",
    "le",
    "logical_or",
    "copy",
)


@pytest.mark.parametrize("name", BINARY)
def test_every_write_of_two_operands_keeps_its_numbers(name: str) -> None:
    packet = getattr(aten, f"{name}_")
    checked = 0
    for overload in (getattr(packet, each) for each in overload_names(packet)):
        for other in OTHERS:
            program = with_write(overload, other)
            if program is not None and not isinstance(other, Tensor):
                held_to_eager(program)
                checked += 1
    assert checked or name in ("atan2", "logical_or", "copy")


@pytest.mark.parametrize("other", OTHERS[2:], ids=["number", "row", "wider"])
@pytest.mark.parametrize("name", BINARY)
def test_writes_of_tensors_keep_their_numbers(name: str, other: Tensor) -> None:
    target = aten.copy_.default if name == "copy" else getattr(getattr(aten, f"{name}_"), "Tensor", None)
    build = Builder(other=other)
    x = build.input("x", torch.tensor([[-0.5, 0.25, 0.0], [0.75, -0.125, 1.0]]))
    base, constant = build.call(aten.neg.default, x), build.const("other")
    write = build.call(target or getattr(aten, f"{name}_").default, base, constant)
    held_to_eager(build.program(write, base, stage=Stage.CAPTURED))


class Statistics(nn.Module):
    """Reads a copy of the running mean after batch norm has updated it."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Any:
        assert self.bn.running_mean is not None
        before = self.bn.running_mean.clone()
        y = self.bn(x)
        return y + before, self.bn.running_mean - before


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_batch_norm_writes_its_statistics(mode: str, method: Method) -> None:
    model = Statistics().train(mode == "train")
    check(model, torch.randn(8, 4), method)


class Region(nn.Module):
    """Writes inside a no_grad region, which stays a region in training, to what is copied before it."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x).detach() * 1
        before, count = y.clone(), self.count.clone()
        with torch.no_grad():
            y.add_(1)
            self.count.add_(1)
        return y + before, self.count * count


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_regions_may_write(mode: str, method: Method) -> None:
    check(Region().train(mode == "train"), torch.randn(2, 4), method)


class Whole(nn.Module):
    """A module kept whole writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        y = -x
        before = y.clone()
        return self.act(y) + before, y


def test_modules_kept_whole_may_write() -> None:
    model, x = Whole().eval(), torch.randn(2, 4)
    program = qc.capture(model, (x,), method="fx", leaf=["act"])
    assert_same(run(program, (x,)).output, run(model, (x,)).output)


def test_long_chains_of_writes_take_one_round() -> None:
    def body(x: Tensor) -> Tensor:
        y = -x
        for _ in range(50):
            y.add_(1).mul_(0.5)
        return y

    program = check(Body(body).eval(), torch.randn(2, 4), "fx")
    assert not program.opaque()


def test_what_stays_in_place_is_listed() -> None:
    def body(x: Tensor) -> Tensor:
        y = -x
        y[0].zero_()
        return y

    program = check(Body(body).eval(), torch.randn(2, 4), "fx")
    (node,) = program.opaque()
    assert node.target is aten.zero_.default
    notes = next(entry.notes for entry in program.log if entry.name == "canonicalize")
    assert f"left opaque: {program.describe(node)}" in notes


@pytest.mark.parametrize("method", ["export", "fx"])
def test_one_tensor_given_for_two_inputs(method: Any) -> None:
    """The copy of an input must stay if another input is written to: the caller may give one tensor for both."""

    class Writes(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = y.clone()
            x.add_(1)
            return z * 2

    program = qc.capture(Writes(), (torch.randn(3), torch.randn(3)), method=method)
    given, same = torch.arange(3.0), torch.arange(3.0)
    assert torch.equal(program(given, given), Writes()(same, same))
    assert torch.equal(given, same)
