"""A linear layer on onednn with a float result, and programs that add to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantc.ir.program import Program
from quantc.targets.kernels.dynamic_linear import Weight
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_linear import OnOnednn, Reading
from tests.support.by_hand import Builder, aten


def plain_layer(relu: bool = False) -> tuple[OnOnednn, Any]:
    """A linear layer with a float result, and what it computes in int64 and float64."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-64, 65, (5, 8)).astype(np.int8)
    bias = rng.normal(size=5).astype(np.float32)
    ending = Ending(torch.full((5,), 0.01), 0, 0, 0, torch.float32)
    kernel = OnOnednn(
        Weight(torch.from_numpy(weight), ending.multiplier, torch.from_numpy(bias)), Reading(7, 255), ending
    )
    if relu:
        kernel.absorb("relu")

    def exact(x: Tensor) -> Any:
        sums = (x.numpy().astype(np.int64) - 7) @ weight.astype(np.int64).T
        return sums * np.float64(np.float32(0.01)) + bias

    return kernel, exact


def with_layer(kernel: OnOnednn, add: Any) -> Program:
    """A program in which something is added to a layer's result."""
    build = Builder()
    x, other = build.input("x", torch.zeros(3, 8, dtype=torch.uint8)), build.input("other", torch.zeros(3, 5))
    build.root.add_module("kernel_linear", kernel)
    own = build.graph.create_node("call_module", "kernel_linear", (x,), name="kernel_linear")
    build.values[own] = torch.zeros(3, 5)
    own.meta["val"] = other.meta["val"]
    return build.program(*add(build, own, other))


ADDED: dict[str, tuple[Any, bool]] = {
    "to the right": (lambda build, own, other: [build.call(aten.add.Tensor, own, other)], True),
    "to the left": (lambda build, own, other: [build.call(aten.add.Tensor, other, own)], True),
    "times two": (lambda build, own, other: [build.call(aten.add.Tensor, own, other, alpha=2)], False),
    "a number": (lambda build, own, other: [build.call(aten.add.Tensor, own, 1.0)], False),
    "itself": (lambda build, own, other: [build.call(aten.add.Tensor, own, own)], False),
    "read again": (lambda build, own, other: [build.call(aten.add.Tensor, own, other), own], False),
    "a row": (
        lambda build, own, other: [build.call(aten.add.Tensor, own, build.call(aten.select.int, other, 0, 0))],
        False,
    ),
}
