"""Fusion report: quantized ops that ONNX Runtime computes on integers, read from its optimized model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from quantc.targets.onnx.sessions import OnnxRuntime

ON_INTEGERS = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "QAttention",
        "QGemm",
        "QLinearAdd",
        "QLinearAveragePool",
        "QLinearConcat",
        "QLinearConv",
        "QLinearGlobalAveragePool",
        "QLinearLeakyRelu",
        "QLinearMatMul",
        "QLinearMul",
        "QLinearReduceMean",
        "QLinearSigmoid",
        "QLinearSoftmax",
        "QLinearWhere",
        "GatherBlockQuantized",
    }
)
"""Kernels of ONNX Runtime that read integers."""
IN_FLOAT = frozenset(
    {"Add", "AveragePool", "Concat", "Conv", "ConvTranspose", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm"}
    | {"GlobalAveragePool", "GRU", "LSTM", "MatMul", "MaxPool", "Mul", "NhwcFusedConv", "ReduceMean", "RNN", "Sub"}
)
"""Ops that compute in float if they read what was dequantized."""
MOVES = frozenset({"Expand", "Flatten", "Gather", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
"""Ops that pass their input on."""


@dataclass(frozen=True)
class Fusions:
    """Numbers of quantized ops on integers and left in float, by op type."""

    integer: dict[str, int]
    """Kernels on integers, by name, and how many there are."""
    left: dict[str, int]
    """Ops that read what was dequantized, and so compute in float."""

    @property
    def fraction(self) -> float:
        """Fraction of quantized ops that compute on integers; 1 if there are none."""
        taken, rest = sum(self.integer.values()), sum(self.left.values())
        return taken / (taken + rest) if taken + rest else 1.0

    def to_data(self) -> dict[str, Any]:
        return {"integer": self.integer, "float": self.left, "fraction": self.fraction}

    def __str__(self) -> str:
        taken, rest = (_counts_text(counts) for counts in (self.integer, self.left))
        total = sum(self.integer.values()) + sum(self.left.values())
        lines = [f"ONNX Runtime computes {sum(self.integer.values())} of {total} quantized ops on integers: {taken}"]
        return "\n".join([*lines, *([f"in float after dequantizing: {rest}"] if self.left else [])])


def _counts_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} × {count}" for name, count in sorted(counts.items())) or "none"


def fusions_of(model: Any) -> Fusions:
    """Fusions that ONNX Runtime applies to a model."""
    graph = OnnxRuntime.optimized(model.SerializeToString()).graph
    integer = Counter(node.op_type for node in graph.node if node.op_type in ON_INTEGERS)
    left: Counter[str] = Counter()
    dequantized: set[str] = set()
    for node in graph.node:  # in topological order
        reads = any(name in dequantized for name in node.input)
        if node.op_type == "DequantizeLinear" or (reads and node.op_type in MOVES):
            dequantized.update(node.output)
        elif reads and node.op_type in IN_FLOAT:
            left[node.op_type] += 1
    return Fusions(dict(integer), dict(left))
