"""Reconstruction of the module tree of a parsed Program: constants, nested graphs and opaque modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx, nn

from quantc.errors import suggest
from quantc.ir.types import TensorType, type_of_value
from quantc.text.digests import REMEMBERED, digest, state_digest, state_name
from quantc.text.lexer import Reader
from quantc.text.node_printer import OpaqueModule

_SAFE_TARGET = re.compile(r"""[^"\\\x00-\x08\x0a-\x1f\x7f]+""")
"""Text within double quotes, which are what fx writes around names."""

_COMPILE_ERRORS = (
    RuntimeError,
    SyntaxError,
    NameError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
)
"""Exceptions that fx's code generator raises on malformed calls."""


@dataclass(frozen=True)
class TextPosition:
    """A location in the text, for messages."""

    reader: Reader
    at: int

    def fail(self, what: str, advice: str | None = None) -> NoReturn:
        self.reader.fail(what, at=self.at, advice=advice)


@dataclass(frozen=True)
class ConstantText:
    """A `const` or `state` line that describes a tensor."""

    path: str
    target: str
    type: TensorType
    kind: str
    digest: str | None
    tied: str | None
    place: TextPosition

    @property
    def name(self) -> str:
        return state_name(self.path, self.target)

    @property
    def facts(self) -> tuple[object, ...]:
        return (self.type, self.kind, self.digest, self.tied)


def check_target(target: str, place: TextPosition) -> str:
    """Raise ParseError unless a target is safe in generated code: nothing in it may end a string or an identifier."""
    parts = target.split(".")
    if not _SAFE_TARGET.fullmatch(target) or any(not part or part.startswith("__") for part in parts):
        place.fail(f"{target!r} cannot be the name of a parameter, buffer or module")
    return target


def holder_of(owner: nn.Module, target: str, place: TextPosition) -> tuple[nn.Module, str]:
    """The module that holds `target`, created from plain modules if missing, and the last part of the name."""
    *parents, leaf = target.split(".")
    module = owner
    for part in parents:
        child = module._modules.get(part)
        if child is None:
            if hasattr(module, part):
                place.fail(f"{target!r} lies inside {part!r}, which is not a module")
            child = nn.Module()
            module.add_module(part, child)
        module = child
    return module, leaf


def install(owner: nn.Module, target: str, value: object, place: TextPosition) -> None:
    """Set a module or a plain value at a free path."""
    holder, leaf = holder_of(owner, target, place)
    if hasattr(holder, leaf):
        place.fail(f"{target!r} is defined twice, or is a name that every module has")
    setattr(holder, leaf, value)


def opaque_module(
    target: str, kind: str | None, state: str | None, given: Mapping[str, nn.Module], place: TextPosition
) -> nn.Module:
    """The module supplied for `target`, or a placeholder that raises when it is run."""
    module = given.get(target)
    if module is None:
        return OpaqueModule(target, kind, state)
    actual = state_digest(module)
    if state is not None and actual is not None and actual != state:
        place.fail(
            f"the module given for {target!r} has parameters #{actual}, but the text says #{state}",
            "give the module this program was dumped with",
        )
    return module


