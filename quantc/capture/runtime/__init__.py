"""Capture by running a model and recording its calls."""
