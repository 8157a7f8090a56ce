"""Constant folding."""

from __future__ import annotations

import operator
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.node import map_arg

from quantc.ir.alias_analysis import Aliasing
from quantc.ir.program import Program, Stage
from quantc.passes.eliminate_dead import Effects
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.rewrite.constant_order import order_constants


class FoldConstants(Pass):
    """Replace calls that depend on constants alone by their results.

    Masks, position tables, transposed weights and tensors made of numbers become constants of the program. Buffers that
    the program writes to are not constants, random ops are never folded, and returned values are computed anew for each
    caller. A result that is large and larger than its inputs (an expanded mask) is left to run time.

    Folding a trainable parameter makes the program inference-only.
    """

    name: ClassVar[str] = "fold-constants"
    needs: ClassVar[Stage] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.ANNOTATED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    max_growth_bytes: int = Field(default=1 << 20, ge=0)
    """Maximum size of a result beyond that of the constants it is made from, in bytes."""

    parameters: Literal["fold", "keep"] = "fold"
    """"fold" counts trainable parameters as constants; "keep" does not, and the program can still be trained."""

    def run(self, program: Program) -> Outcome:
        was_trainable = not program.inference_only
        folded = self._fold(program)
        if was_trainable and program.inference_only:
            folded += self._fold(program)  # ops needed only in training can be folded now
        return Outcome(folded > 0, (f"folded {folded} calls",) if folded else ())

    def _fold(self, program: Program) -> int:
        effects = Effects(program)
        return sum(self._fold_graph(program, graph, effects) for _, graph in program.graphs())

    def _fold_graph(self, program: Program, graph: fx.Graph, effects: Effects) -> int:
        aliasing = Aliasing(graph, program.owner(graph))
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "get_attr" and not aliasing.is_written(node):
                tensor = program.tensor(node)
                if tensor is not None and not tensor.is_meta and not (self.parameters == "keep" and _learns(tensor)):
                    values[node] = tensor
            elif self._can_fold(node, values, effects, aliasing):
                result = _evaluate(node, values)
                if self._worth_it(node, result, values):
                    values[node] = result
        return self._store(program, graph, values)

    @staticmethod
    def _can_fold(node: fx.Node, values: dict[fx.Node, Any], effects: Effects, aliasing: Aliasing) -> bool:
        if node.op != "call_function" or effects.at(node) or aliasing.is_written(node):
            return False
        if aliasing.returned(node):
            return False  # it becomes the caller's, who may write to it
        if not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
            return False
        return all(operand in values for operand in node.all_input_nodes)

    def _worth_it(self, node: fx.Node, result: Any, values: dict[fx.Node, Any]) -> bool:
        sources = sum(_bytes(values[operand]) for operand in node.all_input_nodes)
        return _bytes(result) <= sources + self.max_growth_bytes

    @staticmethod
    def _store(program: Program, graph: fx.Graph, values: dict[fx.Node, Any]) -> int:
        """Make constants of the results that something else needs; the calls they came from go."""
        computed = [node for node in values if node.op == "call_function"]
        needed = [
            node
            for node in computed
            if isinstance(values[node], Tensor)
            and any(user not in values or user.op == "output" for user in node.users)
        ]
        for node in needed:
            tensor = values[node]
            if any(isinstance(values.get(source), nn.Parameter) for source in _roots(node)):
                program.note_inference_only(f"{program.describe(node)} was computed from a parameter once and for all")
            hint = f"folded_{node.name}"
            constant = program.constant(hint, tensor.detach().clone(), before=node)
            program.forward(node, constant)
        gone = set(needed)
        for node in reversed(computed):
            if node not in gone and not node.users:
                program.erase(node)
                gone.add(node)
        if gone:
            for node in reversed(graph.find_nodes(op="get_attr")):
                if not node.users:
                    program.erase(node)
            order_constants(program, graph)
        return len(gone)


def _learns(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _roots(node: fx.Node) -> list[fx.Node]:
    """The get_attr nodes a call is computed from."""
    found, pending, seen = [], [node], set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "get_attr":
            found.append(current)
        pending.extend(current.all_input_nodes)
    return found


def _evaluate(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: values[operand])
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, tuple | list):
        return sum(_bytes(item) for item in value)
    return 0
