"""Kernel registry: makers by target and op, and the call that a maker inspects."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from quantc.errors import UnknownNameError
from quantc.integer.semantics import load
from quantc.qdq.registration import decomposed_ops
from quantc.targets.kernels import kernel_table
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import (
    KERNELS,
    LARGER,
    MODULES,
    Call,
    Maker,
    NoKernelError,
    Placement,
    candidates,
    highest_level,
    kernel,
    kernels_for,
    larger_kernel,
)
from quantc.testing.synthesis import Sketch
from tests.support.kernel_calls import call_of, number
from tests.support.programs import Builder

load()
OWN: Any = torch.ops.quantc
ATEN: Any = torch.ops.aten
BYTES = torch.arange(12, dtype=torch.uint8).reshape(3, 4)


class Nothing(Kernel):
    name: ClassVar[str] = "nothing"

    def pack(self) -> Any:
        return ()

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return inputs[0]


def call(target: Any, *args: Any, **kwargs: Any) -> Call:
    """A call on tensors: bytes and floats are computed, all others are constants."""
    sketch = Sketch()

    def node_of(value: Any) -> Any:
        if isinstance(value, list):
            return [node_of(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        is_computed = value.dtype in (torch.uint8, torch.float32)
        return sketch.input("x", value) if is_computed else sketch.constant("c", value)

    made = sketch.call(target, tuple(map(node_of, args)), {name: node_of(value) for name, value in kwargs.items()})
    return Call(sketch.program(made), made)


ONE = torch.ones((), dtype=torch.float64)


def test_ops_that_both_dialects_have_are_told_apart() -> None:
    assert call(OWN.requantize.default, BYTES, 0, ONE, None, 0, 0, 255, torch.uint8).op == "requantize"
    assert call(ATEN.relu.default, torch.ones(2)).op == "relu"
    weight = torch.ones(2, 4)
    assert call(ATEN.linear.default, torch.ones(3, 4), weight).op == "aten.linear"


def test_arguments_are_known_by_name_and_constants_as_tensors() -> None:
    found = call(OWN.requantize.default, BYTES, 7, ONE, None, 3, 0, 200, dtype=torch.uint8)
    assert (found["x_zero_point"], found["out_zero_point"], found["qmax"]) == (7, 3, 200)
    assert found["dtype"] is torch.uint8
    assert torch.equal(found.tensor("multiplier"), ONE)
    assert not found.tensor("multiplier").requires_grad
    assert found["shift"] is None
    assert found["no such argument"] is None


def test_what_is_computed_is_no_constant() -> None:
    found = call(OWN.requantize.default, BYTES, 7, ONE, None, 3, 0, 200, torch.uint8)
    with pytest.raises(NoKernelError, match="x is not a constant"):
        found.tensor("x")
    with pytest.raises(NoKernelError, match="qmax is not a constant"):
        found.tensor("qmax")


def test_the_inputs_are_what_is_computed_lists_included() -> None:
    terms = [BYTES, BYTES + 1]
    summed = call(OWN.sum.default, terms, [0, 0], [ONE, ONE], None, None, 0, 0, 255, torch.uint8)
    assert list(summed.inputs[:2]) == summed.node.args[0]
    alone = call(OWN.requantize.default, BYTES, 0, ONE, None, 0, 0, 255, torch.uint8)
    assert alone.inputs == (alone.node.args[0],)


# -- the highest level -----------------------------------------------------------------------------------------------


def test_the_highest_level_is_the_clamp_of_the_op_that_made_it() -> None:
    sketch = Sketch()
    x = sketch.input("x", torch.ones(2, 3))
    quantized = sketch.call(decomposed_ops().quantize_per_tensor.default, (x, 0.1, 0, 0, 127, torch.uint8))
    moved = sketch.call(ATEN.reshape.default, (quantized, [3, 2]))
    again = sketch.call(ATEN.transpose.int, (moved, 0, 1))
    factor = sketch.constant("m", ONE)
    other = sketch.call(OWN.requantize.default, (again, 0, factor, None, 0, 0, 63, torch.uint8))
    program = sketch.program(other)
    assert [highest_level(program, node) for node in (quantized, moved, again, other)] == [127, 127, 127, 63]


def test_a_level_that_nothing_bounds_is_that_of_any_byte() -> None:
    sketch = Sketch()
    x = sketch.input("x", BYTES)
    moved = sketch.call(ATEN.reshape.default, (x, [4, 3]))
    program = sketch.program(moved)
    assert [highest_level(program, value) for value in (x, moved, 3)] == [255, 255, 255]


def test_nodes_that_replaced_an_op_keep_its_bound() -> None:
    sketch = Sketch()
    x = sketch.input("x", BYTES)
    moved = sketch.call(ATEN.reshape.default, (x, [4, 3]))
    program = sketch.program(moved)
    program.placements.highest[x] = 31
    assert highest_level(program, moved) == 31


# -- the table -------------------------------------------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(KERNELS, "toy", {})
    monkeypatch.setattr(kernel_table, "LARGER", set(LARGER))
    return "toy"


def test_makers_come_in_the_order_of_registration_and_larger_ones_first(toy: str) -> None:
    def one(call: Call) -> Kernel:
        return Nothing()

    def two(call: Call) -> Kernel:
        return Nothing()

    def large(call: Call) -> Kernel:
        return Nothing()

    assert kernel(toy, "add", "mul")(one) is one
    kernel(toy, "add")(two)
    larger_kernel(toy, "add")(large)
    assert kernels_for(toy) == {"add": [large, one, two], "mul": [one]}


def test_own_makers_come_by_the_list_of_modules_and_before_those_of_others(toy: str) -> None:
    def foreign(call: Call) -> Kernel:
        return Nothing()

    convs = list(kernels_for("x86")["conv"])
    for maker in (foreign, *reversed(convs)):
        kernel(toy, "conv")(maker)
    assert kernels_for(toy)["conv"] == [*convs, foreign]
    places = [MODULES.index(maker.__module__.rpartition(".")[2]) for maker in convs]
    assert places == sorted(places)


def test_a_target_that_is_unknown_is_named_with_those_that_are() -> None:
    with pytest.raises(UnknownNameError, match="'x68'") as caught:
        kernels_for("x68")
    assert "did you mean x86?" in str(caught.value.advice)
    assert "qnnpack" in str(caught.value.advice)


def test_every_module_that_registers_kernels_is_in_the_list() -> None:
    folder = Path(kernel_table.__file__).parent
    registers = {path.stem for path in folder.glob("*.py") if "kernel(" in path.read_text(encoding="utf-8")}
    makers = {
        maker.__module__.rpartition(".")[2] for ops in KERNELS.values() for each in ops.values() for maker in each
    }
    assert set(MODULES) <= registers
    assert len(set(MODULES)) == len(MODULES)
    assert makers <= set(MODULES)


# -- candidates --------------------------------------------------------------------------------------------------------


class Exact(Kernel):
    name: ClassVar[str] = "exact"

    def pack(self) -> Any:
        return ()

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return inputs[0]


class Rough(Exact):
    name: ClassVar[str] = "rough"
    computes_in_float: ClassVar[bool] = True


def exact(call: Call) -> Kernel:
    return Exact()


def rough(call: Call) -> Kernel:
    return Rough()


def refusing(reason: str) -> Maker:
    def maker(call: Call) -> Kernel:
        raise NoKernelError(reason)

    return maker


def a_call() -> Call:
    x = torch.zeros(2, 3, dtype=torch.uint8)
    return call_of("requantize", x, 0, number(1.0), None, 0, 0, 255, torch.uint8)[0]


def test_all_that_take_a_call_are_candidates_and_the_others_say_why_not_once() -> None:
    makers = [refusing("too small"), exact, refusing("too small"), refusing("too wide"), rough]
    found, reason = candidates(makers, a_call(), allow_float=True)
    assert [item.kernel.name for item in found] == ["exact", "rough"]
    assert reason == "too small; too wide"


def test_kernels_in_float_are_candidates_only_where_that_is_allowed() -> None:
    found, reason = candidates([rough, exact], a_call(), allow_float=False)
    assert [item.kernel.name for item in found] == ["exact"]
    assert reason == ""
    assert candidates([rough], a_call(), allow_float=False) == ([], "there is no kernel for it")


def test_a_maker_says_itself_what_its_kernel_reads() -> None:
    call = a_call()
    other = Placement(Exact(), (call.node,))
    found, _ = candidates([lambda call: other, exact], call, allow_float=False)
    assert [item.inputs for item in found] == [(call.node,), call.inputs]


def test_without_makers_there_is_no_kernel() -> None:
    assert candidates([], a_call(), allow_float=True) == ([], "there is no kernel for it")


def test_products_of_constants_have_no_kernel() -> None:
    build = Builder()
    levels = build.constant("c", torch.zeros(2, 3, dtype=torch.uint8))
    factor = build.constant("m", number(1.0))
    node = build.call(torch.ops.quantc.requantize.default, levels, 0, factor, None, 0, 0, 255, torch.uint8)
    call = Call(build.program(node), node)
    assert candidates([exact], call, allow_float=True) == ([], "its activation is a constant")
