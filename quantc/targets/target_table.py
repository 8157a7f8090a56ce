"""quantc's own targets."""

from __future__ import annotations

from quantc.targets.target import Target

KERNEL_FORM = "lower-weights,lower-integer{boundaries=whole curves=float},eliminate-dead"
"""To what kernels take their ops from: the integer form, but quantize and dequantize ops stay whole, and activations
that are no clamps float. Ops whose weight alone is quantized read it as it is stored."""
X86 = Target(
    "x86",
    "quantc.targets.engines.engine_lowering:lower_x86",
    in_process=True,
    pipeline=KERNEL_FORM,
    summary="A module on torch's kernels, or on ONNX Runtime or OpenVINO.",
)
QNNPACK = Target(
    "qnnpack",
    "quantc.targets.kernels.lowered:lower_qnnpack",
    in_process=True,
    pipeline=KERNEL_FORM,
    summary="A module on torch's kernels.",
)
ONNX = Target(
    "onnx",
    "quantc.targets.onnx.onnx_module:lower",
    suffix=".onnx",
    requires=("onnx", "quantc[onnx]"),
    summary="An ONNX model, for ONNX Runtime, OpenVINO and TensorRT.",
)
EXECUTORCH = Target(
    "executorch",
    "quantc.targets.executorch.executorch_lowering:lower",
    suffix=".pte",
    requires=("executorch", "quantc[executorch]"),
    summary="An ExecuTorch program, delegated to XNNPACK.",
)
