"""The modules of a parsed program: names that are safe, tensors of their kind, and what was given for them."""

from __future__ import annotations

import operator
from collections import OrderedDict

import pytest
import torch
from torch import fx, nn

from quantc import quantize
from quantc.errors import ParseError, QuantcError
from quantc.ir.program import Program
from quantc.ir.types import TensorType
from quantc.text.digests import REMEMBERED, constants, digest, state_digest
from quantc.text.lexer import Reader
from quantc.text.node_printer import OpaqueModule
from quantc.text.parser import parse
from quantc.text.printer import dump
from quantc.text.rebuild_modules import (
    ConstantInstaller,
    ConstantText,
    TextPosition,
    check_target,
    compile_nested,
    empty_graph_module,
    holder_of,
    install,
    opaque_module,
)
from tests.support.programs import aten, signature_of, small_net

HERE = TextPosition(Reader("line", "line", 7), 2)
F32 = TensorType(torch.float32, (2,))


def row(target: str, kind: str = "param", **facts: str) -> ConstantText:
    return ConstantText("", target, F32, kind, facts.get("digest"), facts.get("tied"), HERE)


def test_an_opaque_module_raises_when_run_unless_given() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_module("inner.act", (x,)),))
    root, inner = nn.Module(), nn.Linear(3, 3)
    root.inner = nn.Module()
    root.inner.act = inner
    program = Program(graph, root, signature_of(graph, 1))
    text = dump(program)
    assert "call_module @inner.act(%x) {type=" in text
    bare = parse(text)
    assert dump(bare) == text
    with pytest.raises(QuantcError, match=r"'inner\.act'"):
        bare(torch.ones(3))
    given = parse(text, modules={"inner.act": inner})
    assert dump(given) == text
    assert torch.equal(given(torch.ones(3)), program(torch.ones(3)))
    with pytest.raises(ParseError, match=r"module given for 'inner\.act'"):
        parse(text, modules={"inner.act": nn.Linear(3, 3)})


def test_constants_must_be_the_ones_that_were_dumped() -> None:
    program = small_net()
    text, given = dump(program), constants(program)
    assert set(given) == {"w", "mean", "var", "count"}
    with pytest.raises(ParseError, match=r"'mean' has digest #\w{8}, but the text says #\w{8}"):
        parse(text, {**given, "mean": torch.ones(2)})
    with pytest.raises(ParseError, match="no constant is given for 'var'"):
        parse(text, {name: tensor for name, tensor in given.items() if name != "var"})
    with pytest.raises(ParseError, match=r"'var' is f32\[3\], not f32\[2\]"):
        parse(text, {**given, "var": torch.ones(3)})


@pytest.mark.parametrize("target", ["", "a..b", ".a", "a.__class__", 'a"b', "a\\b", "a\nb", "__init__"])
def test_names_that_generated_code_could_not_hold_are_refused_at_their_place(target: str) -> None:
    with pytest.raises(ParseError, match="name of a") as caught:
        check_target(target, HERE)
    assert (caught.value.line, caught.value.column) == (7, 3)


def test_other_names_are_fine() -> None:
    names = ["a.b", "0.weight", "a b", "_x", "a'b", "a\tb", "a#b"]
    assert [check_target(target, HERE) for target in names] == names


def test_names_that_models_can_have_are_read_back() -> None:
    model = nn.Sequential(
        OrderedDict([("it's", nn.Linear(2, 2)), ("a\tb", nn.Linear(2, 2)), ("x # y", nn.Linear(2, 2))])
    )
    x = torch.ones(1, 2)
    program = quantize(model.eval(), (x,), [x]).program
    assert torch.equal(parse(str(program), constants(program))(x), program(x))


def test_holders_are_found_or_made_and_must_be_modules() -> None:
    root = nn.Module()
    root.layer = nn.Linear(2, 2)
    assert holder_of(root, "layer.weight", HERE) == (root.layer, "weight")
    made, leaf = holder_of(root, "new.deep.w", HERE)
    assert made is root.get_submodule("new.deep")
    assert leaf == "w"
    with pytest.raises(ParseError, match="'weight'"):
        holder_of(root, "layer.weight.more", HERE)


