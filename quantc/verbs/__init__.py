"""The verbs of the package: capture, prepare, convert, quantize, lower."""
