"""What a lowered module refuses beyond shapes and dtypes: it says so, where kernels would give numbers that mean nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantc.errors import InputError
from quantc.ir.signature import Signature


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
    """Refuse tensors that are not in the memory of the processor."""
    for item, leaf in zip(signature.inputs, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
            raise InputError(
                f"input {item.name!r} is on {leaf.device}, and the kernels run on the CPU",
                where=f"input {item.name!r}",
                advice="give x.cpu()",
            )
