"""Fake execution of traced ops: sizes and dtypes without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from quantc.capture.symbolic.proxies import ProxyValue
from quantc.ir.dialect import BY_NAME, in_place, ops_in
from quantc.ir.op_row import Family

NO_SHAPE = (
    NotImplementedError,
    UnsupportedOperatorException,
    DynamicOutputShapeException,
    DataDependentOutputException,
)
"""Exceptions of ops that run on real tensors alone, or whose result's shape depends on the data."""


aten = torch.ops.aten
TRAINING = 5
"""Position of the `training` argument of batch norm."""
FUNCTIONS = tuple(BY_NAME[name] for name in ops_in(Family.ACTIVATION, but=("clamp",)))
ELEMENTWISE = frozenset(
    [
        *(op.target for op in FUNCTIONS),
        *(written for op in FUNCTIONS if (written := in_place(op)) is not None),
        *(aten.hardtanh.default, aten.hardtanh_.default, aten.relu6.default, aten.relu6_.default),
    ]
)
"""Ops on one tensor whose result is of its size and, if it is float, of its dtype."""


def _like_its_input(node: fx.Node, args: Sequence[Any]) -> bool:
    """True if a call's result has the size and dtype of its first argument, so that it need not be run: with symbolic
    sizes the decompositions of norms are slower than everything else in a convolutional network.
    """
    is_norm = node.target is aten.batch_norm.default and len(args) > TRAINING and args[TRAINING] is False
    if not is_norm and node.target not in ELEMENTWISE:
        return False
    x = next(iter(args), None)
    return isinstance(x, torch.Tensor) and x.dtype == torch.float32


class Shadows:
    """Runs calls on fake tensors. Without example inputs there are none, and nothing is known."""

    def __init__(self, fakes: FakeTensorMode | None) -> None:
        self.fakes = fakes

    @property
    def has_symbols(self) -> bool:
        """True if some sizes are dynamic."""
        return self.fakes is not None and self.fakes.shape_env is not None

    def compute(self, node: fx.Node) -> Any:
        """Fake value of a call; None if an operand's is unknown or the op cannot be run on fakes."""
        if self.fakes is None or any("val" not in operand.meta for operand in node.all_input_nodes):
            return None
        args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
        if self.has_symbols and _like_its_input(node, args):
            return args[0]
        function: Any = node.target
        try:
            with torch._C.DisableTorchFunction(), self.fakes, torch.no_grad(), self._dispatcher():
                return function(*args, **kwargs)
        except NO_SHAPE:
            return None
        except RuntimeError as error:
            if "no fake impl registered" in str(error):
                return None
            raise

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of any callable on the fakes of traced values; None if it cannot be run on them."""
        values = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is ProxyValue]
        if self.fakes is None or any(value.fake is None for value in values):
            return None
        given, named = pytree.tree_map_only(ProxyValue, lambda value: value.fake, (args, kwargs))
        try:
            with torch._C.DisableTorchFunction(), self.fakes, torch.no_grad(), self._dispatcher():
                return function(*given, **named)
        except Exception:  # noqa: BLE001 - a module that is kept whole may do anything
            return None

    def _dispatcher(self) -> AbstractContextManager[Any]:
        """Symbolic sizes need the decompositions written in Python: those in C++ take plain numbers."""
        return enable_python_dispatcher() if self.has_symbols else nullcontext()


def known_truth(value: torch.SymBool) -> bool | torch.SymBool:
    """Plain True or False where that holds for every size."""
    opposite: Any = torch.sym_not(value)  # type: ignore[no-untyped-call]
    if statically_known_true(value):
        return True
    return False if statically_known_true(opposite) else value


def expression(value: Any) -> str:
    """A symbolic number as text; empty for anything else."""
    if not isinstance(value, torch.SymInt | torch.SymFloat):
        return ""
    return "" if value.node.expr.is_number else f"{type(value).__name__} {value.node.expr}"
