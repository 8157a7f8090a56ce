"""Resolution of op names to overloads."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from quantc.errors import PatternError, suggest
from quantc.ir.dialect import BY_NAME


@cache
def op_target(name: str) -> OpOverload:
    """The overload of an op name: `conv2d`, or a full name such as `aten.cumsum.default`."""
    known = BY_NAME.get(name)
    if known is not None:
        return known.target
    if re.fullmatch(r"[a-zA-Z]\w*\.\w+\.\w+", name):
        value: Any = torch.ops
        for part in name.split("."):
            value = getattr(value, part, None)
        if isinstance(value, OpOverload):
            return value
    raise PatternError(
        f"unknown op {name!r}",
        advice=f"{suggest(name, BY_NAME, noun='ops')}; other ops go by their full name, such as aten.cumsum.default",
    )


def has_many_outputs(name: str) -> bool:
    returns = op_target(name)._schema.returns
    return len(returns) > 1 or any("List" in str(item.type) for item in returns)
