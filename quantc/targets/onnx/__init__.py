"""ONNX export: `qc.lower(program, "onnx")`.

A program in Q/DQ form is translated op by op by a table (`op_writers.py`): quantize and dequantize ops become
QuantizeLinear and DequantizeLinear, weights are stored as integers, and dynamic sizes stay dynamic.
"""
