"""The error of a layer's output that a change of its weights makes, from the Gram matrix of what it reads.

`y = W x` changes by `E x`, so that the mean squared change is `trace(E G Eᵀ) / n`. Where the layer has a bias, or may get
one, the mean of the change can be taken out, `b − E m`; what is left is that of the covariance `G / n − m mᵀ`.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from quantc.errors import ObservationError
from quantc.observe.gram import Gram

Bias = Literal["kept", "free"]
""""kept": the bias stays as it is; "free": it takes up the mean of the change."""


def output_error(change: Tensor, gram: Gram, bias: Bias = "kept") -> Tensor:
    """Mean squared change of each output channel, float64, for a change of the weight `[outputs, inputs, *kernel]`."""
    rows = _rows(change, gram)
    matrix = gram.covariance() if bias == "free" else gram.matrix() / gram.seen
    # rounding may leave less than nothing
    return (rows @ matrix * rows).sum(2).clamp_(min=0).reshape(-1)


def mean_change(change: Tensor, gram: Gram) -> Tensor:
    """Mean change of each output channel, float64: what a bias has to take up."""
    return (_rows(change, gram) @ gram.mean().unsqueeze(2)).reshape(-1)


def _rows(change: Tensor, gram: Gram) -> Tensor:
    """The change by groups, `[groups, outputs, channels]`. ObservationError if the Gram is of another layer's input."""
    groups, width = gram.mean().shape
    if change[0].numel() != width or change.shape[0] % groups:
        raise ObservationError(
            f"a weight of shape {list(change.shape)} does not read {groups} groups of {width} channels",
            advice="give the Gram of this layer's input",
        )
    return change.detach().double().reshape(groups, -1, width)
