"""Runtime profiles: the forms that each ONNX runtime fuses, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quantc.errors import UnknownNameError, suggest
from quantc.ir.program import Program


@dataclass(frozen=True)
class Profile:
    """Forms that a runtime fuses into integer kernels."""

    name: str
    told: str
    activations: Literal["uint8", "as they are"]
    """Type of int8 activations. uint8 is the same shifted by 128, exactly."""
    bias: Literal["int32", "convolutions", "float"]
    """Biases of convs and matmuls written as int32 on the grid of the accumulators: all, those of convolutions, or none."""
    clips: Literal["levels", "float"]
    """Domain of clipping by activations and by ranges narrower than a type: quantized levels, or floats before quantizing."""
    dynamic: Literal["integer", "qdq"]
    """Form of dynamically quantized convs and matmuls: integer ops, or float ops between Q and DQ."""
    float_ops: Literal["folded", "qdq"]
    """Form of quantized weights of float ops: ops that constant-fold when the model is loaded, or DequantizeLinear, which ONNX
    Runtime runs each time."""
    before_norm: Literal["Add", "Sum"]
    """Op of a sum that a layer norm reads. ONNX Runtime fuses Add and norm into a kernel several times slower than the two; it
    does not fuse a Sum."""
    softmax: Literal["apart", "as it is"]
    """Form of a softmax between levels: with a Sum of one behind it, or as it is. ONNX Runtime 1.31 fuses the latter into an
    integer kernel that wraps on overflow: 1 becomes 0."""
    images: Literal["wide", "as they are"]
    """Form of convolutions over three-channel images: with more channels (`quantc.targets.onnx.image_channels`), or with three."""


PROFILES: Mapping[str, Profile] = {
    found.name: found
    for found in (
        Profile(
            "onnxruntime",
            "uint8 × int8, twice as fast as int8 × int8; a float bias keeps it from fusing",
            activations="uint8",
            bias="int32",
            clips="levels",
            dynamic="integer",
            float_ops="folded",
            before_norm="Sum",
            softmax="apart",
            images="wide",
        ),
        Profile(
            "openvino",
            "a linear layer is fastest with a float bias",
            activations="uint8",
            bias="convolutions",
            clips="levels",
            dynamic="qdq",
            float_ops="qdq",
            before_norm="Add",
            softmax="as it is",
            images="as they are",
        ),
        Profile(
            "tensorrt",
            "int8, symmetric; biases are float",
            activations="as they are",
            bias="float",
            clips="float",
            dynamic="qdq",
            float_ops="qdq",
            before_norm="Add",
            softmax="as it is",
            images="as they are",
        ),
    )
}
"""By name."""
BY_BACKEND: Mapping[str, str] = {"openvino": "openvino", "tensorrt": "tensorrt"}
"""Default profile by the program's backend; ONNX Runtime's for all others."""


def profile_of(program: Program, name: str | None) -> Profile:
    """Profile by name, or the one of the program's backend."""
    backend = "" if program.plan.quantizer is None else program.plan.quantizer.name
    wanted = BY_BACKEND.get(backend, "onnxruntime") if name is None else name
    if wanted not in PROFILES:
        raise UnknownNameError(
            f"unknown profile {wanted!r}",
            where=f'qc.lower(..., "onnx", profile={wanted!r})',
            advice=suggest(str(wanted), PROFILES, noun="profiles"),
        )
    return PROFILES[wanted]
