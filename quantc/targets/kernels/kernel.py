"""Base class of kernels: a module that runs one op. Its buffers are plain tensors; packed weights are made at the first call."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.errors import InputError
from quantc.ir.placements import PlacedModule
from quantc.targets.kernels.packing import hush


@dataclass(frozen=True, slots=True)
class Work:
    """Workload of one call: the parameters its time depends on; `str` is the key of remembered times."""

    kind: str
    """`conv2d 3x3 s1`, `conv2d depthwise 3x3 s2`, `linear`."""
    size: int
    """Pixels of the result, batch included, or rows."""
    channels: tuple[int, ...]
    """Those read, and those made."""
    rest: str = ""
    """Other attributes that matter, as text: padding, dilation, groups."""

    def __str__(self) -> str:
        return f"{self.kind}, {self.size} × {'→'.join(map(str, self.channels))}{self.rest and f', {self.rest}'}"


class KernelForm(Enum):
    """Form in which 8-bit tensors pass between kernels: plain, or torch's quantized dtype."""

    PLAIN = "plain"
    QUANTIZED = "quantized"
    """Of torch's quantized dtype, with scale 1 and the zero point of the grid."""


class Kernel(PlacedModule, ABC):
    """One op on a CPU kernel.

    `pack` makes the kernel's packed weights from the module's plain buffers; `run` calls the kernel. Packed weights are
    opaque to torch: they are in no state dict, and copies and pickles are made without them. `run` must not write to
    the module, since several threads may call it at once; nor may it read plain weights, which are dropped once the
    packed ones hold them too.
    """

    name: ClassVar[str]
    """The name in reports: `fbgemm linear_dynamic`."""
    family: ClassVar[str] = "torch"
    """The library of the kernel: "onednn", "fbgemm", "qnnpack", "float32", "torch", or "native", quantc's own; the key of remembered times."""
    computes_in_float: ClassVar[bool] = False
    """True if it computes quantized products in float: taken only where the caller allows it."""
    any_order: ClassVar[bool] = False
    """True if it reads tensors of any strides."""
    keeps_order: ClassVar[bool] = False
    """True if its one result can have the strides of its input, contiguous or not."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: Any = None
        self._packing = threading.Lock()
        self._dropped: tuple[str, ...] = ()
        """The buffers that only the packed weights hold."""
        self.made_of: tuple[Kernel, ...] = ()
        """The kernels that this one does the work of."""
        self.in_order = True
        """True if results must be contiguous; False where all consumers accept any strides."""

    @abstractmethod
    def pack(self) -> Any:
        """First argument of `run`: packed weights and precomputed values."""

    def pack_for(self, *inputs: Tensor) -> Any:
        """Like `pack`, for kernels that specialize on the inputs of the first call: most calls will be like it."""
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
        """True if the input may be a single tensor of torch's quantized dtype with this rank."""
        return False

    @property
    def gives_quantized(self) -> bool:
        """True if the kernel makes a tensor of torch's quantized dtype before it converts it to a plain one."""
        return False

    @property
    def makes_memory(self) -> bool:
        """True if the result is one float tensor in freshly allocated memory."""
        return False

    def bound(self, packed: Any, reads: KernelForm, yields: KernelForm) -> Callable[..., Any]:
        """`run` bound to packed weights, for a caller that has checked everything known statically."""
        return partial(self.run, packed)

    def _pack_once(self, inputs: tuple[Tensor, ...]) -> Any:
        with self._packing:  # several threads may come here at once
            if self._packed is None:
                hush()
                # tensors made in inference mode cannot be used outside it
                with torch.inference_mode(False), torch.no_grad():
                    self._packed = self.pack_for(*inputs)
            return self._packed

    def forget_packed(self) -> None:
        """Invalidate the packed weights: the plain tensors have changed, and the next call packs again."""
        self.take_back()
        self._packed = None

    # -- plain weights, and packed ones that hold them too ---------------------------------------------------------

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        """Buffers recoverable from packed weights, by name; empty if the kernel cannot unpack."""
        return {}

    def drop(self, names: Sequence[str]) -> None:
        """Release buffers that `unpack` can restore."""
        self._dropped = tuple(names)
        for name in names:
            self._buffers[name] = None

    def take_back(self) -> None:
        """Restore all dropped buffers."""
        if self._dropped:
            self._buffers.update(self.plain_buffers())
            self._dropped = ()

    def plain_buffers(self) -> dict[str, Tensor]:
        """All buffers by name, dropped ones included."""
        held = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        if not self._dropped:
            return held
        with torch.inference_mode(False), torch.no_grad():
            found = self.unpack(self._packed)
        return held | {name: found[name] for name in self._dropped}

    # -- what the choice among kernels is made by ------------------------------------------------------------------

    def work(self, *inputs: Tensor) -> Work | None:
        """Workload for inputs of these shapes, which may be meta tensors; None if the kernel states none."""
        return None

    # -- what a kernel may do beyond its own op --------------------------------------------------------------------

    def absorb(self, op: str) -> bool:
        """Fuse an op of the dialect that is the only user of this one; False if the kernel cannot."""
        return False

    @property
    def joins(self) -> Hashable:
        """Key that is equal among kernels that can be merged if they share inputs; None if this one cannot."""
        return None

    @classmethod
    def joined(cls, kernels: Sequence[Kernel]) -> Kernel:
        """One kernel for several with the same inputs, which yields the result of each."""
        raise NotImplementedError(f"{cls.__name__} says that it joins others, and does not")

    def levels_read(self, *inputs: Tensor) -> Tensor | None:
        """Levels that a kernel quantizes its float input to; None if it reads the same inputs as its op."""
        return None

    @property
    def pair_sums(self) -> tuple[Tensor, int] | None:
        """Weight by output channel and the highest input level, if the kernel may add two products in 16 bits; None if not."""
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

    @property
    def description(self) -> str:
        """The kernel with the layers it merged, and its output memory where that is not the usual one."""
        joined = f" for {len(self.made_of)} layers" if self.made_of else ""
        order = "" if self.in_order else "; in any order"
        over = "" if self.written_over is None else f"; over operand {self.written_over}"
        return f"{self.extra_repr()}{joined}{order}{over}"


UNSAVED = ("_packed", "_packing", "_dropped")
"""Attributes that copies and pickles of a kernel leave out."""


def check_columns(x: Tensor, columns: int, kernel: str) -> None:
    """Refuse a tensor whose last axis does not match the weight: some kernels would read out of bounds."""
    if not x.dim() or x.shape[-1] != columns:
        raise InputError(
            f"{kernel} was given a tensor of shape {tuple(x.shape)}, and its weight has {columns} columns",
            where="the last axis of what it reads",
            advice="call the lowered module with inputs of the shapes it was captured for",
        )
