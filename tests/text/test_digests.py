"""Constants without their data: digests of the elements in order, kinds, and ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import fx, nn

from quantc.ir.program import Program
from quantc.ir.types import TensorType
from quantc.text.digests import (
    REMEMBERED,
    Constant,
    Constants,
    constants,
    counter_targets,
    digest,
    owner_of,
    raw_bytes,
    state_digest,
    state_name,
)
from tests.support.programs import Choice, bytes_digest, exported, signature_of, small_net


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.arange(5, dtype=torch.int8),
        torch.ones(3).expand(2, 3),
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=["0-dim", "transposed", "strided", "bool", "empty", "int8", "expanded", "conjugate"],
)
def test_digest_is_that_of_the_elements_in_order(tensor: torch.Tensor) -> None:
    assert digest(tensor) == bytes_digest(np.array(tensor.tolist(), dtype=tensor.resolve_conj().numpy().dtype))


def test_digest_of_bfloat16_and_of_changes_in_place() -> None:
    tensor = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    assert digest(tensor) == bytes_digest(np.array([0x3F80, 0xC000], dtype=np.uint16))
    before = digest(tensor)
    tensor.data[0] = 5
    assert digest(tensor) != before
    assert digest(torch.empty(2, device="meta")) is None


def test_layouts_hold_the_same_elements() -> None:
    dense = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    quantized = torch.quantize_per_tensor(dense, 0.5, 3, torch.qint8)
    assert digest(dense.to_sparse()) == digest(dense.to(memory_format=torch.contiguous_format)) == digest(dense)
    assert digest(quantized) == bytes_digest(np.array([[5, 3], [3, 7]], dtype=np.int8))


def test_bytes_are_those_of_the_elements_whatever_the_strides() -> None:
    x = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    assert bytes(raw_bytes(x.t())) == np.arange(6, dtype=np.int16).reshape(2, 3).T.tobytes()
    odd = torch.tensor([7.0]).as_strided((1,), (5,))
    assert bytes(raw_bytes(odd)) == np.float32(7).tobytes()


def test_the_state_of_a_module_is_its_names_types_and_elements() -> None:
    module = nn.Linear(2, 2)
    before = state_digest(module)
    assert before == state_digest(module)
    nn.init.constant_(module.bias, 5.0)
    assert state_digest(module) != before
    same, renamed = nn.Module(), nn.Module()
    for part, name in ((same, "a"), (renamed, "b")):
        part.register_buffer(name, torch.ones(2))
    assert state_digest(same) != state_digest(renamed)
    assert state_digest(nn.ReLU()) is None
    assert state_digest(nn.Linear(2, 2, device="meta")) is None


def test_constants_print_type_kind_digest_and_tie() -> None:
    kind = TensorType(torch.float32, (2,))
    assert str(Constant(kind, "param", None, None)) == "f32[2] param"
    assert str(Constant(kind, "buffer", "0123abcd", "a b")) == 'f32[2] buffer #0123abcd tied="a b"'


def held() -> Program:
    """A graph that refers to one constant of each kind."""
    root, graph = nn.Module(), fx.Graph()
    root.w = nn.Parameter(torch.ones(2))
    root.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    root.inner = nn.Module()
    root.inner.register_buffer("kept", torch.ones(1))
    root.inner.register_buffer("passing", torch.ones(1), persistent=False)
    vars(root)["plain"] = torch.ones(3)
    root.again = root.w
    vars(root)["number"] = 3
    for name in ("w", "frozen", "inner.kept", "inner.passing", "plain", "again", "number", "missing"):
        graph.create_node("get_attr", name)
    graph.output(())
    return Program(graph, root, signature_of(graph, 0))


def test_kinds_say_how_a_tensor_is_held() -> None:
    program = held()
    table = Constants(program)
    rows = {name: table.describe(program.root, "", name, value) for name, value in constants(program).items()}
    assert {name: row.kind for name, row in rows.items()} == {
        "w": "param",
        "frozen": "param frozen",
        "inner.kept": "buffer",
        "inner.passing": "buffer transient",
        "plain": "tensor",
        "again": "param",
    }
    assert {name: row.tied for name, row in rows.items() if row.tied} == {"w": "again"}, "the first name is the own one"
    assert table.name("", "w", program.root.get_parameter("w")) == "again"


def test_a_digest_that_was_read_is_kept_where_there_is_no_data() -> None:
    program = held()
    program.root.to("meta")
    described = Constants(program).describe(program.root, "", "frozen", program.root.get_parameter("frozen"))
    assert described.digest is None
    program.root.__dict__[REMEMBERED] = {"frozen": "0123abcd"}
    described = Constants(program).describe(program.root, "", "frozen", program.root.get_parameter("frozen"))
    assert described.digest == "0123abcd"


def test_constants_of_nested_graphs_have_the_names_of_the_state_dict() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    assert state_name("true_graph_0/false_graph_0", "a.w") == "true_graph_0.false_graph_0.a.w"
    assert state_name("", "a.w") == "a.w"
    inner = next(graph for path, graph in program.graphs() if path == "false_graph_0")
    program.constant("extra", torch.ones(1), before=next(node for node in inner.nodes if node.op == "call_function"))
    assert "false_graph_0.extra" in constants(program)
    assert "false_graph_0.extra" in program.root.state_dict()
    assert owner_of(program, inner) is program.owner(inner)
    assert list(owner_of(program, fx.Graph()).parameters()) == []


def test_counters_are_listed_where_nothing_else_reads_them() -> None:
    program = small_net()
    assert counter_targets(program, program.graph) == ["count"]
    program.train()
    assert counter_targets(program, program.graph) == [], "in training the graph counts itself"
