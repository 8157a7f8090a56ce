"""`torch.ops.quantc`: the ops of the integer form.

Each op has a *reference*, written in ATen primitives: its definition. The reference is also the op's decomposition,
gives its shape for fake tensors, and is what its kernel is checked against. A *kernel*, where there is one, computes
the same bits faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch._ops import OpOverload

NAMESPACE = "quantc"
ENDING = 'str rounding="half-even", bool saturate=True'
"""As `quantc.spec.arithmetic.Arithmetic` has them."""
OUT = f"Tensor multiplier, Tensor? shift, int out_zero_point, int qmin, int qmax, ScalarType dtype, {ENDING}"
"""The last arguments of every op that ends in `arithmetic.rescale`."""

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]

Function = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class IntegerOp:
    """One op: its schema, reference and formula."""

    name: str
    schema: str
    reference: Function
    formula: str
    deviation: str = ""
    """Bound on the difference to the formula in real numbers, beyond the rounding of the result. Empty: exact."""
    kernel: Function | None = None

    @property
    def target(self) -> OpOverload:
        found: OpOverload = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        return found

    @property
    def summary(self) -> str:
        return (self.reference.__doc__ or "").partition("\n")[0]


OPS: dict[str, IntegerOp] = {}
"""By name, in the order of definition."""


def integer_op(
    schema: str, *, formula: str, deviation: str = "", kernel: Function | None = None, fake: Function | None = None
) -> Function:
    """Define an op by its reference: `@integer_op("linear(Tensor x, …) -> Tensor", formula="…")`.

    `fake` computes output shapes where running the reference for them would take too long.
    """

    def define(reference: Function) -> Function:
        name = schema.partition("(")[0]
        op = IntegerOp(name, schema, reference, formula, deviation, kernel)
        _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
        qualified = f"{NAMESPACE}::{name}"
        torch.library.impl(qualified, ("cpu", "cuda"), _contiguous(kernel or reference), lib=_LIBRARY)
        torch.library.register_fake(qualified, _contiguous(fake or reference), lib=_LIBRARY)
        OPS[name] = op
        return reference

    return define


def _contiguous(function: Function) -> Function:
    """A function with contiguous results: kernel and reference must not differ in strides either."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return tuple(part.contiguous() for part in result) if isinstance(result, tuple) else result.contiguous()

    return wrapped


def op_of(target: Any) -> IntegerOp | None:
    """The integer op of a call target; None if it is not one."""
    if not isinstance(target, OpOverload) or target.namespace != NAMESPACE:
        return None
    return OPS.get(target._schema.name.rpartition("::")[2])
