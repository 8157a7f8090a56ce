"""quantc's own targets."""

from __future__ import annotations

from quantc.targets.target import Target

KERNEL_FORM = "lower-weights,lower-integer{boundaries=whole curves=float},eliminate-dead"
"""To what kernels take their ops from: the integer form, but quantize and dequantize ops stay whole, and activations
that are no clamps float. Ops whose weight alone is quantized read it as it is stored."""
ON_KERNELS = (
    "fuse-epilogues,merge-siblings,fuse-attention,fuse-residual,assign-memory-format,eliminate-dead,overwrite-summands,"
    "copy-returned-constants"
)
"""The passes that follow `place-kernels`."""


def placing_pipeline(target: str) -> str:
    """From the form that kernels take their ops from to the kernels of a target."""
    return f"place-kernels{{target={target}}},{ON_KERNELS}"


def kernel_pipeline(target: str) -> str:
    """From a converted program to the kernels of a target."""
    return f"{KERNEL_FORM},{placing_pipeline(target)}"


X86 = Target(
    "x86",
    "quantc.targets.engines.engine_lowering:lower_x86",
    in_process=True,
    pipeline=kernel_pipeline("x86"),
    summary="A module on torch's kernels, or on ONNX Runtime or OpenVINO.",
)
QNNPACK = Target(
    "qnnpack",
    "quantc.targets.kernels.lowered:lower_qnnpack",
    in_process=True,
    pipeline=kernel_pipeline("qnnpack"),
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
    pipeline="fix-sizes,legalize-xnnpack,legalize-slices,legalize-bmm,legalize-weights,unroll-recurrent,space-to-depth,"
    "duplicate-dq{results=own}",
    requires=("executorch", "quantc[executorch]"),
    summary="An ExecuTorch program, delegated to XNNPACK.",
)
