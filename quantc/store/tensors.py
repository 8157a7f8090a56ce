"""How the tensors of a program are stored: as they are, or in a smaller form from which they come back bit for bit.

    plain    as it is
    filled   one element, where all are the same: the zero points of symmetric weights, scales of a whole tensor
    packed   int8 whose values fit 4 or 2 bits, several to a byte
    narrow   int64 whose values fit a narrower integer

A filled tensor is larger in memory than on disk. So that no small file can fill the memory, there is a limit for each and one
for all together; beyond it tensors are stored plainly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NoReturn

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from quantc.errors import DataError, LoadError
from quantc.packing import Width, pack, unpack
from quantc.store.container import ADVICE
from quantc.types import TensorType, parse_type

LARGEST_FILLED = 1 << 18
"""Elements of one filled tensor."""
MOST_FILLED = 1 << 28
"""Bytes of all filled tensors of a file together."""
MOST_DIMENSIONS = 64
LONGEST_TYPE = 2000
NARROW = (torch.int8, torch.int16, torch.int32)


class _Record(BaseModel, frozen=True, extra="forbid", strict=True):
    type: str
    """Dtype and shape in memory: `i8[64,3,7,7]`."""
    order: tuple[int, ...] | None = None
    """Its dimensions from the outermost in memory to the innermost, unless that is their own order."""


class Plain(_Record, frozen=True):
    form: Literal["plain"] = "plain"


class Filled(_Record, frozen=True):
    form: Literal["filled"] = "filled"
    value: str
    """The bytes of one element, in hex."""


class Packed(_Record, frozen=True):
    form: Literal["packed"] = "packed"
    bits: Width


class Narrow(_Record, frozen=True):
    form: Literal["narrow"] = "narrow"


Record = Annotated[Plain | Filled | Packed | Narrow, Field(discriminator="form")]


class TensorWriter:
    """Collects tensors under their names, each in its form."""

    def __init__(self) -> None:
        self.records: dict[str, Plain | Filled | Packed | Narrow] = {}
        self.stored: dict[str, Tensor] = {}
        self._room = MOST_FILLED
        self._memory: set[int] = set()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor in. It must be a plain, strided one that has storage."""
        plain = tensor.detach().resolve_conj().resolve_neg().cpu()
        kind = str(TensorType(plain.dtype, tuple(plain.shape)))
        order = _order(plain)
        record, stored = self._form(kind, order, plain.contiguous())
        self.records[name] = record
        if stored is not None:
            self.stored[name] = self._apart(stored.contiguous())

    def _form(
        self, kind: str, order: tuple[int, ...] | None, plain: Tensor
    ) -> tuple[Plain | Filled | Packed | Narrow, Tensor | None]:
        if plain.nbytes <= self._room and (value := _single_value(plain)) is not None:
            self._room -= plain.nbytes
            return Filled(type=kind, order=order, value=value), None
        if (bits := _bits(plain)) is not None:
            return Packed(type=kind, order=order, bits=bits), pack(plain, bits)
        if (dtype := _narrower(plain)) is not None:
            return Narrow(type=kind, order=order), plain.to(dtype)
        stored = torch.view_as_real(plain) if plain.dtype == torch.complex128 else plain
        return Plain(type=kind, order=order), stored

    def _apart(self, stored: Tensor) -> Tensor:
        """The format refuses tensors that share memory, or are part of a larger one."""
        storage = stored.untyped_storage()
        if storage.data_ptr() in self._memory or storage.nbytes() != stored.nbytes or not stored.numel():
            stored = stored.clone(memory_format=torch.contiguous_format)
        self._memory.add(stored.untyped_storage().data_ptr())
        return stored


