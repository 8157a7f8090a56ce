"""Dead code elimination."""

from __future__ import annotations

import operator
from typing import ClassVar

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

from quantc.ir.dialect import MODAL, SYMBOLIC, argument, is_op, op_name, position, traits_of, writes
from quantc.ir.placements import PlacedModule
from quantc.ir.program import Program, Stage, attribute
from quantc.pipeline.pipeline import Outcome, Pass, Preserves

SWITCHES = ("train", "training", "use_input_stats", "dropout_p")
"""The arguments that turn an op's training behaviour on."""
OWN = frozenset({"aten", "prim", "prims", "quantized_decomposed", "quantc"})
"""Namespaces whose schemas tell all that an op does."""


class EliminateDead(Pass):
    """Remove calls without users, and constants without readers.

    Nested graphs (the branches of `cond`, the bodies of loops) are cleaned too, and a higher-order call is removed if
    nothing in it has a side effect. Inputs stay: they are the calling convention.

    Ops with side effects are kept, used or not:

    - writes in place, and batch norms that update their statistics;
    - asserts and other ops that return nothing;
    - random ops, because a number not drawn shifts all that are drawn after it. As long as the program can still be
      trained this includes inactive dropout; in an inference-only program such dropout is removed;
    - opaque modules, Python functions and foreign ops.

    Parameters and buffers stay on the program, so its `state_dict` keeps its keys; only the nodes that read them are
    removed.
    """

    name: ClassVar[str] = "eliminate-dead"
    needs: ClassVar[Stage] = Stage.CAPTURED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        effects = Effects(program)
        removed: dict[str, int] = {}
        for _, graph in program.graphs():
            # in reverse topological order, each node is visited after all its users
            for node in reversed(graph.nodes):
                if node.users or effects.at(node):
                    continue
                removed[op_name(node)] = removed.get(op_name(node), 0) + 1
                program.erase(node)
        listed = ", ".join(f"{count} {name}" for name, count in sorted(removed.items()))
        return Outcome(bool(removed), (f"removed {listed}",) if removed else ())


class Effects:
    """Side effects of a program's nodes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.pure: set[int] = set()
        """The ids of nested graphs without effects."""
        nested = [graph for path, graph in program.graphs() if path]
        for graph in reversed(nested):
            # innermost first; a graph met again deeper counts as having effects, which is conservative
            if not any(self.at(node) for node in graph.nodes if node.op not in ("placeholder", "output")):
                self.pure.add(id(graph))

    def at(self, node: fx.Node) -> bool:
        """True if a node must stay although it is unused."""
        if node.op == "call_module":
            return not isinstance(attribute(self.program.owner(node.graph), str(node.target)), PlacedModule)
        if node.op != "call_function":
            return node.op != "get_attr"
        target = node.target
        if isinstance(target, HigherOrderOperator):
            return self._higher_order(node)
        if isinstance(target, OpOverload):
            return self._op(node, target)
        return target is not operator.getitem and target not in SYMBOLIC

    def _higher_order(self, node: fx.Node) -> bool:
        """Without effects only if it calls graphs, all of which are known to be without."""
        owner = self.program.owner(node.graph)
        graphs = []
        for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))):
            value = attribute(owner, str(leaf.target)) if isinstance(leaf, fx.Node) and leaf.op == "get_attr" else None
            if isinstance(value, fx.GraphModule):
                graphs.append(value.graph)
        return not graphs or any(id(graph) not in self.pure for graph in graphs)

    def _op(self, node: fx.Node, target: OpOverload) -> bool:
        if target.namespace not in OWN or writes(target) or not target._schema.returns:
            return True
        if MODAL in traits_of(node):
            return self._switched_on(node, target)
        return torch.Tag.nondeterministic_seeded in target.tags

    def _switched_on(self, node: fx.Node, target: OpOverload) -> bool:
        """True if an op draws random numbers or updates statistics, now or once the program is trained."""
        if is_op(node, "batch_norm", "instance_norm") and argument(node, "mean") is None:
            return False
        row = self.program.modes.get(node)
        if row is not None and not self.program.inference_only:
            return bool(row.train or row.eval)
        return any(bool(argument(node, name)) for name in SWITCHES if position(target, name) >= 0)
