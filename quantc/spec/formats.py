"""The vocabulary of specs: number formats, schemes, granularities, roles and techniques."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, StrictInt

from quantc.support.validated import Frozen


class Role(StrEnum):
    """The purpose of a tensor to the op that reads it."""

    ACT = "act"
    WEIGHT = "weight"
    BIAS = "bias"


class Scheme(StrEnum):
    """The position of zero in the range: any zero point, or the middle."""

    AFFINE = "affine"
    SYMMETRIC = "symmetric"


class Timing(StrEnum):
    """The technique: when scales are found, and whether the op computes on integers."""

    STATIC = "static"
    """Before the program runs: from calibration data, or from the weights."""
    DYNAMIC = "dynamic"
    """Each time the program runs, from the tensor at hand."""
    WEIGHT_ONLY = "weight-only"
    """The weight is stored quantized and the op computes in float."""


class Offer(StrEnum):
    """Support of a rule for a technique (static or dynamic): never, only when named in the config, or by default."""

    NO = "no"
    NAMED = "named"
    """Only where a config names the op, node, edge or layer: it costs more than it gains."""
    YES = "yes"


class DType(StrEnum):
    """A number format. Integers narrower than a byte are stored one to an int8 until they are packed."""

    INT2 = "int2"
    INT3 = "int3"
    INT4 = "int4"
    INT5 = "int5"
    INT6 = "int6"
    INT7 = "int7"
    INT8 = "int8"
    UINT8 = "uint8"
    INT16 = "int16"
    INT32 = "int32"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def facts(self) -> Facts:
        return FACTS[self]

    @property
    def bits(self) -> int:
        return FACTS[self].bits

    @property
    def storage(self) -> torch.dtype:
        """The torch dtype it is stored in."""
        return FACTS[self].storage

    @property
    def qmin(self) -> int:
        return FACTS[self].qmin

    @property
    def qmax(self) -> int:
        return FACTS[self].qmax

    @property
    def is_float(self) -> bool:
        return self.storage.is_floating_point

    @property
    def is_signed(self) -> bool:
        return self.qmin < 0


@dataclass(frozen=True, slots=True)
class Facts:
    """Width, storage dtype and range of a number format."""

    bits: int
    storage: torch.dtype
    qmin: int
    qmax: int


def _integer(bits: int, storage: torch.dtype) -> Facts:
    return Facts(bits, storage, -(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def _float(bits: int, storage: torch.dtype) -> Facts:
    largest = int(torch.finfo(storage).max)
    return Facts(bits, storage, -largest, largest)


FACTS: dict[DType, Facts] = {
    **{DType(f"int{bits}"): _integer(bits, torch.int8) for bits in range(2, 9)},
    DType.UINT8: Facts(8, torch.uint8, 0, 255),
    DType.INT16: _integer(16, torch.int16),
    DType.INT32: _integer(32, torch.int32),
    DType.FP16: _float(16, torch.float16),
    DType.FP8_E4M3: _float(8, torch.float8_e4m3fn),
    DType.FP8_E5M2: _float(8, torch.float8_e5m2),
}


class _Share(Frozen, frozen=True):
    """A granularity."""

    noun: ClassVar[str] = "granularity"


class PerTensor(_Share, frozen=True):
    """One scale for the whole tensor."""

    kind: Literal["per-tensor"] = "per-tensor"

    def __str__(self) -> str:
        return self.kind


class PerChannel(_Share, frozen=True):
    """One scale for each index along an axis."""

    kind: Literal["per-channel"] = "per-channel"
    axis: StrictInt = 0

    def __str__(self) -> str:
        return f"{self.kind}(axis={self.axis})"


class PerGroup(_Share, frozen=True):
    """One scale for each run of `size` elements along an axis, separately for each index of the other axes."""

    kind: Literal["per-group"] = "per-group"
    axis: StrictInt = 1
    size: Annotated[StrictInt, Field(gt=1)] = 32

    def __str__(self) -> str:
        return f"{self.kind}(axis={self.axis},size={self.size})"


class PerToken(_Share, frozen=True):
    """One scale for each row along the last axis."""

    kind: Literal["per-token"] = "per-token"

    def __str__(self) -> str:
        return self.kind


def _from_name(value: Any) -> Any:
    """`"per-channel"` alone is the granularity with its defaults."""
    return {"kind": value} if isinstance(value, str) else value


Granularity = Annotated[
    PerTensor | PerChannel | PerGroup | PerToken, Field(discriminator="kind"), BeforeValidator(_from_name)
]
"""The set of elements that share a scale."""
