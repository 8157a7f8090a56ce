"""A histogram of evenly spaced bins, and the range of least squared error that is found in it by narrowing.

The numbers are torch's, bit for bit, so that a model comes out with the scales it had; the engine's own histogram
(`observe="mse"`) needs no range beforehand, merges exactly and searches both ends, and is what to take otherwise.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantc.errors import DataError, SpecError
from quantc.nn.range_observers import UniformQuantizationObserverBase, default_qparams, has_numbers
from quantc.spec.torch_dtypes import PER_TENSOR, PLAIN

UPSAMPLING = 16
"""Into how many parts a bin is cut before its content goes to the bins of a wider range."""
STEP = 1e-5
"""The share of the data that each move of the search leaves out."""

_STEPS = round(1 / STEP) + 10
FROM_BELOW: list[float] = np.add.accumulate([0.0, *[STEP] * _STEPS]).tolist()
"""The share that is left out below after each step. Step by step, since the rounding of each sum goes into the next."""
FROM_ABOVE: list[float] = np.subtract.accumulate([1.0, *[STEP] * _STEPS]).tolist()
"""The share that is still in, from above."""


def _idle_steps(start: int, content: float, total: float) -> int:
    """The steps from above that leave every bin in: those before the first that leaves out some of `content`."""
    indices = range(start, len(FROM_ABOVE))
    found = bisect_left(indices, True, key=lambda index: float(np.float32(FROM_ABOVE[index] * total)) < content)
    return min(start + found, len(FROM_ABOVE) - 1) - 1


class HistogramObserver(UniformQuantizationObserverBase):
    """Counts the data in `bins` bins over the range so far, and narrows that range while the squared error falls."""

    schemes = PER_TENSOR
    histogram: Tensor
    min_val: Tensor
    max_val: Tensor

    def __init__(self, bins: int = 2048, dtype: Any = torch.quint8, **keywords: Any) -> None:
        if keywords.get("is_dynamic"):
            raise SpecError(
                "a histogram is of data seen before, so its scales are not dynamic", advice="take MinMaxObserver"
            )
        super().__init__(dtype, **keywords)
        self.bins = bins
        storage = PLAIN.get(dtype) or dtype
        self.dst_nbins = 2 ** torch.iinfo(storage).bits
        self.register_buffer("histogram", torch.zeros(bins, **self.factory_kwargs))
        self.register_buffer("min_val", torch.tensor(torch.inf, **self.factory_kwargs))
        self.register_buffer("max_val", torch.tensor(-torch.inf, **self.factory_kwargs))

    @property
    def has_seen(self) -> bool:
        """True if it has seen data."""
        return bool(self.min_val <= self.max_val)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        if x.numel() and has_numbers(x):
            self._count(_finite(x.detach(), self.place))
        return x

    def _count(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        low, high = torch.aminmax(x)
        if not self.has_seen:
            self._set(torch.histc(x, self.bins, float(low), float(high)), low, high)
            return
        new_low, new_high = torch.minimum(self.min_val, low), torch.maximum(self.max_val, high)
        counts = torch.histc(x, self.bins, float(new_low), float(new_high))
        self._set(counts + self._rebin(new_low, new_high), new_low, new_high)

    def _set(self, histogram: Tensor, low: Tensor, high: Tensor) -> None:
        self.histogram.copy_(histogram)
        self.min_val.copy_(low)
        self.max_val.copy_(high)

    def _rebin(self, low: Tensor, high: Tensor) -> Tensor:
        """The counts so far, in bins of a range that contains the current one."""
        if bool(low == self.min_val) and bool(high == self.max_val):
            return self.histogram
        if bool(self.min_val == self.max_val):
            place = torch.histc(self.min_val, self.bins, float(low), float(high))
            return place * self.histogram.sum()
        parts = self.bins * UPSAMPLING
        width = (self.max_val - self.min_val) / parts
        centres = torch.linspace(float(self.min_val), float(self.max_val), parts + 1)[:-1] + 0.5 * width
        edges = torch.linspace(float(low), float(high), self.bins + 1)
        places = (torch.bucketize(centres, edges, right=True) - 1).clamp(0, self.bins - 1)
        shares = self.histogram.repeat_interleave(UPSAMPLING) / UPSAMPLING
        return torch.bincount(places, weights=shares, minlength=self.bins)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        if not self.has_seen:
            return default_qparams(self)
        return self._calculate_qparams(*self._non_linear_param_search())

    def _non_linear_param_search(self) -> tuple[Tensor, Tensor]:
        """The range between the first and the last bin that are kept."""
        first, last = self._best_bins()
        width = (self.max_val - self.min_val) / self.bins
        return self.min_val + width * first, self.min_val + width * (last + 1)

    def _best_bins(self) -> tuple[int, int]:
        """Leave out a little of the data at the end that gives up more bins for it, as long as the error falls."""
        below = torch.cumsum(self.histogram, dim=0).tolist()
        total = torch.sum(self.histogram).item()
        lost, kept = 0, 0  # how many steps were taken from below, and from above
        first, last, least = 0, self.bins - 1, float("inf")
        while first < last and FROM_BELOW[lost] < FROM_ABOVE[kept]:
            # the counts are float32, and so is what they are compared with
            left = min(bisect_left(below, float(np.float32(FROM_BELOW[lost + 1] * total)), first), last)
            right = max(bisect_right(below, float(np.float32(FROM_ABOVE[kept + 1] * total)), 0, last + 1) - 1, first)
            if left - first > last - right:
                tried, lost = (left, last), lost + 1
            elif right < last:
                tried, kept = (first, right), kept + 1
            else:
                kept = _idle_steps(kept + 2, below[last], total)
                continue
            error = self._squared_error(*tried)
            if error > least:
                break
            least, (first, last) = error, tried
        return first, last

    def _squared_error(self, first: int, last: int) -> float:
        """The squared error of quantizing the range of some bins, with the data spread evenly within each bin.

        A bin reaches over parts of two levels and over whole ones between them. The terms are added in single precision
        and in this order, which is what makes the result torch's.
        """
        width = (self.max_val.item() - self.min_val.item()) / self.bins
        level = width * (last - first + 1) / self.dst_nbins
        if level == 0.0:
            return 0.0
        begin = (torch.arange(self.bins) - first) * width
        end = begin + width
        level_of_begin = torch.div(begin, level, rounding_mode="floor").clamp(0, self.dst_nbins - 1)
        level_of_end = torch.div(end, level, rounding_mode="floor").clamp(0, self.dst_nbins - 1)
        density = self.histogram / width
        half = torch.tensor(level / 2)
        error = _integral(begin - (level_of_begin + 0.5) * level, half, density)
        error += (level_of_end - level_of_begin - 1) * _integral(-half, half, density)
        error += _integral(-half, end - (level_of_end * level + level / 2), density)
        return error.sum().item()

    def reset_min_max_vals(self) -> None:
        self._set(torch.zeros(self.bins), torch.tensor(torch.inf), torch.tensor(-torch.inf))

    def extra_repr(self) -> str:
        return f"min_val={self.min_val}, max_val={self.max_val}"


def _integral(begin: Tensor, end: Tensor, density: Tensor) -> Tensor:
    """The integral of the square between two distances, times a density."""
    return density * ((end * end * end - begin * begin * begin) / 3)


def _finite(x: Tensor, place: str | None) -> Tensor:
    """A tensor without what is infinite, which is said; NaN is refused."""
    low, high = (float(end) for end in torch.aminmax(x))
    if low != low or high != high:
        raise DataError(
            "HistogramObserver was given NaN",
            where=place,
            advice="look for the op that makes it, and correct the model or the data",
        )
    if np.isfinite(low) and np.isfinite(high):
        return x
    warnings.warn("infinite values were left out of a histogram", stacklevel=4)
    return x[torch.isfinite(x)]