class TensorReader:
    """Gives the tensors back. Each can be taken once, and all must be."""

    def __init__(self, records: Mapping[str, Plain | Filled | Packed | Narrow], stored: Mapping[str, Tensor]) -> None:
        self.records = dict(records)
        self.stored = dict(stored)
        self._room = MOST_FILLED

    def take(self, name: str) -> Tensor:
        record = self.records.pop(name, None)
        if record is None:
            raise LoadError(f"nothing is known of the tensor {name!r}", where="records", advice=ADVICE)
        where = f"records.{name}"
        kind = _type(record.type, where)
        try:
            plain = self._plain(record, kind, name, where)
            return plain if record.order is None else _laid_out(plain, record.order, where)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            _refuse(f"no tensor is {record.type[:60]}: {str(error).splitlines()[0] if str(error) else error!r}", where)

    def take_all(self, prefix: str) -> dict[str, Tensor]:
        """Those whose names begin so, without it."""
        return {name.removeprefix(prefix): self.take(name) for name in list(self.records) if name.startswith(prefix)}

    def finish(self) -> None:
        """Every tensor must have been taken."""
        for name in [*self.records, *self.stored]:
            raise LoadError(f"the tensor {name!r} belongs to nothing", where="records", advice=ADVICE)

    def _plain(self, record: Plain | Filled | Packed | Narrow, kind: TensorType, name: str, where: str) -> Tensor:
        shape = [int(size) for size in kind.shape]
        if isinstance(record, Filled):
            return self._filled(record, kind.dtype, shape, where)
        stored = self.stored.pop(name, None)
        if stored is None:
            _refuse("the tensor is missing", where)
        if isinstance(record, Packed):
            if kind.dtype != torch.int8:
                _refuse(f"type: only int8 is packed, not {record.type}", where)
            return _unpacked(stored, record.bits, shape, where)
        if isinstance(record, Narrow) and stored.dtype in NARROW and kind.dtype == torch.int64:
            stored = stored.to(torch.int64)
        if kind.dtype == torch.complex128 and stored.dtype == torch.float64:
            stored = torch.view_as_complex(stored)
        if stored.dtype != kind.dtype or list(stored.shape) != shape:
            _refuse(f"type: it is {record.type[:60]}, and {stored.dtype} {list(stored.shape)} is stored", where)
        return stored

    def _filled(self, record: Filled, dtype: torch.dtype, shape: list[int], where: str) -> Tensor:
        count, size = math.prod(shape), dtype.itemsize
        if not 0 < count <= LARGEST_FILLED or count * size > self._room:
            _refuse(f"type: {record.type[:60]} is too large, or too small, to be filled", where)
        value = bytes.fromhex(record.value)
        if len(value) != size:
            _refuse(f"value: one element of {record.type[:60]} has {size} bytes", where)
        self._room -= count * size
        return torch.frombuffer(bytearray(value * count), dtype=dtype).reshape(shape)


def _refuse(what: str, where: str) -> NoReturn:
    raise LoadError(what, where=where, advice=ADVICE)


def _type(text: str, where: str) -> TensorType:
    try:
        kind = parse_type(text) if len(text) <= LONGEST_TYPE else None
    except (ValueError, RecursionError):
        kind = None
    if not isinstance(kind, TensorType) or kind.rank > MOST_DIMENSIONS:
        _refuse(f"type: {text[:60]!r} is not the type of a tensor", where)
    if not all(isinstance(size, int) and size >= 0 for size in kind.shape):
        _refuse(f"type: {text[:60]!r} has a size that is not a count", where)
    return kind


def _unpacked(stored: Tensor, bits: Width, shape: list[int], where: str) -> Tensor:
    try:
        return unpack(stored, bits, torch.Size(shape))
    except DataError as error:
        _refuse(error.what, where)


# -- which form ------------------------------------------------------------------------------------------------


def _single_value(plain: Tensor) -> str | None:
    """The bytes that all elements consist of; None if they differ. Bits are compared: 0.0 is not -0.0."""
    if not 0 < plain.numel() <= LARGEST_FILLED:
        return None
    elements = plain.reshape(-1).view(torch.uint8).reshape(plain.numel(), -1)
    if not bool((elements == elements[0]).all()):
        return None
    return elements[0].numpy().tobytes().hex()


def _bits(plain: Tensor) -> Width | None:
    if plain.dtype != torch.int8 or plain.numel() < 2:
        return None
    low, high = (int(end) for end in torch.aminmax(plain))
    if low >= -2 and high <= 1:
        return 2
    return 4 if low >= -8 and high <= 7 else None


def _narrower(plain: Tensor) -> torch.dtype | None:
    if plain.dtype != torch.int64 or not plain.numel():
        return None
    low, high = (int(end) for end in torch.aminmax(plain))
    return next((dtype for dtype in NARROW if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max), None)


# -- the order in memory ---------------------------------------------------------------------------------------


def _order(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of a dense tensor's dimensions in memory, such as that of channels_last; None if it is the usual."""
    usual = tuple(range(tensor.dim()))
    if tensor.stride() == _strides(tensor.shape, usual):
        return None
    sizes, strides = tuple(tensor.shape), tensor.stride()
    order = tuple(sorted(usual, key=lambda dim: (-strides[dim], -sizes[dim])))
    return order if tensor.stride() == _strides(tensor.shape, order) else None


def _strides(shape: torch.Size, order: tuple[int, ...]) -> tuple[int, ...]:
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _laid_out(plain: Tensor, order: tuple[int, ...], where: str) -> Tensor:
    if sorted(order) != list(range(plain.dim())):
        _refuse(f"order: {list(order)[:16]} is not an order of {plain.dim()} dimensions", where)
    made = torch.empty_strided(plain.shape, _strides(plain.shape, order), dtype=plain.dtype)
    return made.copy_(plain)
