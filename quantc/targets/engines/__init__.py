"""Engines outside torch that run a program written as ONNX: ONNX Runtime and OpenVINO.

`qc.lower(program, "x86", engine=...)` gives a module whichever engine runs it. None is imported before it is asked for.
"""
