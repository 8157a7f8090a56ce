"""Kernels shared by both targets: they need no engine's packing and no instruction set.

QNNPACK has its own kernels for adds, pools and activations. torch uses them only if QNNPACK is the process-wide engine,
which is not ours to choose; and they are no better: its adds round twice, and its activations are lookup tables rebuilt
at each call.
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
