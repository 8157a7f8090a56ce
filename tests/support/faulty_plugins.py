"""Quantizers, targets, passes and observations that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from quantc.errors import DataError
from quantc.ir.dialect import argument, is_op
from quantc.ir.program import Program, Stage
from quantc.observe.minmax import MinMax
from quantc.passes.eliminate_dead import EliminateDead
from quantc.pipeline.pipeline import Pass, Preserves
from quantc.spec.granularity import Share
from quantc.spec.numerics import QParams
from quantc.spec.observation import Order, State
from quantc.spec.spec import Option, QuantSpec

# -- passes ------------------------------------------------------------------------------------------------------


class MergeRelus(Pass):
    """Merge a relu of a relu into one. It is right."""

    name: ClassVar[str] = "merge-relus"

    keep: tuple[str, ...] = ()

    def run(self, program: Program) -> bool:
        merged = False
        for _, graph in program.graphs():
            for node in graph.nodes:
                if is_op(node, "relu") and node.name not in self.keep and is_op(inner := argument(node, "x"), "relu"):
                    program.forward(node, inner)
                    merged = True
        return bool(EliminateDead().run(program)) or merged


class DropRelus(MergeRelus):
    """Breaks its promise: a relu cannot simply go."""

    name: ClassVar[str] = "drop-relus"

    def run(self, program: Program) -> bool:
        found = [node for node in program.graph.nodes if is_op(node, "relu")]
        for node in found:
            program.forward(node, node.args[0])
        return bool(found)


class SilentRelus(MergeRelus):
    """Says that it never changes anything."""

    name: ClassVar[str] = "silent-relus"

    def run(self, program: Program) -> bool:
        super().run(program)
        return False


class OneRelu(MergeRelus):
    """Stops after the first, so that running it again goes on."""

    name: ClassVar[str] = "one-relu"
    preserves: ClassVar[Preserves] = Preserves.NOTHING

    def run(self, program: Program) -> bool:
        for node in program.graph.nodes:
            if node.op == "call_function" and "gone" not in node.name and is_op(node, "relu"):
                new = program.emit(node.target, node.args, before=node, like=node, name=f"gone_{node.name}")
                program.replace(node, new)
                return True
        return False


class BackwardRelus(MergeRelus):
    """Lets a node use one that comes after it."""

    name: ClassVar[str] = "backward-relus"

    def run(self, program: Program) -> bool:
        for node in program.graph.nodes:
            if is_op(node, "relu") and node.users:
                node.args = (next(iter(node.users)),)
                program.touch()
                return True
        return False


class LostOption(MergeRelus):
    """Has an option that its text loses."""

    name: ClassVar[str] = "lost-option"

    def __str__(self) -> str:
        return self.name


class Raising(MergeRelus):
    """Raises something of Python's."""

    name: ClassVar[str] = "raising"

    def run(self, program: Program) -> bool:
        raise IndexError("tuple index out of range")


class Nothing(MergeRelus):
    """Has nothing to do on any program."""

    name: ClassVar[str] = "nothing"
    needs: ClassVar[Stage] = Stage.CANONICAL

    def run(self, program: Program) -> bool:
        return False


# -- observations ------------------------------------------------------------------------------------------------


class Copied(MinMax):
    """The range, under another name. It is right."""

    statistics: ClassVar[str] = "copied"


class LastWins(MinMax):
    """Depends on the order, and says that it does not."""

    statistics: ClassVar[str] = "last-wins"

    def update(self, x: Tensor, *, where: str = "") -> None:
        if x.numel():
            self.low = self.high = None
        super().update(x, where=where)


class Forgetful(MinMax):
    """Leaves the upper end out of its state."""

    statistics: ClassVar[str] = "forgetful"

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        made = super().from_state(share, state)
        if made.high is not None:
            made.high = made.high + 1
        return made


class Unrounded(MinMax):
    """Looks at no field of the spec but the range."""

    statistics: ClassVar[str] = "unrounded"

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        found = super().qparams(spec.but(scale_bits=24), where=where)
        return QParams(found.scale, found.zero_point)


class Tiny(MinMax):
    """Scales below the smallest one."""

    statistics: ClassVar[str] = "tiny"

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        found = super().qparams(spec, where=where)
        return QParams(found.scale / 2**20, found.zero_point)


class Careless(MinMax):
    """Takes NaN and unknown options."""

    statistics: ClassVar[str] = "careless"

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, Option]) -> Self:
        return cls(share)

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        try:
            return super().qparams(spec, where=where)
        except DataError:
            return QParams(torch.tensor(1.0), torch.tensor(0))


class Mutating(MinMax):
    """Adds to the one it merges into."""

    statistics: ClassVar[str] = "mutating"

    def merge(self, other: Any) -> Any:
        self.seen += other.seen
        if other.low is not None and other.high is not None:
            self._widen(other.low, other.high, "")
        return self


@dataclass
class Lacking:
    """Lacks most of the members."""

    statistics: ClassVar[str] = "lacking"
    order: ClassVar[Order] = Order.FREE
    rows: list[Any] = field(default_factory=list)
