"""The weights that quantized ops were made of: what they held then, and whether they still do.

Kernels have weights packed, and fused ops have them folded. Whoever writes to a weight afterwards must be told, however it
was done: torch counts writes, but not those through `.data`, NumPy or an address. So each weight has a fingerprint from
the moment the program is made. It is compared in full when a model is first called, and after every call while statistics
are taken. A converted model asks torch's counts after each call. Memory has left the cache by then, so that looking at all
of it would take too long: it looks at where each weight lies and at one of its outermost values, which any write to the whole
of it changes; and at one piece of memory now and then, so that nothing stays unseen for ever.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from quantc.errors import InputError
from quantc.program import attribute

PIECE = 1 << 16
"""Bytes of memory that are looked at in one go."""
EVERY = 8
"""Calls from one look at a piece of memory to the next."""
WORD = 4
"""Bytes that are looked at of each weight after every call."""


def fingerprint(tensor: Tensor) -> str:
    """What a tensor holds, in few letters: two that differ have the same one time in four thousand million."""
    with torch._C.DisableTorchFunction():
        plain = tensor.detach()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        plain = plain.cpu().contiguous()
        return f"{plain.dtype} {list(plain.shape)} {zlib.crc32(_bytes_of(plain)):08x}"


def fingerprints(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Those of parameters and buffers of a model, by name."""
    return {name: fingerprint(Weight(model, name).tensor) for name in sorted(names)}


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor whose elements lie side by side. Whoever reads it holds the tensor, and asks first whether it
    still lies there. Not through NumPy: torch marks tensors that it has handed out so."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr() if size else 0)).cast("B")


class Weight:
    """A parameter or buffer that is part of a quantized op."""

    __slots__ = ("held", "last", "name", "tensor")

    def __init__(self, model: nn.Module, name: str, prefix: str = "") -> None:
        self.name = name
        owner, _, self.last = name.removeprefix(prefix).rpartition(".")
        module = attribute(model, owner) if owner else model
        places = (module._parameters, module._buffers) if isinstance(module, nn.Module) else ()
        found: Any = next((place for place in places if place.get(self.last) is not None), None)
        if found is None:
            raise self.changed()
        self.held: Any = found
        self.tensor: Tensor = found[self.last]

    def changed(self) -> InputError:
        """The error for one that is another now."""
        return InputError(
            f"{self.name} was written to or replaced, and the quantized op has it as it was",
            where=f"a model of the dynamic tracing flow, {self.name}",
            advice="change weights before prepare and convert; or load a state dict of a model that was prepared and "
            "converted alike, whole",
        )


class Weights:
    """The weights of a model, held to what its quantized ops were made of. InputError if one is another."""

    def __init__(self, rows: Iterable[Weight], made_of: Mapping[str, str]) -> None:
        self.rows = [row for row in rows if row.name in made_of]
        self.made_of = {row.name: made_of[row.name] for row in self.rows}
        self._turns = count(1)
        self.check_all()
        self._bind()

    def check_all(self) -> None:
        """Compare all of them in full."""
        for row in self.rows:
            if row.held.get(row.last) is not row.tensor or fingerprint(row.tensor) != self.made_of[row.name]:
                raise row.changed()

    def check(self) -> None:
        """Look at them, as far as there is time after every call."""
        if not self._are_in_place():
            self._settle()
        for row in self._scattered:
            if fingerprint(row.tensor) != self.made_of[row.name]:
                raise row.changed()
        if self._places:
            self._look(next(self._turns))

    def _are_in_place(self) -> bool:
        """Whether the model has the very same ones, and torch knows of nothing that was written to them."""
        try:
            for held, last, tensor, version in self._counted:
                if held[last] is not tensor or tensor._version != version:
                    return False
            return not self._uncounted or all(held[last] is tensor for held, last, tensor in self._uncounted)
        except KeyError:
            return False

    def _look(self, turn: int) -> None:
        """Look at their memory. Whether they lie where they lay is asked first: else it could not be read."""
        for tensor, address in self._places:
            if tensor.data_ptr() != address:
                return self._settle()
        words, values = self._words[turn % 2]
        if b"".join(words) != values:
            return self.check_all()
        if turn % EVERY == 0:
            tensor, address, piece, before, after = self._pieces[turn // EVERY % len(self._pieces)]
            if tensor.data_ptr() != address:
                return self._settle()
            if zlib.crc32(piece, before) != after:
                return self.check_all()
        return None

    def _settle(self) -> None:
        """One was replaced, written to, or moved in memory, which alone changes nothing."""
        for held, last, tensor, version in self._counted:
            if held.get(last) is tensor and tensor._version != version:
                raise next(row for row in self.rows if row.tensor is tensor).changed()
        self.check_all()
        self._bind()

    def _bind(self) -> None:
        """Write down where they lie, and what is to be found there."""
        with torch._C.DisableTorchFunction():
            counts = [(row, not row.tensor.is_inference()) for row in self.rows]
            self._counted = [
                (row.held, row.last, row.tensor, row.tensor._version) for row, has_one in counts if has_one
            ]
            self._uncounted = [(row.held, row.last, row.tensor) for row, has_one in counts if not has_one]
            lying = [(row, _as_it_lies(row.tensor.detach())) for row in self.rows]
            self._scattered = [row for row, flat in lying if flat is None]
            laid = [(row.tensor, flat) for row, flat in lying if flat is not None and flat.numel()]
            self._laid = laid  # so that memory is not given away while it is looked at
            self._places = [(tensor, tensor.data_ptr()) for tensor, _ in laid]
            both = ([_word(flat, flat.argmax()) for _, flat in laid], [_word(flat, flat.argmin()) for _, flat in laid])
            self._words = [(words, b"".join(words)) for words in both]  # the largest and the smallest value of each
            self._pieces = [
                (tensor, tensor.data_ptr(), *piece) for tensor, flat in laid for piece in _pieces_of(_bytes_of(flat))
            ]


def _as_it_lies(tensor: Tensor) -> Tensor | None:
    """The elements in the order in which they lie in memory; None if there are others between them."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    turned = tensor.permute(order)
    is_plain = turned.layout is torch.strided and turned.is_cpu and turned.is_floating_point()
    return turned.view(-1) if is_plain and turned.is_contiguous() else None


def _word(flat: Tensor, index: Tensor) -> memoryview:
    """The memory around one element."""
    memory = _bytes_of(flat)
    start = int(index) * flat.element_size() // WORD * WORD
    return memory[start : start + max(WORD, flat.element_size())]


def _pieces_of(memory: memoryview) -> list[tuple[memoryview, int, int]]:
    """Memory piece by piece, each with the checksum of all before it, and of all before it and itself."""
    rows: list[tuple[memoryview, int, int]] = []
    before = 0
    for start in range(0, len(memory), PIECE):
        piece = memory[start : start + PIECE]
        after = zlib.crc32(piece, before)
        rows.append((piece, before, after))
        before = after
    return rows


__all__ = ["Weight", "Weights", "fingerprint", "fingerprints"]
