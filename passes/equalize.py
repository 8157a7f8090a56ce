"""Equalization of channels across layers."""

from __future__ import annotations

from typing import ClassVar

from quantc.ir.program import Program
from quantc.recover.channel_groups import ChannelGroup
from quantc.recover.transforming import TransformPass


class Equalize(TransformPass):
    """Equalize the ranges of channels across layers.

    Between layers, through ops that are positively homogeneous (relu, pools, moves, adds), channels may be multiplied by any
    number: the rows of the weights before take the factors up, and the columns of the weights behind undo them. All factors
    of a program are found together, as those of least predicted noise: that of rounded weights, and that of activations,
    whose steps are as wide as their widest channel makes them. It takes the Gram matrices and ranges that
    `qc.calibrate(..., collect="recover")` collects.

    A group of channels keeps its factors where they lower the noise on the batches that they were not fitted to, and the
    outputs stay what they were, on the example inputs and on noise. A clamp with an upper bound, an op of which nothing is
    known, an output, or a weight that two layers read lets what it reads stay as it is; the log names it.
    """

    name: ClassVar[str] = "equalize"

    def concerns(self, program: Program, group: ChannelGroup) -> bool:
        return True
