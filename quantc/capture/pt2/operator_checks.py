"""Validation of operator names that torch may look up.

torch resolves them with `getattr`, starting at `torch`, `math` or `operator`. Here they are checked as text first:
symbolic arithmetic and higher-order ops by exact name, all others only if the dispatcher already knows them.
"""

from __future__ import annotations

import re

import torch

from quantc.capture.pt2.expression_checks import words

ARITHMETIC = words("add and_ eq floordiv ge getitem gt le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv")
SYMBOLIC = frozenset(f"_operator.{name}" for name in ARITHMETIC) | words(
    "math.ceil math.floor math.trunc torch._sym_sqrt torch.sym_float torch.sym_int torch.sym_ite torch.sym_max"
    " torch.sym_min torch.sym_not torch.sym_sum"
)
# Those that only run graphs stored beside them, or wrap a dispatcher op. Delegates, compiled kernels, custom classes
# and functions passed by reference are left out.
HIGHER_ORDER = words(
    "_export_tracepoint associative_scan auto_functionalized auto_functionalized_v2 cond flex_attention hints_wrapper"
    " invoke_subgraph map_impl out_dtype scan strict_mode tag_activation_checkpoint while_loop while_loop_stack_output"
    " with_effects wrap wrap_activation_checkpoint wrap_with_autocast wrap_with_set_grad_enabled"
)
# Dispatcher ops that reach out of the model when they run: files, other processes, the profiler, compiled kernels.
OUTSIDE_OPS = frozenset({"aten::from_file", "aten::_print", "export::access_subclass_inner_tensor"})
OUTSIDE = words(
    "_c10d_functional _c10d_functional_autograd _dtensor _test c10d debug_mode_ops debugprims inductor profiler"
    " static_runtime symm_mem"
)
DISPATCHED = re.compile(r"torch\.ops\.([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)", re.ASCII)
LOOKED_UP = ("_operator", "torch", "math", "#")
DOTTED = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*", re.ASCII)


def why_not_operator(target: str) -> str | None:
    """Reason why a node may not call this target; None if it may."""
    if target in SYMBOLIC:
        return None
    owner, _, name = target.rpartition(".")
    if owner == "torch.ops.higher_order":
        return None if name in HIGHER_ORDER else f"calls the higher-order op `{name[:60]}`, which can run foreign code"
    parts = DISPATCHED.fullmatch(target)
    if parts is None:
        return f"calls `{target[:60]}`, which is not an operator"
    return _why_not_dispatched(*parts.groups())


def _why_not_dispatched(namespace: str, name: str, overload: str) -> str | None:
    op = f"{namespace}::{name}"
    if namespace in OUTSIDE or op in OUTSIDE_OPS:
        return f"calls `{op}`, which reaches out of the model"
    full = op if overload == "default" else f"{op}.{overload}"
    if torch._C._dispatch_has_kernel(full):
        return None
    return f"calls `{full}`, which is not registered (import the package that defines it before loading)"


def why_not_lookup(target: str) -> str | None:
    """Reason why torch may not look up this name for a node's source records; None if it may."""
    if not target.startswith(LOOKED_UP):
        return None
    if DOTTED.fullmatch(target) and not any(part.startswith("__") for part in target.split(".")):
        return None
    return f"names its source function `{target[:60]}`, which is not a function of torch"
