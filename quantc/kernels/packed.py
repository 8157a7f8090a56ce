"""A module that runs one op on a kernel. Its tensors are plain; what the kernel wants packed is made when it first runs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from quantc.errors import InputError


class Kernel(nn.Module, ABC):
    """One op on a real kernel.

    `pack` makes what the kernel reads out of the module's plain tensors; `run` calls the kernel. Packed weights are
    opaque to torch: they are in no state dict, and copies and pickles are made without them. `run` must not write to
    the module, since several threads may call it at once.
    """

    name: ClassVar[str]
    """What the kernel is called in reports: `fbgemm linear_dynamic`."""
    any_order: ClassVar[bool] = False
    """Whether it reads tensors as they lie in memory, whatever their strides."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: Any = None
        self._packing = threading.Lock()
        self.in_order = True
        """Whether results must lie in memory in order; False where all that read them take them as they come."""

    @abstractmethod
    def pack(self) -> Any:
        """What `run` is given first: packed weights, and numbers worked out once."""

    @abstractmethod
    def run(self, packed: Any, *inputs: Tensor) -> Any:
        """Call the kernel."""

    def forward(self, *inputs: Tensor) -> Any:
        packed = self._packed
        if packed is None:
            packed = self._pack_once()
        return self.run(packed, *inputs)

    def _pack_once(self) -> Any:
        with self._packing:  # several threads may come here at once
            if self._packed is None:
                self._packed = self.pack()
            return self._packed

    def forget_packed(self) -> None:
        """Pack again before the next call: the plain tensors have changed."""
        self._packed = None

    # -- what a kernel may do beyond its own op --------------------------------------------------------------------

    def absorb(self, op: str) -> bool:
        """Do an op of the dialect too, the only one that reads this one; False if the kernel cannot."""
        return False

    @property
    def joins(self) -> Hashable:
        """What is equal among kernels that can be one, if they read the same; None if it is best alone."""
        return None

    @classmethod
    def joined(cls, kernels: Sequence[Kernel]) -> Kernel:
        """One kernel for several that read the same, which yields the result of each."""
        raise NotImplementedError(f"{cls.__name__} says that it joins others, and does not")

    @property
    def pair_sums(self) -> tuple[Tensor, int] | None:
        """Weights by output channel and the highest level they are multiplied with, where the kernel may add two such
        products in 16 bits; None where it does not."""
        return None

    # -- torch's own ways ------------------------------------------------------------------------------------------

    def optional_buffer(self, name: str) -> Tensor | None:
        return self._buffers[name]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.forget_packed()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_packed", "_packing")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._packed = None
        self._packing = threading.Lock()

    def extra_repr(self) -> str:
        return self.name


def check_columns(x: Tensor, columns: int, kernel: str) -> None:
    """Refuse a tensor with another number of columns than the weight has: some kernels would read beyond its end."""
    if not x.dim() or x.shape[-1] != columns:
        raise InputError(
            f"{kernel} was given a tensor of shape {tuple(x.shape)}, and its weight has {columns} columns",
            where="the last axis of what it reads",
            advice="call the lowered module with inputs of the shapes it was captured for",
        )
