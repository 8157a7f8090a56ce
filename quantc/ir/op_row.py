"""The row of an op: every fact about it that more than one part of the compiler reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch._ops import OpOverload

from quantc.ir.curves import MakeCurve


class Trait(Enum):
    """A property of an op that passes may rely on."""

    COMMUTES = "the first two operands may be swapped"
    PRESERVES_VALUES = "every output element is an input element (or a zero/pad constant): no arithmetic"
    ELEMENTWISE = "output element i depends on input elements i alone"
    MODAL = "behaves differently in training and inference"


class Family(Enum):
    """The kind of an op. Lists of ops are queries by family: a new op joins them by its row."""

    CONV = "convolution"
    CONV_TRANSPOSE = "transposed convolution"
    MATMUL = "matrix product"
    CONTRACTION = "sum of products in a form that is decomposed first"
    LOOKUP = "rows of a table by index"
    RECURRENT = "recurrent layer over a sequence"
    RECURRENT_CELL = "one step of a recurrent layer"
    ARITHMETIC = "elementwise function of two or more operands"
    ACTIVATION = "elementwise function between layers"
    MATH = "other elementwise function of one operand"
    SOFTMAX = "softmax along an axis"
    NORM = "normalization"
    DROPOUT = "drops elements in training"
    MAX_POOL = "maximum over windows"
    AVERAGE_POOL = "mean over windows"
    ADAPTIVE_POOL = "mean over windows that divide the input"
    REDUCTION = "reduction along axes"
    EXTREME = "reduction to elements of the input"
    JOIN = "several tensors to one"
    SPLIT = "one tensor to several"
    VIEW = "another shape, elements in the same order"
    PERMUTE = "axes in another order"
    EXPAND = "elements repeated"
    SLICE = "a contiguous part"
    GATHER = "elements by index"
    FLIP = "elements in another order"
    SHUFFLE = "channels and pixels exchanged"
    COPY = "the same tensor"
    PAD = "a border"
    RESIZE = "nearest neighbours"
    INTERPOLATE = "weighted neighbours"
    OTHER = "anything else"


MOVES = (
    Family.VIEW,
    Family.PERMUTE,
    Family.EXPAND,
    Family.SLICE,
    Family.GATHER,
    Family.FLIP,
    Family.SHUFFLE,
    Family.COPY,
    Family.SPLIT,
)
"""Families that move elements and do nothing else."""


def byte_grid(low: float, high: float) -> tuple[float, int]:
    """The scale and the zero point of a range in 256 levels that begin at 0."""
    scale = (high - low) / 256
    return scale, round(-low / scale)


@dataclass(frozen=True, slots=True)
class Op:
    """One canonical op. `operands` names the leading arguments; the others keep their ATen names."""

    name: str
    target: OpOverload
    operands: tuple[str, ...]
    family: Family
    traits: frozenset[Trait] = frozenset()
    factors: tuple[str, str] | None = None
    """The two operands that are multiplied and accumulated."""
    curve: MakeCurve | None = None
    """For functions of one number: the float64 reference with its monotone segments, by the op's options."""
    range: tuple[float, float] | None = None
    """The range of the results, where the op has one whatever it reads."""
    aliases: tuple[str, ...] = ()
    """Other names that ATen has for the op, with the same arguments."""
    examples: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    """For arguments that are no tensors and have no default that will do: values to try the op with."""
    spatial: int | None = None
    """For ops over windows: the number of spatial axes."""
    scales: tuple[tuple[str, ...], ...] = ()
    """Sets of operands: multiplying all of one set by a positive number multiplies the result by it. Ops that preserve
    values, and functions of one number, need no row: see `quantc.ir.homogeneity`."""
