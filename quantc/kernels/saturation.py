"""A warning for sums that the processor at hand cuts off.

`convert` sees to it that none is, for the instruction set of the backend. But a program may have been converted for
another one, or a config may have asked for more bits than are safe.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch

from quantc.integer.proof.bounds import by_channel, decisive, pair_reach
from quantc.integer.proof.report import accumulators, why_not_provable
from quantc.kernels.packed import Kernel
from quantc.program import Program

PAIR_BITS = 16
MOST_NAMES = 8
"""How many ops a warning names."""


INSTRUCTION_SETS_HERE: Mapping[str, str] = {"AVX2": "avx2", "AVX512": "avx512"}
"""What torch calls a processor of the x86 family, and the instruction set of its kernels for bytes without VNNI."""


def instruction_set_here() -> str:
    """The instruction set of this processor, where its kernels add two products of bytes in 16 bits; empty elsewhere."""
    if torch.cpu._is_vnni_supported():
        return ""
    return INSTRUCTION_SETS_HERE.get(torch.backends.cpu.get_cpu_capability(), "")


def adds_in_16_bits() -> bool:
    """Whether kernels for bytes add two products in 16 bits on this processor: x86 without VNNI."""
    return bool(instruction_set_here())


def can_saturate(kernel: Kernel) -> bool:
    """Whether two products of a kernel can leave 16 bits, whatever it reads."""
    found = kernel.pair_sums
    if found is None:
        return False
    weights, highest = found
    return bool(pair_reach(decisive(by_channel(weights), "adjacent"), 0, highest).beyond(PAIR_BITS).any())


def warn_of_saturation(kernels: Iterable[tuple[str, Kernel]], program: Program | None = None) -> None:
    """Name the ops whose sums may be cut off here, and the instruction sets the program was converted for."""
    here = instruction_set_here()
    names = [name for name, kernel in kernels if can_saturate(kernel)] if here else []
    _warn(names, here, program)


def warn_of_products(program: Program) -> None:
    """The same for a program in Q/DQ form that an engine outside torch runs here."""
    here = instruction_set_here()
    rows = accumulators(program).rows if here and why_not_provable(program) is None else ()
    _warn([row.node for row in rows if here in row.saturates_on], here, program)


def _warn(names: list[str], here: str, program: Program | None) -> None:
    if not names:
        return
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    cut_off = f"adds two products of bytes in {PAIR_BITS} bits, and what goes beyond is cut off"
    warnings.warn(
        f"sums can saturate in {', '.join(names[:MOST_NAMES])}{more}: {_told(program, here, cut_off)}", stacklevel=4
    )


def _told(program: Program | None, here: str, cut_off: str) -> str:
    """Why there was no room made for them, and what to do."""
    sets = {} if program is None else program.plan.instruction_sets
    others = [
        f"{name or 'no instruction set in particular'} (backend {of})" for of, name in sets.items() if name != here
    ]
    if program is not None and others:
        return (
            f"{program.name} was converted for {', '.join(others)}, and this processor is {here}: it {cut_off}. Quantize "
            f"for a backend whose instruction set is {here}, such as x86: convert makes room there where it is needed"
        )
    return (
        f'this processor, {here}, {cut_off}. Convert with reduce_range="auto", the default, which makes room where it is '
        "needed; run-time activations of x86's dynamic mode, up to 127, need none"
    )
