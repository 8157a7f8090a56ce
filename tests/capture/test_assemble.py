"""Assembly of Programs: copied tensors with their ties, readable symbols, and types instead of values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from quantc.capture.assemble import SymbolNames, assemble, inputs_of, light_type, place
from quantc.capture.model_copies import Tensors
from quantc.ir.program import Program
from quantc.ir.signature import Signature
from quantc.ir.sites import Origin
from quantc.ir.types import ScalarType, TensorType, TupleType

aten = torch.ops.aten


def symbolic(*shape: int) -> torch.Tensor:
    """A fake tensor whose sizes are symbols."""
    from torch._dynamo.source import ConstantSource

    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape), constraint_sizes=[None] * len(shape)
    )
    fakes = FakeTensorMode(shape_env=ShapeEnv())
    return fakes.from_tensor(torch.ones(shape), symbolic_context=context, source=ConstantSource("x"))


def test_symbols_have_the_names_of_the_user_or_are_numbered() -> None:
    x = symbolic(5, 7)
    first, second = (str(size.node.expr) for size in x.shape)  # type: ignore[attr-defined]
    names = SymbolNames({first: "batch"})
    assert light_type(x, names) == TensorType(torch.float32, ("batch", "s0"))
    assert names.used == {first: "batch", second: "s0"}
    assert names.size(x.shape[0] * 2) == "2*batch"
    assert names.size(3) == 3
    assert SymbolNames({"u": "s0"}, {"u": "s0"}).name("v") == "s1"  # a name that is taken is not given twice


def test_values_become_types() -> None:
    names = SymbolNames()
    assert light_type(torch.ones(2, 3, dtype=torch.int8), names) == TensorType(torch.int8, (2, 3))
    assert light_type(True, names) == ScalarType("bool", "True")
    assert light_type(3, names) == ScalarType("int", "3")
    assert light_type(2.5, names) == ScalarType("float", "2.5")
    assert light_type([torch.ones(1), None], names) == TupleType((TensorType(torch.float32, (1,)), None))
    assert light_type("text", names) is None


def test_tensors_and_modules_are_placed_at_dotted_names() -> None:
    root = nn.Module()
    place(root, "a.b.weight", nn.Parameter(torch.ones(1)))
    place(root, "a.b.kept", torch.zeros(1))
    place(root, "a.lost", torch.zeros(1), is_saved=False)
    place(root, "a.act", nn.ReLU())
    assert [name for name, _ in root.named_parameters()] == ["a.b.weight"]
    assert sorted(root.state_dict()) == ["a.b.kept", "a.b.weight"]
    assert isinstance(root.get_submodule("a.act"), nn.ReLU)


def test_inputs_are_tensors_or_constants_of_the_capture() -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "flag", "nothing")]
    rows = inputs_of(nodes, [torch.ones(2), True, None], SymbolNames())
    assert [(row.name, row.is_constant, row.constant) for row in rows] == [
        ("x", False, None), ("flag", True, True), ("nothing", True, None),
    ]  # fmt: skip
    assert rows[0].type == TensorType(torch.float32, (2,))
    with pytest.raises(ValueError, match="zip"):
        inputs_of(nodes, [torch.ones(2)], SymbolNames())


class Source(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.two.weight = self.one.weight
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("lost", torch.ones(2), persistent=False)
        self.plain = torch.full((2,), 5.0)
        self.act = nn.PReLU()


def assembled(source: nn.Module, tensors: Tensors = Tensors.COPIED) -> Program:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3, 2)
    names = ("two.weight", "two.bias", "plain", "made")
    weight, bias, plain, made = (graph.create_node("get_attr", name) for name in names)
    y = graph.call_function(aten.linear.default, (x, weight, bias))
    y.meta = {"val": torch.ones(3, 2), "stack_trace": "long"}
    z = graph.call_module("act", (graph.call_function(aten.add.Tensor, (y, plain)),))
    graph.output((graph.call_function(aten.add.Tensor, (z, made)),))

    def signature(names: SymbolNames) -> Signature:
        spec = pytree.tree_structure(((0,), {}))
        return Signature(inputs_of([x], [torch.ones(3, 2)], names), spec, pytree.tree_structure((0,)))

    return assemble(
        graph,
        source,
        signature,
        name="Net",
        method="fx",
        is_training=False,
        constants={"made": torch.full((2,), 7.0)},
        origin_of=lambda node: Origin("one") if node.op == "call_function" else Origin("wrong"),
        tensors=tensors,
    )


def test_a_program_has_copies_with_the_ties_of_the_model() -> None:
    source = Source()
    program = assembled(source)
    held: Any = program.root
    assert held.one.weight is held.two.weight
    assert held.one.weight is not source.one.weight
    assert sorted(program.root.state_dict()) == sorted(source.state_dict())
    assert [float(held.plain[0]), float(held.made[0])] == [5.0, 7.0]
    x = torch.randn(3, 2)
    expected = source.act(source.two(x) + 5.0) + 7.0
    assert torch.equal(program(x)[0], expected)
    with torch.no_grad():
        source.one.weight.zero_()
        source.act.weight.zero_()
    assert torch.equal(program(x)[0], expected)


def test_a_program_that_is_only_read_may_share_the_tensors() -> None:
    source = Source()
    held: Any = assembled(source, Tensors.SHARED).root
    assert held.one.weight is source.one.weight
    assert held.act.weight is source.act.weight
    assert held.act is not source.act


def test_of_meta_only_a_type_stays_and_calls_alone_have_origins() -> None:
    program = assembled(Source())
    linear = next(node for node in program.nodes() if node.target is aten.linear.default)
    assert linear.meta == {"val": TensorType(torch.float32, (3, 2))}
    weight = next(node for node in program.nodes() if node.target == "two.weight")
    assert weight.meta == {"val": TensorType(torch.float32, (2, 2))}
    assert {node.op for node in program.origins} == {"call_function", "call_module"}
