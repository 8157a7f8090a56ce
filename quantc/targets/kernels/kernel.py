"""A module that runs one op on a kernel. Its tensors are plain; what the kernel wants packed is made when it first runs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quantc.errors import InputError
from quantc.targets.kernels.packing import hush


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel has to do for one call: what its time depends on, and the name under which times are remembered."""

    kind: str
    """`conv2d 3x3 s1`, `conv2d depthwise 3x3 s2`, `linear`."""
    size: int
    """Pixels of the result, batch included, or rows."""
    channels: tuple[int, ...]
    """Those read, and those made."""
    rest: str = ""
    """Whatever else matters, as text: padding, dilation, groups."""

    def __str__(self) -> str:
        return f"{self.kind}, {self.size} × {'→'.join(map(str, self.channels))}{self.rest and f', {self.rest}'}"


class Form(Enum):
    """What bytes are handed from one kernel to the next as."""

    PLAIN = "plain"
    QUANTIZED = "quantized"
    """Of torch's quantized dtype, with scale 1 and the zero point of the grid."""


class Kernel(nn.Module, ABC):
    """One op on a real kernel.

    `pack` makes what the kernel reads out of the module's plain tensors; `run` calls the kernel. Packed weights are
    opaque to torch: they are in no state dict, and copies and pickles are made without them. `run` must not write to
    the module, since several threads may call it at once; nor may it read plain weights, which are dropped where the
    packed ones hold them too.
    """

    name: ClassVar[str]
    """What the kernel is called in reports: `fbgemm linear_dynamic`."""
    family: ClassVar[str] = "torch"
    """Whose kernel it is: "onednn", "fbgemm", "qnnpack", "float32" or "torch". Times are remembered by it."""
    computes_in_float: ClassVar[bool] = False
    """Whether it computes in float what bytes were meant for: taken only where the caller allows it."""
    any_order: ClassVar[bool] = False
    """Whether it reads tensors as they lie in memory, whatever their strides."""
    keeps_order: ClassVar[bool] = False
    """Whether its one result can lie in memory as what it reads does, where that need not be in order."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: Any = None
        self._packing = threading.Lock()
        self._dropped: tuple[str, ...] = ()
        """The buffers that only the packed weights hold."""
        self.made_of: tuple[Kernel, ...] = ()
        """The kernels that this one does the work of."""
        self.in_order = True
        """Whether results must lie in memory in order; False where all that read them take them as they come."""

    @abstractmethod
    def pack(self) -> Any:
        """What `run` is given first: packed weights, and numbers worked out once."""

    def pack_for(self, *inputs: Tensor) -> Any:
        """The same, where the kernel can make use of what it is called with first: most calls will be like it."""
        return self.pack()

    @abstractmethod
    def run(self, packed: Any, *inputs: Tensor) -> Any:
        """Call the kernel."""

    def forward(self, *inputs: Tensor) -> Any:
        packed = self._packed
        if packed is None:
            packed = self._pack_once(inputs)
        return self.run(packed, *inputs)

    def takes_quantized(self, rank: int) -> bool:
        """Whether what it reads may be one tensor of torch's quantized dtype with so many axes."""
        return False

    @property
    def gives_quantized(self) -> bool:
        """Whether it makes tensors of torch's quantized dtype before it makes bytes of them."""
        return False

    @property
    def makes_memory(self) -> bool:
        """Whether what it yields is one float tensor, in memory that nobody else has."""
        return False

    def bound(self, packed: Any, reads: Form, yields: Form) -> Callable[..., Any]:
        """`run` with what it is given first, for a caller that has looked into everything which is known beforehand."""
        return partial(self.run, packed)

    def _pack_once(self, inputs: tuple[Tensor, ...]) -> Any:
        with self._packing:  # several threads may come here at once
            if self._packed is None:
                hush()
                # what is made in inference mode could be used in no other
                with torch.inference_mode(False), torch.no_grad():
                    self._packed = self.pack_for(*inputs)
            return self._packed

    def forget_packed(self) -> None:
        """Pack again before the next call: the plain tensors have changed."""
        self.take_back()
        self._packed = None

    # -- plain weights, and packed ones that hold them too ---------------------------------------------------------

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        """The buffers that can be had back from what `pack` made, by name; none if that is not known."""
        return {}

    def drop(self, names: Sequence[str]) -> None:
        """Let go of buffers that `unpack` gives back."""
        self._dropped = tuple(names)
        for name in names:
            self._buffers[name] = None

    def take_back(self) -> None:
        """Hold all buffers again."""
        if self._dropped:
            self._buffers.update(self.plain_buffers())
            self._dropped = ()

    def plain_buffers(self) -> dict[str, Tensor]:
        """All buffers by name, those that were dropped too."""
        held = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        if not self._dropped:
            return held
        with torch.inference_mode(False), torch.no_grad():
            found = self.unpack(self._packed)
        return held | {name: found[name] for name in self._dropped}

    # -- what the choice among kernels is made by ------------------------------------------------------------------

    def work(self, *inputs: Tensor) -> Work | None:
        """What the kernel has to do on inputs of such shapes, which may be on the meta device; None if nobody asks."""
        return None

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

    def levels_read(self, *inputs: Tensor) -> Tensor | None:
        """The bytes that a kernel makes of floats before its own op; None if it reads what its op does."""
        return None

    @property
    def pair_sums(self) -> tuple[Tensor, int] | None:
        """Weights by output channel and the highest level they are multiplied with, where the kernel may add two such
        products in 16 bits; None where it does not."""
        return None

    # -- torch's own ways ------------------------------------------------------------------------------------------

    def optional_buffer(self, name: str) -> Tensor | None:
        return self._buffers[name]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        plain = self.plain_buffers() if self._dropped else {}
        destination.update({f"{prefix}{name}": plain[name] for name in self._dropped})

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.take_back()
        super()._load_from_state_dict(*args, **kwargs)
        self.forget_packed()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in UNSAVED}
        return {**state, "_buffers": {**self._buffers, **self.plain_buffers()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._packed = None
        self._packing = threading.Lock()
        self._dropped = ()

    def extra_repr(self) -> str:
        return self.name


UNSAVED = ("_packed", "_packing", "_dropped")
"""What copies and pickles of a kernel do without."""


def check_columns(x: Tensor, columns: int, kernel: str) -> None:
    """Refuse a tensor with another number of columns than the weight has: some kernels would read beyond its end."""
    if not x.dim() or x.shape[-1] != columns:
        raise InputError(
            f"{kernel} was given a tensor of shape {tuple(x.shape)}, and its weight has {columns} columns",
            where="the last axis of what it reads",
            advice="call the lowered module with inputs of the shapes it was captured for",
        )
