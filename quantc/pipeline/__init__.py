"""Passes and pipelines: running, parsing, ordering, the numeric guard and reproducers."""

from quantc.pipeline.pipeline import Outcome, Pass, Pipeline, Preserves

__all__ = ["Outcome", "Pass", "Pipeline", "Preserves"]