def test_values_are_installed_where_nothing_is() -> None:
    root = nn.Module()
    install(root, "a.number", 3, HERE)
    assert root.get_submodule("a").number == 3
    for taken in ("a.number", "forward"):
        with pytest.raises(ParseError, match=taken):
            install(root, taken, 4, HERE)


def installed(*rows: ConstantText, given: dict[str, torch.Tensor] | None = None) -> nn.Module:
    root = nn.Module()
    ConstantInstaller(list(rows), given).install({"": root})
    return root


def test_tensors_are_held_as_their_kind_says() -> None:
    root = installed(
        row("w"), row("frozen", "param frozen"), row("b", "buffer"), row("gone", "buffer transient"), row("t", "tensor")
    )
    assert {name: p.requires_grad for name, p in root.named_parameters()} == {"w": True, "frozen": False}
    assert [name for name, _ in root.named_buffers()] == ["b", "gone"]
    assert list(root.state_dict()) == ["w", "frozen", "b"]
    assert isinstance(root.t, torch.Tensor)
    assert all(tensor.is_meta for tensor in (*root.parameters(), *root.buffers()))


def test_given_tensors_are_used_without_a_copy_and_tied_names_share_one() -> None:
    value = torch.tensor([1.0, 2.0])
    own = digest(value) or ""
    root = installed(row("a", digest=own), row("b", digest=own, tied="a"), given={"a": value})
    assert root.get_parameter("b") is root.get_parameter("a")
    assert root.get_parameter("a").data_ptr() == value.data_ptr()


def test_digests_are_remembered_where_there_is_no_data() -> None:
    root = installed(row("a", digest="0123abcd"), row("b"))
    assert vars(root)[REMEMBERED] == {"a": "0123abcd"}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ((row("a"), row("a", "buffer")), "two ways"),
        ((row("a", tied="b"),), "tied to 'b'"),
        ((row("a"), row("b", tied="a"), row("c", tied="b")), "tied to 'b'"),
        ((row("a"), row("b", "buffer", tied="a")), "described differently"),
        ((row("a"), row("a.b")), "not a module"),
        ((row("train"),), "'train'"),
    ],
    ids=["two ways", "nothing", "tie of a tie", "other kind", "inside", "taken"],
)
def test_constants_that_contradict_each_other_are_refused(rows: tuple[ConstantText, ...], told: str) -> None:
    with pytest.raises(ParseError, match=told):
        installed(*rows)


def test_integers_are_not_trained() -> None:
    number = ConstantText("", "n", TensorType(torch.int64, ()), "param", None, None, HERE)
    with pytest.raises(ParseError, match="'n' is i64"):
        installed(number, given={"n": torch.tensor(3)})


def test_a_module_that_is_given_must_have_the_state_of_the_text() -> None:
    layer = nn.Linear(2, 2)
    state = state_digest(layer)
    assert opaque_module("act", "K", state, {"act": layer}, HERE) is layer
    assert opaque_module("act", "K", None, {"act": layer}, HERE) is layer
    assert isinstance(opaque_module("act", "K", state, {}, HERE), OpaqueModule)
    with pytest.raises(ParseError, match="'act'"):
        opaque_module("act", "K", "00000000", {"act": layer}, HERE)


def test_a_graph_that_torch_cannot_compile_is_refused() -> None:
    module, graph = empty_graph_module(), fx.Graph()
    graph.output((graph.call_function(aten.relu.default, (graph.placeholder("x"),)),))
    compile_nested(module, graph, HERE)
    assert module(torch.tensor([-1.0]))[0].item() == 0.0
    broken = fx.Graph()
    broken.output((broken.call_function(operator.add, (broken.placeholder("x"),)),))
    with pytest.raises(ParseError, match="torch cannot compile"):
        compile_nested(empty_graph_module(), broken, HERE)
