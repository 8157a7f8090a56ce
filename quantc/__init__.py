"""quantc: a quantization compiler for PyTorch.

import quantc as qc

program = qc.capture(model, example_inputs)
prepared = qc.prepare(program, "x86")
qc.calibrate(prepared, batches)
quantized = qc.convert(prepared)
"""

from importlib.metadata import version as _version

from quantc import errors, hooks, pipelines, qat, reference
from quantc.api import capture, convert, prepare
from quantc.calibrate import calibrate
from quantc.calibration_report import CalibrationReport
from quantc.config import QuantConfig
from quantc.errors import QuantcError
from quantc.inspect.agreement import agreement
from quantc.inspect.compare import compare
from quantc.integer.semantics import load as _register_ops
from quantc.kernels.lowered import Lowered
from quantc.kernels.stored import load
from quantc.one_call import Result, quantize
from quantc.outcomes import FLOAT, Fixed, Quantize, SameAs
from quantc.parse import parse
from quantc.pipeline import Outcome, Pass, Pipeline, Preserves
from quantc.program import Program, Stage
from quantc.quantizer import Backend, Quantizer, Quantizers, TableQuantizer
from quantc.reuse import merge_statistics, use_statistics
from quantc.spec import (
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
from quantc.targets import lower

__version__ = _version("quantc")

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
