"""Canonical form: one spelling per op."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from torch import fx
from torch._ops import OpOverload

from quantc.ir.alias_analysis import Aliasing, gives_shape, in_place_operand
from quantc.ir.dialect import aten, op_name
from quantc.ir.program import Program, Stage
from quantc.passes.eliminate_dead import Effects
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.rewrite.constant_order import order_constants
from quantc.rewrite.functionalize import functional_form
from quantc.rewrite.inline_wrappers import inline_wrappers
from quantc.rewrite.no_op_calls import CASTS, IDENTITIES, ResultMemory, cast_dtype
from quantc.rewrite.normal_form import normalize
from quantc.rewrite.replacements import Substitution
from quantc.rewrite.spellings import COPIED_PARTS, SPELLINGS

CHECKS = frozenset({aten._assert_tensor_metadata.default})
"""Checks that tracing left behind, of facts the program's types state already."""


class Canonicalize(Pass):
    """Rewrite every op to the canonical form that patterns match.

    Overloads, in-place and copying variants, and older names of an op become one canonical ATen op with arguments in
    schema order and defaults omitted. `addmm` and `mm` on a transposed constant become `linear`, `mm` and `bmm` become
    `matmul`, `hardtanh`, `relu6` and `clip` become `clamp`, `view` becomes `reshape`, and so on.

    In-place writes become functional where the difference is not observable; the others stay, and `program.opaque()`
    lists them. Copies, no-op casts, aliases and dead code are removed. `dropout` and `batch_norm` stay as they are,
    with their mode. Constants come first, in order of use, one node per tensor, tied ones included.

    In a program that is not in training mode `detach` and `no_grad` regions are removed as well: they matter only to
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
        was_trainable = not program.inference_only
        for _, graph in program.graphs():
            _canonicalize(program, graph, done)
        if was_trainable and program.inference_only:
            for _, graph in program.graphs():
                _canonicalize(program, graph, done)  # ops needed only in training can be removed now
        notes = [f"{count} {what}" for what, count in done.items() if count]
        opaque = [program.describe(node) for node in program.opaque()]
        if opaque:
            shown = ", ".join(opaque[:8]) + (f" and {len(opaque) - 8} more" if len(opaque) > 8 else "")
            notes.append(f"left opaque: {shown}")
        return Outcome(any(done.values()), tuple(notes))


def _canonicalize(program: Program, graph: fx.Graph, done: Counter[str]) -> None:
    """One round suffices, unless writes stay: a dropped op may have been the only one that kept a write in place."""
    before = -1
    while before != done.total():
        before = done.total()
        _sweep(program, graph, done)
        aliasing = Aliasing(graph, program.owner(graph))
        if aliasing.has_writes and _Writes(program, aliasing, done).run():
            aliasing = Aliasing(graph, program.owner(graph))
        _Rewriter(program, aliasing, done).run()
        _sweep(program, graph, done)
        done.update(order_constants(program, graph))
        if not aliasing.has_writes:
            return


def _sweep(program: Program, graph: fx.Graph, done: Counter[str]) -> None:
    """One backward walk for dead code. Dead nodes must not count as users of tensors that are written in place."""
    effects = Effects(program)
    for node in reversed(graph.nodes):
        if node.target in CHECKS:
            done["checks dropped"] += 1
            program.erase(node)
        elif not node.users and not effects.at(node):
            done[f"dead {op_name(node)}" if node.op != "get_attr" else "unused constants"] += 1
            program.erase(node)


class _Writes:
    """One forward walk that makes the writes of a graph functional where nothing else can see the difference.

    Nothing else is rewritten meanwhile: a copy must not be taken for its source as long as either can change.
    """

    def __init__(self, program: Program, aliasing: Aliasing, done: Counter[str]) -> None:
        self.program = program
        self.aliasing = aliasing
        self.done = done
        self.substitution = Substitution(program)

    def run(self) -> bool:
        """True if anything changed."""
        before = self.done.total()
        for node in list(self.aliasing.order):
            self.substitution.arrive(node)
            target = in_place_operand(node)
            if target is not None:
                self._rewrite(node, target)
        self.substitution.finish()
        return self.done.total() != before

    def _rewrite(self, node: fx.Node, target: fx.Node) -> None:
        if node.target is aten.copy_.default and node.args[1] is target:
            # `self.count += 1` assigns the buffer its own value
            self.substitution.forward(node, target)
            self.done["copies and no-ops dropped"] += 1
            return
        form = None if node in self.aliasing.seen else functional_form(self.program, node)
        if form is None:
            self._read_through(node, target)
            return
        self.substitution.rename(target, form)
        self.substitution.replace(node, form)
        self.done["writes made functional"] += 1

    def _read_through(self, node: fx.Node, target: fx.Node) -> None:
        """A write that stays gives back the tensor it writes to: let all read that under one name."""
        if node.users and not gives_shape(node):
            self.substitution.rename(node, target)
            self.done["tensors renamed"] += 1


class _Rewriter:
    """One forward walk over a graph whose writes are settled."""

    def __init__(self, program: Program, aliasing: Aliasing, done: Counter[str]) -> None:
        self.program = program
        self.aliasing = aliasing
        self.done = done
        self.substitution = Substitution(program)

    def run(self) -> None:
        for node in list(self.aliasing.order):
            self.substitution.arrive(node)
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                self._rewrite(node)
        self.substitution.finish()

    def _rewrite(self, current: fx.Node) -> None:
        changed = self._settle(current)
        while isinstance(current.target, OpOverload) and current.target in SPELLINGS and not self._must_copy(current):
            spelled = SPELLINGS[current.target](self.program, current)
            if spelled is None:
                break
            self.done["spellings"] += 1
            if spelled in self.aliasing.order:
                # the call did nothing: its operand stands for it
                self.substitution.forward(current, spelled)
                return
            self._stand_in(current, spelled)
            current = spelled
            if not isinstance(current.target, OpOverload):
                return
            changed = self._settle(current)
        self.done["calls normalized"] += changed
        self._drop_identity(current)

    def _must_copy(self, node: fx.Node) -> bool:
        """True if a node copies parts of a tensor, in a graph where a write might distinguish copies from views."""
        return node.target in COPIED_PARTS and self.aliasing.has_writes

    def _stand_in(self, old: fx.Node, new: fx.Node) -> None:
        made = self.aliasing.learn(new, old)
        self.substitution.replace(old, new)
        for operand in made:
            self._rewrite(operand)
        self.substitution.arrive(new)

    def _settle(self, node: fx.Node) -> bool:
        if not normalize(node):
            return False
        self.program.touch()
        return True

    def _drop_identity(self, node: fx.Node) -> None:
        found = IDENTITIES.get(node.target)
        if found is None:
            return
        same, memory = found
        source = same(node)
        if source is not None and self._can_go(node, source, memory):
            self._note_gradient(node, source)
            self.aliasing.merge(node, source)
            self.substitution.forward(node, source)
            self.done["copies and no-ops dropped"] += 1
            return
        if node.target in CASTS and node.target is not aten.to.dtype and (dtype := cast_dtype(node)) is not None:
            cast = self.program.emit(aten.to.dtype, (node.args[0], dtype), before=node, like=node)
            self._stand_in(node, cast)
            self.done["spellings"] += 1

    def _can_go(self, node: fx.Node, source: fx.Node, memory: ResultMemory) -> bool:
        if node.target is aten.detach.default and self.program.training:
            return False
        if memory is ResultMemory.SHARED:
            return True
        aliasing = self.aliasing
        if aliasing.is_written(node) or aliasing.is_written_after(source, node):
            return False
        # the caller gets a tensor of their own: not the model's, and not one they get under another name as well
        others = aliasing.returned(source) - (memory is ResultMemory.EITHER)
        return not aliasing.returned(node) or not (aliasing.is_external(source) or others > 0)

    def _note_gradient(self, node: fx.Node, source: fx.Node) -> None:
        tensor = self.program.tensor(source)
        has_gradient = tensor.requires_grad if tensor is not None else source.op != "placeholder"
        if node.target is aten.detach.default and has_gradient:
            self.program.note_inference_only(f"{self.program.describe(node)} stopped gradients, and was dropped")
