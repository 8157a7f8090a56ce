"""Signal and noise power, accumulated over batches, and the SQNR they give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantc.errors import QuantcError


class Noise:
    """Power of a reference and of the difference to it, in float64, over all batches so far."""

    __slots__ = ("count", "noise", "signal")

    def __init__(self) -> None:
        self.signal = 0.0
        self.noise = 0.0
        self.count = 0
        """The number of elements compared."""

    def add(self, reference: Any, value: Any) -> bool:
        """Accumulate every pair of float tensors of two pytrees of one structure. False if there is no such pair."""
        pairs = list(_pairs(reference, value))
        for left, right in pairs:
            self._add(left, right)
        return bool(pairs)

    def _add(self, reference: Tensor, value: Tensor) -> None:
        signal, noise = _power(reference), _power(value - reference)
        if not math.isfinite(signal + noise):
            # an infinity in both, as in a mask, is neither signal nor noise
            same = (reference == value) | (reference.isnan() & value.isnan())
            signal = _power(reference[reference.isfinite()])
            noise = _power((value - reference)[~same])
        self.signal += signal
        self.noise += noise
        self.count += reference.numel()

    @property
    def sqnr(self) -> float:
        """SQNR in dB; infinite without noise, NaN if the noise is NaN or nothing was compared."""
        if not self.count or math.isnan(self.noise):
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


def _power(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 if tensor.numel() else 0.0


def _pairs(reference: Any, value: Any) -> Iterator[tuple[Tensor, Tensor]]:
    left, right = pytree.tree_leaves(reference), pytree.tree_leaves(value)
    if len(left) != len(right):
        return
    for one, other in zip(left, right, strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            continue
        if one.shape == other.shape and one.is_floating_point() and other.is_floating_point():
            yield one.detach(), other.detach()


def check_alike(reference: Sequence[Any], value: Sequence[Any], names: tuple[str, str]) -> None:
    """Raise QuantcError unless two lists of outputs can be compared elementwise: same count, same shapes."""
    left, right = list(reference), list(value)
    counts = f"{len(left)} and {len(right)}"
    faults = [f"they yield {counts} outputs"] if len(left) != len(right) else []
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape != other.shape:
            faults.append(f"output {place} is {list(one.shape)} and {list(other.shape)}")
    if faults:
        raise QuantcError(
            f"{names[0]} and {names[1]} yield different things: {'; '.join(faults)}",
            where="their outputs",
            advice="compare a quantized program with the one it was made from, or two versions of one model",
        )


def add_outputs(reference: Sequence[Any], value: Sequence[Any], noises: list[Noise], largest: list[float]) -> None:
    """Accumulate outputs pairwise: into the noise of each, and into its largest absolute difference."""
    pairs = list(zip(reference, value, strict=True))
    if not noises:
        noises.extend(Noise() for _ in pairs)
        largest.extend(0.0 for _ in pairs)
    for place, (left, right) in enumerate(pairs):
        noises[place].add(left, right)
        for one, other in _pairs(left, right):
            largest[place] = max(largest[place], _largest(one, other), key=_badness)


def _largest(reference: Tensor, value: Tensor) -> float:
    apart = (value.double() - reference.double()).abs()
    same = (reference == value) | (reference.isnan() & value.isnan())
    return float(apart.masked_fill(same, 0.0).max()) if apart.numel() else 0.0


def _badness(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def together(noises: Iterable[Noise]) -> Noise:
    """The sum of several."""
    total = Noise()
    for noise in noises:
        total.signal += noise.signal
        total.noise += noise.noise
        total.count += noise.count
    return total


def format_sqnr(sqnr: float | None) -> str:
    """An SQNR as text for tables."""
    if sqnr is None:
        return ""
    return f"{sqnr:.1f}" if math.isfinite(sqnr) else {math.inf: "equal", -math.inf: "all noise"}.get(sqnr, "NaN")


def as_data(sqnr: float | None) -> float | str | None:
    """An SQNR as a JSON value: "inf", "-inf" and "nan" are strings."""
    return sqnr if sqnr is None or math.isfinite(sqnr) else str(sqnr)
