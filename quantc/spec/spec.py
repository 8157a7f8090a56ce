"""`QuantSpec`: how a tensor is quantized, as a value, and the named specs.

A spec holds no constructor and no node: it can be compared, hashed, printed and saved. `str(spec)` is text in the
grammar of pipelines and `QuantSpec.parse` reads it back. Decisions, which assign specs to sites, are in
`quantc.ir.decisions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    BeforeValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    field_serializer,
    field_validator,
)

from quantc.errors import SpecError, suggest
from quantc.spec.formats import DType, Granularity, PerChannel, PerGroup, PerTensor, PerToken, Role, Scheme, Timing
from quantc.support.option_text import Value, read, spell
from quantc.support.validated import Frozen

Option = StrictBool | StrictInt | StrictFloat | StrictStr

ACT_EPS = 2.0**-12
FLOAT32_EPS = 2.0**-23
"""The smallest scale of a weight: 2^-12 costs up to 9.5 dB on wide layers."""

SMALLEST_SCALE = 2.0**-126
FLOAT32_DIGITS = 24
POWER_OF_TWO = 1
"""Significant bits of a power of two."""

OBSERVE_CHECKS: list[Callable[[str, Mapping[str, Option]], str | None]] = []
"""Checks that give the reason why a spec cannot name an observation with these options, or None. The registry of
observations adds its own."""


class Observe(Frozen, frozen=True):
    """The observation that finds the range, by name, with its options: `minmax`, `percentile{percentile=99.9}`."""

    noun: ClassVar[str] = "choice of observation"

    name: StrictStr = "minmax"
    options: tuple[tuple[str, Option], ...] = ()
    """Sorted pairs, so that choices can be hashed; a mapping is accepted."""

    @field_validator("options", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        return tuple(sorted(value.items())) if isinstance(value, Mapping) else value

    @field_serializer("options")
    def _mapping(self, value: tuple[tuple[str, Option], ...]) -> dict[str, Option]:
        return dict(value)

    def why_not(self) -> str | None:
        if self in (DEFAULT_OBSERVE, FIT):
            return None  # used by the named specs, which are built before the registry
        for check in OBSERVE_CHECKS:
            if (why := check(self.name, dict(self.options))) is not None:
                return why
        return None

    @staticmethod
    def parse(text: str) -> Observe:
        name, options = _one_call(text, "choice of observation")
        return Observe.model_validate({"name": name, "options": options})

    def __str__(self) -> str:
        return f"{self.name}{spell(dict(self.options))}" if self.options else self.name


DEFAULT_OBSERVE = Observe.model_construct()
FIT = Observe.model_construct(name="fit")
"""Scales of least squared error, for weights."""
FITTED_BITS = 8


def _observe(value: Any) -> Any:
    return Observe.parse(value) if isinstance(value, str) else value


class QuantSpec(Frozen, frozen=True):
    """The quantization of one tensor. Fields that are left out follow from the others."""

    noun: ClassVar[str] = "spec"

    dtype: DType
    scheme: Scheme = Field(default_factory=lambda known: _derived(known)["scheme"])
    """Affine, and symmetric for float formats, unless given."""
    granularity: Granularity = PerTensor()
    role: Role = Role.ACT
    """The kind of tensor it is meant for; decides the default `eps`, and where a config applies it."""
    timing: Timing = Timing.STATIC
    qmin: StrictInt = Field(default_factory=lambda known: _derived(known)["qmin"])
    """The smallest quantized value; the dtype's own unless given."""
    qmax: StrictInt = Field(default_factory=lambda known: _derived(known)["qmax"])
    """The largest quantized value; the dtype's own unless given."""
    eps: float = Field(default_factory=lambda known: _derived(known)["eps"])
    """The smallest scale: 2^-12, and float32's epsilon for weights."""
    scale_bits: Annotated[StrictInt, Field(ge=1, le=FLOAT32_DIGITS)] = FLOAT32_DIGITS
    """Significant bits of a scale: 24 is float32, 8 is bfloat16. Files keep 8 bits and fewer in two bytes. 1 is a power of
    two, the next that keeps the range; other scales are rounded to the nearest."""
    observe: Annotated[Observe, BeforeValidator(_observe)] = DEFAULT_OBSERVE

    @field_validator("eps")
    @classmethod
    def _eps_is_a_scale(cls, value: float) -> float:
        if not SMALLEST_SCALE <= value < math.inf:
            raise ValueError("it must be a positive finite number of at least 2^-126, so that it can be divided by")
        return value

    def why_not(self) -> str | None:
        return _why_not_range(self) or _why_not_float(self) or _why_not_use(self) or _why_not_fit(self)

    def but(self, **changes: Any) -> QuantSpec:
        """The same spec with some fields changed, validated again. Zero is a value like any other; None means the
        default. Bounds and eps that were the old defaults become the new ones."""
        unknown = sorted(set(changes) - set(type(self).model_fields))
        if unknown:
            advice = suggest(unknown[0], type(self).model_fields, noun="fields")
            raise SpecError(f"a spec has no field {unknown[0]!r}", advice=advice)
        old = _derived({"dtype": self.dtype, "role": self.role})
        kept = {name: getattr(self, name) for name in type(self).model_fields}
        kept = {name: value for name, value in kept.items() if old.get(name) != value}
        return QuantSpec.model_validate(
            {name: value for name, value in {**kept, **changes}.items() if value is not None}
        )

    @property
    def levels(self) -> int:
        """The number of quantized values."""
        return self.qmax - self.qmin + 1

    @staticmethod
    def parse(text: str) -> QuantSpec:
        """The inverse of `str(spec)`; also accepts the name of a named spec: `int8{scheme=symmetric}`,
        `INT8_WEIGHT`."""
        if text in NAMED:
            return NAMED[text]
        dtype, options = _one_call(text, "spec")
        if dtype.isupper():
            raise SpecError(f"unknown spec {dtype}", advice=suggest(dtype, NAMED, noun="named specs"))
        return QuantSpec.model_validate({"dtype": dtype, **options})

    def __str__(self) -> str:
        plain = {
            "role": Role.ACT,
            "granularity": PerTensor(),
            "timing": Timing.STATIC,
            "scale_bits": FLOAT32_DIGITS,
            "observe": DEFAULT_OBSERVE,
            **_derived({"dtype": self.dtype, "role": self.role}),
        }
        given = {name: _short(getattr(self, name)) for name, value in plain.items() if getattr(self, name) != value}
        return f"{self.dtype.value}{spell(given)}" if given else self.dtype.value


