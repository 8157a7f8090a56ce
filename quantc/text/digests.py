"""Descriptions of a Program's constants without their data: kind, type, digest, and ties.

Digests are computed from the bytes on every call. Nothing is cached: a tensor may change in place between two dumps,
and a stale digest would be worse than a slow one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from quantc.ir.program import Program, attribute
from quantc.ir.types import TensorType, type_of_value
from quantc.text.literals import quote
from quantc.text.plan_section import plan_tensors

REMEMBERED = "_quantc_digests"
"""Attribute of the owner of a parsed graph: the digests of constants whose data was not supplied."""

_DIGEST = re.compile(r"[0-9a-f]{8}", re.ASCII)


def digest(tensor: torch.Tensor) -> str | None:
    """Eight hex digits over the elements in order, or None for a tensor without storage."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return None
    return _hash(tensor).hexdigest()


def is_digest(text: str) -> bool:
    """True if a text has the form of a digest."""
    return _DIGEST.fullmatch(text) is not None


def _hash(tensor: torch.Tensor) -> blake2b:
    plain = tensor.detach()
    if plain.is_quantized:
        plain = plain.int_repr()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    return blake2b(raw_bytes(plain.resolve_conj().resolve_neg()).data, digest_size=4)


def raw_bytes(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor's elements in order, as an array. A tensor of one element counts as contiguous whatever its
    stride, so the stride is set."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()


def state_digest(module: nn.Module) -> str | None:
    """One digest over all of a module's parameters and buffers; None if it has none, or one has no storage."""
    total = blake2b(digest_size=4)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        part = digest(tensor)
        if part is None:
            return None
        total.update(f"{name}:{type_of_value(tensor)}:{part};".encode())
    return total.hexdigest() if tensors else None


@dataclass(frozen=True, slots=True)
class Constant:
    """Description of one tensor that a graph refers to.

    `kind` is "param", "param frozen", "buffer", "buffer transient" (not in the state dict) or "tensor" (a plain
    attribute). `tied` is the name of the other constant that is the same tensor.
    """

    type: TensorType
    kind: str
    digest: str | None
    tied: str | None

    def __str__(self) -> str:
        text = f"{self.type} {self.kind}"
        if self.digest is not None:
            text += f" #{self.digest}"
        return text if self.tied is None else f"{text} tied={quote(self.tied)}"


def state_name(path: str, target: str) -> str:
    """The name of a graph's constant in the state dict of the whole program."""
    return f"{path.replace('/', '.')}.{target}" if path else target


def owner_of(program: Program, graph: fx.Graph) -> nn.Module:
    """Like `program.owner`, but an empty module for a graph without one, so that broken programs can be dumped."""
    if graph is program.graph:
        return program.root
    return graph.owning_module if graph.owning_module is not None else nn.Module()


def constants(program: Program) -> dict[str, torch.Tensor]:
    """Every tensor named in the text of a program, those of its plan too: the `constants` that `parse` needs to restore
    it."""
    return {**graph_constants(program), **plan_tensors(program)}


def graph_constants(program: Program) -> dict[str, torch.Tensor]:
    """Every tensor that a graph of a program refers to, by its name in the state dict."""
    return {state_name(path, target): tensor for path, _, target, tensor in _tensors(program)}


def counter_targets(program: Program, graph: fx.Graph) -> list[str]:
    """Buffers referred to by the table of batch counters alone, in order of use."""
    if not len(program.counters):
        return []
    owner = owner_of(program, graph)
    seen = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    rows = dict.fromkeys(program.counters.get(node) for node in graph.nodes)
    unread = [target for target in rows if target is not None and target not in seen]
    return [target for target in unread if isinstance(attribute(owner, target), torch.Tensor)]


def _tensors(program: Program) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for path, graph in program.graphs():
        owner = owner_of(program, graph)
        targets = [str(node.target) for node in graph.find_nodes(op="get_attr")]
        for target in [*targets, *counter_targets(program, graph)]:
            value = attribute(owner, target)
            if isinstance(value, torch.Tensor):
                yield path, owner, target, value


class Constants:
    """The constants of one program, described lazily."""

    def __init__(self, program: Program) -> None:
        names: dict[int, set[str]] = {}
        for path, _, target, tensor in _tensors(program):
            names.setdefault(id(tensor), set()).add(state_name(path, target))
        self._first = {key: min(group) for key, group in names.items() if len(group) > 1}

    def name(self, path: str, target: str, value: object) -> str:
        """The name in the state dict; of tied constants, the first in alphabetical order."""
        return self._first.get(id(value)) or state_name(path, target)

    def describe(self, owner: nn.Module, path: str, target: str, tensor: torch.Tensor) -> Constant:
        name, first = state_name(path, target), self.name(path, target, tensor)
        kind = type_of_value(tensor)
        return Constant(
            kind if isinstance(kind, TensorType) else TensorType(tensor.dtype, tuple(tensor.shape)),
            _kind(owner, target, tensor),
            digest(tensor) or _remembered(owner, target),
            None if first == name else first,
        )


def _kind(owner: nn.Module, target: str, tensor: torch.Tensor) -> str:
    if isinstance(tensor, nn.Parameter):
        return "param" if tensor.requires_grad else "param frozen"
    parent, _, leaf = target.rpartition(".")
    holder: Any = attribute(owner, parent) if parent else owner
    if not isinstance(holder, nn.Module) or leaf not in holder._buffers:
        return "tensor"
    return "buffer transient" if leaf in holder._non_persistent_buffers_set else "buffer"


def _remembered(owner: nn.Module, target: str) -> str | None:
    known: dict[str, str] = getattr(owner, REMEMBERED, {})
    return known.get(target)
