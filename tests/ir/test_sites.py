"""Sites, origins, and tables of facts that follow their nodes."""

from __future__ import annotations

from torch import fx

from quantc.ir.sites import ModeValue, NodeTable, Origin, Site


def nodes(count: int) -> list[fx.Node]:
    graph = fx.Graph()
    return [graph.placeholder(f"x{index}") for index in range(count)]


def test_sites_print_their_graph_node_and_place() -> None:
    assert str(Site("", "conv2d", out=0)) == "conv2d:out0"
    assert str(Site("", "conv2d", operand=1)) == "conv2d:in1"
    assert str(Site("true_graph_0", "conv2d", operand=0)) == "true_graph_0/conv2d:in0"


def test_sites_are_values() -> None:
    assert len({Site("", "add", out=0), Site("", "add", out=0), Site("", "add", operand=0)}) == 2
    assert sorted([Site("b", "a", out=0), Site("", "z", out=0), Site("", "a", out=1), Site("", "a", out=0)]) == [
        Site("", "a", out=0),
        Site("", "a", out=1),
        Site("", "z", out=0),
        Site("b", "a", out=0),
    ]


def test_origins_omit_what_is_unknown() -> None:
    known = Origin("layer1.0", "torch.nn.modules.conv.Conv2d", "/some/folder/model.py", 12)
    assert str(known) == "layer1.0 : Conv2d @ model.py:12"
    assert str(Origin("layer1.0")) == "layer1.0"
    assert str(Origin(module_type="a.B")) == ": B"
    assert str(Origin(file="model.py", line=3)) == "@ model.py:3"
    assert str(Origin("a", "", "model.py", 3)) == "a @ model.py:3"
    assert str(Origin()) == ""


def test_the_source_is_the_file_without_its_folder() -> None:
    assert Origin(file="C:\\code\\model.py", line=7).source == "model.py:7"
    assert Origin(line=7).source == ""


def test_a_mode_value_is_that_of_the_mode() -> None:
    value = ModeValue(2, train=0.5, eval=0.0)
    assert (value.value(True), value.value(False)) == (0.5, 0.0)


def test_rows_move_to_the_replacement_unless_it_has_its_own() -> None:
    a, b, c = nodes(3)
    table = NodeTable({a: "a", c: "c"})
    table.move(a, b)
    assert (a in table, table[b]) == (False, "a")
    table.move(b, c)
    assert table.rows == {c: "c"}
    table.move(a, b)
    assert b not in table


def test_rows_are_dropped_with_their_nodes() -> None:
    a, b = nodes(2)
    table = NodeTable({a: 1})
    table[b] = 2
    table.drop(a)
    table.drop(a)
    assert (list(table), len(table), table.get(a), table.get(b)) == ([b], 1, None, 2)


def test_a_copied_graph_gets_the_rows_of_the_nodes_it_has() -> None:
    a, b, new = nodes(3)
    table = NodeTable({a: "a", b: "b"})
    copy = table.renamed({a: new})
    assert copy.rows == {new: "a"}
    copy.drop(new)
    assert len(table) == 2
