"""Decisions about a tensor at a site: quantized, tied to another, derived, fixed, or left float."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from quantc.errors import SpecError
from quantc.ir.sites import Site
from quantc.spec.formats import PerTensor
from quantc.spec.spec import FLOAT32_DIGITS, POWER_OF_TWO, QuantSpec, name_of

CONFIG = ConfigDict(extra="forbid")
Formula = Literal["scale-product"]
"""Formula of derived qparams: `scale-product` is that of the bias of a matmul or convolution, zero point 0."""


@dataclass(frozen=True, config=CONFIG)
class Quantize:
    """Quantized with qparams from its own statistics."""

    spec: QuantSpec
    kind: Literal["quantize"] = "quantize"

    def __str__(self) -> str:
        return f"quantize as {name_of(self.spec)}"


@dataclass(frozen=True, config=CONFIG)
class SameAs:
    """Quantized with the qparams of another site."""

    site: Site
    kind: Literal["same-as"] = "same-as"

    def __str__(self) -> str:
        return f"same as {self.site}"


@dataclass(frozen=True, config=CONFIG)
class Derived:
    """Quantized with qparams computed from those of other sites, as a bias from input and weight."""

    sites: tuple[Site, ...]
    formula: Formula = "scale-product"
    kind: Literal["derived"] = "derived"

    def __post_init__(self) -> None:
        if len(self.sites) < 2:
            raise SpecError(
                f"{self.formula} of {len(self.sites)} sites is not defined", advice="give the sites to derive from"
            )

    def __str__(self) -> str:
        return f"{self.formula} of {', '.join(str(site) for site in self.sites)}"


@dataclass(frozen=True, config=CONFIG)
class Fixed:
    """Quantized with qparams known beforehand, as the output of a sigmoid."""

    scale: float
    zero_point: int
    spec: QuantSpec
    kind: Literal["fixed"] = "fixed"

    def __post_init__(self) -> None:
        spec = self.spec
        if not 0 < self.scale < math.inf:
            raise SpecError(f"scale: it must be a positive finite number (given: {self.scale})", where=str(self))
        if not spec.qmin <= self.zero_point <= spec.qmax:
            allowed = f"{spec.qmin}..{spec.qmax}"
            raise SpecError(f"zero_point: it must lie in {allowed} (given: {self.zero_point})", where=str(self))
        is_short = (math.frexp(self.scale)[0] * 2**spec.scale_bits).is_integer()
        if not is_short and spec.scale_bits < FLOAT32_DIGITS:
            raise SpecError(
                f"scale: it has more significant bits than the spec gives it (scale_bits={spec.scale_bits})",
                where=str(self),
                advice="fix a power of two" if spec.scale_bits == POWER_OF_TWO else None,
            )
        if not isinstance(spec.granularity, PerTensor):
            raise SpecError(f"spec: fixed qparams are per-tensor, and this is {spec.granularity}", where=str(self))

    def __str__(self) -> str:
        return f"fixed at scale {self.scale!r}, zero point {self.zero_point}, {name_of(self.spec)}"


@dataclass(frozen=True, config=CONFIG)
class Float:
    """Left in floating point, with the reason."""

    reason: str = "asked for"
    kind: Literal["float"] = "float"

    def __str__(self) -> str:
        return f"float: {self.reason}"


FLOAT = Float()

TensorOutcome = Annotated[Quantize | SameAs | Derived | Fixed | Float, Field(discriminator="kind")]
"""The decision about a tensor."""

OUTCOMES: TypeAdapter[Quantize | SameAs | Derived | Fixed | Float] = TypeAdapter(TensorOutcome)
"""Reads and writes decisions as JSON: `OUTCOMES.dump_json(outcome)`, `OUTCOMES.validate_json(text)`."""

__all__ = ["FLOAT", "OUTCOMES", "Derived", "Fixed", "Float", "Formula", "Quantize", "SameAs", "TensorOutcome"]
