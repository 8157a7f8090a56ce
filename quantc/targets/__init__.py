"""Deployment targets: CPU kernels, engines, ONNX and ExecuTorch."""
