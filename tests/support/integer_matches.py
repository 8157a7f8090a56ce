"""Integers by hand, and what the matches of a program read and yield: for tests of the integer form.

Nothing of `quantc.integer` computes here but the ops that are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx

import quantc as qc
from quantc.integer.library import OPS
from quantc.integer.semantics import load
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.ir.types import tensor_type
from tests.support.named_ops import naming

load()
NARROW = (torch.uint8, torch.int8, torch.int16)
Array = Any  # NumPy arrays of whatever dtype
Steps = Callable[[Any, Any, float], Array]


# -- by hand -------------------------------------------------------------------------------------------------------


def onto_grid(steps: Array, zero_point: int, qmin: int, qmax: int, dtype: torch.dtype) -> Tensor:
    """One rounding, half to even, of float64 numbers of steps."""
    levels = np.clip(np.rint(np.asarray(steps, dtype=np.float64)) + zero_point, qmin, qmax)
    return torch.from_numpy(np.asarray(levels)).to(dtype)


def less(x: Tensor, zero_point: int) -> Array:
    return x.numpy().astype(np.int64) - zero_point


def some_integers(generator: np.random.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Over the whole range of a dtype, its ends among them."""
    info = torch.iinfo(dtype)
    drawn = np.asarray(generator.integers(info.min, info.max, size=tuple(shape), endpoint=True, dtype=np.int64))
    at_end = generator.random(drawn.shape) < 0.1
    return torch.from_numpy(np.where(at_end, generator.choice([info.min, info.max], drawn.shape), drawn)).to(dtype)


def some_multiplier(generator: np.random.Generator, shape: Sequence[int] = ()) -> Tensor:
    """Of either sign; half of the time a power of two, so that there are ties."""
    drawn = np.exp2(generator.integers(-9, 2, size=tuple(shape)).astype(np.float64))
    if generator.random() < 0.5:
        drawn = drawn * generator.uniform(1, 2, size=tuple(shape))
    return torch.from_numpy(np.asarray(drawn * generator.choice([-1.0, 1.0], size=tuple(shape))))


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def both(name: str, *args: Any) -> Tensor:
    """What an op yields, by its kernel and by its reference, which must agree."""
    by_kernel: Tensor = OPS[name].target(*args)
    assert same(by_kernel, OPS[name].reference(*args))
    return by_kernel


# -- programs ------------------------------------------------------------------------------------------------------


class Recorder(fx.Interpreter):
    """Keeps what every node yields, by name."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n.name] = value
        return value


def values_of(program: Program, inputs: Sequence[Tensor]) -> dict[str, Any]:
    recorder = Recorder(program)
    recorder.run(*inputs)
    return recorder.values


class Match:
    """One match of a Q/DQ program: what its first op reads, as integers less their zero points, with their scales;
    and the node that quantizes what it yields."""

    def __init__(self, program: Program, name: str, inputs: Sequence[Tensor]) -> None:
        (self.core,) = [node for node in program.graph.nodes if op_name(node) == name]
        claim = program.plan.claims[self.core]
        nodes = [node for node in program.graph.nodes if program.plan.claims.get(node) is claim]
        values = values_of(program, inputs)
        self.operands = [self._operand(item, values) for item in self.core.args[:2]]
        self.quantizer = next(iter(nodes[-1].users))

    @property
    def out_scale(self) -> float:
        return float(np.float32(cast(float, self.quantizer.args[1])))

    @staticmethod
    def _operand(item: Any, values: dict[str, Any]) -> Any:
        if not isinstance(item, fx.Node):
            return item
        source, scale, zero_point, *_ = cast(tuple[Any, ...], item.args)
        return less(values[source.name], zero_point), float(np.float32(scale))

    def steps(self, formula: Steps) -> Array:
        """How many steps of its result a formula of both operands and the scale of the result comes to."""
        x, y = self.operands
        return formula(x, y, self.out_scale)

    def rounded(self, steps: Array) -> Tensor:
        _, _, zero_point, qmin, qmax, dtype = cast(tuple[Any, ...], self.quantizer.args)
        return onto_grid(steps, zero_point, qmin, qmax, dtype)


def calibrated(program: Program, backend: Any, inputs: Sequence[Tensor]) -> Program:
    prepared = qc.prepare(program, backend, config=naming(program, backend))
    qc.calibrate(prepared, [tuple(inputs)])
    return prepared


def integer_ops(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if getattr(node.target, "namespace", "") == "quantc"]


def floats_inside(program: Program) -> list[str]:
    """Nodes that yield floats made from integers, and from which integers are made."""
    below: set[fx.Node] = set()
    above: set[fx.Node] = set()
    for node in program.graph.nodes:
        if any(_is_integer(item) or item in below for item in node.all_input_nodes):
            below.add(node)
    for node in reversed(program.graph.nodes):
        if any(_is_integer(user) or user in above for user in node.users):
            above.add(node)
    return [node.name for node in below & above if not _is_integer(node)]


def _is_integer(node: fx.Node) -> bool:
    kind = tensor_type(node)
    return node.op == "call_function" and kind is not None and not kind.dtype.is_floating_point
