"""Quantization by dynamic tracing: eager code that no tracer can capture, quantized while it runs.

    from quantc.flows.tracing import prepare, convert

    prepared = prepare(model, example_inputs)
    ...                                            # calibrate: call it
    quantized = convert(prepared)

An early prototype upstream, whose final name was never decided; here it is `quantc.flows.tracing`.
"""

from quantc.flows.tracing.compare import compare
from quantc.flows.tracing.quantization_state import AutoQuantizationState
from quantc.flows.tracing.trace import UnseenOpError
from quantc.flows.tracing.verbs import convert, coverage, explain, prepare, to_program

__all__ = [
    "AutoQuantizationState",
    "UnseenOpError",
    "compare",
    "convert",
    "coverage",
    "explain",
    "prepare",
    "to_program",
]
