"""Capabilities: the specs that a backend's kernels accept, as data."""

from __future__ import annotations

from typing import ClassVar

from quantc.spec.formats import DType, Role, Scheme, Timing
from quantc.spec.spec import FLOAT32_DIGITS, POWER_OF_TWO, QuantSpec
from quantc.support.validated import Frozen


class Capability(Frozen, frozen=True):
    """A set of specs: those of one role whose fields are all among the listed ones."""

    noun: ClassVar[str] = "capability"

    role: Role
    dtypes: tuple[DType, ...]
    schemes: tuple[Scheme, ...] = (Scheme.AFFINE, Scheme.SYMMETRIC)
    granularities: tuple[str, ...] = ("per-tensor",)
    timings: tuple[Timing, ...] = (Timing.STATIC,)
    qmin: int | None = None
    """No spec may go below it; by default the dtype's own end."""
    qmax: int | None = None
    min_eps: float = 0.0
    """The smallest scale the kernels take."""
    scale_bits: int = FLOAT32_DIGITS
    """The most significant bits of a scale: 1 if scales must be powers of two."""
    observes: tuple[str, ...] = ()
    """The observations that may find the range, by name; empty for all."""

    @staticmethod
    def of(spec: QuantSpec) -> Capability:
        """The capability for a spec and its like: same format and granularity, any range within its own, scales of
        as many bits at most."""
        return Capability(
            role=spec.role,
            dtypes=(spec.dtype,),
            schemes=(spec.scheme,),
            granularities=(spec.granularity.kind,),
            timings=(spec.timing,),
            qmin=spec.qmin,
            qmax=spec.qmax,
            scale_bits=spec.scale_bits,
        )

    def refusals(self, spec: QuantSpec) -> list[str]:
        """The reasons against a spec; empty if it is accepted."""
        low = self.qmin if self.qmin is not None else spec.dtype.qmin
        high = self.qmax if self.qmax is not None else spec.dtype.qmax
        checks = {
            f"dtype must be {_listed(self.dtypes)}, not {spec.dtype.value}": spec.dtype in self.dtypes,
            f"scheme must be {_listed(self.schemes)}, not {spec.scheme.value}": spec.scheme in self.schemes,
            f"granularity must be {' or '.join(self.granularities)}, not {spec.granularity.kind}": (
                spec.granularity.kind in self.granularities
            ),
            f"timing must be {_listed(self.timings)}, not {spec.timing.value}": spec.timing in self.timings,
            f"the range must lie in {low}..{high}, not be {spec.qmin}..{spec.qmax}": (
                low <= spec.qmin and spec.qmax <= high
            ),
            f"the smallest scale (eps) must be at least {self.min_eps!r}, not {spec.eps!r}": spec.eps >= self.min_eps,
            f"scales must {_bits(self.scale_bits)}, not {_bits(spec.scale_bits)} (scale_bits)": (
                spec.scale_bits <= self.scale_bits
            ),
            f"the range must be found by {' or '.join(self.observes)}, not {spec.observe.name} (observe)": (
                not self.observes or spec.observe.name in self.observes
            ),
        }
        return [text for text, fits in checks.items() if not fits]


def _bits(count: int) -> str:
    return "be powers of two" if count == POWER_OF_TWO else f"have {count} significant bits"


def _listed(values: tuple[DType | Scheme | Timing, ...]) -> str:
    return " or ".join(value.value for value in values)


def refusal(capabilities: tuple[Capability, ...], spec: QuantSpec) -> str | None:
    """The reason why none of the capabilities accepts a spec: the objections of the nearest; None if one accepts it."""
    of_role = [capability for capability in capabilities if capability.role is spec.role]
    if not of_role:
        roles = sorted({capability.role.value for capability in capabilities})
        return f"it quantizes {' and '.join(roles) or 'nothing'}, not {spec.role.value}"
    of_timing = [capability for capability in of_role if spec.timing in capability.timings]
    if not of_timing:
        timings = tuple(dict.fromkeys(timing for capability in of_role for timing in capability.timings))
        return f"timing must be {_listed(timings)}, not {spec.timing.value}"
    nearest = min((capability.refusals(spec) for capability in of_timing), key=len)
    return "; ".join(nearest) or None
