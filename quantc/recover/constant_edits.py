"""Changes of constants, tensor by tensor: ties stay tied where every reader asks for the same, and are refused or undone
where not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from quantc.ir.alias_analysis import Aliasing
from quantc.ir.dialect import position
from quantc.ir.graph_tree import attribute
from quantc.ir.program import Program
from quantc.recover.stream import CannotRotateError, Use

Tied = Literal["keep", "untie"]
Key = tuple[str, int, bytes]
Reader = tuple[fx.Node, fx.Node]
"""An op, and the constant that it reads."""


@dataclass(frozen=True, eq=False)
class Edit:
    """One change of a constant as a function of float64 tensors. Two of the same key do the same."""

    key: Key
    apply: Callable[[Tensor], Tensor]


def filled(value: float) -> Edit:
    return Edit((f"fill {value}", 0, b""), lambda tensor: torch.full_like(tensor, value))


def scaled(axis: int, factors: Tensor) -> Edit:
    """Each slice along an axis times a number."""

    def apply(tensor: Tensor) -> Tensor:
        shape = [1] * tensor.dim()
        shape[axis] = -1
        return tensor * factors.reshape(shape)

    return Edit(("scale", axis, _bytes(factors)), apply)


def added(values: Tensor) -> Edit:
    return Edit(("add", 0, _bytes(values)), lambda tensor: tensor + values.reshape(tensor.shape))


def rotated(axis: int, vectors: Tensor, matrix: Tensor) -> Edit:
    """The vectors at some positions along an axis, `[vectors, width]`, times a matrix."""

    def apply(tensor: Tensor) -> Tensor:
        turned = tensor.movedim(axis, -1).clone()
        turned[..., vectors] = turned[..., vectors] @ matrix
        return turned.movedim(-1, axis).contiguous()

    return Edit((f"rotate {id(matrix)}", axis, _bytes(vectors)), apply)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


@dataclass
class Edits:
    """Changes by use, in order."""

    program: Program
    by_reader: dict[Reader, list[Edit]] = field(default_factory=lambda: defaultdict(list))
    roles: dict[Reader, str] = field(default_factory=dict)

    def add(self, use: Use, edit: Edit) -> None:
        """Ask for one more edit. CannotRotateError if an op reads the constant twice."""
        reader = use.user, use.constant
        if self.roles.setdefault(reader, use.role) != use.role:
            raise CannotRotateError(f"{use.user.name} reads {use.constant.target} twice")
        self.by_reader[reader].append(edit)

    def carry_out(self, tied: Tied) -> Journal:
        """Change the constants. CannotRotateError, before anything is changed, if a table that several ops read would
        have to become several."""
        plans = list(self._plans(tied))
        journal = Journal(self.program)
        for tensor, edits, readers, in_place in plans:
            value = tensor.detach().double()
            for edit in edits:
                value = edit.apply(value)
            journal.put(readers, value.to(tensor.dtype), tensor, in_place)
        return journal

    def _plans(self, tied: Tied) -> Iterator[tuple[Tensor, list[Edit], list[Reader], bool]]:
        readers = _readers(self.program)
        tensors = {id(found): found for _, node in self.by_reader if (found := self.program.tensor(node)) is not None}
        for key, tensor in tensors.items():
            if not readers[key]:
                raise CannotRotateError("a constant of it is written to")
            kinds: dict[tuple[Key, ...], list[Reader]] = defaultdict(list)
            for reader in readers[key]:
                kinds[tuple(edit.key for edit in self.by_reader.get(reader, []))].append(reader)
            if len(kinds) > 1 and tensor.dim() > 1 and tied == "keep":
                names = ", ".join(dict.fromkeys(user.name for user, _ in readers[key]))
                raise CannotRotateError(
                    f"{readers[key][0][1].target} is tied: {names} read it, and would need different values; "
                    "tied=untie allows it"
                )
            unchanged = kinds.pop((), None)
            for index, each in enumerate(kinds.values(), start=1):
                yield tensor, self.by_reader[each[0]], each, index == len(kinds) and unchanged is None


def _readers(program: Program) -> dict[int, list[Reader]]:
    """The readers of each tensor, by its id. One that is written to has none."""
    found: dict[int, list[Reader]] = defaultdict(list)
    for _, graph in program.graphs():
        aliasing = Aliasing(graph, program.owner(graph))
        for node in graph.find_nodes(op="get_attr"):
            tensor = program.tensor(node)
            if tensor is not None and not aliasing.is_written(node):
                found[id(tensor)] += ((user, node) for user in node.users)
    return found


class Journal:
    """What was changed, so that it can be taken back."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._undo: list[Callable[[], None]] = []

    def put(self, readers: list[Reader], value: Tensor, old: Tensor, in_place: bool) -> None:
        """Give readers another value of a constant: in its place if nothing else reads that, or as one of its own."""
        stored = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
        nodes = dict.fromkeys(node for _, node in readers)
        if in_place:
            for node in nodes:
                self._set(node, stored, old)
            return
        for node in nodes:
            new = self._new(str(node.target), stored, node)
            for user in dict.fromkeys(user for user, each in readers if each is node):
                user.replace_input_with(node, new)
                self._undo.append(partial(user.replace_input_with, new, node))

    def _new(self, hint: str, value: Tensor, behind: fx.Node) -> fx.Node:
        node = self.program.constant(hint, value, before=behind.next)
        self._undo.append(lambda: self.program.erase(node))
        return node

    def _set(self, node: fx.Node, value: Tensor, old: Tensor) -> None:
        parent, _, leaf = str(node.target).rpartition(".")
        owner: Any = self.program.owner(node.graph)
        holder = attribute(owner, parent) if parent else owner
        if getattr(holder, leaf) is old:
            setattr(holder, leaf, value)
            self._undo.append(lambda: setattr(holder, leaf, old))

    def give_bias(self, node: fx.Node, size: int, like: fx.Node) -> fx.Node:
        """A bias of zeros for an op that has none."""
        weight = self.program.tensor(like)
        parent = str(like.target).rpartition(".")[0]
        zero = torch.zeros(size, dtype=weight.dtype if weight is not None else None)
        bias = self._new(f"{parent}.bias" if parent else "bias", zero, like)
        index = position(node.target, "b")
        before = node.args
        node.args = (*before[:index], bias, *before[index + 1 :])
        self._undo.append(lambda: setattr(node, "args", before))
        return bias

    def undo(self) -> None:
        for step in reversed(self._undo):
            step()
        self._undo.clear()
        self.program.touch()