def _derived(known: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that follow from dtype and role. If those are invalid, they are reported and not the defaults."""
    dtype, role = known.get("dtype", DType.INT8), known.get("role", Role.ACT)
    return {
        "scheme": Scheme.SYMMETRIC if dtype.is_float else Scheme.AFFINE,
        "qmin": dtype.qmin,
        "qmax": dtype.qmax,
        "eps": ACT_EPS if role is Role.ACT else FLOAT32_EPS,
    }


def _short(value: Any) -> Value:
    """A field's value in text; a granularity with its defaults is its kind alone."""
    if isinstance(value, PerTensor | PerChannel | PerGroup | PerToken):
        return value.kind if value == type(value)() else value.model_dump()
    return value if isinstance(value, int | float) else str(value)


def _one_call(text: str, noun: str) -> tuple[str, dict[str, Value]]:
    calls = read(text)
    if len(calls) != 1:
        raise SpecError(f"{text!r} is not a {noun}", advice="write one name, with its options in braces")
    return calls[0].name, {option.name: option.value for option in calls[0].options}


def _why_not_range(spec: QuantSpec) -> str | None:
    low, high, dtype = spec.qmin, spec.qmax, spec.dtype
    if not dtype.qmin <= low < high <= dtype.qmax:
        return (
            f"qmin and qmax must lie in {dtype.qmin}..{dtype.qmax}, the range of {dtype.value}, "
            f"with qmin below qmax (given: {low}..{high})"
        )
    if not low <= 0 <= high:
        return f"qmin..qmax must contain 0, so that zero is exact (given: {low}..{high})"
    if spec.scheme is Scheme.SYMMETRIC and dtype.is_signed and low + high not in (-1, 0):
        return f"a symmetric signed range must be balanced: qmin = -qmax or -qmax - 1 (given: {low}..{high})"
    return None


def _why_not_float(spec: QuantSpec) -> str | None:
    dtype = spec.dtype
    if not dtype.is_float:
        return None
    if spec.scheme is not Scheme.SYMMETRIC:
        return f"scheme: {dtype.value} has no zero point, so the scheme must be symmetric"
    if (spec.qmin, spec.qmax) != (dtype.qmin, dtype.qmax):
        return f"qmin, qmax: {dtype.value} keeps its own range {dtype.qmin}..{dtype.qmax}"
    if dtype is DType.FP16 and not isinstance(spec.granularity, PerTensor):
        return "granularity: fp16 has no scale, so it must be per-tensor"
    return None


def _why_not_use(spec: QuantSpec) -> str | None:
    if spec.timing is Timing.DYNAMIC and spec.role is not Role.ACT:
        return f"timing: only activations can be dynamic, and the role is {spec.role.value}"
    if spec.timing is Timing.WEIGHT_ONLY and spec.role is not Role.WEIGHT:
        return f"timing: weight-only is for weights, and the role is {spec.role.value}"
    if isinstance(spec.granularity, PerToken) and spec.role is not Role.ACT:
        return f"granularity: per-token is for activations, and the role is {spec.role.value}"
    return None


def _why_not_fit(spec: QuantSpec) -> str | None:
    if spec.observe.name != FIT.name:
        return None
    if spec.role is not Role.WEIGHT:
        return f"observe: fit looks at every number, so it is for weights, and the role is {spec.role.value}"
    if spec.dtype.is_float or spec.dtype.bits > FITTED_BITS:
        return f"observe: fit is for integers of at most {FITTED_BITS} bits, and the dtype is {spec.dtype.value}"
    return None


INT8 = QuantSpec(dtype=DType.INT8)
UINT8 = QuantSpec(dtype=DType.UINT8)
INT8_WEIGHT = QuantSpec(dtype=DType.INT8, scheme=Scheme.SYMMETRIC, granularity=PerChannel(axis=0), role=Role.WEIGHT)
INT8_NARROW_WEIGHT = INT8_WEIGHT.but(qmin=-127)
INT8_TENSOR_WEIGHT = INT8_WEIGHT.but(granularity=PerTensor())
INT8_WEIGHT_ONLY = INT8_WEIGHT.but(timing=Timing.WEIGHT_ONLY)
INT8_DYNAMIC = INT8.but(timing=Timing.DYNAMIC)
UINT8_DYNAMIC = UINT8.but(timing=Timing.DYNAMIC)
INT8_TOKEN = INT8_DYNAMIC.but(granularity=PerToken())
UINT8_TOKEN = UINT8_DYNAMIC.but(granularity=PerToken())
INT4_GROUP = INT8_WEIGHT_ONLY.but(
    dtype=DType.INT4, scheme=Scheme.AFFINE, granularity=PerGroup(axis=1, size=32), scale_bits=7
)
"""Levels lie at most 15 steps from the zero point: with a scale of 7 bits each weight has 11, those of a float16."""
INT4_GROUP_SYMMETRIC = INT8_WEIGHT_ONLY.but(dtype=DType.INT4, granularity=PerGroup(axis=1, size=32))
INT4_WEIGHT = INT8_WEIGHT.but(dtype=DType.INT4)
INT2_GROUP = INT4_GROUP.but(dtype=DType.INT2, observe=FIT)
"""With four levels ranges are far too wide; with more, scales of least squared error of weights lose more on outputs."""
INT16 = QuantSpec(dtype=DType.INT16, scheme=Scheme.SYMMETRIC)
INT32_BIAS = QuantSpec(dtype=DType.INT32, scheme=Scheme.SYMMETRIC, role=Role.BIAS)
FP16_WEIGHT = INT8_TENSOR_WEIGHT.but(dtype=DType.FP16, timing=Timing.WEIGHT_ONLY)
FP8_E4M3_WEIGHT = INT8_WEIGHT_ONLY.but(dtype=DType.FP8_E4M3)
FP8_E5M2_WEIGHT = INT8_WEIGHT_ONLY.but(dtype=DType.FP8_E5M2)

NAMED: dict[str, QuantSpec] = {name: value for name, value in list(globals().items()) if isinstance(value, QuantSpec)}
"""The named specs, for files and messages."""


def name_of(spec: QuantSpec) -> str:
    """The name of a named spec, else its text."""
    return next((name for name, named in NAMED.items() if named == spec), str(spec))


__all__ = [
    "ACT_EPS",
    "FLOAT32_EPS",
    "FP8_E4M3_WEIGHT",
    "FP8_E5M2_WEIGHT",
    "FP16_WEIGHT",
    "INT2_GROUP",
    "INT4_GROUP",
    "INT4_GROUP_SYMMETRIC",
    "INT4_WEIGHT",
    "INT8",
    "INT8_DYNAMIC",
    "INT8_NARROW_WEIGHT",
    "INT8_TENSOR_WEIGHT",
    "INT8_TOKEN",
    "INT8_WEIGHT",
    "INT8_WEIGHT_ONLY",
    "INT16",
    "INT32_BIAS",
    "NAMED",
    "UINT8",
    "UINT8_DYNAMIC",
    "UINT8_TOKEN",
    "Observe",
    "Option",
    "QuantSpec",
    "name_of",
]
