"""A warning for sums that the processor at hand cuts off.

`convert` sees to it that none is, for the instruction set of the backend. But a program may have been converted for
another one, or a config may have asked for more bits than are safe.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from quantc.integer.proof.bounds import by_channel, decisive, pair_reach
from quantc.kernels.packed import Kernel

PAIR_BITS = 16
MOST_NAMES = 8
"""How many ops a warning names."""


def adds_in_16_bits() -> bool:
    """Whether kernels for bytes add two products in 16 bits on this processor: x86 without VNNI."""
    capability = torch.backends.cpu.get_cpu_capability()
    if "AVX" not in capability:
        return False
    return not torch.cpu._is_vnni_supported()


def can_saturate(kernel: Kernel) -> bool:
    """Whether two products of a kernel can leave 16 bits, whatever it reads."""
    found = kernel.pair_sums
    if found is None:
        return False
    weights, highest = found
    return bool(pair_reach(decisive(by_channel(weights)), 0, highest).beyond(PAIR_BITS).any())


def warn_of_saturation(kernels: Iterable[tuple[str, Kernel]]) -> None:
    """Name the ops whose sums may be cut off here."""
    if not adds_in_16_bits():
        return
    names = [name for name, kernel in kernels if can_saturate(kernel)]
    if not names:
        return
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    warnings.warn(
        f"sums can saturate in {', '.join(names[:MOST_NAMES])}{more}: this processor adds two products of bytes in "
        f"{PAIR_BITS} bits, and what goes beyond is cut off. Quantize for a backend whose instruction set is that of "
        'this processor, with reduce_range="weights" (of qc.quantize and qc.convert), which makes room where it is '
        "needed; run-time activations of x86's dynamic mode, up to 127, need none",
        stacklevel=3,
    )
