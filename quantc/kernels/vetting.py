"""What a lowered module refuses beyond shapes and dtypes: it says so, where kernels would give numbers that mean nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantc.errors import InputError
from quantc.program import Program
from quantc.qdq import is_quantize
from quantc.signature import Signature


def watched(program: Program) -> tuple[int, ...]:
    """Which of the flat inputs are looked at for NaN: the float ones, if the program has grids that were fixed before.

    Such grids have no level for NaN. Grids that are found as the program runs hand it on in the integer form, as float does;
    in Q/DQ form, which runtimes outside torch read, they are quantize ops too, and what those make of NaN is a number.
    """
    if not any(is_quantize(node) for node in program.nodes()):
        return ()
    kinds = [item.type for item in program.signature.inputs]
    return tuple(index for index, kind in enumerate(kinds) if kind is not None and kind.dtype.is_floating_point)


def has_nan(x: Tensor) -> bool:
    """Whether a tensor holds NaN."""
    # a sum is read faster than every number is looked at; it is NaN for infinities of both signs too
    total = float(x.sum())
    return total != total and bool(x.isnan().any())


def check_numbers(leaves: Sequence[Any], watched: tuple[int, ...], signature: Signature) -> None:
    """Refuse NaN."""
    for index in watched:
        if has_nan(leaves[index]):
            name = signature.inputs[index].name
            raise InputError(
                f"input {name!r} holds NaN, for which the grid it is put on has no level",
                where=f"input {name!r}",
                advice="replace NaN before the call; the float model yields NaN for such inputs",
            )


def check_gradients(leaves: Sequence[Any], signature: Signature) -> None:
    """Refuse inputs that want gradients, while these are recorded: kernels have none, and training would stand still."""
    for item, leaf in zip(signature.inputs, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"input {item.name!r} requires a gradient, and kernels have none",
                where=f"input {item.name!r}",
                advice="call it under torch.no_grad() or torch.inference_mode(), or give x.detach()",
            )


def check_device(leaves: Sequence[Any], signature: Signature) -> None:
    """Refuse tensors that are not in the memory of the processor, element by element."""
    for item, leaf in zip(signature.inputs, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
            raise InputError(
                f"input {item.name!r} is on {leaf.device}, and the kernels run on the CPU",
                where=f"input {item.name!r}",
                advice="give x.cpu()",
            )
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise InputError(
                f"input {item.name!r} has the layout {leaf.layout}, which kernels do not read",
                where=f"input {item.name!r}",
                advice="give x.to_dense()",
            )
