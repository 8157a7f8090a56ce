"""Check QConfigs against the dtype configs of a BackendConfig."""

from __future__ import annotations

from typing import Any

import torch

from quantc.flows.foreign_observers import inner
from quantc.flows.fx.custom_config import CustomConfigError, QuantType

SIGNED = (torch.qint8, torch.int8)
UNSIGNED = (torch.quint8, torch.uint8)
BYTES = (*SIGNED, *UNSIGNED, torch.quint4x2)
FLOATS = (torch.float32, torch.float16, None)
SIDES = ("input_dtype", "output_dtype", "weight_dtype")


def check_dtypes(config: Any, dtypes: tuple[Any, ...]) -> None:
    """Refuse formats that programs of this flow do not have."""
    for each in dtypes:
        for side in SIDES:
            if getattr(each, side) not in (*BYTES, *FLOATS):
                raise CustomConfigError(
                    f"{side} is {getattr(each, side)}, which this flow does not quantize to",
                    where=f"the pattern {config.pattern or config._pattern_complex_format}",
                    advice="give quint8 or qint8, quint4x2 for tables, or float16 for weights; int16 is a spec of "
                    "qc.prepare with a config",
                )


def kinds_of(dtypes: tuple[Any, ...]) -> tuple[QuantType, ...]:
    """The kinds of quantization that formats are for."""
    found: list[QuantType] = []
    for each in dtypes:
        if each.is_dynamic:
            found.append(QuantType.DYNAMIC)
        elif each.input_dtype in BYTES:
            found.append(QuantType.STATIC)
        elif each.weight_dtype in BYTES:
            found.append(QuantType.WEIGHT_ONLY)
    return tuple(dict.fromkeys(found))


def why_not_format(formats: tuple[Any, ...], qconfig: Any, kind: QuantType | None, is_weighted: bool) -> str | None:
    """The reason why no format accepts a QConfig; None if one does, or if there are none to check."""
    if not formats:
        return None
    reasons = [_why_not(each, qconfig, kind, is_weighted) for each in formats]
    return None if None in reasons else f"the backend config does not take it: {reasons[-1]}"


def _why_not(config: Any, qconfig: Any, kind: QuantType | None, is_weighted: bool) -> str | None:
    if bool(config.is_dynamic) != (kind is QuantType.DYNAMIC):
        return f"scales are to be found {'as it runs' if config.is_dynamic else 'beforehand'}"
    reasons: list[str | None] = []
    if kind is not QuantType.WEIGHT_ONLY:
        reasons.append(_why_not_observer(config.input_dtype_with_constraints, qconfig.activation(), "activations"))
    if kind is QuantType.STATIC and config.output_dtype in BYTES:
        reasons.append(_why_not_observer(config.output_dtype_with_constraints, qconfig.activation(), "results"))
    if is_weighted:
        reasons.append(_why_not_observer(config.weight_dtype_with_constraints, qconfig.weight(), "weights"))
    return next((reason for reason in reasons if reason is not None), None)


def _why_not_observer(wanted: Any, given: Any, noun: str) -> str | None:
    observer = inner(given)
    dtype = getattr(observer, "dtype", None)
    if wanted.dtype is None:
        return None
    if _plain(wanted.dtype) != _plain(dtype):
        return f"{noun} are to be {wanted.dtype}, not {dtype}"
    low, high = wanted.quant_min_lower_bound, wanted.quant_max_upper_bound
    qmin, qmax = getattr(observer, "quant_min", None), getattr(observer, "quant_max", None)
    if (low is not None or high is not None) and (qmin is None or qmax is None):
        return f"{noun} are to be in {low}..{high}, and the observer has no range"
    if (low is not None and qmin < low) or (high is not None and qmax > high):
        return f"{noun} are to be in {low}..{high}, not {qmin}..{qmax}"
    return _why_not_scale(wanted, observer, noun)


def _why_not_scale(wanted: Any, observer: Any, noun: str) -> str | None:
    least, eps = wanted.scale_min_lower_bound, getattr(observer, "eps", None)
    if least is not None and (eps is None or float(eps) < least):
        return f"scales of {noun} are to be at least {least}, and the observer's can be {eps and float(eps)}"
    exact = {"scale": wanted.scale_exact_match, "zero_point": wanted.zero_point_exact_match}
    for name, value in exact.items():
        found = getattr(observer, name, None)
        if value is not None and (found is None or float(found) != float(value)):
            return f"the {name} of {noun} is to be {value}, not {found and float(found)}"
    return None


def _plain(dtype: Any) -> str:
    """int8 and qint8 are one format."""
    return str(dtype).removeprefix("torch.").replace("quint", "uint").replace("qint", "int")
