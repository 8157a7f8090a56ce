"""Changes of constants, tensor by tensor: ties stay tied where every reader asks for the same, and are refused or undone
where not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    by_use: dict[tuple[fx.Node, fx.Node, str], list[Edit]] = field(default_factory=lambda: defaultdict(list))

    def add(self, use: Use, edit: Edit) -> None:
        self.by_use[use.user, use.constant, use.role].append(edit)

    def carry_out(self, tied: Tied) -> Journal:
        """Change the constants. CannotRotateError, before anything is changed, if a table that several ops read would
        have to become several."""
        plans = list(self._plans(tied))
        journal = Journal(self.program)
        for tensor, edits, users, is_whole in plans:
            value = tensor.detach().double()
            for edit in edits:
                value = edit.apply(value)
            journal.put(users, value.to(tensor.dtype), tensor, is_whole)
        return journal

    def _plans(self, tied: Tied) -> Iterator[tuple[Tensor, list[Edit], list[tuple[fx.Node, fx.Node]], bool]]:
        readers = _readers(self.program)
        tensors = {id(found): found for _, node, _ in self.by_use if (found := self.program.tensor(node)) is not None}
        for key, tensor in tensors.items():
            asked: dict[tuple[fx.Node, fx.Node], list[Edit]] = {}
            for (user, node, _), edits in self.by_use.items():
                if self.program.tensor(node) is tensor:
                    if (user, node) in asked and _keys(asked[user, node]) != _keys(edits):
                        raise CannotRotateError(f"{user.name} reads {node.target} twice, in different ways")
                    asked[user, node] = edits
            kinds: dict[tuple[Key, ...], list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
            for pair in readers[key]:
                kinds[_keys(asked.get(pair, []))].append(pair)
            if len(kinds) > 1 and tensor.dim() > 1 and tied == "keep":
                names = ", ".join(dict.fromkeys(user.name for user, _ in readers[key]))
                raise CannotRotateError(f"{readers[key][0][1].target} is tied: {names} read it, and would need different values; tied=untie allows it")
            for signature, pairs in kinds.items():
                if signature:
                    yield tensor, asked[next(pair for pair in pairs if pair in asked)], pairs, len(kinds) == 1


def _keys(edits: list[Edit]) -> tuple[Key, ...]:
    return tuple(edit.key for edit in edits)


def _readers(program: Program) -> dict[int, list[tuple[fx.Node, fx.Node]]]:
    """The readers of each tensor, by its id: (user, get_attr node). CannotRotateError is left to who asks for one that
    is written to: such a tensor has no reader here."""
    found: dict[int, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
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

    def put(self, users: list[tuple[fx.Node, fx.Node]], value: Tensor, old: Tensor, is_whole: bool) -> None:
        """Give readers another value of a constant: in its place if all get it, else as a constant of its own."""
        stored = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
        nodes = dict.fromkeys(node for _, node in users)
        if is_whole:
            for node in nodes:
                self._set(node, stored, old)
            return
        for node in nodes:
            new = self.program.constant(str(node.target), stored, before=node.next)
            for user in dict.fromkeys(user for user, each in users if each is node):
                user.replace_input_with(node, new)
                self._undo.append(lambda user=user, new=new, node=node: user.replace_input_with(new, node))

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
        bias = self.program.constant(f"{parent}.bias" if parent else "bias", zero, before=like.next)
        index = position(node.target, "b")  # type: ignore[arg-type]
        before = node.args
        node.args = (*before[:index], bias, *before[index + 1 :])
        self._undo.append(lambda: setattr(node, "args", before))
        return bias

    def undo(self) -> None:
        for step in reversed(self._undo):
            step()
        self._undo.clear()
        self.program.touch()
