"""Programs as ONNX: `qc.lower(program, "onnx")`.

A program in Q/DQ form is written op by op by a table (`table.py`): quantize and dequantize ops become QuantizeLinear and
DequantizeLinear, weights are stored as the integers they are, and sizes stay as dynamic as the program has them.
"""
