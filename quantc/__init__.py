"""quantc: a quantization compiler for PyTorch.

import quantc as qc

program = qc.capture(model, example_inputs)
prepared = qc.prepare(program, "x86")
qc.calibrate(prepared, batches)
quantized = qc.convert(prepared)
"""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from quantc import errors
from quantc.errors import QuantcError
from quantc.integer.semantics import load as _register_ops
from quantc.support.moved_modules import find_moved as _find_moved
from quantc.text.plan_section import PLAN_FORM as _PLAN_FORM
from quantc.text.plan_section import PlanForm as _PlanForm

if TYPE_CHECKING:
    from quantc import hooks, pipelines, qat, reference
    from quantc.annotate.quantizer import Backend, Quantizer, Quantizers, TableQuantizer
    from quantc.calibration.calibration_report import CalibrationReport
    from quantc.calibration.collect import Collect
    from quantc.calibration.loop import calibrate
    from quantc.calibration.reuse_statistics import merge_statistics, use_statistics
    from quantc.config.config import QuantConfig
    from quantc.inspect.agreement import agreement
    from quantc.ir.decisions import FLOAT, Fixed, Quantize, SameAs
    from quantc.ir.program import Program, Stage
    from quantc.pipeline.pipeline import Outcome, Pass, Pipeline, Preserves
    from quantc.spec.spec import (
        FP8_E4M3_WEIGHT,
        FP8_E5M2_WEIGHT,
        FP16_WEIGHT,
        INT2_GROUP,
        INT4_GROUP,
        INT4_GROUP_SYMMETRIC,
        INT4_WEIGHT,
        INT8,
        INT8_DYNAMIC,
        INT8_NARROW_WEIGHT,
        INT8_TENSOR_WEIGHT,
        INT8_TOKEN,
        INT8_WEIGHT,
        INT8_WEIGHT_ONLY,
        INT16,
        INT32_BIAS,
        UINT8,
        UINT8_DYNAMIC,
        UINT8_TOKEN,
        QuantSpec,
    )
    from quantc.targets.kernels.lowered import Lowered
    from quantc.text.parser import parse
    from quantc.verbs.capture import capture
    from quantc.verbs.compare import compare
    from quantc.verbs.convert import convert
    from quantc.verbs.load import load
    from quantc.verbs.lower import lower
    from quantc.verbs.prepare import prepare
    from quantc.verbs.quantize_model import Result, quantize
    from quantc.verbs.recover import recover

__version__ = _version("quantc")

_MODULES = ("hooks", "pipelines", "qat", "reference")
_NAMES = {
    "annotate.quantizer": ("Backend", "Quantizer", "Quantizers", "TableQuantizer"),
    "calibration.calibration_report": ("CalibrationReport",),
    "calibration.collect": ("Collect",),
    "calibration.loop": ("calibrate",),
    "calibration.reuse_statistics": ("merge_statistics", "use_statistics"),
    "config.config": ("QuantConfig",),
    "inspect.agreement": ("agreement",),
    "ir.decisions": ("FLOAT", "Fixed", "Quantize", "SameAs"),
    "ir.program": ("Program", "Stage"),
    "pipeline.pipeline": ("Outcome", "Pass", "Pipeline", "Preserves"),
    "spec.spec": (
        "FP8_E4M3_WEIGHT",
        "FP8_E5M2_WEIGHT",
        "FP16_WEIGHT",
        "INT2_GROUP",
        "INT4_GROUP",
        "INT4_GROUP_SYMMETRIC",
        "INT4_WEIGHT",
        "INT8",
        "INT8_DYNAMIC",
        "INT8_NARROW_WEIGHT",
        "INT8_TENSOR_WEIGHT",
        "INT8_TOKEN",
        "INT8_WEIGHT",
        "INT8_WEIGHT_ONLY",
        "INT16",
        "INT32_BIAS",
        "UINT8",
        "UINT8_DYNAMIC",
        "UINT8_TOKEN",
        "QuantSpec",
    ),
    "targets.kernels.lowered": ("Lowered",),
    "text.parser": ("parse",),
    "verbs.capture": ("capture",),
    "verbs.compare": ("compare",),
    "verbs.convert": ("convert",),
    "verbs.load": ("load",),
    "verbs.lower": ("lower",),
    "verbs.prepare": ("prepare",),
    "verbs.quantize_model": ("Result", "quantize"),
    "verbs.recover": ("recover",),
}
"""Public names by the module that defines them; it is imported when a name is first used."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

_find_moved(keep=_HOMES)

_register_ops()  # torch.ops.quantc: torch.export.load asks for the ops of a file without telling us
for _module in ("observe.observation_registry", "qdq.float_ops", "qdq.registration"):
    _import_module(f"quantc.{_module}")  # checks of specs, and ops that parsers look up, register on import


def _plan_form() -> _PlanForm:
    from quantc.store import plan_parser, plan_text

    return _PlanForm(plan_text.write_plan, plan_text.tensors_of, plan_parser.read_plan)


_PLAN_FORM.append(_plan_form)  # texts lie below plans, and their data models load when a text has one

if not TYPE_CHECKING:  # type checkers would take every name for a public one

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return _import_module(f"quantc.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'quantc' has no attribute {name!r}")
        value = globals()[name] = getattr(_import_module(f"quantc.{_HOMES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "FLOAT",
    "FP8_E4M3_WEIGHT",
    "FP8_E5M2_WEIGHT",
    "FP16_WEIGHT",
    "INT2_GROUP",
    "INT4_GROUP",
    "INT4_GROUP_SYMMETRIC",
    "INT4_WEIGHT",
    "INT8",
    "INT8_DYNAMIC",
    "INT8_NARROW_WEIGHT",
    "INT8_TENSOR_WEIGHT",
    "INT8_TOKEN",
    "INT8_WEIGHT",
    "INT8_WEIGHT_ONLY",
    "INT16",
    "INT32_BIAS",
    "UINT8",
    "UINT8_DYNAMIC",
    "UINT8_TOKEN",
    "Backend",
    "CalibrationReport",
    "Collect",
    "Fixed",
    "Lowered",
    "Outcome",
    "Pass",
    "Pipeline",
    "Preserves",
    "Program",
    "QuantConfig",
    "QuantSpec",
    "QuantcError",
    "Quantize",
    "Quantizer",
    "Quantizers",
    "Result",
    "SameAs",
    "Stage",
    "TableQuantizer",
    "__version__",
    "agreement",
    "calibrate",
    "capture",
    "compare",
    "convert",
    "errors",
    "hooks",
    "load",
    "lower",
    "merge_statistics",
    "parse",
    "pipelines",
    "prepare",
    "qat",
    "quantize",
    "recover",
    "reference",
    "use_statistics",
]
