"""Write detection: snapshots of tensors, to find out whether they were written to since."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

C: Any = torch._C


def is_tracked(x: Tensor) -> bool:
    """True if torch's version counter covers all writes to a tensor. NumPy's writes bypass it, but torch marks shared memory."""
    return not x.is_inference() and (x.is_meta or x.layout is not torch.strided or x.untyped_storage().resizable())


def is_wrapped(x: Tensor) -> bool:
    """True for a functorch wrapper, as within torch.vmap: it has no memory of its own."""
    made: bool = C._functorch.is_functorch_wrapped_tensor(x)
    return made


def _dense(x: Tensor) -> Tensor:
    """Numbers that can be compared."""
    return x if x.layout is torch.strided else x.to_dense()


class Exact(Enum):
    """Comparison policy: values always, or only where torch has no version counter."""

    YES = "numbers are compared"
    NO = "torch's count is believed, where there is one"


class Stamp:
    """Snapshot of a tensor. Where torch does not count writes, a copy is kept."""

    __slots__ = ("copy", "exact", "tensor", "version")

    def __init__(self, tensor: Tensor, exact: Exact = Exact.NO) -> None:
        self.tensor, self.exact = tensor, exact
        self.version = -1
        self.copy: Tensor | None = None
        self.renew()

    def renew(self) -> None:
        """Take a new snapshot."""
        with torch._C.DisableTorchFunction():
            if is_wrapped(self.tensor):
                return
            is_counted = self.exact is Exact.NO and is_tracked(self.tensor)
            self.version = self.tensor._version if is_counted else -1
            self.copy = None if is_counted else self.tensor.detach().clone()

    def watch(self) -> None:
        """The tensor's memory was exposed: compare its values from now on."""
        if self.copy is None and self.holds and not is_wrapped(self.tensor):
            with torch._C.DisableTorchFunction():
                self.copy = self.tensor.detach().clone()

    @property
    def holds(self) -> bool:
        """True if the tensor was not written to."""
        with torch._C.DisableTorchFunction():
            if self.copy is not None:
                copy, now = _dense(self.copy), _dense(self.tensor)
                return copy.shape == now.shape and bool(
                    torch.equal(copy, now) or torch.allclose(copy, now, rtol=0, atol=0, equal_nan=True)
                )
            return is_wrapped(self.tensor) or self.version == self.tensor._version

    def shares_memory(self, other: Tensor) -> bool:
        """True if another tensor uses the same storage."""
        with torch._C.DisableTorchFunction():
            if any(x.layout is not torch.strided or is_wrapped(x) for x in (self.tensor, other)):
                return False
            return self.tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
