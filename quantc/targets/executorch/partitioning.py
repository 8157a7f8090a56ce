"""Partitioner wrappers that undo partial markings and report refusals.

XNNPACK's partitioner marks the quantize and dequantize ops around an op as fused while it still checks whether it can
take the op. If it cannot, the marks stay, and marked ops do nothing in the delegate: integers are read as floats. So
the marks of refused ops are removed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from quantc.targets.executorch.lazy_imports import XNNPACK

NAME = "quantc"
"""Under this key an op carries, in what exporters hand on for users, the name of the program's node."""
IMPLICIT = "IS_IMPLICIT_Q_DQ_TAG"
"""XNNPACK's mark of quantize and dequantize ops that are part of an op beside them."""
LOGGERS = tuple(
    f"{XNNPACK}.partition.config.{module}"
    for module in ("xnnpack_config", "gemm_configs", "generic_node_configs", "node_configs")
)

TRACE = "torch.__trace"
"""The logger of all that torch's compilers trace; a handler on it costs more time than all the rest."""


def name_of(node: fx.Node) -> str:
    """Name of the program's node that an ExecuTorch op comes from; empty if none."""
    return str((node.meta.get("custom") or {}).get(NAME, ""))


def give_name(node: fx.Node, name: str) -> None:
    """Tag an op with the program's node it belongs to; an empty name means none."""
    node.meta["custom"] = {NAME: name}


def is_implicit(node: fx.Node) -> bool:
    """True if XNNPACK treats a quantize or dequantize op as part of its neighbour."""
    return bool(node.meta.get(IMPLICIT, False))


def guard_partitioners(partitioners: Sequence[Any]) -> list[Any]:
    """The same partitioners; those with a config table remove the marks of ops they refuse."""
    for partitioner in partitioners:
        for config in getattr(partitioner, "target_partitioner_configs", {}).values():
            if "check_constraints" not in vars(config):
                config.check_constraints = _Careful(config.check_constraints)
    return list(partitioners)


def _is_number(node: fx.Node) -> bool:
    """True if an operand or result has rank 0: XNNPACK's delegate does not support these and fails."""
    kinds = [near.meta.get("val") for near in (node, *node.all_input_nodes)]
    return any(isinstance(kind, torch.Tensor) and kind.dim() == 0 for kind in kinds)


class _Careful:
    """A constraint check without side effects if it fails.

    Ops in a branch or a loop are left to ExecuTorch's own kernels: the check accepts them, but the delegate does not
    look there, and the op would be left without a kernel.
    """

    def __init__(self, check: Any) -> None:
        self.check = check

    def __call__(self, node: fx.Node, exported: Any) -> bool:
        if _is_number(node) or node.graph is not exported.graph:
            return False
        around = [*node.all_input_nodes, *node.users]
        around += [further for near in node.users for further in near.users]
        around += [further for near in node.all_input_nodes for further in near.all_input_nodes]
        unmarked = [near for near in around if not is_implicit(near)]
        is_taken = bool(self.check(node, exported))
        if not is_taken:
            for near in unmarked:
                near.meta.pop(IMPLICIT, None)
        return is_taken


class _Reasons(logging.Handler):
    """Keeps what partitioners log about nodes they refuse."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        node, reason = getattr(record.msg, "node", None), getattr(record.msg, "reason", "")
        if isinstance(node, fx.Node) and (name := name_of(node)):
            self.found[name] = str(reason)


@contextmanager
def reasons() -> Iterator[dict[str, str]]:
    """Context manager that collects why nodes are refused, by the name of the program's node."""
    handler = _Reasons()
    trace = logging.getLogger(TRACE)
    was_disabled, trace.disabled = trace.disabled, True
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
    try:
        yield handler.found
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
        trace.disabled = was_disabled
