"""Calibration: the loop over batches, observers, checkpoints, and qparams from statistics."""
