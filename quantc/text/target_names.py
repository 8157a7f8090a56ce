"""Names of call targets, and resolution of a name to the callable.

Resolution uses a closed list. Text never imports a module and never reaches an attribute that is not listed, so an
untrusted file can name nothing but tensor ops and arithmetic.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from quantc.errors import UnknownNameError, suggest
from quantc.ir.dialect import BY_NAME, target_name

Callee = Callable[..., Any]

_BUILTINS: tuple[Callee, ...] = (getattr, len, abs, max, min, round, sum, pow, divmod, int, float, bool)
_REACHES_OUTSIDE = frozenset({"from_file"})
"""Tensor functions that access files."""
ON_DEMAND: dict[str, Callable[[], object]] = {}
"""Namespaces of `torch.ops` that are registered lazily, when text first names one, each with its registration
function."""
_OP = re.compile(r"[A-Za-z]\w*\.\w+\.\w+", re.ASCII)


def _routines(module: ModuleType, homes: frozenset[str]) -> Iterator[tuple[str, Callee]]:
    for name, value in vars(module).items():
        if name.startswith("_") or name in _REACHES_OUTSIDE or not inspect.isroutine(value):
            continue
        if getattr(value, "__module__", None) in homes:
            yield f"{module.__name__}:{name}", value


def _torch_functions() -> Iterator[tuple[str, Callee]]:
    """`torch.relu` and the like; not `torch.load`, `torch.compile` and other entry points of the library."""
    for name, value in _routines(torch, frozenset({"torch", "torch.functional"})):
        is_tensor_function = getattr(value, "__qualname__", "").startswith("_VariableFunctionsClass.")
        if is_tensor_function or value.__module__ == "torch.functional" or name.startswith("torch:sym_"):
            yield name, value
    yield "torch:_check", torch._check
    yield "torch:_sym_sqrt", torch._sym_sqrt  # type: ignore[attr-defined]


@cache
def functions() -> dict[str, Callee]:
    """Every Python function that text may name, by `module:name`."""
    known: dict[str, Callee] = {f"builtins:{f.__name__}": f for f in _BUILTINS}
    for name, value in vars(operator).items():
        if inspect.isbuiltin(value) and not name.startswith("_") and name != "call":
            known[f"operator:{name}"] = value
    known.update(_routines(math, frozenset({"math"})))
    known.update(_torch_functions())
    known.update(_routines(torch.nn.functional, frozenset({"torch", "torch.nn.functional", "torch._C._nn"})))
    for module, home in ((torch.special, "_special"), (torch.linalg, "_linalg"), (torch.fft, "_fft")):
        known.update(_routines(module, frozenset({f"torch._C.{home}", module.__name__})))
    return known


@cache
def _names() -> dict[Callee, str]:
    names: dict[Callee, str] = {}
    for name, value in functions().items():
        names.setdefault(value, name)
    return names


@cache
def callee_name(target: Any) -> str:
    """The name of a call target in dump text. Re-exported functions go by their public name."""
    if isinstance(target, OpOverload | HigherOrderOperator):
        return target_name(target)
    public = _names().get(target)
    if public is not None:
        return public
    if hasattr(target, "__qualname__"):
        return target_name(target)
    kind = type(target)  # a callable object: its own repr holds an address
    return f"{kind.__module__}:{kind.__qualname__}"


def resolve(name: str, extra: Mapping[str, Callee]) -> Callee:
    """The callable of that name. UnknownNameError, with advice, for anything not on the list."""
    if name in extra:
        return extra[name]
    op = BY_NAME.get(name)
    if op is not None:
        return op.target
    if ":" in name:
        return _function(name)
    if name.startswith("higher_order."):
        return _higher_order(name)
    return _overload(name)


def _function(name: str) -> Callee:
    found = functions().get(name)
    if found is not None:
        return found
    raise UnknownNameError(
        f"the Python function {name!r} is not one that text may name",
        advice=f"if you trust it, give it: parse(text, functions={{{name!r}: function}})",
    )


def _higher_order(name: str) -> Callee:
    short = name.removeprefix("higher_order.")
    found = getattr(torch.ops.higher_order, short, None) if short.isidentifier() else None
    if isinstance(found, HigherOrderOperator):
        return found
    raise UnknownNameError(
        f"unknown higher-order op {short!r}", advice="import the library that defines it, then parse again"
    )


def _overload(name: str) -> Callee:
    parts = name.split(".")
    found: Any = None
    if _OP.fullmatch(name):
        if (register := ON_DEMAND.get(parts[0])) is not None:
            register()
        found = torch.ops
        for part in parts:
            found = getattr(found, part, None)
    if isinstance(found, OpOverload):
        return found
    if len(parts) == 1:
        raise UnknownNameError(f"unknown op {name!r}", advice=suggest(name, BY_NAME, noun="ops"))
    raise UnknownNameError(
        f"unknown op {name!r}",
        advice="write it namespace.op.overload, and import the library that defines it before parsing",
    )
