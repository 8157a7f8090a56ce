"""One row by linear layers of quantc's own kernels, beside float32 and other tools, as a share of what a core can read.

    python -m benchmarks.native [--rows 1 4 16] [--shapes 2048x2048 8192x2048] [--rounds 30] [--json FILE]

Weights are distinct and take turns, more of them than the cache holds, as in a model. All tools take turns in one process,
on one thread; processor time counts, its lowest quarter, and only ratios mean anything. A core's speed of reading is that of
a loop in C++ over as many bytes. Peers: ONNX Runtime's MatMulNBits (accuracy levels 4, int8 activations by block, and 0, float)
and torch's `_weight_int4pack_mm_for_cpu` (bfloat16 activations), where they are installed. Both settings:

    FBGEMM_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python -m benchmarks.native
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear

from quantc.support.optional_dependency import is_installed
from quantc.targets.kernels.huge_pages import on_large_pages
from quantc.targets.kernels.native_library import compiler, native_library
from quantc.targets.kernels.native_linear import NativeW4, NativeW8
from quantc.targets.kernels.stored_weight import StoredWeight
from quantc.targets.kernels.weight_only_kernels import HalfLinear

GROUP = 32
BEYOND = 96 << 20
"""Bytes of all weights of a tool."""
READ = """
#include <cstddef>
#include <immintrin.h>
extern "C" int read_all(const char *from, size_t size) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t i = 0; i < size; i += 128) {
        _mm_prefetch(from + i + 1024, _MM_HINT_T0);
        _mm_prefetch(from + i + 1088, _MM_HINT_T0);
        a = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *)(from + i)));
        b = _mm256_xor_si256(b, _mm256_loadu_si256((const __m256i *)(from + i + 32)));
        c = _mm256_xor_si256(c, _mm256_loadu_si256((const __m256i *)(from + i + 64)));
        d = _mm256_xor_si256(d, _mm256_loadu_si256((const __m256i *)(from + i + 96)));
    }
    return _mm256_extract_epi32(_mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)), 0);
}
"""


@dataclass(frozen=True)
class Tool:
    """A call for each weight in turn, and the bytes of one."""

    calls: list[Callable[[], Any]]
    bytes: int


def reading(size: int) -> Tool:
    with tempfile.TemporaryDirectory() as name:
        source, made = Path(name) / "read.cpp", Path(name) / "read.so"
        source.write_text(READ, encoding="utf-8")
        subprocess.run([compiler(), "-O3", "-mavx2", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
        read = ctypes.CDLL(str(made)).read_all
    read.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    parts = [on_large_pages(lambda: torch.ones(size, dtype=torch.uint8), size) for _ in range(count(size))]
    return Tool([partial(_read, read, part) for part in parts], size)


def _read(read: Any, part: Tensor) -> None:
    read(part.data_ptr(), part.numel())


def count(size: int) -> int:
    return max(4, BEYOND // size)


def weight8(outputs: int, inputs: int) -> StoredWeight:
    levels = torch.randint(-127, 128, (outputs, inputs)).to(torch.int8)
    return StoredWeight(levels, torch.rand(outputs) / inputs, None, 0, None)


def weight4(outputs: int, inputs: int) -> StoredWeight:
    scale = torch.randint(64, 128, (outputs, inputs // GROUP)) * 2.0**-12
    levels = torch.randint(-8, 8, (outputs, inputs)).to(torch.int8)
    return StoredWeight(levels, scale, torch.randint(-2, 3, scale.shape), 1, GROUP)


def own(kind: type[Any], make: Callable[[int, int], StoredWeight], x: Tensor, outputs: int) -> Tool:
    inputs, size = x.shape[1], 0
    kernels = []
    for _ in range(count(outputs * inputs // (2 if make is weight4 else 1))):
        weight = make(outputs, inputs)
        kernel = kind(weight, None)
        kernel(x)
        size = 2 * outputs * inputs if kind is HalfLinear else kernel._packed[0].numel()
        kernels.append(kernel)
        if kind is not HalfLinear:
            kernel.drop(list(kernel.unpack(kernel._packed)))
    return Tool([partial(kernel, x) for kernel in kernels], size)


def by_torch(x: Tensor, outputs: int) -> Tool:
    """torch's 4-bit weights in groups, with bfloat16 activations."""
    inputs, halves = x.shape[1], x.bfloat16()
    calls: list[Callable[[], Any]] = []
    for _ in range(count(outputs * inputs // 2)):
        levels = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        scales = torch.rand(inputs // GROUP, outputs, 2).bfloat16()
        calls.append(partial(torch.ops.aten._weight_int4pack_mm_for_cpu, halves, packed, GROUP, scales))
    return Tool(calls, outputs * inputs // 2 + outputs * inputs // GROUP * 4)


def by_onnxruntime(level: int, x: Tensor, outputs: int) -> Tool:
    """ONNX Runtime's MatMulNBits."""
    import numpy as np
    import onnx
    import onnxruntime

    inputs, groups = x.shape[1], x.shape[1] // GROUP
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    chance, given = np.random.default_rng(0), {"x": x.numpy()}
    calls: list[Callable[[], Any]] = []
    for _ in range(count(outputs * inputs // 2)):
        weights = [
            onnx.numpy_helper.from_array(chance.integers(0, 256, (outputs, groups, GROUP // 2), dtype=np.uint8), "w"),
            onnx.numpy_helper.from_array(chance.random((outputs * groups,), dtype=np.float32), "s"),
            onnx.numpy_helper.from_array(chance.integers(0, 256, (outputs * groups // 2,), dtype=np.uint8), "z"),
        ]
        node = onnx.helper.make_node(
            "MatMulNBits", ["x", "w", "s", "z"], ["y"], domain="com.microsoft",
            K=inputs, N=outputs, bits=4, block_size=GROUP, accuracy_level=level,
        )  # fmt: skip
        ends = [
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, size])
            for name, size in (("x", inputs), ("y", outputs))
        ]
        graph = onnx.helper.make_graph([node], "g", [ends[0]], [ends[1]], weights)
        opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        calls.append(partial(session.run, None, given))
    return Tool(calls, outputs * inputs // 2 + outputs * groups * 9 // 2)


def tools(rows: int, outputs: int, inputs: int) -> dict[str, Tool]:
    x, size = torch.randn(rows, inputs), 4 * outputs * inputs
    floats = [torch.randn(outputs, inputs) for _ in range(count(size))]
    found = {
        "reading": reading(outputs * inputs),
        "float32": Tool([partial(linear, x, weight) for weight in floats], size),
        "int8, quantc": own(NativeW8, weight8, x, outputs),
        "int8, fbgemm float16": own(HalfLinear, weight8, x, outputs),
        "int4, quantc": own(NativeW4, weight4, x, outputs),
        "int4, torch pack": by_torch(x, outputs),
    }
    if is_installed("onnx") and is_installed("onnxruntime"):
        found |= {f"int4, ONNX Runtime level {level}": by_onnxruntime(level, x, outputs) for level in (4, 0)}
    return found


def timed(found: dict[str, Tool], rounds: int) -> dict[str, float]:
    """Seconds of a call: the time that a quarter of the rounds are below."""
    samples: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(rounds + 2):
        for name, tool in found.items():
            start = time.process_time()
            for call in tool.calls:
                call()
            if turn >= 2:
                samples[name].append((time.process_time() - start) / len(tool.calls))
    return {name: sorted(times)[len(times) // 4] for name, times in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--shapes", nargs="+", default=["2048x2048", "2048x8192", "8192x2048"], help="outputs × inputs")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("outputs × inputs", "rows", "tool", "µs", "× float32", "GB/s", "of reading")
    data = []
    for shape in options.shapes:
        outputs, inputs = map(int, shape.split("x"))
        for rows in options.rows:
            with torch.inference_mode():
                found = tools(rows, outputs, inputs)
                times = timed(found, options.rounds)
            speeds = {name: found[name].bytes / seconds / 1e9 for name, seconds in times.items()}
            for name, seconds in times.items():
                ratio, share = times["float32"] / seconds, speeds[name] / speeds["reading"]
                gained = "" if name == "reading" else f"{ratio:.2f}"
                table.add_row(
                    shape, str(rows), name, f"{seconds * 1e6:.0f}", gained, f"{speeds[name]:.1f}", f"{share:.0%}"
                )
                data.append(
                    {"shape": shape, "rows": rows, "tool": name, "seconds": seconds, "ratio": ratio, "share": share}
                )
    console = Console(width=110)
    console.print(f"instructions: {native_library().instructions}")
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(data, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
