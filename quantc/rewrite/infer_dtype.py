"""Dtype inference from weights, for programs captured without example inputs.

A convolution accepts only an input of its weight's dtype, so its input and output have that dtype, and so do the
results of dtype-preserving ops around it. The search covers a few steps back from a value, and a few of its users.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import fx

from quantc.ir.dialect import WEIGHTED, is_op, ops_in, traits_of
from quantc.ir.op_row import Family, Trait
from quantc.ir.types import dtype_of

STEPS = 16
USERS = 8
PASSING = (
    "batch_norm",
    "dropout",
    *ops_in(Family.ACTIVATION, Family.MAX_POOL, Family.AVERAGE_POOL, Family.ADAPTIVE_POOL),
)
"""Ops that preserve the dtype of a floating-point tensor."""


def proven_dtype(node: Any) -> torch.dtype | None:
    """The dtype of a value in every run that does not raise; None if unknown."""
    for _ in range(STEPS):
        if not isinstance(node, fx.Node):
            return None
        found = dtype_of(node) or _weight_dtype(node) or _consumer_dtype(node)
        if found is not None:
            return found
        if not is_op(node, *PASSING) and Trait.PRESERVES_VALUES not in traits_of(node):
            return None
        node = node.args[0]
    return None


def _weight_dtype(node: fx.Node) -> torch.dtype | None:
    return dtype_of(node.args[1]) if is_op(node, *WEIGHTED) else None


def _consumer_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype that one of the first users of a value requires."""
    for user in islice(node.users, USERS):
        if is_op(user, *WEIGHTED) and user.args[0] is node:
            return dtype_of(user.args[1])
    return None
