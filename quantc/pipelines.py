"""The named pipelines, as values to print, change and run: `pipelines.inference().without("fuse")`.

Each is also known to pipeline text by its name, and its parameters are options there.
"""

from typing import Any

from quantc.config import QuantConfig
from quantc.pipeline import Pipeline
from quantc.quantizer import finishing, quantizer_of


def inference() -> Pipeline:
    """Tidy a model for inference: one spelling for each op, no dropout, constants folded, batch norms fused."""
    return Pipeline.parse("sink-constants,canonicalize,strip-dropout,fold-constants,fuse,eliminate-dead")


def prepare(backend: Any, config: QuantConfig | None = None, allow_empty: bool = False) -> Pipeline:
    """What `qc.prepare` runs: tidy for inference, take apart what the backend wants in parts, annotate, share."""
    from quantc.passes.annotate import Annotate
    from quantc.passes.share import Share

    quantizer = quantizer_of(backend)
    annotate = Annotate(
        backend=quantizer, config=config if config is not None else QuantConfig(), allow_empty=allow_empty
    )
    return inference().then(*quantizer.transforms(), annotate, Share())


def convert(backend: Any = None) -> Pipeline:
    """What `qc.convert` runs: carry the plan out, merge what says the same twice, store weights quantized; then what
    the backend wants done at the end."""
    last = finishing(quantizer_of(backend)) if backend is not None else ()
    return Pipeline.parse("quantize,dedup-qdq,fold").then(*last)


def integer(multiplier: str = "float64") -> Pipeline:
    """What `qc.convert(prepared, to="integer")` runs after `quantize` and `fold`: integer ops in place of Q/DQ."""
    return Pipeline.parse(f"lower-integer{{multiplier={multiplier}}},eliminate-dead")
