"""Storage forms of a program's tensors: plain, or a smaller form that restores them bit for bit.

    plain    as it is
    filled   one element, where all are the same: the zero points of symmetric weights, scales of a whole tensor
    packed   signed integers whose values fit fewer than 8 bits, several to a byte
    narrow   numbers that are all exact in a narrower type: int64 in int8, float32 in bfloat16

Contents are deduplicated. A tensor whose content is already stored under another name refers to it with `at`: the
plan's scales and those in the graph take space once. Each is still restored to memory of its own. Only stored tensors
can be referred to; there are no chains to follow.

A tensor may be larger in memory than on disk. So that no small file can fill the memory, all together may take eight
times what is stored, and 256 MiB besides; tensors beyond that are stored in a larger form.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal, NoReturn

import torch
from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer
from torch import Tensor

from quantc.errors import DataError, LoadError
from quantc.ir.types import TensorType, parse_type
from quantc.store.bit_packing import Width, pack, unpack
from quantc.store.file_versions import ADVICE, digest

UNFOLDING = 8
"""Bytes in memory for each byte that is stored."""
MAX_UNFOLDED = 1 << 28
"""And so many besides."""
MAX_DIMENSIONS = 64
LONGEST_TYPE = 2000
GLANCE = 256
"""Number of elements checked first: tensors that do not fit a form mostly show it there."""
INTEGERS: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.int8: (),
    torch.int16: (torch.int8, torch.uint8),
    torch.int32: (torch.int8, torch.uint8, torch.int16),
    torch.int64: (torch.int8, torch.uint8, torch.int16, torch.int32),
}
"""The signed integers, and the types that may be narrow enough for their values."""
FLOATS: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.bfloat16, torch.float16, torch.float32),
}
NARROWER = {**INTEGERS, **FLOATS}
BITS: dict[torch.dtype, torch.dtype] = {torch.float32: torch.int32, torch.float64: torch.int64}
WIDTHS: dict[int, Width] = {1: 2, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7}
"""Packing width of integers by the bits they need."""


class _Record(BaseModel, frozen=True, extra="forbid", strict=True):
    type: str
    """Dtype and shape in memory: `i8[64,3,7,7]`."""
    order: tuple[int, ...] | None = None
    """Its dimensions from the outermost in memory to the innermost, unless that is their own order."""

    @model_serializer(mode="wrap")
    def _without_none(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in whole(self).items() if value is not None}


class _Stored(_Record, frozen=True):
    at: str | None = None
    """The name of the stored tensor, unless that is its own."""


class Plain(_Stored, frozen=True):
    form: Literal["plain"] = "plain"


class Filled(_Record, frozen=True):
    form: Literal["filled"] = "filled"
    value: str
    """The bytes of one element, in hex."""


class Packed(_Stored, frozen=True):
    form: Literal["packed"] = "packed"
    bits: Width


class Narrow(_Stored, frozen=True):
    form: Literal["narrow"] = "narrow"


AnyRecord = Plain | Filled | Packed | Narrow
Record = Annotated[AnyRecord, Field(discriminator="form")]


class TensorWriter:
    """Collects tensors by name, each in its form."""

    def __init__(self) -> None:
        self.records: dict[str, AnyRecord] = {}
        self.stored: dict[str, Tensor] = {}
        self.digests: dict[str, str] = {}
        """Of the stored tensor."""
        self._names: dict[tuple[torch.dtype, torch.Size, str], str] = {}
        self._room = MAX_UNFOLDED
        self._memory: set[int] = set()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. It must be a plain, strided one that has storage."""
        plain = tensor.detach().resolve_conj().resolve_neg().cpu()
        facts: dict[str, Any] = {"type": str(TensorType(plain.dtype, tuple(plain.shape))), "order": order_of(plain)}
        form, stored = next(made for made in _forms(plain.contiguous()) if self._has_room(plain, made[1]))
        self._room -= plain.nbytes
        if stored is not None and (at := self._store(name, stored.contiguous())) != name:
            facts["at"] = at
        self.records[name] = form(**facts)

    def _has_room(self, plain: Tensor, stored: Tensor | None) -> bool:
        return plain.nbytes <= self._room + (0 if stored is None else UNFOLDING * stored.nbytes)

    def _store(self, name: str, stored: Tensor) -> str:
        """The name under which it is stored: that of the first whose content is the same."""
        seal = digest(stored)
        first = self._names.setdefault((stored.dtype, stored.shape, seal), name)
        if first != name and self._room >= 0:
            return first
        self._room += UNFOLDING * stored.nbytes
        self.stored[name], self.digests[name] = self._apart(stored), seal
        return name

    def _apart(self, stored: Tensor) -> Tensor:
        """The format refuses tensors that share memory, or are part of a larger one."""
        storage = stored.untyped_storage()
        if storage.data_ptr() in self._memory or storage.nbytes() != stored.nbytes or not stored.numel():
            stored = stored.clone(memory_format=torch.contiguous_format)
        self._memory.add(stored.untyped_storage().data_ptr())
        return stored


