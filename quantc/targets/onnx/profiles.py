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
    """What int8 activations are written as. uint8 is the same shifted by 128, exactly."""
    bias: Literal["int32", "convolutions", "float"]
    """Which biases of products of quantized tensors are written on the grid of the sums: all, those of convolutions,
    or none."""
    clips: Literal["levels", "float"]
    """Where activations and ranges narrower than a type are clipped: after quantizing, or before."""
    dynamic: Literal["integer", "qdq"]
    """How products with run-time scales are written: on integers, or between Q and DQ."""
    float_ops: Literal["folded", "qdq"]
    """How quantized weights are written for ops that compute in float: by ops that are folded as the model is loaded, or by
    DequantizeLinear, which ONNX Runtime runs each time."""
    before_norm: Literal["Add", "Sum"]
    """How a sum is written that a layer norm reads. ONNX Runtime makes one kernel of Add and norm, which is several times
    slower than the two; a Sum it leaves alone."""
    softmax: Literal["apart", "as it is"]
    """How a softmax between levels is written: with a Sum of one behind it, or as it is. ONNX Runtime 1.31 makes a kernel on
    integers of the latter, in which what rounds to beyond the last level becomes the first: 1 becomes 0."""
    images: Literal["wide", "as they are"]
    """How convolutions of images of three channels are written: with more of them (`quantc.targets.onnx.image_channels`), or with
    three."""


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
"""Which profile is meant by what a program was prepared for; anything else is for ONNX Runtime."""


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
