"""Annotation: quantizers decide, by rule table or in code, how each tensor is quantized."""
