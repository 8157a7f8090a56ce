"""Bring every spelling to one."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from torch import fx
from torch._ops import OpOverload

from quantc.aliasing import Aliasing
from quantc.aten_spellings import SPELLINGS
from quantc.constants import order_constants
from quantc.dialect import aten, op_name
from quantc.functional import functional_form
from quantc.identities import CASTS, IDENTITIES, Memory, cast_dtype
from quantc.inline import inline_wrappers
from quantc.normal_form import normalize
from quantc.passes.eliminate_dead import Effects
from quantc.pipeline import Outcome, Pass, Preserves
from quantc.program import Program, Stage

CHECKS = frozenset({aten._assert_tensor_metadata.default})
"""Checks that tracing left behind, of facts the program's types state already."""


class Canonicalize(Pass):
    """Spell every op in the one way that patterns know.

    Overloads, in-place and copying variants, and older names of an op become one canonical ATen op with its
    arguments in schema order and its defaults left out. `addmm` and `mm` on a transposed constant become `linear`,
    `mm` and `bmm` become `matmul`, `hardtanh`, `relu6` and `clip` become `clamp`, `view` becomes `reshape`, and so on.

    Writes in place become functional where nothing else can see the difference; the others stay, and
    `program.opaque()` lists them. Copies, no-op casts, aliases and dead code go. `dropout` and `batch_norm` stay as
    they are, with their mode. Constants come first, in order of use, one node for each tensor, tied ones included.

    In a program that is not in training mode `detach` and `no_grad` regions go as well: they matter only to
    gradients, so the program is inference-only from then on if there were any.
    """

    name: ClassVar[str] = "canonicalize"
    needs: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage | None] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.ANNOTATED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        done: Counter[str] = Counter()
        done["regions inlined"] = inline_wrappers(program)
        for _, graph in program.graphs():
            _Rewriter(program, graph, done).run()
        notes = [f"{count} {what}" for what, count in done.items() if count]
        opaque = [program.describe(node) for node in program.opaque()]
        if opaque:
            shown = ", ".join(opaque[:8]) + (f" and {len(opaque) - 8} more" if len(opaque) > 8 else "")
            notes.append(f"left opaque: {shown}")
        return Outcome(any(done.values()), tuple(notes))


class _Rewriter:
    """One forward walk over one graph, then one walk back for dead code."""

    def __init__(self, program: Program, graph: fx.Graph, done: Counter[str]) -> None:
        self.program = program
        self.graph = graph
        self.done = done
        self.aliasing = Aliasing(graph)

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                self._rewrite(node)
        self._sweep()
        self.done.update(order_constants(self.program, self.graph))

    def _rewrite(self, node: fx.Node) -> None:
        if node.target in CHECKS:
            self.program.erase(node)
            self.done["checks dropped"] += 1
            return
        if node.target is aten.copy_.default and _is_itself(node.args[0], node.args[1]):
            self._forward(node, node.args[0])  # type: ignore[arg-type]
            return
        current = self._functional(node)
        if current is None or not isinstance(current.target, OpOverload):
            return
        changed = self._settle(current)
        while current.target in SPELLINGS:
            spelled = SPELLINGS[current.target](self.program, current)
            if spelled is None:
                break
            self.done["spellings"] += 1
            if current.users or spelled is not current:
                self._stand_in(current, spelled)
            current = spelled
            if not isinstance(current.target, OpOverload):
                return
            changed = self._settle(current)
        self.done["calls normalized"] += changed
        self._drop_identity(current)

    def _stand_in(self, old: fx.Node, new: fx.Node) -> None:
        self.aliasing.order.setdefault(new, self.aliasing.order.get(old, 0))
        self.program.replace(old, new)

    def _settle(self, node: fx.Node) -> bool:
        if not normalize(node):
            return False
        self.program.touch()
        return True

    def _functional(self, node: fx.Node) -> fx.Node | None:
        """The node to go on with: itself, or its functional form where the write can be seen by nobody else."""
        written = self.aliasing.written(node)
        if written is None:
            return node
        if node in self.aliasing.kept:
            return node
        form = functional_form(self.program, node)
        if form is None:
            # it stays in place, so whatever shares this memory must stay as well
            self.aliasing.keep(node)
            return node
        order = self.aliasing.order
        moment = order[node]
        written.replace_all_uses_with(form, lambda user: order.get(user, -1) > moment)
        if form is not node:
            self._stand_in(node, form)
        self.done["writes made functional"] += 1
        return form if form.op == "call_function" else None

    def _drop_identity(self, node: fx.Node) -> None:
        found = IDENTITIES.get(node.target)
        if found is None:
            return
        same, memory = found
        source = same(node)
        if source is not None and self._can_go(node, source, memory):
            self._note_gradient(node, source)
            self._forward(node, source)
            return
        if node.target in CASTS and node.target is not aten.to.dtype and (dtype := cast_dtype(node)) is not None:
            cast = self.program.emit(aten.to.dtype, (node.args[0], dtype), before=node, like=node)
            self._stand_in(node, cast)
            self.done["spellings"] += 1

    def _forward(self, node: fx.Node, source: fx.Node) -> None:
        self.program.forward(node, source)
        self.done["copies and no-ops dropped"] += 1

    def _can_go(self, node: fx.Node, source: fx.Node, memory: Memory) -> bool:
        if node.target is aten.detach.default and self.program.training:
            return False
        aliasing = self.aliasing
        if aliasing.is_written(node) or aliasing.is_written_after(source, node):
            return False
        is_returned = any(user.op == "output" for user in node.users)
        if memory is Memory.OWN and is_returned and aliasing.is_external(source):
            # the caller gets a tensor of their own, not the model's
            return False
        return memory is Memory.OWN or not aliasing.is_written(source)

    def _note_gradient(self, node: fx.Node, source: fx.Node) -> None:
        tensor = self.program.tensor(source)
        has_gradient = tensor.requires_grad if tensor is not None else source.op != "placeholder"
        if node.target is aten.detach.default and has_gradient:
            self.program.note_inference_only(f"{self.program.describe(node)} stopped gradients, and was dropped")

    def _sweep(self) -> None:
        effects = Effects(self.program)
        for node in reversed(self.graph.nodes):
            if not node.users and not effects.at(node):
                self.done[f"dead {op_name(node)}" if node.op != "get_attr" else "unused constants"] += 1
                self.program.erase(node)


def _is_itself(destination: Any, source: Any) -> bool:
    """Whether a copy is of a tensor onto itself: `self.count += 1` assigns the buffer what it already is."""
    while isinstance(source, fx.Node) and source is not destination:
        source = Aliasing.written(source)
    return source is destination
