"""What stands for tensors that are not floats, or not yet: tensors without numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantc.errors import InputError

BODIES: dict[torch.Size, Tensor] = {}
MOST_BODIES = 256


def body_for(shape: torch.Size) -> Tensor:
    """A tensor of a shape, without numbers."""
    found = BODIES.get(shape)
    if found is None:
        if len(BODIES) >= MOST_BODIES:
            BODIES.clear()
        with torch.inference_mode(False):
            found = BODIES[shape] = torch.empty(shape, device="meta")
    return found


def with_numbers(output: Any, args: tuple[Any, ...]) -> Any:
    """What a function has computed; refused if that is of what stands for a tensor, taken by code that asks nobody."""
    if isinstance(output, Tensor) and output.is_meta and args and isinstance(args[0], Tensor) and args[0].is_meta:
        raise without_numbers("was read or written to")
    return output


def without_numbers(what: str) -> InputError:
    """The error for code that has taken what stands for a tensor for the tensor itself."""
    return InputError(
        f"a tensor {what} by code that goes past torch's functions, as torch.vmap and extensions in C++ do",
        where="a model of the dynamic tracing flow",
        advice="give that code a tensor of its own: x.clone()",
    )


def without_gradients() -> InputError:
    """The error for a tensor that asks for gradients: a kernel gives none, and what others give would lack its part."""
    return InputError(
        "a quantized op reads a tensor that asks for gradients, and kernels have none",
        where="a converted model, called where gradients are enabled",
        advice="call it under torch.no_grad(); or leave float, with a config, the layers that the model itself differentiates",
    )
