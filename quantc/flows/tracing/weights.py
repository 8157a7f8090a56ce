"""The weights in quantized ops, and checks that they are unchanged.

Kernels hold packed weights, and fused ops folded ones, so later writes to a weight must be reported. Digests compare the
contents when a model is bound: at its first call, by `convert`, in a copy, after a state dict was loaded. After each call, a
check compares the identity, address and version counter of each tensor. Writes past the version counter (`.data`, NumPy, an
address) are noticed the next time a digest is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantc.errors import InputError
from quantc.ir.program import attribute


def digest(tensor: Tensor) -> str:
    """Dtype, shape and hash of a tensor's contents."""
    with torch._C.DisableTorchFunction():
        plain = tensor.detach()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        # a copy: torch marks tensors whose memory it has handed to NumPy
        held = (
            plain.cpu().contiguous().view(-1).view(torch.uint8)
            if plain.numel()
            else plain.new_zeros(0, dtype=torch.uint8)
        )
        found = hashlib.blake2b(held.clone().numpy().data, digest_size=16).hexdigest()
        return f"{plain.dtype} {list(plain.shape)} {found}"


def digests(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Digests of parameters and buffers of a model, by name."""
    return {name: digest(Weight(model, name).tensor) for name in sorted(names)}


class Weight:
    """A parameter or buffer that is part of a quantized op."""

    __slots__ = ("address", "held", "last", "name", "tensor", "version")

    def __init__(self, model: nn.Module, name: str, prefix: str = "") -> None:
        self.name = name
        owner, _, self.last = name.removeprefix(prefix).rpartition(".")
        module = attribute(model, owner) if owner else model
        places = (module._parameters, module._buffers) if isinstance(module, nn.Module) else ()
        found: Any = next((place for place in places if place.get(self.last) is not None), None)
        if found is None:
            raise self.changed()
        self.held: Any = found
        self.bind()

    def bind(self) -> None:
        """Take it as it is in the model now."""
        self.tensor: Tensor = self.held[self.last]
        with torch._C.DisableTorchFunction():
            self.version = None if self.tensor.is_inference() else self.tensor._version
            self.address = self.tensor.data_ptr() if self.tensor.layout is torch.strided else 0

    @property
    def is_in_place(self) -> bool:
        """True if the model holds the same tensor in the same memory, and its version counter has not moved."""
        tensor = self.tensor
        if self.held.get(self.last) is not tensor or (self.version is not None and tensor._version != self.version):
            return False
        return not self.address or tensor.data_ptr() == self.address

    def changed(self) -> InputError:
        """The error for one that is another now."""
        return InputError(
            f"{self.name} was written to or replaced, and the quantized op has it as it was",
            where=f"a model of the dynamic tracing flow, {self.name}",
            advice="change weights before prepare and convert; or load a state dict of a model that was prepared and "
            "converted alike, whole",
        )


class Weights:
    """The weights in a model's quantized ops. Raises InputError if one has changed."""

    def __init__(self, rows: Iterable[Weight], made_of: Mapping[str, str]) -> None:
        self.rows = [row for row in rows if row.name in made_of]
        self.made_of = made_of
        self.check_all()

    def check(self) -> None:
        """Ask whether they are in place. One that only lies elsewhere holds what it did."""
        for row in self.rows:
            if not row.is_in_place:
                if row.held.get(row.last) is row.tensor and row.version not in (None, row.tensor._version):
                    raise row.changed()
                self.check_all()
                return

    def check_all(self) -> None:
        """Compare all of them in full, as they are in the model now."""
        for row in self.rows:
            found = row.held.get(row.last)
            if found is None or digest(found) != self.made_of[row.name]:
                raise row.changed()
        for row in self.rows:
            row.bind()
