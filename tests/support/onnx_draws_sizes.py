"""Functions of sizes that vary, and of scales that are found as the program runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantc.qdq import choose_qparams as run_time
from quantc.qdq.registration import decomposed_ops

decomposed = decomposed_ops()


def dynamic(x: Tensor) -> Any:
    scale, zero_point = decomposed.choose_qparams(x, 0, 255, 1e-7, torch.uint8)
    levels = decomposed.quantize_per_tensor(x, scale, zero_point, 0, 255, torch.uint8)
    return decomposed.dequantize_per_tensor(levels, scale, zero_point, 0, 255, torch.uint8)


def chosen(qmin: int, qmax: int, zero_point: int | None, per_token: bool) -> Callable[[Tensor], Tensor]:
    """Q/DQ with scales of the numbers themselves, for a tensor or for each token."""
    dtype = torch.int8 if qmin < 0 else torch.uint8

    def run(x: Tensor) -> Any:
        scale, zero = run_time.CHOOSE(x, per_token, zero_point, qmin, qmax, 1e-5)
        if per_token:
            levels = decomposed.quantize_per_token(x, scale, zero, qmin, qmax, dtype)
            return decomposed.dequantize_per_token(levels, scale, zero, qmin, qmax, dtype, torch.float32)
        levels = decomposed.quantize_per_tensor(x, scale, zero, qmin, qmax, dtype)
        return decomposed.dequantize_per_tensor(levels, scale, zero, qmin, qmax, dtype)

    return run


def signed(qmin: int, zero_point: int) -> Callable[[Tensor], Tensor]:
    """Q/DQ in int8, which is written as uint8."""

    def run(x: Tensor) -> Any:
        levels = decomposed.quantize_per_tensor(x, 0.02, zero_point, qmin, 127, torch.int8)
        return decomposed.dequantize_per_tensor(levels, 0.02, zero_point, qmin, 127, torch.int8)

    return run


ON_SIZES: dict[str, Callable[[Tensor], Any]] = {
    "ceil-division": lambda x: x[: -(-x.shape[0] // 2)] * 2,
    "floor-division": lambda x: x[: x.shape[0] // 3 + 1],
    "negative-quotient": lambda x: x[(-x.shape[0]) // 3 :],
    "remainder": lambda x: x[x.shape[0] % 3 :],
    "negative-remainder": lambda x: x[(-x.shape[0]) % 3 :],
    "sums": lambda x: x.new_zeros(x.shape[0] * 2 + 1 - x.shape[0], 2) + 1,
    "ends": lambda x: x[: torch.sym_min(x.shape[0], 4)],  # type: ignore[no-untyped-call]
    "largest": lambda x: torch.zeros(torch.sym_max(x.shape[0], 6)),  # type: ignore[no-untyped-call]
    "scaled": lambda x: x * x.shape[0],
    "counted": lambda x: torch.arange(x.shape[0]) + torch.arange(-x.shape[0], 0),
    "narrowed": lambda x: x.narrow(0, 1, x.shape[0] - 2),
    "made": lambda x: torch.full((x.shape[0], 2), 3.0) + torch.ones(x.shape[0], 1),
    "expanded": lambda x: x[:1].expand(x.shape[0], -1) + x,
    "repeated": lambda x: x.repeat(2, 1).reshape(2, x.shape[0], -1).flatten(0, 1),
    "rolled": lambda x: x.roll(-9, 0) + x.roll(7, 0),
    "varied": lambda x: x.var(0) + x.std((0, 1)),
}
RUN_TIME: dict[str, Callable[[Tensor], Any]] = {
    "dynamic": dynamic,
    "int8": signed(-128, 5),
    "int8-narrow": signed(-127, 0),
    "own-affine": chosen(0, 255, None, False),
    "own-symmetric": chosen(-127, 127, 0, False),
    "tokens-affine": chosen(-128, 127, None, True),
    "tokens-symmetric": chosen(-127, 127, 0, True),
}
