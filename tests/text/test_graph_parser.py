"""Statements of one graph: what each kind of line makes, and lines that make nothing."""

from __future__ import annotations

import pytest
import torch

from quantc.errors import ParseError
from quantc.ir.sites import ModeValue, Origin
from quantc.ir.types import TensorType, type_of
from quantc.text.graph_parser import GraphReader
from quantc.text.lexer import Reader
from quantc.text.rebuild_modules import TextPosition

aten = torch.ops.aten


def read(*lines: str, path: str = "") -> GraphReader:
    """A graph made of these lines."""
    text = "\n".join(lines)
    made = GraphReader(path, TextPosition(Reader(text, "", 1), 0))
    for number, line in enumerate(lines, 1):
        made.statement(Reader(text, line, number, scope=made))
    return made


def test_inputs_are_placeholders_and_part_of_the_signature_of_the_top_graph() -> None:
    made = read(
        "input %x : f32[2,4]",
        'input %y {name="image", accepts="f32[s0,4]"}',
        'input %mode = "fast"',
        'input %z {target="zed", default=None}',
    )
    assert [(row.name, str(row.type), row.is_constant, row.constant) for row in made.inputs] == [
        ("x", "f32[2,4]", False, None),
        ("image", "f32[s0,4]", False, None),
        ("mode", "None", True, "fast"),
        ("z", "None", False, None),
    ]
    assert type_of(made.nodes["x"]) == TensorType(torch.float32, (2, 4))
    assert (made.nodes["z"].target, made.nodes["z"].args) == ("zed", (None,))
    assert read("input %x : f32[2]", path="branch").inputs == []


def test_calls_have_targets_types_modes_counters_and_origins() -> None:
    made = read(
        "input %x : f32[2]",
        '%d : f32[2] = dropout(%x, p=0.5, train=False) {mode_arg=2, train=True, eval=False, counter="n"}  # drop : Dropout',
        "%v = call_method .view(%d, -1)",
        '%m = call_module @act(%v) {type="ReLU"}',
        "output (%m,)",
    )
    drop = made.nodes["d"]
    assert (drop.target, drop.args) == (aten.dropout.default, (made.nodes["x"], 0.5, False))
    assert (made.modes[drop], made.counters[drop]) == (ModeValue(2, True, False), "n")
    assert made.origins[drop] == Origin("drop", "Dropout")
    assert [(node.op, node.target) for node in list(made.graph.nodes)[2:4]] == [
        ("call_method", "view"),
        ("call_module", "act"),
    ]
    assert made.modules["act"][:2] == ("ReLU", None)
    made.finish()


def test_constants_are_described_and_left_to_be_made() -> None:
    made = read(
        'const %w = "layer.w" : f32[2] param frozen #0123abcd tied="v"',
        'const %n = "number" value 3',
        'const %gone = "gone" missing',
        "const %g = @branch",
        'state "count" : i64[] buffer transient',
    )
    first, last = made.constants
    assert (first.target, first.kind, first.digest, first.tied) == ("layer.w", "param frozen", "0123abcd", "v")
    assert (last.target, last.kind, str(last.type)) == ("count", "buffer transient", "i64[]")
    assert made.values["number"][0] == 3
    assert [name for name, _ in made.references] == ["branch"]
    assert {name: node.target for name, node in made.nodes.items()} == {
        "w": "layer.w",
        "n": "number",
        "gone": "gone",
        "g": "branch",
    }


def test_nested_graphs_in_a_call_are_made_once_at_their_first_use() -> None:
    made = read("input %x", "%a = higher_order.cond(%x, @yes, @no, (%x,))", "%b = higher_order.cond(%x, @yes, @no, ())")
    assert [node.name for node in made.graph.nodes] == ["x", "yes", "no", "a", "b"]
    assert [name for name, _ in made.references] == ["yes", "no"]


def test_names_of_builtins_are_kept() -> None:
    made = read("input %input", "%max = relu(%input)")
    assert [node.name for node in made.graph.nodes] == ["input", "max"]
    again = made.graph.create_node("call_function", torch.relu, (made.nodes["max"],), name="max")
    assert again.name not in ("input", "max")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("inputs %x", "'inputs'"),
        ("%y = relu(%z)", "%z is used before"),
        ("%x = relu(%x)", "%x is defined twice"),
        ("%class = relu(%x)", "'class'"),
        ("%y = relu %x", "expected"),
        ("%y = relu(%x) rest", "the end of the line"),
        ('%y = relu(%x) {type="T"}', "describe a module"),
        ("%y = relu(%x) {mode_arg=3, train=True, eval=False}", "mode_arg=3"),
        ("%y = call_method .tofile(%x)", "'tofile'"),
        ('const %w = "w" : f32[2] weight', "'weight' is not a kind"),
        ('const %w = "w" : (f32[2], f32[2]) param', "one tensor"),
        ('const %w = "w" nothing', "missing, module, value"),
        ('const %w = "w" module {type=3}', "strings"),
        ('input %y {name="a b"}', "'a b'"),
        ('input %y {accepts="int(3)"}', "type of a tensor"),
        ('input %y {target="a b"}', "'a b'"),
    ],
)
def test_lines_that_make_nothing_are_refused_by_their_number(line: str, told: str) -> None:
    with pytest.raises(ParseError, match=told) as caught:
        read("input %x : f32[2]", line)
    assert caught.value.line == 2


def test_only_inputs_of_the_top_graph_are_in_the_signature() -> None:
    for line in ("input %x = 3", 'input %x {name="y"}', "input %x {accepts=None}"):
        with pytest.raises(ParseError, match="top graph"):
            read(line, path="branch")


def test_a_graph_ends_with_its_one_output() -> None:
    with pytest.raises(ParseError, match="nothing may follow"):
        read("input %x", "output (%x,)", "%y = relu(%x)")
    with pytest.raises(ParseError, match="no output"):
        read("input %x").finish()


def test_what_is_described_twice_is_described_alike() -> None:
    same = 'const %a = "n" value 3', 'const %b = "n" value 3'
    assert read(*same).values["n"][0] == 3
    with pytest.raises(ParseError, match="two ways"):
        read(same[0], 'const %b = "n" value 4')
    with pytest.raises(ParseError, match="two ways"):
        read("input %x", '%a = call_module @m(%x) {type="A"}', '%b = call_module @m(%x) {type="B"}')