class TensorReader:
    """Restores the tensors. Each can be taken once, and all must be."""

    def __init__(self, records: Mapping[str, AnyRecord], stored: Mapping[str, Tensor]) -> None:
        self.records = dict(records)
        self.stored = dict(stored)
        self._room = MAX_UNFOLDED + UNFOLDING * sum(tensor.nbytes for tensor in stored.values())
        self._left = Counter(_place(record, name) for name, record in records.items() if not isinstance(record, Filled))
        """Number of tensors still to be built from each stored one."""

    def take(self, name: str) -> Tensor:
        record = self.records.pop(name, None)
        if record is None:
            raise LoadError(f"nothing is known of the tensor {name!r}", where="records", advice=ADVICE)
        where = f"records.{name}"
        kind = _type(record.type, where)
        self._room -= math.prod(int(size) for size in kind.shape) * kind.dtype.itemsize
        if self._room < 0:
            _refuse(f"type: {record.type[:60]} is too large for what the file stores", where)
        try:
            plain = self._plain(record, kind, name, where)
            return plain if record.order is None else laid_out(plain, record.order)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            _refuse(f"no tensor is {record.type[:60]}: {str(error).splitlines()[0] if str(error) else error!r}", where)

    def take_all(self, prefix: str) -> dict[str, Tensor]:
        """Tensors whose names start with `prefix`, without it."""
        return {name.removeprefix(prefix): self.take(name) for name in list(self.records) if name.startswith(prefix)}

    def finish(self) -> None:
        """LoadError unless every tensor has been taken."""
        for name in [*self.records, *self.stored]:
            raise LoadError(f"the tensor {name!r} belongs to nothing", where="records", advice=ADVICE)

    def _plain(self, record: AnyRecord, kind: TensorType, name: str, where: str) -> Tensor:
        shape = [int(size) for size in kind.shape]
        if isinstance(record, Filled):
            return _fill(record, kind.dtype, shape, where)
        stored = self._take_stored(record, name, where)
        if isinstance(record, Packed):
            if kind.dtype not in INTEGERS:
                _refuse(f"type: only signed integers are packed, not {record.type[:60]}", where)
            return _unpack(stored, record.bits, shape, where).to(kind.dtype)
        given = stored.dtype
        if kind.dtype == torch.complex128 and given == torch.float64 and isinstance(record, Plain):
            stored, given = torch.view_as_complex(stored), kind.dtype
        allowed = NARROWER.get(kind.dtype, ()) if isinstance(record, Narrow) else (kind.dtype,)
        if given not in allowed or list(stored.shape) != shape:
            _refuse(f"type: it is {record.type[:60]}, and {given} {list(stored.shape)} is stored", where)
        return stored.to(kind.dtype)

    def _take_stored(self, record: Plain | Packed | Narrow, name: str, where: str) -> Tensor:
        at = _place(record, name)
        stored = self.stored.get(at)
        if stored is None:
            _refuse("the tensor is missing" if at == name else f"at: no tensor {at[:60]!r} is stored", where)
        self._left[at] -= 1
        if not self._left[at]:
            return self.stored.pop(at)
        return stored.clone() if isinstance(record, Plain) else stored


def _place(record: Plain | Packed | Narrow, name: str) -> str:
    return name if record.at is None else record.at


def _refuse(what: str, where: str) -> NoReturn:
    raise LoadError(what, where=where, advice=ADVICE)


