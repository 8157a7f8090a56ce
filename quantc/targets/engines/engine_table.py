"""Table of the engines that can run a program on x86."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quantc.errors import MissingDependencyError, UnknownNameError, suggest
from quantc.support.optional_dependency import is_installed
from quantc.targets.onnx.sessions import OnnxRuntime, OpenVino, Session


@dataclass(frozen=True)
class Engine:
    """A runtime that reads ONNX."""

    name: str
    told: str
    load: Callable[[bytes, int], Session]
    """Of a model and a number of threads."""
    profile: str
    """The profile of the ONNX model (`quantc.targets.onnx.profiles`)."""
    packages: tuple[str, ...]
    extra: str
    suited: tuple[str, ...]
    """Backends whose rules suit it, the best first: programs for other backends run too, with more ops in float."""

    def why_not(self) -> str | None:
        """Reason why it is not available; None if it is."""
        return f"{self.missing}: pip install 'quantc[{self.extra}]'" if self.missing else None

    @property
    def missing(self) -> str:
        """Packages that are not installed, as text; empty if all are."""
        packages = [package for package in self.packages if not is_installed(package)]
        return f"{', '.join(packages)} {'is' if len(packages) == 1 else 'are'} not installed" if packages else ""


TORCH = "torch"
AUTO = "auto"
ENGINES: Mapping[str, Engine] = {
    found.name: found
    for found in (
        Engine(
            "onnxruntime",
            "uint8 × int8, half as fast on int8 × int8; convolutions only if their result is quantized",
            OnnxRuntime,
            "onnxruntime",
            ("onnx", "onnxruntime"),
            "onnx",
            ("onnx",),
        ),
        Engine(
            "openvino",
            "fuses what lies between two quantize ops; compiles for seconds",
            OpenVino,
            "openvino",
            ("onnx", "openvino"),
            "openvino",
            ("openvino", "onnx"),
        ),
    )
}
"""By name; torch's own kernels are the engine that is always there."""


SHORT = {
    "ort": "onnxruntime",
    "onnx": "onnxruntime",
    "ov": "openvino",
    "pytorch": TORCH,
    "onednn": TORCH,
    "fbgemm": TORCH,
}
"""Other names of engines, for advice."""


def _advice(name: str) -> str:
    known = (TORCH, AUTO, *ENGINES)
    short = SHORT.get(name.lower())
    listed = ", ".join(sorted(known))
    return suggest(name, known, noun="engines") if short is None else f"did you mean {short}? Known engines: {listed}"


def engine_of(name: str) -> Engine:
    """Engine by name; an error if it is unknown or not installed."""
    if name not in ENGINES:
        raise UnknownNameError(
            f"unknown engine {name!r}",
            where=f'qc.lower(..., "x86", engine={name!r})',
            advice=_advice(str(name)),
        )
    found = ENGINES[name]
    if found.missing:
        raise MissingDependencyError(
            found.missing,
            where=f'qc.lower(..., "x86", engine={name!r})',
            advice=f"pip install 'quantc[{found.extra}]'",
        )
    return found
