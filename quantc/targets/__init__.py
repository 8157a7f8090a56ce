"""Targets: where programs end up. Kernels, engines, ONNX and ExecuTorch."""
