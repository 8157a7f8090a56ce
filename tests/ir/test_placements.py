"""Placements: what runs each op of a program, in tables that follow its nodes."""

from __future__ import annotations

from torch import fx

from quantc.ir.placements import KernelChoice, Placed, Placements
from tests.support.by_hand import two_layers


def placements(*nodes: fx.Node) -> Placements:
    made = Placements({node.name: Placed(node.name, "linear", "kernel", "") for node in nodes})
    for node in nodes:
        made.runs[node] = (node.name,)
    return made


def test_rows_are_those_of_ops_that_are_left_in_the_order_of_the_program() -> None:
    program = two_layers()
    first, second = program.node("linear"), program.node("linear_1")
    program.placements = placements(first, second)
    moved = program.emit(first.target, first.args, before=first, like=first)
    program.replace(first, moved)
    assert [row.node for row in program.placements.placed] == ["linear", "linear_1"]
    assert program.placements.keys(moved) == ("linear",)
    program.forward(second, second.all_input_nodes[0])
    assert [row.node for row in program.placements.placed] == ["linear"]


def test_a_node_stands_for_itself_unless_it_is_told_otherwise() -> None:
    program = two_layers()
    first, second = program.node("linear"), program.node("linear_1")
    program.placements.stand_ins[second] = ("a", "b")
    assert program.placements.stands_for(first) == "linear"
    assert program.placements.stands_for(second) == ("a", "b")


def test_a_copy_has_rows_of_its_own() -> None:
    program = two_layers()
    node = program.node("linear")
    program.placements = placements(node)
    program.placements.choices["linear"] = KernelChoice("quick", (("quick", "torch"),))
    program.placements.highest[node] = 31
    twin = program.clone()
    copied = twin.node("linear")
    assert twin.placements.keys(copied) == ("linear",)
    assert twin.placements.highest[copied] == 31
    twin.placements.ops.clear()
    twin.placements.choices.clear()
    assert [row.node for row in program.placements.placed] == ["linear"]
    assert program.placements.choices


def test_a_row_is_told_in_a_line() -> None:
    row = Placed(
        "conv2d", "conv", "onednn qconv", "too wide", "table", "", {"onednn qconv": 10.4, "fbgemm qconv": 12.0}
    )
    assert str(row) == "conv2d (conv): onednn qconv: too wide; table: onednn qconv 10 µs, fbgemm qconv 12 µs"
    assert str(Placed("lstm", "lstm", "", "")) == "lstm (lstm): as written"
