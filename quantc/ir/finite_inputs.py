"""Input checks of quantized programs: NaN and infinity are refused, in every form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from quantc.errors import InputError
from quantc.ir.infinite_masks import is_mask, masks_rows
from quantc.ir.signature import Signature
from quantc.support.finite_tensors import EMPTY_ROW, why_not_finite


@dataclass(frozen=True, slots=True)
class Watched:
    """An input that is checked."""

    place: int
    """Index among the flat inputs."""
    name: str
    may_be_infinite: bool = False
    """True for a mask."""
    masks_rows: bool = False
    """True if its rows go into a softmax that gives NaN for a fully masked row."""


@dataclass(frozen=True, slots=True)
class Watch:
    """The inputs of a program that must be finite: all float inputs with users. Masks may hold infinities."""

    inputs: tuple[Watched, ...]

    @staticmethod
    def of(graph: fx.Graph, signature: Signature) -> Watch:
        found = []
        entries = graph.find_nodes(op="placeholder")
        for place, (item, entry) in enumerate(zip(signature.inputs, entries, strict=True)):
            kind = None if item.type is None else item.type.dtype
            if item.is_constant or not entry.users or (kind is not None and not _is_float(kind)):
                continue
            may_be_infinite = is_mask(entry)
            found.append(Watched(place, item.name, may_be_infinite, may_be_infinite and masks_rows(entry)))
        return Watch(tuple(found))

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(item.place for item in self.inputs)

    def check(self, leaves: Sequence[Any]) -> None:
        """Raise InputError, naming the input, if flat inputs hold NaN or infinity."""
        for item in self.inputs:
            leaf = leaves[item.place]
            if isinstance(leaf, Tensor) and (
                why := why_not_finite(leaf, may_be_infinite=item.may_be_infinite, masks_rows=item.masks_rows)
            ):
                raise not_finite(f"input {item.name!r}", why)


def _is_float(kind: torch.dtype) -> bool:
    return kind.is_floating_point or kind.is_complex


def not_finite(what: str, why: str) -> InputError:
    """The error for a non-finite input."""
    if why == EMPTY_ROW:
        return InputError(
            f"{what} holds {why}: softmax gives NaN for it",
            where=what,
            advice="leave a position of every row open, or compute with F.scaled_dot_product_attention: it gives zeros",
        )
    return InputError(
        f"{what} holds {why}, for which a grid has no level",
        where=what,
        advice=f"look for {why} before the call, with torch.isfinite; the float model hands it on",
    )


def check_has_numbers(name: str, root: nn.Module, leaves: Iterable[Any]) -> None:
    """Raise InputError if only one of inputs and program is on the meta device, where tensors have no data."""
    no_numbers = {leaf.is_meta for leaf in leaves if isinstance(leaf, torch.Tensor)}
    is_hollow = _is_hollow(root)
    if is_hollow and no_numbers != {True}:
        raise _hollow(name)
    if not is_hollow and True in no_numbers:
        raise InputError(
            "an input is on the meta device: it has a size and no numbers",
            where=name,
            advice="give tensors with numbers, as torch.zeros_like(x, device='cpu')",
        )


def refuse_hollow(name: str, root: nn.Module) -> None:
    """Raise InputError if a program has constants on the meta device."""
    if _is_hollow(root):
        raise _hollow(name)


def _is_hollow(root: nn.Module) -> bool:
    plain = (value for module in root.modules() for value in vars(module).values())
    return any(
        value.is_meta for value in (*root.parameters(), *root.buffers(), *plain) if isinstance(value, torch.Tensor)
    )


def _hollow(name: str) -> InputError:
    return InputError(
        f"{name} has no numbers: it was parsed without its constants, or made on the meta device",
        where=name,
        advice="give them: qc.parse(text, constants), with quantc.text.digests.constants(program)",
    )


def why_no_range(name: str, nodes: Iterable[fx.Node], error: RuntimeError) -> InputError | None:
    """The error for dynamic quantization of an empty tensor by torch's op; None if `error` has another cause."""
    if "aminmax" not in str(error) or not any(_finds_scales(node) for node in nodes):
        return None
    return InputError(
        "an empty tensor has no range, and this program finds scales as it runs",
        where=f"{name}, Q/DQ form",
        advice="leave empty batches out, or run the integer form, which gives what the float model does: "
        'qc.convert(prepared, to="integer")',
    )


def _finds_scales(node: fx.Node) -> bool:
    """True if a node chooses qparams at run time, by the name of its op."""
    return isinstance(node.target, OpOverload) and node.target._schema.name.partition("::")[2].startswith(
        "choose_qparams"
    )