class ConstantInstaller:
    """Creates and registers the tensors of a program; tied names share one tensor."""

    def __init__(self, rows: list[ConstantText], given: Mapping[str, torch.Tensor] | None) -> None:
        self.given = given
        self.rows: dict[str, ConstantText] = {}
        for row in rows:
            known = self.rows.setdefault(row.name, row)
            if known.facts != row.facts:
                row.place.fail(f"{row.name!r} is described in two ways; see line {known.place.reader.number}")
        self.tensors: dict[str, torch.Tensor] = {}

    def install(self, owners: Mapping[str, nn.Module]) -> None:
        for row in self.rows.values():
            owner = owners[row.path]
            tensor = self._tensor(self._first(row))
            self._register(owner, row, tensor)
            if row.digest is not None and digest(tensor) is None:
                owner.__dict__.setdefault(REMEMBERED, {})[row.target] = row.digest

    def _first(self, row: ConstantText) -> ConstantText:
        if row.tied is None:
            return row
        first = self.rows.get(row.tied)
        if first is None or first.tied is not None:
            row.place.fail(f"{row.name!r} is tied to {row.tied!r}, which is not a constant of its own")
        if first.type != row.type or first.digest != row.digest or first.kind[:5] != row.kind[:5]:
            row.place.fail(f"{row.name!r} is tied to {row.tied!r}, but the two are described differently")
        return first

    def _tensor(self, row: ConstantText) -> torch.Tensor:
        if row.name not in self.tensors:
            plain = without_numbers(row.type, row.place) if self.given is None else self._given(row, self.given)
            self.tensors[row.name] = _as_kind(row, plain)
        return self.tensors[row.name]

    def _given(self, row: ConstantText, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensor = given.get(row.name)
        if tensor is None:
            row.place.fail(f"no constant is given for {row.name!r}", suggest(row.name, given, noun="constants"))
        check_given(row.name, tensor, row.type, row.digest, row.place)
        return tensor

    def _register(self, owner: nn.Module, row: ConstantText, tensor: torch.Tensor) -> None:
        holder, leaf = holder_of(owner, row.target, row.place)
        present = getattr(holder, leaf, None)
        if isinstance(present, torch.Tensor) and type_of_value(present) == row.type:
            return  # part of a module the caller supplied
        if present is not None or hasattr(holder, leaf):
            row.place.fail(f"{row.target!r} is defined twice, or is a name that every module has")
        if row.kind.startswith("param"):
            holder.register_parameter(leaf, tensor)  # type: ignore[arg-type]
        elif row.kind == "tensor":
            setattr(holder, leaf, tensor)
        else:
            holder.register_buffer(leaf, tensor, persistent=row.kind == "buffer")


def check_given(name: str, tensor: Any, kind: TensorType, seal: str | None, place: TextPosition) -> None:
    """Raise ParseError unless a constant is what the text says: its type, and its digest."""
    if not isinstance(tensor, torch.Tensor) or type_of_value(tensor) != kind:
        place.fail(f"the constant given for {name!r} is {type_of_value(tensor)}, not {kind}")
    actual = digest(tensor)
    if seal is not None and actual is not None and actual != seal:
        place.fail(
            f"the constant given for {name!r} has digest #{actual}, but the text says #{seal}",
            "give the constants this program was dumped with, or leave them out",
        )


def without_numbers(kind: TensorType, place: TextPosition) -> torch.Tensor:
    """A tensor of a type, on the meta device."""
    sizes = [size for size in kind.shape if isinstance(size, int)]
    if len(sizes) != kind.rank:
        place.fail(f"{kind} has a size that is not a number")
    try:
        return torch.empty(sizes, dtype=kind.dtype, device="meta")
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        place.fail(f"no tensor is {kind}: {str(error).splitlines()[0]}")


def _as_kind(row: ConstantText, tensor: torch.Tensor) -> torch.Tensor:
    if not row.kind.startswith("param"):
        return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor
    trains = row.kind == "param"
    if isinstance(tensor, nn.Parameter) and tensor.requires_grad == trains:
        return tensor
    if trains and not (tensor.is_floating_point() or tensor.is_complex()):
        row.place.fail(f"{row.name!r} is {row.type}: only floating point parameters can be trained")
    return nn.Parameter(tensor.detach(), requires_grad=trains)


def empty_graph_module() -> fx.GraphModule:
    """A module for a nested graph that is still being parsed."""
    return fx.GraphModule(nn.Module(), fx.Graph())


def compile_nested(module: fx.GraphModule, graph: fx.Graph, place: TextPosition) -> None:
    """Assign a nested graph to its module and compile it."""
    try:
        module.graph = graph
    except _COMPILE_ERRORS as error:
        place.fail(f"torch cannot compile this graph: {str(error).splitlines()[0] if str(error) else error!r}")
