"""Kernels that both targets have: they ask for no engine's packing and for no instruction set.

QNNPACK has kernels of its own for sums, pools and activations. torch takes them only where QNNPACK is the engine of the
whole process, which is not ours to choose; and they compute no better: its sums are rounded twice, and its activations
are tables that are made anew for each call.
"""

from __future__ import annotations

from importlib import import_module

from quantc.targets.kernels.kernel_table import KERNELS, kernel

SHARED = ("int8_elementwise", "int8_pools", "int8_reductions", "int8_norms", "int8_matmul")
"""The modules whose kernels are for any processor."""


def _share() -> None:
    """Offer for QNNPACK what these modules offer for x86."""
    modules = {import_module(f"quantc.targets.kernels.{name}").__name__ for name in SHARED}
    for op, makers in KERNELS["x86"].items():
        for maker in makers:
            if maker.__module__ in modules:
                kernel("qnnpack", op)(maker)


_share()
