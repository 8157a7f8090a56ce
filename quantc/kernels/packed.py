"""A module that runs one op on a kernel. Its tensors are plain; what the kernel wants packed is made when it first runs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn


class Kernel(nn.Module, ABC):
    """One op on a real kernel.

    `pack` makes what the kernel reads out of the module's plain tensors; `run` calls the kernel. Packed weights are
    opaque to torch: they are in no state dict, and copies and pickles are made without them.
    """

    name: ClassVar[str]
    """What the kernel is called in reports: `fbgemm linear_dynamic`."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: Any = None
        self._packing = threading.Lock()

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

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.forget_packed()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_packed", "_packing")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._packed = None
        self._packing = threading.Lock()

    def extra_repr(self) -> str:
        return self.name
