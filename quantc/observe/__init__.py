"""Observations: mergeable statistics of tensors, from which ranges, scales and zero points are derived."""

from quantc.observe.average import MovingAverage
from quantc.observe.fit import Fit
from quantc.observe.fixed import FixedQParams
from quantc.observe.histogram import Histogram
from quantc.observe.minmax import MinMax
from quantc.observe.module import ObserverModule, observers_in, observers_off
from quantc.observe.observation_registry import OBSERVATIONS, register_observation, start
from quantc.observe.ranges import METHODS, RangeMethod
from quantc.observe.recording import Nothing, Recording
from quantc.observe.store import Statistics
from quantc.spec.observation import Observation, Order, State

__all__ = [
    "METHODS",
    "OBSERVATIONS",
    "Fit",
    "FixedQParams",
    "Histogram",
    "MinMax",
    "MovingAverage",
    "Nothing",
    "Observation",
    "ObserverModule",
    "Order",
    "RangeMethod",
    "Recording",
    "State",
    "Statistics",
    "observers_in",
    "observers_off",
    "register_observation",
    "start",
]
