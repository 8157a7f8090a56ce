"""Warnings for sums that saturate on the current processor.

`convert` prevents saturation for the backend's instruction set. But a program may have been converted for another one,
or a config may have asked for more bits than are safe.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantc.integer.proof.bounds import by_channel, decisive, pair_reach
from quantc.integer.proof.overflow_report import accumulators, why_not_provable
from quantc.ir.program import Program
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.packing import linear_to_floats, packed_linear

PAIR_BITS = 16
MAX_NAMES = 8
"""Maximum number of ops that a warning names."""


INSTRUCTION_SETS_HERE: Mapping[str, str] = {"AVX2": "avx2", "AVX512": "avx512"}
"""The instruction set of byte kernels without VNNI, by torch's name for an x86 processor."""
COLUMNS, LEVEL, BYTE = 64, 127, 255
"""A product of two rows that are as large as bytes can be."""


def instruction_set_here() -> str:
    """Instruction set of torch's int8 kernels, if they add two products in 16 bits; else empty."""
    return INSTRUCTION_SETS_HERE.get(torch.backends.cpu.get_cpu_capability(), "") if _is_cut_off() else ""


def instruction_set_of_processor() -> str:
    """Like `instruction_set_here`, for engines outside torch, which go by the processor itself."""
    if torch.cpu._is_vnni_supported():
        return ""
    return INSTRUCTION_SETS_HERE.get(torch.backends.cpu.get_cpu_capability(), "")


@cache
def _is_cut_off() -> bool:
    """True if one of torch's engines saturates the sum of two products. Tested with a real GEMM: environment variables
    (`FBGEMM_ENABLE_INSTRUCTIONS`, `ONEDNN_MAX_CPU_ISA`) restrict engines to fewer instructions than the processor has.
    """
    row, levels = torch.full((1, COLUMNS), BYTE, dtype=torch.uint8), torch.full((1, COLUMNS), LEVEL, dtype=torch.int8)
    with torch.inference_mode(False), torch.no_grad():
        found = [product(row, levels) for name, product in PRODUCTS.items() if name in engines()]
    return any(float(product) != COLUMNS * LEVEL * BYTE for product in found)


def engines() -> list[str]:
    """Quantized engines of this build of torch."""
    return [str(name) for name in torch.backends.quantized.supported_engines]


def _by_fbgemm(row: Tensor, levels: Tensor) -> Tensor:
    return linear_to_floats(row, None, 0, packed_linear("fbgemm", levels, torch.ones(1), None), relu=False)


def _by_onednn(row: Tensor, levels: Tensor) -> Tensor:
    packed, zeros = torch.ops.onednn.qlinear_prepack(levels, None), torch.zeros(1, dtype=torch.int32)
    settings: tuple[Any, ...] = (torch.ones(1), zeros, None, 1.0, 0, torch.float32, "none", [], "")
    made: Tensor = torch.ops.onednn.qlinear_pointwise(row, 1.0, 0, packed, *settings)
    return made


PRODUCTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"fbgemm": _by_fbgemm, "onednn": _by_onednn}


def adds_in_16_bits() -> bool:
    """True if torch's int8 kernels add two products in 16 bits here: on x86 without VNNI they do."""
    return bool(instruction_set_here())


def can_saturate(kernel: Kernel) -> bool:
    """True if the sum of two products of a kernel can exceed 16 bits for some input."""
    found = kernel.pair_sums
    if found is None:
        return False
    weights, highest = found
    return bool(pair_reach(decisive(by_channel(weights), "adjacent"), 0, highest).beyond(PAIR_BITS).any())


def warn_of_saturation(kernels: Iterable[tuple[str, Kernel]], program: Program | None = None) -> None:
    """Warn of ops whose sums may saturate here, and name the instruction sets the program was converted for."""
    here = instruction_set_here()
    names = [name for name, kernel in kernels if can_saturate(kernel)] if here else []
    _warn(names, here, program)


def warn_of_products(program: Program) -> None:
    """Like `warn_of_saturation`, for a program in Q/DQ form that an engine outside torch runs."""
    here = instruction_set_of_processor()
    rows = accumulators(program).rows if here and why_not_provable(program) is None else ()
    _warn([row.node for row in rows if here in row.saturates_on], here, program)


def _warn(names: list[str], here: str, program: Program | None) -> None:
    if not names:
        return
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    cut_off = f"adds two products of bytes in {PAIR_BITS} bits, and what goes beyond is cut off"
    warnings.warn(
        f"sums can saturate in {', '.join(names[:MAX_NAMES])}{more}: {_advice(program, here, cut_off)}", stacklevel=4
    )


def _advice(program: Program | None, here: str, cut_off: str) -> str:
    """Message: why the program has no reduced range for these kernels, and what to do."""
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
