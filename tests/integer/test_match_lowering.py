"""A match while it is lowered: what it reads and yields, the nodes it writes, and clamps as bounds of a grid."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx

from quantc.integer.grid import Grid
from quantc.integer.match_lowering import Bounds, NotIntegerError, Task, bounds_of, tail_bounds
from quantc.ir.plan import Claim
from quantc.ir.program import Program
from quantc.ir.types import type_of
from quantc.spec.arithmetic import Arithmetic
from tests.support.by_hand import aten
from tests.support.qdq_by_hand import QdqBuilder, drawn, integers


def add_relu(*, read_in_float: bool = False) -> tuple[Task, list[fx.Node]]:
    """An add of two quantized tensors, a relu, and a quantize; with the nodes add, relu and quantize."""
    build = QdqBuilder()
    x = build.fake(build.input("x", drawn(2, 3)), 0.5, 3)
    add = build.call(aten.add.Tensor, x, build.fake(build.input("y", drawn(2, 3)), 0.25))
    relu = build.call(aten.relu.default, add)
    quantizer = build.quantize(relu, 0.125)
    program = build.done(build.dequantize(quantizer, 0.125), *([relu] if read_in_float else []))
    for node in (add, relu):
        program.plan.claims[node] = Claim("small", "add", relu.name)
    return Task(program, (add, relu)), [add, relu, quantizer]


def test_a_match_begins_with_its_core_and_ends_with_its_root() -> None:
    task, (add, relu, _) = add_relu()
    assert (task.core, task.tail, task.root) == (add, (relu,), relu)
    assert task.argument("alpha") == 1
    assert task.argument("x") is add.args[0]


def test_a_quantized_operand_is_its_integers_and_their_grid() -> None:
    task, (_, relu, _) = add_relu()
    found = task.whole(task.argument("x"))
    (source,) = task.argument("x").all_input_nodes
    assert found.node is source
    assert (found.grid.one_scale, found.grid.one_zero_point) == (0.5, 3)
    assert task.maybe_quantized(relu) is None
    assert task.maybe_quantized(2.0) is None
    with pytest.raises(NotIntegerError, match="relu does not come quantized"):
        task.quantized(relu)
    with pytest.raises(NotIntegerError, match=r"2\.0 does not come quantized"):
        task.quantized(2.0)


def test_channels_and_groups_are_told_apart() -> None:
    build = QdqBuilder()
    channels = build.by_channel("w", integers(2, 4), torch.tensor([0.5, 0.25]))
    groups = build.by_group("v", integers(2, 4), torch.ones(2, 2), 2)
    task = Task(build.done(channels, groups), (channels,))
    assert task.quantized(channels).grid.axis == 0
    stored = task.constant(task.quantized(channels).node)
    assert stored is not None
    assert torch.equal(stored, integers(2, 4))
    with pytest.raises(NotIntegerError, match="w has a scale for each channel"):
        task.whole(channels)
    assert task.grouped(channels) is None
    grouped = task.grouped(groups)
    assert grouped is not None
    assert grouped.grid.group == 2
    with pytest.raises(NotIntegerError, match="scale for each group"):
        task.quantized(groups)


def test_the_result_has_quantizers_only_if_nobody_reads_it_in_float() -> None:
    task, (add, _, quantizer) = add_relu()
    assert task.quantizers() == (quantizer,)
    assert task.quantizers(add) == ()
    assert task.grid(quantizer).one_scale == 0.125
    assert add_relu(read_in_float=True)[0].quantizers() == ()
    build = QdqBuilder()
    channels = build.by_channel("w", integers(2, 4), torch.tensor([0.5, 0.25]))
    other = Task(build.done(channels), (channels,))
    with pytest.raises(NotIntegerError, match="does not have one known scale"):
        other.grid(channels)


# -- writing -------------------------------------------------------------------------------------------------------


def test_new_nodes_have_the_shape_of_what_they_are_like() -> None:
    task, (add, _, _) = add_relu()
    made = task.emit(aten.neg.default, add, dtype=torch.int32)
    assert str(type_of(made)) == "i32[2,3]"
    kept = task.keep("table", torch.arange(4))
    assert kept.name.startswith("add_table")
    assert task.constant(kept) is not None
    order = list(task.program.graph.nodes)
    assert order.index(kept) < order.index(add) < order.index(made) < order.index(task.root)


def test_what_replaces_a_node_takes_over_the_claim_and_the_name() -> None:
    task, (add, _, quantizer) = add_relu()
    made = task.emit(aten.neg.default, task.root, dtype=torch.uint8)
    reader = next(iter(quantizer.users))
    task.replace(quantizer, made)
    plan = task.program.plan
    assert reader.args[0] is made
    assert plan.claims[made] == plan.claims[add]
    assert plan.lowered[made] == quantizer.name
    assert task.made == [made]
    task.keep_name()
    assert made.name == "add"
    assert add.name != "add"


def test_a_step_after_the_claimed_one_is_not_claimed() -> None:
    task, (_, relu, _) = add_relu()
    made = task.emit(aten.neg.default, task.core, dtype=torch.float32, like=task.root)
    task.stand_in(relu, made)
    assert task.program.plan.lowered[made] == "relu"
    assert task.made == []


def test_multipliers_come_in_the_form_that_was_asked_for() -> None:
    task, _ = add_relu()
    grid = Grid(torch.tensor(0.5).double(), torch.tensor(3), 0, 255, torch.uint8)
    node, shift, *rest = task.onto(grid, torch.tensor(0.375), Bounds(low=0.0))
    assert shift is None
    assert task.constant(node) == 0.375
    assert rest == [3, 3, 255, torch.uint8]
    assert task.onto(grid, torch.tensor(0.375))[2:] == (3, 0, 255, torch.uint8)
    task.arithmetic = Arithmetic(multiplier="fixed")
    mantissa, places = (task.constant(part) for part in task.onto(grid, torch.tensor(0.375))[:2])
    assert mantissa is not None
    assert places is not None
    assert int(mantissa) / 2 ** int(places) == 0.375
    assert task.to_float(torch.tensor(0.25))[1:] == (None, 0, 0, 0, torch.float32)


# -- clamps --------------------------------------------------------------------------------------------------------


def clamps(*ends: tuple[float | None, float | None] | str) -> tuple[Program, list[fx.Node]]:
    build = QdqBuilder()
    node = build.input("x", torch.linspace(-10, 10, 81))
    made = []
    for end in ends:
        target = aten.relu.default if end == "relu" else aten.clamp.default
        node = build.call(target, node, *(() if isinstance(end, str) else end))
        made.append(node)
    return build.done(node), made


ENDS: list[tuple[float | None, float | None] | str] = ["relu", (-2.0, 3.0), (None, 1.0), (2.0, None), (4.0, -4.0)]


@pytest.mark.parametrize("ends", list(itertools.product(ENDS, repeat=2)))
def test_clamps_in_a_row_are_one_clamp(ends: tuple[tuple[float | None, float | None] | str, ...]) -> None:
    program, nodes = clamps(*ends)
    found = tail_bounds(nodes)
    assert found is not None
    x = torch.linspace(-10, 10, 81)
    assert torch.equal(program(x), x.clamp(found.low, found.high))


def test_bounds_on_a_grid_are_its_levels() -> None:
    grid = Grid(torch.tensor(0.5).double(), torch.tensor(3), 0, 255, torch.uint8)
    assert Bounds().on(grid) == (0, 255)
    assert Bounds(0.0, 6.0).on(grid) == (3, 15)
    assert Bounds(-1e9, 1e9).on(grid) == (0, 255)
    assert Bounds(5.0, 1.0).on(grid) == (5, 5)  # where they cross, the upper one wins


def test_other_ops_and_computed_ends_are_no_bounds() -> None:
    build = QdqBuilder()
    x = build.input("x", drawn(3))
    tanh, clamp = build.call(aten.tanh.default, x), build.call(aten.clamp.default, x, 0.0, 1.0)
    build.done(tanh, clamp)
    clamp.args = (x, tanh, 1.0)
    assert bounds_of(tanh) is None
    assert bounds_of(clamp) is None
    assert tail_bounds([tanh]) is None
    assert tail_bounds([]) == Bounds()
