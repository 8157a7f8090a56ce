"""quantc: a quantization compiler for PyTorch.

import quantc as qc

program = qc.capture(model, example_inputs)
prepared = qc.prepare(program, "x86")
qc.calibrate(prepared, batches)
quantized = qc.convert(prepared)
"""

from importlib.metadata import version as _version

from quantc import errors, hooks, pipelines, qat, reference
from quantc.annotate.quantizer import Backend, Quantizer, Quantizers, TableQuantizer
from quantc.calibration.calibration_report import CalibrationReport
from quantc.calibration.loop import calibrate
from quantc.calibration.reuse_statistics import merge_statistics, use_statistics
from quantc.config.config import QuantConfig
from quantc.errors import QuantcError
from quantc.inspect.agreement import agreement
from quantc.integer.semantics import load as _register_ops
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
from quantc.support.moved_modules import find_moved as _find_moved
from quantc.targets.kernels.lowered import Lowered
from quantc.text.parser import parse
from quantc.verbs.capture import capture
from quantc.verbs.compare import compare
from quantc.verbs.convert import convert
from quantc.verbs.load import load
from quantc.verbs.lower import lower
from quantc.verbs.prepare import prepare
from quantc.verbs.quantize_model import Result, quantize

__version__ = _version("quantc")

_find_moved()

_register_ops()  # torch.ops.quantc: torch.export.load asks for the ops of a file without telling us

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
    "reference",
    "use_statistics",
]
