"""Real architectures from capture to Q/DQ: how much of the arithmetic is int8, and that nothing else is touched.

Multiply-adds are counted by torch's own flop counter, over the model for the total and node by node over the quantized
program for the part that is int8 times int8: quantc's own count has no say in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import quantc as qc
from quantc.errors import AnnotationError
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.qdq.ops import is_dequantize, is_quantize
from tests.support.architectures import CASES
from tests.support.named_ops import naming
from tests.zoo.case import Case

CALIBRATION = range(1, 7)
UNSEEN = range(100, 102)
BYTES = (torch.int8, torch.uint8)
IDS = [case.name for case in CASES]
BY_NAME = {case.name: case for case in CASES}

SHARE = 0.95
"""How much of a model's multiply-adds must be int8 times int8 on x86."""
RECURRENT = (
    "a recurrent layer is one op: x86 has no static int8 kernel for it, so it is quantized dynamically if at all"
)
EXCEPTIONS: dict[str, dict[str, str]] = {
    "lstm_tagger": {"lstm": RECURRENT},
    "gru_tagger": {"gru": RECURRENT},
}
"""Ops whose multiply-adds are not counted in a model, with the reason."""

UNUSED = {"unused_outputs": ("auxiliary",), "wavenet": ("residuals.4",)}
"""Modules whose results nobody reads: they are not in the quantized program."""

FLOORS = {"x86": 30.0, "qnnpack": 18.0, "executorch": 18.0}
"""The least signal-to-noise ratio on unseen inputs, in dB. The latter two quantize what goes between products as well."""

INDEXES = {
    "embedding": (1,),
    "embedding_bag": (1, 2),
    "index": (1,),
    "index_select": (2,),
    "gather": (2,),
    "aten.index_put.default": (1,),
    "masked_fill": (1,),
    "where": (0,),
}
"""Arguments that pick elements, by position."""


LARGE = {"resnet18", "mobilenet_v2", "mobilenet_v3", "efficientnet", "convnext", "swin"}
"""These take most of the time, so `make test` runs two of them, for x86 alone."""
SLOW = LARGE - {"mobilenet_v3", "swin"}
BYTEWISE = ("qnnpack", "executorch")
"""Backends that quantize what goes between products as well: small models take turns at them in `make test`."""
NOTHING = {("einsum_attention", "executorch")}
"""Where no rule fits: the delegate takes neither einsum nor norms, and a sum of what is float stays float."""


def marks(name: str, backend: str) -> list[pytest.MarkDecorator]:
    is_slow = name in (SLOW if backend == "x86" else LARGE | {*IDS[BYTEWISE.index(backend) :: 2]})
    return [pytest.mark.slow] if is_slow else []


everywhere = pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=marks(name, backend))
        for name in IDS
        for backend in ("x86", *BYTEWISE)
        if (name, backend) not in NOTHING
    ],
)
on_x86 = pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name, "x86")) for name in IDS])


@cache
def captured(name: str) -> tuple[nn.Module, Program]:
    case = BY_NAME[name]
    model = case.model()
    args, kwargs = case.example()
    return model, qc.capture(model, args, method="export", example_kwargs=kwargs)


@cache
def quantized(name: str, backend: str) -> Program:
    """With products of two activations quantized on every backend."""
    program = captured(name)[1]
    prepared = qc.prepare(program, backend, config=naming(program, backend))
    qc.calibrate(prepared, [BY_NAME[name].example(seed)[0] for seed in CALIBRATION], progress="silent")
    return qc.convert(prepared)


# -- running a program and looking on ------------------------------------------------------------------------------


class Seen(fx.Interpreter):
    """Runs a program and keeps its integers and booleans (by name), and the dtypes of what it quantizes."""

    def __init__(self, program: Program, case: Case) -> None:
        super().__init__(program.root, graph=program.graph)
        self.whole: dict[str, Tensor] = {}
        self.quantized: set[torch.dtype] = set()
        with torch.no_grad():
            self.run(*pytree.tree_leaves(case.example()))

    def run_node(self, n: fx.Node) -> Any:
        if is_quantize(n):
            self.quantized.add(self.env[n.args[0]].dtype)  # type: ignore[index]
        value = super().run_node(n)
        if isinstance(value, Tensor) and not value.is_floating_point() and not is_quantize(n):
            self.whole[n.name] = value
        return value


class Counted(fx.Interpreter):
    """Runs a program and counts what each node computes."""

    def __init__(self, program: Program, case: Case) -> None:
        super().__init__(program.root, graph=program.graph)
        self.flops: dict[fx.Node, int] = {}
        with torch.no_grad():
            self.run(*pytree.tree_leaves(case.example()))

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or is_quantize(n) or is_dequantize(n):
            return super().run_node(n)
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(n)
        self.flops[n] = counter.get_total_flops() + recurrent_flops(n, self.env)
        return value


def recurrent_flops(node: fx.Node, env: dict[fx.Node, Any]) -> int:
    """torch does not count recurrent layers: each weight meets each row of the sequence once."""
    if op_name(node) not in ("lstm", "gru"):
        return 0
    x, *others = (env[leaf] for leaf in pytree.tree_leaves(node.args) if isinstance(leaf, fx.Node))
    return 2 * int(x.shape[0] * x.shape[1]) * sum(int(weight.numel()) for weight in others if weight.dim() == 2)


