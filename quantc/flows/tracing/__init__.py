"""The dynamic tracing flow: eager code that no tracer can capture, quantized as it runs."""
