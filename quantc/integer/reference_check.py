"""Kernel check: an interpreter that compares every integer op of a program with its reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from quantc.errors import QuantcError
from quantc.integer.library import NAMESPACE, IntegerOp, op_of
from quantc.ir.batch_inputs import leaves_of
from quantc.ir.program import Program, attribute
from quantc.ir.types import type_of_value

BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A node whose kernel and reference differ on the same inputs."""

    node: str
    """Its name; `branch/name` in a nested graph."""
    op: str
    count: int
    """Number of differing elements over all runs of the node."""
    elements: int
    largest: float
    """The largest difference; infinite where one is not a number, or where there is nothing to subtract."""
    note: str = ""
    """Another mismatch: dtype or shape."""

    def __str__(self) -> str:
        head = f"{self.node} ({NAMESPACE}.{self.op})"
        if self.note:
            return f"{head}: {self.note}"
        return f"{head}: {self.count} of {self.elements} elements differ from the reference, by up to {self.largest:g}"


def check_kernels(program: Program, inputs: Any) -> tuple[Mismatch, ...]:
    """Run a program of fused integer ops node by node, and each op's reference on the op's inputs.

    `inputs` is a tuple of the model's arguments, a dict of them by name, or its one argument.

    Each op continues from its own kernel's result. Returns the nodes whose kernel and reference differ in any bit, in
    program order; branches that these inputs do not reach are not checked. QuantcError if the program has no integer
    ops.
    """
    if not any(op_of(node.target) is not None for node in program.nodes()):
        raise QuantcError(
            f"{program.name} has no integer ops to check",
            where=f"its stage is {program.stage.label}",
            advice="give what qc.convert(prepared, to='integer') gives, in the style 'fused'",
        )
    leaves = leaves_of(program, inputs, 0)
    found: dict[str, Mismatch] = {}
    with torch.no_grad():
        _Checker(program.root, program.graph, "", found).run(*leaves, enable_io_processing=False)
    return tuple(found.values())


class _Checker(fx.Interpreter):
    """Runs one graph. The graphs of higher-order ops are run by others like it."""

    def __init__(self, owner: nn.Module, graph: fx.Graph, path: str, found: dict[str, Mismatch]) -> None:
        super().__init__(owner, garbage_collect_values=True, graph=graph)
        self.extra_traceback = False
        self.path = path
        self.found = found
        self.name = ""

    def run_node(self, n: fx.Node) -> Any:
        self.name = f"{self.path}/{n.name}".lstrip("/")
        return super().run_node(n)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = attribute(self.module, str(target))
        if not isinstance(value, fx.GraphModule):
            return value
        return _runner(value, f"{self.path}/{target}".lstrip("/"), self.found)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # the interpreter knows a module that has two names by one of them only
        return attribute(self.module, str(target))(*args, **kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().call_function(target, args, kwargs)
        op = op_of(target)
        if op is not None:
            self._check(op, value, op.reference(*args, **kwargs))
        return value

    def _check(self, op: IntegerOp, value: Any, expected: Any) -> None:
        pairs = zip(pytree.tree_leaves(value), pytree.tree_leaves(expected), strict=True)
        for mismatch in (_compare(self.name, op.name, left, right) for left, right in pairs):
            if mismatch is not None:
                earlier = self.found.get(self.name)
                self.found[self.name] = mismatch if earlier is None else _both(earlier, mismatch)


def _runner(module: fx.GraphModule, path: str, found: dict[str, Mismatch]) -> Callable[..., Any]:
    """Replacement for the graph that a higher-order op calls."""

    def run(*operands: Any) -> Any:
        return _Checker(module, module.graph, path, found).run(*operands, enable_io_processing=False)

    return run


def _compare(node: str, op: str, value: Tensor, expected: Tensor) -> Mismatch | None:
    if value.dtype != expected.dtype or value.shape != expected.shape:
        note = f"the kernel gives {type_of_value(value)}, the reference {type_of_value(expected)}"
        return Mismatch(node, op, value.numel(), value.numel(), float("inf"), note)
    left, right = (_bits(tensor) for tensor in (value, expected))
    differs = left != right
    count = int(differs.sum())
    if count == 0:
        return None
    return Mismatch(node, op, count, value.numel(), _largest(value[differs], expected[differs]))


def _bits(tensor: Tensor) -> Tensor:
    """A tensor as integers that are equal where all bits are."""
    kind = BITS.get(tensor.dtype)
    return tensor if kind is None else tensor.contiguous().view(kind)


def _largest(left: Tensor, right: Tensor) -> float:
    wide = torch.float64 if left.dtype.is_floating_point else torch.int64
    gaps = (left.to(wide) - right.to(wide)).abs().double()
    return float(torch.nan_to_num(gaps, nan=float("inf"), posinf=float("inf")).max())


def _both(first: Mismatch, second: Mismatch) -> Mismatch:
    """The mismatches of one node that ran twice, or that yields several tensors."""
    return replace(
        first,
        count=first.count + second.count,
        elements=first.elements + second.elements,
        largest=max(first.largest, second.largest),
        note=first.note or second.note,
    )


__all__ = ["Mismatch", "check_kernels"]
