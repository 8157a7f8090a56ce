"""Inspection of quantized programs: coverage, explanations, comparison with the float program, size."""
