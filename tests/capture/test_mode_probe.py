"""Mode-dependent arguments in the user's own code, found by a capture in the other mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.capture.mode_flags import record_modes
from quantc.capture.mode_probe import readers_of_mode, settle_modes
from quantc.ir.program import Program
from quantc.ir.sites import ModeValue, Origin
from tests.support.programs import Builder, aten


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5, self.training)


class Hides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def chosen() -> Tensor:
            return x if self.training else -x

        return chosen()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(x)
        return out


def test_functions_that_read_the_mode_are_named_with_their_line() -> None:
    (found,) = readers_of_mode(nn.Sequential(Plain(), Reads(), Reads()))
    assert found.startswith("Reads.forward (test_mode_probe.py:")
    assert [row.partition(" ")[0] for row in readers_of_mode(Hides())] == ["Hides.forward"]
    assert readers_of_mode(Plain()) == []  # torch's modules are not asked
    assert len(readers_of_mode(type("Child", (Reads,), {})())) == 1  # nor is what a class inherits forgotten


Make = Callable[[Builder, Any], Any]


def captured(make: Make, training: bool, *origins: str) -> Program:
    build = Builder()
    program = build.program(make(build, build.input("x", 2, 3)))
    program.training = training
    record_modes(program, None)
    for node, kind in zip([node for node in program.nodes() if node.op == "call_function"], origins, strict=False):
        program.origins[node] = Origin("drop", kind)
    return program


def settled(model: nn.Module, now: Make, other: Make, *origins: str, training: bool = False) -> Program:
    program = captured(now, training, *origins)
    settle_modes(program, model, lambda: captured(other, not training))
    return program


def dropout(p: float, train: bool) -> Make:
    return lambda build, x: build.call(aten.dropout.default, x, p, train)


def modes(program: Program) -> list[ModeValue]:
    return list(program.modes.rows.values())


def never() -> Program:
    raise AssertionError("there was no need to capture again")


def test_without_readers_flags_outside_of_torch_s_modules_are_fixed() -> None:
    program = captured(dropout(0.5, False), False, "model.Net")
    assert len(modes(program)) == 1
    settle_modes(program, Plain(), never)
    assert modes(program) == []
    program = captured(dropout(0.5, False), False, "torch.nn.modules.dropout.Dropout")
    settle_modes(program, Plain(), never)
    assert modes(program) == [ModeValue(2, train=True, eval=False)]


@pytest.mark.parametrize("training", [False, True])
def test_arguments_that_differ_between_the_modes_follow_them(training: bool) -> None:
    program = settled(Reads(), dropout(0.5, training), dropout(0.5, not training), training=training)
    assert modes(program) == [ModeValue(2, train=True, eval=False)]
    assert not program.fixed_mode
    by_rate = settled(Reads(), dropout(0.1, True), dropout(0.5, True))
    assert modes(by_rate) == [ModeValue(1, train=0.5, eval=0.1)]


def test_a_flag_that_is_the_same_in_both_modes_is_fixed() -> None:
    program = settled(Reads(), dropout(0.5, False), dropout(0.5, False))
    assert modes(program) == []
    assert not program.fixed_mode


DIFFERENT: dict[str, tuple[Make, Make, str]] = {
    "op": (
        lambda build, x: build.call(aten.relu.default, x),
        lambda build, x: build.call(aten.neg.default, x),
        "neg",
    ),
    "more": (
        lambda build, x: build.call(aten.relu.default, x),
        lambda build, x: build.call(aten.relu.default, build.call(aten.relu.default, x)),
        "",
    ),
    "operands": (
        lambda build, x: build.call(aten.sub.Tensor, x, build.call(aten.neg.default, x)),
        lambda build, x: build.call(aten.sub.Tensor, build.call(aten.neg.default, x), x),
        "sub",
    ),
    "two arguments": (dropout(0.1, False), dropout(0.5, True), "dropout"),
    "a size": (
        lambda build, x: build.call(aten.sum.dim_IntList, x, [0]),
        lambda build, x: build.call(aten.sum.dim_IntList, x, [1]),
        "sum",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_program_that_differs_in_more_is_for_its_mode_alone(name: str) -> None:
    now, other, told = DIFFERENT[name]
    program = settled(Reads(), now, other)
    assert "Reads.forward" in program.fixed_mode
    assert told in program.fixed_mode


def test_a_default_that_one_mode_writes_out_is_no_difference() -> None:
    program = settled(
        Reads(),
        lambda build, x: build.call(aten.softmax.int, x, 1),
        lambda build, x: build.call(aten.softmax.int, x, 1, None),
    )
    assert not program.fixed_mode
