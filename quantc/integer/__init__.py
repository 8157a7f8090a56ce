"""The integer form: the exact integer semantics of quantized ops.

`library` holds the ops of `torch.ops.quantc`, each defined by a reference in ATen primitives. `semantics` is the single
table that maps ops of the dialect to them, with their formulas.
"""
