"""Kernel registry: kernels by target and op of the integer form.

    @kernel("x86", "linear_dynamic")
    def fbgemm(call: Call) -> Kernel: ...

A maker inspects one call and returns its kernel, or raises NoKernelError with the reason. Kernel selection decides
among several; an op without any runs as the integer form writes it, which is exact and slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from torch import Tensor, fx

from quantc.errors import UnknownNameError, suggest
from quantc.integer.library import OPS, op_of
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.qdq.ops import is_quantize
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.target import TARGETS


class NoKernelError(Exception):
    """The reason why a kernel cannot take a call. Never reaches the user: it is recorded in the report, unless it is empty:
    the call is none of the kernel's business."""


@dataclass(frozen=True)
class Call:
    """A node that calls an op, with arguments by name; constants are resolved to tensors."""

    program: Program
    node: fx.Node

    @property
    def op(self) -> str:
        """Registry key: the name of an integer op, or of a dialect op, prefixed as `aten.linear` if the integer form has a `linear` too."""
        own = op_of(self.node.target)
        name = op_name(self.node) if own is None else own.name
        return f"aten.{name}" if own is None and name in OPS else name

    @cached_property
    def arguments(self) -> dict[str, Any]:
        target: Any = self.node.target
        names = [argument.name for argument in target._schema.arguments]
        given = {**dict(zip(names, self.node.args, strict=False)), **self.node.kwargs}
        return {name: self._value(value) for name, value in given.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            tensor = self.program.tensor(value)
            return value if tensor is None else tensor.detach()
        return value

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def tensor(self, name: str) -> Tensor:
        """An argument that must be a constant; NoKernelError if it is not."""
        found = self[name]
        if not isinstance(found, Tensor):
            raise NoKernelError(f"{name} is not a constant")
        return found

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """Computed arguments in schema order: the inputs of the kernel."""
        flat = [value for value in self.arguments.values() if isinstance(value, fx.Node)]
        listed = [item for value in self.arguments.values() if isinstance(value, list | tuple) for item in value]
        return (*flat, *(item for item in listed if isinstance(item, fx.Node)))


@dataclass(frozen=True)
class Placement:
    """A kernel and its inputs, for kernels that also absorb ops before the call and so read other nodes."""

    kernel: Kernel
    inputs: tuple[fx.Node, ...]


def highest_level(program: Program, value: Any) -> int:
    """Highest level an 8-bit tensor can have: the clamp of the op that made it; value-preserving ops are looked through.

    Nodes that replaced an op have its bound in the program's placements.
    """
    known = program.placements.highest
    while isinstance(value, fx.Node) and value not in known:
        target: Any = value.target
        if op_of(target) is not None or is_quantize(value):
            names = [argument.name for argument in target._schema.arguments]
            at = next((names.index(name) for name in ("qmax", "quant_max") if name in names), None)
            found = value.args[at] if at is not None and at < len(value.args) else None
            return found if isinstance(found, int) and found > 0 else MAX_LEVEL
        value = value.args[0] if value.op == "call_function" and value.args else None
    return known[value] if isinstance(value, fx.Node) else MAX_LEVEL


MAX_LEVEL = 255
"""The highest level of any byte."""

Maker = Callable[[Call], "Kernel | Placement"]

KERNELS: dict[str, dict[str, list[Maker]]] = {"x86": {}, "qnnpack": {}}
"""By target, then by op."""
MODULES = (
    "dynamic_linear",
    "dynamic_conv",
    "dynamic_recurrent",
    "fp16_recurrent",
    "int8_conv",
    "fbgemm_conv",
    "int8_conv_transpose",
    "float_conv",
    "int8_elementwise",
    "int8_pools",
    "int8_reductions",
    "int8_norms",
    "int8_linear",
    "int8_linear_activation",
    "int8_activations",
    "int8_matmul",
    "qnnpack_conv",
    "qnnpack_linear",
    "qnnpack_shared",
    "qnnpack_activations",
    "native_linear",
    "weight_only_kernels",
    "embedding",
    "dequantized_weights",
)


def kernel(target: str, *ops: str) -> Callable[[Maker], Maker]:
    """Register a maker for ops on a target, which may be one from outside."""

    def add(maker: Maker) -> Maker:
        for op in ops:
            KERNELS.setdefault(target, {}).setdefault(op, []).append(maker)
        return maker

    return add


def larger_kernel(target: str, *ops: str) -> Callable[[Maker], Maker]:
    """Register a maker that also absorbs ops before the call; these are tried first."""

    def add(maker: Maker) -> Maker:
        LARGER.add(maker)
        return kernel(target, *ops)(maker)

    return add


LARGER: set[Maker] = set()
"""The makers of kernels that do the work of ops before theirs too."""


def _place(maker: Maker) -> tuple[bool, int]:
    """Sort key of a maker among those for its op: its module, in any order of import; third-party makers come last."""
    package, _, name = maker.__module__.rpartition(".")
    is_ours = package == __package__ and name in MODULES
    return maker not in LARGER, MODULES.index(name) if is_ours else len(MODULES)


def kernels_for(target: str) -> dict[str, list[Maker]]:
    """Makers of a target, by op; UnknownNameError if there is no such target. A package from outside registers its
    kernels as its target is imported."""
    for name in MODULES:
        import_module(f"quantc.targets.kernels.{name}")
    if target not in KERNELS and target in TARGETS:
        _ = TARGETS[target].function
    if target not in KERNELS:
        raise UnknownNameError(
            f"there are no kernels for {target!r}",
            where=f"qc.lower(..., {target!r})",
            advice=suggest(str(target), KERNELS, noun="targets"),
        )
    for makers in KERNELS[target].values():
        makers.sort(key=_place)
    return KERNELS[target]


def candidates(makers: list[Maker], call: Call, allow_float: bool) -> tuple[list[Placement], str]:
    """Kernels that support a call, and the reasons of those that do not."""
    if not call.inputs and isinstance(call["x"], Tensor):
        return [], "its activation is a constant"
    if call["rounding"] not in (None, "half-even") or call["saturate"] is False:
        return [], "kernels round half to even and saturate"
    found: list[Placement] = []
    reasons: list[str] = []
    for maker in makers:
        try:
            made = maker(call)
        except NoKernelError as refusal:
            reasons += [str(refusal)] if str(refusal) else []
            continue
        placement = made if isinstance(made, Placement) else Placement(made, call.inputs)
        if allow_float or not placement.kernel.computes_in_float:
            found.append(placement)
    return found, "; ".join(dict.fromkeys(reasons)) or ("" if found else "there is no kernel for it")
