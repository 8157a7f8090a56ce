"""The float program on the runtime of a quantized one: its fair baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantc import pipelines
from quantc.ir.program import Program


@dataclass(frozen=True, eq=False)
class FloatRun:
    """A callable float program, and its runtime."""

    runtime: str
    model: Any


def in_float(target: str, captured: Program) -> FloatRun:
    """The float program on the runtime of `target`: ONNX Runtime, ExecuTorch, or torch, with norms folded into weights.
    QuantcError if the runtime does not support it.
    """
    program = pipelines.inference().run_on_copy(captured)
    if target == "onnx":
        from quantc.targets.onnx.onnx_export import export
        from quantc.targets.onnx.onnx_module import OnnxModel
        from quantc.targets.onnx.profiles import PROFILES

        return FloatRun("ONNX Runtime", OnnxModel(program, export(program, PROFILES["onnxruntime"])))
    if target == "executorch":
        from quantc.targets.executorch.executorch_lowering import as_pte

        return FloatRun("ExecuTorch", as_pte(program, largest=None))
    return FloatRun("torch with norms folded", program.module)
