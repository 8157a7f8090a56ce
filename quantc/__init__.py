"""quantc: a quantization compiler for PyTorch.

import quantc as qc

program = qc.capture(model, example_inputs)
print(program)
"""

from quantc.api import capture
from quantc.errors import QuantcError
from quantc.pipeline import Pass, Pipeline
from quantc.program import Program, Stage

__all__ = ["Pass", "Pipeline", "Program", "QuantcError", "Stage", "capture"]