def _type(text: str, where: str) -> TensorType:
    try:
        kind = parse_type(text) if len(text) <= LONGEST_TYPE else None
    except (ValueError, RecursionError):
        kind = None
    if not isinstance(kind, TensorType) or kind.rank > MAX_DIMENSIONS:
        _refuse(f"type: {text[:60]!r} is not the type of a tensor", where)
    if not all(isinstance(size, int) and size >= 0 for size in kind.shape):
        _refuse(f"type: {text[:60]!r} has a size that is not a count", where)
    return kind


def _fill(record: Filled, dtype: torch.dtype, shape: list[int], where: str) -> Tensor:
    value = bytearray.fromhex(record.value)
    if not math.prod(shape):
        _refuse(f"type: {record.type[:60]} is too small to be filled", where)
    if len(value) != dtype.itemsize:
        _refuse(f"value: one element of {record.type[:60]} has {dtype.itemsize} bytes", where)
    one = torch.frombuffer(value, dtype=dtype).reshape([1] * len(shape))
    return one.expand(shape).clone(memory_format=torch.contiguous_format)


def _unpack(stored: Tensor, bits: Width, shape: list[int], where: str) -> Tensor:
    try:
        return unpack(stored, bits, torch.Size(shape))
    except DataError as error:
        _refuse(error.what, where)


# -- which form ------------------------------------------------------------------------------------------------

Made = tuple[Callable[..., AnyRecord], Tensor | None]
"""Constructor of the record, and the stored tensor."""


def _forms(whole: Tensor) -> Iterator[Made]:
    """The forms that a contiguous tensor has, the smallest first; plain is the last."""
    if (value := _single_value(whole)) is not None:
        yield partial(Filled, value=value), None
    if whole.dtype in INTEGERS and whole.numel() > 1:
        yield from _smaller_integers(whole)
    for dtype in FLOATS.get(whole.dtype, ()):
        if (narrow := _exact(whole, dtype)) is not None:
            yield Narrow, narrow
    yield Plain, torch.view_as_real(whole) if whole.dtype == torch.complex128 else whole


def _single_value(whole: Tensor) -> str | None:
    """The bytes that all elements consist of; None if they differ. Bits are compared: 0.0 is not -0.0."""
    if not whole.numel():
        return None
    elements = whole.reshape(-1).view(torch.uint8).reshape(whole.numel(), -1)
    first = elements[0]
    if not all(bool((part == first).all()) for part in (elements[:GLANCE], elements)):
        return None
    return first.numpy().tobytes().hex()


def _smaller_integers(whole: Tensor) -> Iterator[Made]:
    low, high = (int(end) for end in torch.aminmax(whole))
    width = WIDTHS.get(1 + max(high, ~low).bit_length())
    if width is not None:
        yield partial(Packed, bits=width), pack(whole, width)
    for dtype in INTEGERS[whole.dtype]:
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            yield Narrow, whole.to(dtype)


def _exact(whole: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The same floats in a narrower type; None if they are not exactly the same, bit for bit."""
    flat, bits = whole.reshape(-1), BITS[whole.dtype]
    for part in (flat[:GLANCE], flat) if flat.numel() else ():
        if not torch.equal(part.to(dtype).to(flat.dtype).view(bits), part.view(bits)):
            return None
    return whole.to(dtype) if flat.numel() else None


def order_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Dimensions from the outermost to the innermost; None if the tensor is contiguous or not dense."""
    usual = tuple(range(tensor.dim()))
    if tensor.stride() == _strides(tensor.shape, usual):
        return None
    sizes, strides = tuple(tensor.shape), tensor.stride()
    order = tuple(sorted(usual, key=lambda dim: (-strides[dim], -sizes[dim])))
    return order if tensor.stride() == _strides(tensor.shape, order) else None


def laid_out(plain: Tensor, order: tuple[int, ...]) -> Tensor:
    """A tensor with that memory order. ValueError if it is not an order of its dimensions."""
    if sorted(order) != list(range(plain.dim())):
        raise ValueError(f"{list(order)[:16]} is not an order of {plain.dim()} dimensions")
    made = torch.empty_strided(plain.shape, _strides(plain.shape, order), dtype=plain.dtype)
    return made.copy_(plain)


def _strides(shape: torch.Size, order: tuple[int, ...]) -> tuple[int, ...]:
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
