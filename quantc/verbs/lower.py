"""`qc.lower`: lowers a quantized program to a target. A target is a name and its lowering function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from quantc.errors import ConfigError, UnknownNameError, suggest
from quantc.ir.finite_inputs import check_has_numbers
from quantc.ir.program import Program
from quantc.pipeline.pipeline import Hook, Pipeline
from quantc.targets.provenance import check_converted
from quantc.targets.target import TARGETS, check_invariants, is_own, suffixes

if TYPE_CHECKING:
    from quantc.targets.executorch.artifact import Pte
    from quantc.targets.kernels.lowered import Lowered
    from quantc.targets.onnx.onnx_module import OnnxModel

FOREIGN = (".engine", ".gguf", ".mlmodel", ".mlpackage", ".ort", ".plan", ".ptl", ".tflite", ".trt", ".xml")
"""The ends of files of other tools, in whose form quantc itself writes nothing; a target from outside may."""

_ENGINE = (
    'qc.lower(program, "x86", engine="{0}") to run it here, or qc.lower(program, "onnx"{1}).save(path) to write a file'
)
_ORT = ("ONNX Runtime, an engine", _ENGINE.format("onnxruntime", ""))
_OPENVINO = ("an engine", _ENGINE.format("openvino", ', profile="openvino"'))
_TENSORRT = ("a runtime that reads ONNX", 'qc.lower(program, "onnx", profile="tensorrt").save(path)')
_TORCH = ("a library of torch's", 'qc.lower(program, "x86")')
RUNTIMES: dict[str, tuple[str, str]] = {
    "onnxruntime": _ORT,
    "onnx_runtime": _ORT,
    "ort": _ORT,
    "openvino": _OPENVINO,
    "ov": _OPENVINO,
    "tensorrt": _TENSORRT,
    "trt": _TENSORRT,
    "xnnpack": ("a delegate of ExecuTorch", 'qc.lower(program, "executorch")'),
    "fbgemm": _TORCH,
    "onednn": _TORCH,
}
"""Runtimes that are mistaken for targets: what each is, and the way to use it."""


def artifact_of(path: Path) -> str | None:
    """Target whose files have this suffix; None for quantc's own programs. ConfigError for files of other tools."""
    ending = path.suffix.lower()
    if ending in FOREIGN and ending not in suffixes():
        raise ConfigError(
            f"quantc writes no {ending} files",
            where=str(path),
            advice=f"give a name that ends in {' or '.join(sorted(suffixes()))}, or in .qc for the program, which qc.load reads",
        )
    return suffixes().get(ending)


@overload
def lower(program: Program, target: Literal["onnx"], *, profile: str | None = None) -> OnnxModel: ...
@overload
def lower(
    program: Program,
    target: Literal["executorch"],
    *,
    partitioners: Sequence[Any] | None = None,
    largest: int | Mapping[str, int] | None = None,
) -> Pte: ...
@overload
def lower(program: Program, target: Literal["x86"], *, engine: str, threads: int | None = None) -> Any: ...
@overload
def lower(program: Program | Lowered, target: Literal["qnnpack", "x86"], **options: Any) -> Lowered: ...
@overload
def lower(program: Program | Lowered, target: str, **options: Any) -> Any: ...
def lower(program: Program | Lowered, target: str, **options: Any) -> Any:
    """Lower a quantized program to a target, which defines the options and the type of the result.

    `"x86"` and `"qnnpack"` give a module on torch's kernels: see `quantc.targets.kernels.lowered.lower`. With
    `engine=`, x86 runs on ONNX Runtime or OpenVINO: see `quantc.targets.engines.engine_lowering`. `"onnx"` gives an
    ONNX model, with `.save(path)`: see `quantc.targets.onnx.onnx_module.lower`. `"executorch"` gives a `.pte`: see
    `quantc.targets.executorch.executorch_lowering.lower`.

    Every target takes `pipeline=`, to run instead of `qc.pipelines.lower(target)`, and `hooks=`, which watch it.
    """
    function = _function(target)
    _check_options(function, target, [name for name in options if name not in PASSES_OPTIONS])
    declared = [TARGETS[target]] if target in TARGETS else []
    for each in declared:
        each.check_ready()
    if isinstance(program, Program):
        check_has_numbers(program.name, program.root, ())
        check_converted(program)
        check_invariants(program, *declared)
    if not _runs_passes(function):
        steps, hooks = options.pop("pipeline", None), options.pop("hooks", ())
        program = _on_its_way(program, target, steps, hooks)
    return declared[0].run(program, options) if declared else function(program, **options)


PASSES_OPTIONS = ("pipeline", "hooks")
"""Options of every target."""


def _runs_passes(function: Callable[..., Any]) -> bool:
    """True if a lowering function runs the pipeline itself: it takes one."""
    kinds = {name: row.kind for name, row in signature(function).parameters.items()}
    return "pipeline" in kinds or Parameter.VAR_KEYWORD in kinds.values()


def _on_its_way(
    program: Program | Lowered, target: str, pipeline: Pipeline | str | None, hooks: Sequence[Hook]
) -> Program | Lowered:
    """The program that the passes of a target make of one, which is not modified."""
    steps = Pipeline.of(TARGETS[target].pipeline if pipeline is None else pipeline)
    if not steps.passes or not isinstance(program, Program):
        return program
    return steps.left_for(program).run_on_copy(program, hooks)


def _function(target: str) -> Callable[..., Any]:
    """Lowering function of a target: its own, or the kernel lowering for targets with registered kernels."""
    if not isinstance(target, str):
        raise UnknownNameError(
            f"{target!r} is no name of a target",
            where="the second argument of qc.lower",
            advice=f"give one of {', '.join(TARGETS)}",
        )
    if target in TARGETS:
        return TARGETS[target].function
    kernels = import_module("quantc.targets.kernels.kernel_table").KERNELS
    if target not in kernels and (elsewhere := RUNTIMES.get(str(target).lower())) is not None:
        raise UnknownNameError(
            f"{target!r} is no target: it is {elsewhere[0]}",
            where=f"qc.lower(..., {target!r})",
            advice=f"write {elsewhere[1]}; known targets: {', '.join(sorted({*TARGETS, *kernels}))}",
        )
    if target not in kernels:
        raise UnknownNameError(
            f"there are no kernels for {target!r}",
            where=f"qc.lower(..., {target!r})",
            advice=suggest(str(target), {*TARGETS, *kernels}, noun="targets"),
        )
    return lambda program, **options: import_module("quantc.targets.kernels.lowered").lower(program, target, **options)


def _check_options(function: Callable[..., Any], target: str, given: Iterable[str]) -> None:
    """Refuse options that a target does not have."""
    parameters = [*signature(function).parameters.values()]
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        if target in TARGETS and not is_own(target):
            return  # it looks at them itself
        parameters += signature(import_module("quantc.targets.kernels.lowered").lower).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is Parameter.KEYWORD_ONLY]
    for name in given:
        if name not in known:
            raise UnknownNameError(
                f"{target} has no option {name!r}",
                where=f"qc.lower(program, {target!r})",
                advice=suggest(name, known, noun="options"),
            )
