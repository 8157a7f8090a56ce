"""Quantization-aware training, for programs from `qc.prepare(program, backend, qat=True)`.

Such a program trains in any loop. `train` is a small one that detects common mistakes; `freeze_norms`, `freeze_ranges`
and `Schedule` are for the last part of a training.
"""

from quantc.qat.schedule import Schedule, freeze_norms, freeze_ranges
from quantc.qat.training_loop import TrainingReport, train

__all__ = ["Schedule", "TrainingReport", "freeze_norms", "freeze_ranges", "train"]
