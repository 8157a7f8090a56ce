"""The runner against torch's own interpreter: the same values at every node, in nested graphs too."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_over
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.calibration.interpreter import IN_PLACE, Runner, Watch
from quantc.errors import CalibrationError
from quantc.ir.dialect import target_name
from quantc.ir.program import Program
from tests.support.chains import chain
from tests.support.growth import calls, exponent
from tests.zoo import BY_NAME

NAMES = (
    "resnet_block",
    "dense_block",
    "gpt_masked",
    "lstm_tagger",
    "pools",
    "dict_in_and_out",
    "nested_inputs",
    "constant_inputs",
    "pass_through",
    "inplace_used_again",
    "inplace_residual",
)


def keeper(seen: dict[str, list[Any]], node: fx.Node) -> Watch:
    return lambda value: seen.setdefault(node.name, []).append(
        value.detach().clone() if isinstance(value, Tensor) else value
    )


def same(left: Any, right: Any) -> bool:
    pairs = zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


class Interpreter(fx.Interpreter):
    def __init__(self, program: Program, seen: dict[str, list[Any]]) -> None:
        super().__init__(program.root, graph=program.graph)
        self.seen = seen

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        keeper(self.seen, n)(value)
        return value


@pytest.mark.parametrize("name", NAMES)
def test_every_node_has_the_value_torchs_interpreter_gives_it(name: str) -> None:
    case = BY_NAME[name]
    args, kwargs = case.example()
    program = qc.pipelines.inference().run_on_copy(qc.capture(case.model(), args, example_kwargs=kwargs))
    leaves = pytree.tree_leaves((args, kwargs))
    expected: dict[str, list[Any]] = {}
    seen: dict[str, list[Any]] = {}
    nodes = [node for node in program.graph.nodes if node.op not in ("get_attr", "output")]
    with torch.no_grad():
        outputs = Interpreter(program, expected).run(*[_copy(leaf) for leaf in leaves], enable_io_processing=False)
    runner = Runner(program, {node: keeper(seen, node) for node in nodes})
    given = runner.run([_copy(leaf) for leaf in leaves])
    assert same(list(outputs), given)
    for node in nodes:
        assert same(expected[node.name], seen[node.name]), node.name
    # and with nobody watching, when memory is reused
    assert same(given, Runner(program, {}).run([_copy(leaf) for leaf in leaves]))


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


@pytest.mark.parametrize("op", IN_PLACE, ids=str)
def test_what_overwrites_its_operand_gives_the_same_bits(op: Any) -> None:
    numbers = torch.cat([torch.linspace(-30, 30, 1001), torch.randn(23) * 3]).reshape(32, 32)
    for x in (numbers, numbers.t(), numbers.reshape(4, 4, 8, 8).to(memory_format=torch.channels_last), numbers[:7]):
        more = {"clamp": (-1.0, 1.5), "add": (x.cos(),), "mul": (x.cos(),)}.get(target_name(op), ())
        own = x.clone()
        assert IN_PLACE[op](own, *more) is own
        assert torch.equal(own, op(x, *more))


# -- nested graphs ---------------------------------------------------------------------------------------------


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: (x * 2).relu(), lambda x: (x * 3).tanh(), (x,))


class While(nn.Module):
    def forward(self, x: Tensor) -> Any:
        start = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, (h * 2).tanh()), (start, x))[1]  # type: ignore[no-untyped-call]


class Scan(nn.Module):
    def forward(self, x: Tensor) -> Any:
        def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            new = (carry + row).tanh()
            return new, new * 2

        return scan(step, x.new_zeros(x.shape[1]), x)[1]


class Map(nn.Module):
    def forward(self, x: Tensor) -> Any:
        over: Any = map_over  # its annotations and its behaviour differ
        return over(lambda row: (row * 2).tanh(), x)


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(x.tanh())
        return y.float()


def while_steps(x: Tensor) -> list[Tensor]:
    first = (x * 2).tanh()
    second = (first * 2).tanh()
    return [first, second, (second * 2).tanh()]


def scan_steps(x: Tensor) -> list[Tensor]:
    steps, carry = [], x.new_zeros(x.shape[1])
    for row in x:
        carry = (carry + row).tanh()
        steps.append(carry)
    return steps


NESTED: dict[str, tuple[Callable[[], nn.Module], str, Callable[[Tensor], list[Tensor]]]] = {
    "cond": (Branch, "tanh", lambda x: [(x * 3).tanh()]),
    "while_loop": (While, "tanh", while_steps),
    "scan": (Scan, "tanh", scan_steps),
    "map": (Map, "tanh", lambda x: [(row * 2).tanh() for row in x]),
    "autocast": (Cast, "tanh", lambda x: [x.tanh()]),
}


@pytest.mark.parametrize("kind", NESTED)
def test_values_in_nested_graphs_are_watched_each_time_they_are_computed(kind: str) -> None:
    build, name, steps = NESTED[kind]
    torch.manual_seed(0)
    model, x = build().eval(), -torch.rand(5, 4)
    program = qc.capture(model, (x,))
    seen: dict[str, list[Any]] = {}
    watch = {node: keeper(seen, node) for node in program.nodes() if node.name == name}
    assert len(watch) == 1
    given = Runner(program, watch).run([x])
    with torch.no_grad():
        assert same(given[0], model(x))
    assert same(seen[name], steps(x))


def test_a_branch_that_is_not_taken_is_not_seen() -> None:
    x = -torch.rand(5, 4)
    program = qc.capture(Branch().eval(), (x,))
    seen: dict[str, list[Any]] = {}
    Runner(program, {node: keeper(seen, node) for node in program.nodes() if node.name == "relu"}).run([x])
    assert not seen


# -- leaves, errors, memory ------------------------------------------------------------------------------------


class Offset(nn.Module):
    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return x + by


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset = Offset()

    def forward(self, x: Tensor) -> Any:
        return self.offset(x.relu(), x) * 2


def test_modules_kept_whole_are_run() -> None:
    x = torch.randn(3, 4)
    program = qc.capture(Holder(), (x,), leaf="offset")
    seen: dict[str, list[Any]] = {}
    node = next(node for node in program.nodes() if node.op == "call_module")
    given = Runner(program, {node: keeper(seen, node)}).run([x])
    assert same(given[0], (x.relu() + x) * 2)
    assert same(seen[node.name], [x.relu() + x])


def test_an_op_that_fails_is_named() -> None:
    program = qc.capture(nn.Linear(4, 2).eval(), (torch.randn(3, 4),))
    with pytest.raises(CalibrationError, match="does not run on this input") as found:
        Runner(program, {}).run([torch.randn(3, 5)])
    assert "linear" in str(found.value.where)


def test_values_are_freed_after_their_last_use() -> None:
    x = torch.randn(3, 4)
    program = qc.capture(nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Tanh(), nn.Sigmoid()).eval(), (x,))
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def watch(value: Tensor) -> None:
        nonlocal most
        alive.append(weakref.ref(value))
        most = max(most, sum(reference() is not None for reference in alive))

    nodes = [node for node in program.nodes() if node.op == "call_function"]
    Runner(program, dict.fromkeys(nodes, watch)).run([x])
    assert len(alive) == 4
    assert most == 2  # what an op reads, and what it gives


def test_compiling_and_running_grow_linearly() -> None:
    costs = {}
    for blocks in (20, 40, 80, 160):
        program = chain(blocks)
        x = torch.randn(1, 2, 3, 3)
        costs[blocks] = float(calls(lambda program=program, x=x: Runner(program, {}).run([x])))  # type: ignore[misc]
    assert exponent(costs) < 1.05


# -- isolation -------------------------------------------------------------------------------------------------
