"""Conversion of statistics to a kind that they determine."""

from __future__ import annotations

from quantc.errors import ObservationError, QuantcError
from quantc.observe.average import MovingAverage
from quantc.observe.fixed import FixedQParams
from quantc.observe.minmax import MinMax, WithExtremes
from quantc.observe.observation_registry import start
from quantc.observe.recording import Recording
from quantc.spec.observation import Observation, check_spec
from quantc.spec.spec import QuantSpec


def derived(observation: Observation, spec: QuantSpec, *, where: str = "") -> Observation:
    """The observation that a spec asks for, computed from another. ObservationError if that one does not determine
    it."""
    wanted = start(spec)
    if isinstance(observation, Recording):
        for tensor in observation.tensors:
            wanted.update(tensor, where=where)
        return wanted
    check_spec(observation, spec, where)
    if isinstance(wanted, FixedQParams):
        wanted.seen = observation.seen
        return wanted
    if isinstance(wanted, MovingAverage) and isinstance(observation, MovingAverage) and wanted.rate != observation.rate:
        raise ObservationError(
            f"an average that moved by {observation.rate} cannot give one that moves by {wanted.rate}",
            where=where or None,
            advice="calibrate again with this spec",
        )
    if type(observation) is type(wanted):
        return observation
    if isinstance(wanted, MinMax) and isinstance(observation, WithExtremes):
        return observation.extremes
    raise ObservationError(
        f"{observation.statistics} statistics cannot give {spec.observe} ranges",
        where=where or None,
        advice="calibrate again with this spec; histograms (mse, percentile, entropy) serve every range method",
    )


def why_not_derived(observation: Observation, spec: QuantSpec) -> str | None:
    """The reason why the observation of a spec cannot be derived from another; None if it can."""
    try:
        derived(observation, spec)
    except QuantcError as error:
        return error.what
    return None
