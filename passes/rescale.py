"""Scales of weights fitted to what their layers read."""

from __future__ import annotations

from typing import ClassVar

from quantc.recover.fitting import FittingPass, Proposal
from quantc.recover.layers import Layer
from quantc.recover.scale_search import rescaled


class Rescale(FittingPass):
    """Choose scales of weights by the error of their layers' outputs, not by that of the weights.

    Ranges from that of the weights down to a quarter of it are searched, for each set of weights that shares a scale, each
    input weighted with its mean square. It takes the Gram matrices that `qc.calibrate(..., collect="recover")` collects.
    """

    name: ClassVar[str] = "rescale"

    def propose(self, layer: Layer) -> Proposal | str:
        return rescaled(layer)
