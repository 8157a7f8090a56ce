"""Specialization of dynamic sizes, for targets that need static ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, fx

from quantc.ir.program import Program, Stage
from quantc.ir.signature import Input
from quantc.ir.size_expressions import evaluate
from quantc.ir.types import ScalarType, TensorType, TupleType, ValueType, type_of
from quantc.pipeline.pipeline import Outcome, Pass, Preserves


class FixSizes(Pass):
    """Fix the sizes that capture left open to those of the example inputs.

    Capture opens the batch dimension unless told otherwise. A target that sets memory aside for the largest size
    gains from a fixed one. Sizes that the user named in `dynamic_shapes` stay open, and so do all of a program without
    example inputs. Sizes become numbers in types, in arguments and in the signature; the ops that read them go.
    """

    name: ClassVar[str] = "fix-sizes"
    needs: ClassVar[Stage] = Stage.CAPTURED
    before: ClassVar[Stage | None] = Stage.LOWERED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        note = fix_opened(program)
        return Outcome(note is not None, () if note is None else (note,))


def fix_opened(program: Program) -> str | None:
    """A note on the sizes that were fixed, or None if there were none."""
    signature = program.signature
    sizes = {symbol: size for symbol, size in _example_sizes(program).items() if symbol in signature.opened}
    if not sizes:
        return None
    for _, graph in program.graphs():
        for node in list(graph.nodes):
            kind = type_of(node)
            if kind is not None:
                node.meta["val"] = kind = _fix(kind, sizes)
            if node.op == "call_function" and isinstance(kind, ScalarType) and (number := _number(kind)) is not None:
                write_out(node, number)
                program.erase(node)
    program.signature = replace(
        signature,
        inputs=tuple(_fix_input(item, sizes) for item in signature.inputs),
        ranges={symbol: bounds for symbol, bounds in signature.ranges.items() if symbol not in sizes},
        opened=signature.opened - set(sizes),
    )
    program.touch()
    return f"{', '.join(f'{symbol} is fixed to {size}' for symbol, size in sizes.items())}, as in the example inputs"


def _example_sizes(program: Program) -> dict[str, int]:
    """Value of each symbol in the example inputs."""
    found: dict[str, int] = {}
    for item, leaf in zip(program.signature.inputs, program.example_inputs or (), strict=False):
        if item.type is not None and isinstance(leaf, Tensor):
            pairs = zip(item.type.shape, leaf.shape, strict=True)
            found.update({size: now for size, now in pairs if isinstance(size, str) and size.isidentifier()})
    return found


def _fix_input(item: Input, sizes: Mapping[str, int]) -> Input:
    kind = None if item.type is None else _fix(item.type, sizes)
    return replace(item, type=kind) if isinstance(kind, TensorType) else item


def _fix(kind: ValueType, sizes: Mapping[str, int]) -> ValueType:
    """A type without these symbols."""
    if isinstance(kind, TensorType):
        return TensorType(kind.dtype, tuple(_size(size, sizes) for size in kind.shape))
    if isinstance(kind, TupleType):
        return TupleType(tuple(None if item is None else _fix(item, sizes) for item in kind.items))
    return ScalarType(kind.kind, str(_size(kind.value, sizes))) if kind.kind == "int" else kind


def _size(size: int | str, sizes: Mapping[str, int]) -> int | str:
    known = evaluate(size, sizes) if isinstance(size, str) else size
    return size if known is None else known


def _number(kind: ScalarType) -> int | None:
    return evaluate(kind.value, {}) if kind.kind == "int" else None


def write_out(node: fx.Node, value: Any) -> None:
    """Replace all uses of a node by a value."""
    swap = _Swap(node, value)
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg(user.args, swap), fx.map_arg(user.kwargs, swap)


@dataclass(frozen=True)
class _Swap:
    """One node for a value, and every other for itself."""

    old: fx.Node
    new: Any

    def __call__(self, node: fx.Node) -> Any:
        return self.new if node is self.old else node
