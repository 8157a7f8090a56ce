"""Input checks of lowered modules beyond shape and dtype: refuse inputs that kernels would silently compute garbage for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantc.errors import InputError
from quantc.ir.signature import Signature


def check_gradients(leaves: Sequence[Any], signature: Signature) -> None:
    """Refuse inputs that require gradients while autograd records: kernels have no backward, and training would not progress."""
    for item, leaf in zip(signature.inputs, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"input {item.name!r} requires a gradient, and kernels have none",
                where=f"input {item.name!r}",
                advice="call it under torch.no_grad() or torch.inference_mode(), or give x.detach()",
            )


def check_device(leaves: Sequence[Any], signature: Signature) -> None:
    """Refuse tensors that are not on the CPU."""
    for item, leaf in zip(signature.inputs, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
            raise InputError(
                f"input {item.name!r} is on {leaf.device}, and the kernels run on the CPU",
                where=f"input {item.name!r}",
                advice="give x.cpu()",
            )
