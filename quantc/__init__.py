"""quantc: a quantization compiler for PyTorch.

import quantc as qc

program = qc.capture(model, example_inputs)
qc.pipelines.inference().run(program)
print(program)
"""

from quantc import errors, hooks, pipelines
from quantc.api import capture
from quantc.errors import QuantcError
from quantc.parse import parse
from quantc.pipeline import Outcome, Pass, Pipeline, Preserves
from quantc.program import Program, Stage

__all__ = [
    "Outcome",
    "Pass",
    "Pipeline",
    "Preserves",
    "Program",
    "QuantcError",
    "Stage",
    "capture",
    "errors",
    "hooks",
    "parse",
    "pipelines",
]
