"""eliminate-dead: what goes, what stays, and that the numbers do not move."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from quantc.hooks import Guard, Truth
from quantc.ir.program import Program
from quantc.ir.sites import ModeValue
from quantc.passes.eliminate_dead import EliminateDead
from quantc.pipeline.pipeline import Pipeline
from tests.support.by_hand import Builder, aten

PIPELINE = Pipeline((EliminateDead(),))


def calls(program: Program) -> list[str]:
    return [node.name for node in program.graph.nodes if node.op.startswith("call_")]


def test_the_state_dict_keeps_its_keys() -> None:
    build = Builder(w=nn.Parameter(torch.ones(2)), n=torch.ones(2))
    x = build.input("x", torch.ones(2))
    build.call(aten.add.Tensor, build.const("w"), build.const("n"))
    program = build.program(build.call(aten.relu.default, x))
    keys = list(program.module.state_dict())
    PIPELINE.run(program)
    assert not program.graph.find_nodes(op="get_attr")
    assert list(program.root.state_dict()) == keys == ["w", "n"]
    assert program.log[-1].notes == ("removed 1 add, 2 get_attr",)


def batch_norm(training: bool) -> Program:
    build = Builder(mean=torch.zeros(3), var=torch.ones(3))
    x = build.input("x", torch.ones(2, 3))
    build.call(
        aten.batch_norm.default, x, None, None, build.const("mean"), build.const("var"), training, 0.1, 1e-5, False
    )
    return build.program(build.call(aten.relu.default, x))


def dropout(p: float, train: bool) -> Program:
    build = Builder()
    x = build.input("x", torch.ones(2, 3))
    build.call(aten.dropout.default, x, p, train)
    return build.program(build.call(aten.relu.default, x))


def test_statistics_that_are_updated_stay() -> None:
    assert "batch_norm" in calls(PIPELINE.run(batch_norm(True)))
    assert "batch_norm" not in calls(PIPELINE.run(batch_norm(False)))


def test_random_numbers_that_are_drawn_stay() -> None:
    assert "dropout" in calls(PIPELINE.run(dropout(0.5, True)))
    assert "dropout" not in calls(PIPELINE.run(dropout(0.5, False)))
    build = Builder()
    x = build.input("x", torch.ones(2, 3))
    build.call(aten.bernoulli.default, x)
    assert "bernoulli" in calls(PIPELINE.run(build.program(build.call(aten.relu.default, x))))


def test_what_training_would_need_stays_until_the_program_is_inference_only() -> None:
    program = dropout(0.5, False)
    node = program.node("dropout")
    program.modes[node] = ModeValue(2, True, False)
    assert "dropout" in calls(PIPELINE.run(program))
    torch.manual_seed(0)
    program.train()
    program(torch.ones(2, 3))
    drawn = torch.rand(1)
    torch.manual_seed(0)
    nn.functional.dropout(torch.ones(2, 3), 0.5, training=True)
    assert drawn.equal(torch.rand(1)), "training draws what the model would draw"
    program.eval()
    program.note_inference_only("a test says so")
    assert "dropout" not in calls(PIPELINE.run(program))


def test_asserts_and_the_unknown_stay() -> None:
    build = Builder()
    x = build.input("x", torch.ones(2, 3))
    truth = build.call(aten.all.default, build.call(aten.ge.Scalar, x, 0))
    build.call(aten._assert_async.msg, truth, "x is negative")
    build.call(print, x)
    program = build.program(build.call(aten.relu.default, x))
    names = calls(program)
    PIPELINE.run(program)
    assert calls(program) == names


def test_a_long_dead_chain_goes_in_one_run() -> None:
    graph = fx.Graph()
    build = Builder()
    build.graph = graph
    x = build.input("x", torch.ones(1))
    node = x
    for _ in range(20_000):
        node = graph.call_function(aten.relu.default, (node,))
    program = build.program(graph.call_function(aten.tanh.default, (x,)))
    PIPELINE.run(program)
    assert len(program.graph.nodes) == 3
    assert not EliminateDead().run(program)


UNARY = [aten.relu.default, aten.tanh.default, aten.neg.default]
BINARY = [aten.add.Tensor, aten.mul.Tensor]
steps = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=25)


@settings(max_examples=60)
@given(steps, st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_random_graphs_keep_their_numbers_and_match_torchs_own_elimination(
    ops: list[tuple[int, int, int]], outputs: list[int]
) -> None:
    build = Builder(w=nn.Parameter(torch.tensor([0.5, -2.0])))
    nodes = [build.input("x", torch.tensor([1.5, -0.25])), build.const("w")]
    for kind, left, right in ops:
        first, second = nodes[left % len(nodes)], nodes[right % len(nodes)]
        is_unary = kind < len(UNARY)
        nodes.append(
            build.call(UNARY[kind], first) if is_unary else build.call(BINARY[kind - len(UNARY)], first, second)
        )
    program = build.program(*(nodes[index % len(nodes)] for index in outputs))
    oracle = fx.Graph()
    oracle.output(oracle.graph_copy(program.graph, {}))
    oracle.eliminate_dead_code()
    guard = Guard()
    PIPELINE.run(program, [Truth(), guard])
    assert guard.checked == ["eliminate-dead"]
    assert [node.name for node in program.graph.nodes] == [node.name for node in oracle.nodes]
    assert not EliminateDead().run(program)
