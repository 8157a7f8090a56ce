"""Cost of the tracing flow: Python per intercepted call, and ResNet-18 beside the graph-lowered one.

python -m benchmarks.tracing
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.bench.networks import resnet18
from quantc.flows.tracing import convert, prepare
from quantc.flows.tracing.extract_program import Compute

WIDTH = 16


class Chain(nn.Module):
    """Small layers: almost all of their time is Python."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def median(call: Callable[[], Any], times: int) -> float:
    """Seconds."""
    taken: list[float] = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def per_op(depth: int = 50) -> float:
    """Microseconds of Python per intercepted call, kernels excluded: the converted chain, less its kernels."""
    torch.manual_seed(0)
    model, x = Chain(depth).eval(), torch.randn(2, WIDTH)
    prepared = prepare(model, x)
    forward, taken = Compute.forward, [0.0]

    def timed(compute: Compute, *operands: Tensor) -> Any:
        start = time.perf_counter()
        made = forward(compute, *operands)
        taken[-1] += time.perf_counter() - start
        return made

    def call() -> None:
        taken.append(0.0)
        quantized(x)

    with torch.inference_mode():
        prepared(x)
        quantized = convert(prepared)
        for _ in range(10):
            quantized(x)
        with mock.patch.object(Compute, "forward", timed):
            whole = median(call, 200)
    return (whole - statistics.median(taken[1:])) / (2 * depth) * 1e6


def resnet(times: int) -> tuple[float, float]:
    """Milliseconds at batch 1: traced, and lowered as a graph; turn and turn about."""
    torch.manual_seed(0)
    model, x = resnet18(), torch.randn(1, 3, 224, 224)
    prepared = prepare(model, x)
    program = qc.prepare(qc.capture(model, (x,)), "x86")
    with torch.inference_mode():
        prepared(x)
        qc.calibrate(program, [x], progress="silent")
        lowered, quantized = qc.lower(qc.convert(program), "x86"), convert(prepared)
        for _ in range(8):
            if not torch.equal(lowered(x), quantized(x)):
                raise SystemExit("the two do not compute the same")
        rows = [(median(lambda: quantized(x), 1), median(lambda: lowered(x), 1)) for _ in range(times)]
    traced, graph = (statistics.median(column) * 1e3 for column in zip(*rows, strict=True))
    return traced, graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=60)
    times = parser.parse_args().times
    torch.set_num_threads(1)
    sys.stdout.write(f"python per intercepted op: {per_op():.1f} µs\n")
    traced, graph = resnet(times)
    sys.stdout.write(f"ResNet-18, batch 1: traced {traced:.2f} ms, graph {graph:.2f} ms, {graph / traced:.2f} x\n")


if __name__ == "__main__":
    main()
