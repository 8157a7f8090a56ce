"""The named pipelines, as values to print, change and run: `pipelines.inference().without("fuse")`.

Each is also known to pipeline text by its name, and its parameters are options there.
"""

from quantc.pipeline import Pipeline


def inference() -> Pipeline:
    """Tidy a model for inference: one spelling for each op, no dropout, constants folded, batch norms fused."""
    return Pipeline.parse("canonicalize,strip-dropout,fold-constants,fuse,eliminate-dead")
