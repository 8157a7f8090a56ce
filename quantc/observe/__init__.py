"""Statistics of tensors that merge in bits, and observations: those from which scales and zero points are derived."""

from quantc.observe.cross_gram import CrossGram
from quantc.observe.fit import Fit
from quantc.observe.fixed_qparams import FixedQParams
from quantc.observe.gram import Gram
from quantc.observe.histogram import Histogram
from quantc.observe.minmax import MinMax
from quantc.observe.module import ObserverModule, observers_in, observers_off
from quantc.observe.moments import Fisher, Moments
from quantc.observe.moving_average import MovingAverage
from quantc.observe.observation_registry import OBSERVATIONS, register_observation, start
from quantc.observe.ranges import METHODS, RangeMethod
from quantc.observe.recording import Nothing, Recording
from quantc.observe.reservoir import Reservoir
from quantc.observe.statistic_registry import STATISTICS
from quantc.observe.store import Statistics
from quantc.observe.tokens import Tokens
from quantc.spec.halves import Halves
from quantc.spec.observation import Observation, Order, State
from quantc.spec.statistic import Change, Permutation, Rotation, Scale, Statistic, carried

__all__ = [
    "METHODS",
    "OBSERVATIONS",
    "STATISTICS",
    "Change",
    "CrossGram",
    "Fisher",
    "Fit",
    "FixedQParams",
    "Gram",
    "Halves",
    "Histogram",
    "MinMax",
    "Moments",
    "MovingAverage",
    "Nothing",
    "Observation",
    "ObserverModule",
    "Order",
    "Permutation",
    "RangeMethod",
    "Recording",
    "Reservoir",
    "Rotation",
    "Scale",
    "State",
    "Statistic",
    "Statistics",
    "Tokens",
    "carried",
    "observers_in",
    "observers_off",
    "register_observation",
    "start",
]