def is_bytes(value: Any) -> bool:
    """Whether a node gives back what was stored as 8-bit integers."""
    if not isinstance(value, fx.Node) or not is_dequantize(value):
        return False
    return value.args[-1] in BYTES


def factors(node: fx.Node) -> list[Any]:
    """What a product op multiplies: the first two tensors, however they are given."""
    given = [leaf for leaf in pytree.tree_leaves(node.args) if isinstance(leaf, fx.Node)]
    return given[1:3] if op_name(node) in ("addmm", "baddbmm") else given[:2]


def is_int8(node: fx.Node) -> bool:
    return op_name(node) not in ("lstm", "gru", "sdpa") and all(is_bytes(factor) for factor in factors(node))


def total_flops(case: Case) -> int:
    """What the model computes, but for what it does not use and the ops that are excepted.

    Attention is run in its plain form: torch does not count the fused kernels in full."""
    model = captured(case.name)[0]
    args, kwargs = case.example()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, depth=9) as counter:
            model(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    counts = {name.partition(".")[2]: int(sum(ops.values())) for name, ops in counter.get_flop_counts().items()}
    out = ["rnn"] if EXCEPTIONS.get(case.name, {}).keys() & {"lstm", "gru"} else []
    return int(counter.get_total_flops()) - sum(counts.get(name, 0) for name in (*out, *UNUSED.get(case.name, ())))


def outputs(call: Callable[..., Any], case: Case, seed: int) -> Tensor:
    args, kwargs = case.example(seed)
    with torch.no_grad():
        leaves = pytree.tree_leaves(call(*args, **kwargs))
    return torch.cat([leaf.flatten() for leaf in leaves if leaf.is_floating_point()])


def sqnr(model: nn.Module, program: Program, case: Case) -> float:
    signal = noise = 0.0
    for seed in UNSEEN:
        expected, actual = outputs(model, case, seed), outputs(program, case, seed)
        signal += float(expected.square().sum())
        noise += float((expected - actual).square().sum())
    return 10 * float(torch.log10(torch.tensor(signal / noise)))


# -- the tests -----------------------------------------------------------------------------------------------------


@on_x86
def test_the_arithmetic_is_int8_on_x86(name: str) -> None:
    case = BY_NAME[name]
    run = Counted(quantized(name, "x86"), case)
    excepted = EXCEPTIONS.get(name, {})
    assert not excepted.keys() - {op_name(node) for node in run.flops}, "an exception for an op that is not there"
    counted = {node: flops for node, flops in run.flops.items() if flops and op_name(node) not in excepted}
    total = total_flops(case)
    assert sum(counted.values()) == pytest.approx(total, rel=0.01), "the quantized program computes something else"
    inside = sum(flops for node, flops in counted.items() if is_int8(node))
    left = Counter({f"{node.name}: {op_name(node)}": flops for node, flops in counted.items() if not is_int8(node)})
    print(f"{name}: {inside / total:.1%} int8; {', '.join(name for name, _ in left.most_common(5)) or 'all of it'}")  # noqa: T201
    assert inside >= SHARE * total, left.most_common(12)


@pytest.mark.parametrize(("name", "backend"), sorted(NOTHING))
def test_nothing_quantized_is_an_error(name: str, backend: str) -> None:
    with pytest.raises(AnnotationError, match="nothing was quantized"):
        quantized(name, backend)


@everywhere
def test_it_runs_close_to_the_float_model(name: str, backend: str) -> None:
    case, (model, _) = BY_NAME[name], captured(name)
    program = quantized(name, backend)
    program.verify()
    found = sqnr(model, program, case)
    print(f"{name} on {backend}: {found:.1f} dB")  # noqa: T201
    assert found > FLOORS[backend]


@everywhere
def test_integers_are_left_alone(name: str, backend: str) -> None:
    case, (_, program) = BY_NAME[name], captured(name)
    result = quantized(name, backend)
    run = Seen(result, case)
    assert run.quantized == {torch.float32}
    for node in result.nodes():
        for operand in indexes(node):
            bad = [before.name for before in closure(operand) if is_quantize(before) or is_dequantize(before)]
            assert not bad, f"what {node.name} picks by went through {bad}"
    before = Seen(qc.pipelines.inference().run_on_copy(program), case).whole
    for kept in before.keys() & run.whole.keys():
        assert torch.equal(run.whole[kept], before[kept]), kept


def indexes(node: fx.Node) -> Iterator[fx.Node]:
    for position in INDEXES.get(op_name(node), ()):
        if position < len(node.args):
            yield from (leaf for leaf in pytree.tree_leaves(node.args[position]) if isinstance(leaf, fx.Node))


def closure(node: fx.Node) -> list[fx.Node]:
    """A node and all whose numbers it is computed from."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        current = pending.pop()
        if current not in found:
            found[current] = None
            pending.extend(() if "aten.new_" in op_name(current) else current.all_input_nodes)
    return list(found)


@on_x86
def test_both_captures_are_quantized_alike(name: str) -> None:
    case, (model, program) = BY_NAME[name], captured(name)
    args, kwargs = case.example()
    traced = qc.prepare(qc.capture(model, args, method="fx", example_kwargs=kwargs), "x86")
    exported = qc.prepare(program, "x86")
    assert claims(traced) == claims(exported)
    assert len(traced.plan.groups) == len(exported.plan.groups)


def claims(program: Program) -> Counter[str]:
    return Counter(str(claim) for claim in program.plan.claims.rows.values())
