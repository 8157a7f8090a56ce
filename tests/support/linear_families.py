"""Models whose linear layers run on the kernels of one x86 family."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

import quantc as qc
from quantc.targets.kernels import int8_linear, int8_linear_activation
from quantc.targets.kernels.int8_linear import Linear, OnFbgemm, OnOnednn
from quantc.targets.kernels.int8_linear_activation import QUANTIZE
from quantc.targets.kernels.kernel_agreement import KernelGap, kernel_agreement
from quantc.targets.kernels.kernel_table import KERNELS, kernels_for

CLOSE = 2e-6
"""How far floats may be off, relative to the largest: kernels sum in float32 what the integer form has in float64."""
FAMILIES: dict[str, type[Linear]] = {"fbgemm": OnFbgemm, "onednn": OnOnednn}


@contextmanager
def only(family: str) -> Iterator[None]:
    """No other kernels for linear layers than those of a family."""
    ops = kernels_for("x86")
    before = {op: list(makers) for op, makers in ops.items()}
    ops["linear"] = [getattr(int8_linear, family)]
    others = [maker for maker in ops[QUANTIZE] if maker.__module__ != int8_linear_activation.__name__]
    ops[QUANTIZE] = [getattr(int8_linear_activation, family), *others]
    try:
        yield
    finally:
        KERNELS["x86"].update(before)


def lowered(family: str, model: nn.Module, *inputs: Tensor, **options: Any) -> qc.Lowered:
    prepared = qc.prepare(qc.capture(model.eval(), inputs, **options), "x86")
    qc.calibrate(prepared, [inputs])
    with only(family):
        return qc.lower(qc.convert(prepared, reduce_range="weights"), "x86")


def gaps(module: qc.Lowered, *inputs: Tensor) -> tuple[KernelGap, ...]:
    found = kernel_agreement(module, *inputs)
    assert all(gap.steps <= 1 and gap.relative <= CLOSE for gap in found), "\n".join(map(str, found))
    return found


def layers(module: qc.Lowered) -> list[Linear]:
    return [kernel for kernel in module.modules() if isinstance(kernel, Linear)]
