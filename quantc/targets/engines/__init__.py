"""Engines outside torch that run a program through ONNX: ONNX Runtime and OpenVINO.

`qc.lower(program, "x86", engine=...)` returns a module for any engine. Engines are imported lazily.
"""
