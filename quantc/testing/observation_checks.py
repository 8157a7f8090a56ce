"""Checks of an observation: the laws of a monoid, its state, its qparams, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quantc.errors import DataError, ObservationError, QuantcError, SpecError
from quantc.observe.observation_registry import OBSERVATIONS
from quantc.spec.formats import PerChannel, PerTensor, Scheme
from quantc.spec.granularity import Share
from quantc.spec.numerics import QParams
from quantc.spec.observation import Observation, Order
from quantc.spec.spec import INT8, INT8_WEIGHT, UINT8, Option, QuantSpec
from quantc.testing.conformance import Check, Conformance, Fault, Ledger, raised

NOUN = "observation"
SPECS: dict[str, QuantSpec] = {
    "uint8": UINT8,
    "int8 symmetric": INT8.but(scheme=Scheme.SYMMETRIC),
    "int8 per channel": INT8_WEIGHT,
    "int8, powers of two": INT8.but(scheme=Scheme.SYMMETRIC, scale_bits=1),
    "int8, scales of at least 1/16": INT8.but(eps=0.0625),
}
"""Each without its way to find the range, which is what is checked."""
Kind = type[Observation]


def check_observation(kind: Kind, options: Mapping[str, Option]) -> Conformance:
    """Feed an observation batches in every order and split, and look at what comes out."""
    ledger = Ledger(str(getattr(kind, "statistics", kind.__name__)), noun=NOUN)
    reason = OBSERVATIONS.why_not(ledger.backend, kind)
    ledger.add("", Check.READY, [Fault(reason, "see quantc.spec.observation.Observation")] if reason else [])
    if reason:
        return ledger.conformance(())
    checks: dict[Check, Callable[[Kind, Share, Mapping[str, Option]], list[Fault] | None]] = {
        Check.MERGES: _merges,
        Check.UNCHANGED: _unchanged,
        Check.STATE: _state,
        Check.QPARAMS: _qparams,
        Check.REFUSES: _refuses,
    }
    for share in (PerTensor(), PerChannel(axis=0)):
        if not isinstance(share, PerTensor) and _is_refused(kind, share, options):
            continue
        for check, look in checks.items():
            try:
                faults = look(kind, share, options)
            except Exception as error:  # noqa: BLE001 - whatever a plugin raises is what is to be reported
                faults = [raised("", error)]
            ledger.add("", check, faults, where=str(share))
    return ledger.conformance(())


def _is_refused(kind: Kind, share: Share, options: Mapping[str, Option]) -> bool:
    """True if it is not for such specs, as a spec says when it is made."""
    try:
        kind.empty(share, options)
    except SpecError:
        return True
    except Exception:  # noqa: BLE001 - the checks report it
        return False
    return False


def _batches() -> list[Tensor]:
    """Batches of unlike sizes and ranges, with zeros of both signs; the channels are the first axis."""
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(3, size, generator=generator) * scale for size, scale in ((7, 1.0), (40, 0.1), (5, 3.0), (1, 9.0))
    ]
    made[1][0, :2] = torch.tensor([0.0, -0.0])
    return made


def _of(kind: Kind, share: Share, options: Mapping[str, Option], *batches: Tensor) -> Observation:
    made = kind.empty(share, options)
    for batch in batches:
        made.update(batch)
    return made


def bits_of(observation: Observation) -> dict[str, Any]:
    """All that it holds, to the bit."""
    state = observation.to_state()
    tensors = {name: (str(x.dtype), list(x.shape), _bits(x)) for name, x in state.tensors.items()}
    return {**tensors, **state.values, "seen": observation.seen, "non_finite": observation.non_finite}


def _bits(x: Tensor) -> list[int]:
    return list(x.detach().contiguous().flatten().view(torch.uint8).tolist()) if x.numel() else []


def _result(observation: Observation) -> dict[str, Any]:
    """All that becomes of it, to the bit."""
    made: dict[str, Any] = {"seen": observation.seen, "non_finite": observation.non_finite}
    for name, spec in SPECS.items():
        if spec.granularity == observation.share:
            found = observation.qparams(spec)
            made |= {f"the scale ({name})": _bits(found.scale), f"the zero point ({name})": _bits(found.zero_point)}
    return made


def _merges(kind: Kind, share: Share, options: Mapping[str, Option]) -> list[Fault] | None:
    """Any order and any split give the same bits."""
    if kind.order is not Order.FREE:
        return None
    a, b, c, d = _batches()
    whole = _result(_of(kind, share, options, a, b, c, d))
    left, right = _of(kind, share, options, a, b), _of(kind, share, options, c, d)
    empty = kind.empty(share, options)
    ways = {
        "in another order": _of(kind, share, options, d, b, a, c),
        "two parts merged": left.merge(right),
        "two parts merged the other way round": right.merge(left),
        "merged with an empty one": left.merge(right).merge(empty),
        "an empty one merged with it": empty.merge(left.merge(right)),
        "four parts, the last two first": _of(kind, share, options, a).merge(
            _of(kind, share, options, b).merge(_of(kind, share, options, c).merge(_of(kind, share, options, d)))
        ),
        "with an empty batch": _of(kind, share, options, a, a[:, :0], b, c, d),
    }
    for what, other in ways.items():
        found = _result(other)
        differing = [name for name in whole | found if whole.get(name) != found.get(name)]
        if differing:
            return [Fault(f"{what}: {', '.join(differing)} differ", _ORDER)]
    return []


_ORDER = (
    "hold what does not depend on the order (extremes, counts, integers), or declare order = Order.MATTERS, which calibration "
    "in parts refuses"
)


def _unchanged(kind: Kind, share: Share, options: Mapping[str, Option]) -> list[Fault]:
    """Neither merging nor reading changes what is there, and no batch is written to or kept."""
    a, b, c, _ = _batches()
    given = a.clone()
    left, right = _of(kind, share, options, a, b), _of(kind, share, options, c)
    before = bits_of(left), bits_of(right)
    if kind.order is Order.FREE:
        left.merge(right)
    left.qparams(_spec(INT8, share))
    if (bits_of(left), bits_of(right)) != before:
        return [Fault("merge or qparams changes what they read", "give a new observation, and new tensors")]
    if not torch.equal(a, given):
        return [Fault("update writes to the batch", "work on a copy")]
    a.fill_(1e3)
    if bits_of(left) != before[0]:
        return [Fault("it changes when a batch is written to afterwards", "keep no views of what is observed")]
    return []


def _state(kind: Kind, share: Share, options: Mapping[str, Option]) -> list[Fault]:
    """An observation comes back from its state, empty or not, and goes on as before."""
    a, b, c, _ = _batches()
    faults: list[Fault] = []
    for batches in ((), (a, b)):
        made = _of(kind, share, options, *batches)
        state = made.to_state()
        json.dumps(dict(state.values))
        again = kind.from_state(share, state)
        if bits_of(again) != bits_of(made) or again.share != made.share:
            faults.append(
                Fault(f"of {len(batches)} batches, another one comes back", "write all it holds to the state")
            )
            continue
        made.update(c)
        again.update(c)
        if bits_of(again) != bits_of(made):
            faults.append(Fault("read back, it goes on otherwise than before", "write its options to the state too"))
    return faults


def _spec(spec: QuantSpec, share: Share) -> QuantSpec:
    return spec.but(granularity=share)


def _qparams(kind: Kind, share: Share, options: Mapping[str, Option]) -> list[Fault]:
    """Scales are positive float32 numbers that the spec allows, and zero points lie in range."""
    faults: list[Fault] = []
    for name, spec in SPECS.items():
        if spec.granularity != share:
            continue
        for what, batches in (
            ("", _batches()),
            (" of tiny numbers", [x * 1e-12 for x in _batches()]),
            (" of zeros", [torch.zeros(3, 4)]),
        ):
            found = _of(kind, share, options, *batches).qparams(spec)
            reason = why_not_qparams(found, spec)
            faults += [Fault(f"{name}{what}: {reason}", _QPARAMS)] if reason else []
    return faults


_QPARAMS = "derive them with quantc.spec.numerics.qparams_from_range, which does what the spec says"


def why_not_qparams(found: QParams, spec: QuantSpec) -> str | None:
    """The reason why qparams are none of a spec; None if they are."""
    scale, zero_point = found.scale, found.zero_point
    if scale.dtype != torch.float32 or not bool(((scale > 0) & scale.isfinite()).all()):
        return f"scales are {scale.dtype}, {scale.flatten()[:4].tolist()}"
    if zero_point.is_floating_point() or int(zero_point.min()) < spec.qmin or int(zero_point.max()) > spec.qmax:
        return f"zero points {zero_point.flatten()[:4].tolist()} are not integers within {spec.qmin}..{spec.qmax}"
    if spec.scheme is Scheme.SYMMETRIC and spec.dtype.is_signed and bool(zero_point.any()):
        return f"zero points of a symmetric spec are {zero_point.flatten()[:4].tolist()}"
    if bool((scale < spec.eps).any()):
        return f"the scale {float(scale.min()):.3g} is below the smallest one, {spec.eps:.3g} (eps)"
    whole = torch.frexp(scale).mantissa.double() * 2.0**spec.scale_bits
    if bool((whole != whole.round()).any()):
        return (
            f"the scale {float(scale.flatten()[0]):.6g} has more than {spec.scale_bits} significant bits (scale_bits)"
        )
    return None


def _refuses(kind: Kind, share: Share, options: Mapping[str, Option]) -> list[Fault]:
    """NaN, no data, and unknown options are errors of quantc's."""
    spec, nan = _spec(INT8, share), torch.full((3, 4), torch.nan)
    tried: dict[str, tuple[Callable[[], object], type[QuantcError]]] = {
        "without data": (lambda: kind.empty(share, options).qparams(spec), ObservationError),
        "of NaN": (lambda: _of(kind, share, options, nan).qparams(spec), DataError),
        "for another granularity": (
            lambda: _of(kind, share, options, *_batches()).qparams(_spec(INT8, PerChannel(axis=1))),
            ObservationError,
        ),
        "with an unknown option": (lambda: kind.empty(share, {**options, "no-such-option": 1}), SpecError),
    }
    faults: list[Fault] = []
    for what, (attempt, expected) in tried.items():
        try:
            attempt()
        except expected:
            continue
        except Exception as error:  # noqa: BLE001 - as above
            faults.append(Fault(f"{what}: {type(error).__name__} instead of {expected.__name__}", _REFUSE))
            continue
        faults.append(Fault(f"{what}: no {expected.__name__}", _REFUSE))
    return faults


_REFUSE = "call no_options, refuse_empty and check_spec of quantc.spec.observation; count non_finite in update"
__all__ = ["bits_of", "check_observation", "why_not_qparams"]
