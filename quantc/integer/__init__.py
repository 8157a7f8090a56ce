"""The integer form: what quantized ops compute, exactly, on integers.

`library` holds the ops of `torch.ops.quantc`, each with the reference that defines it, written in ATen primitives.
`semantics` is the one table that says which of them stands for which op of the dialect, and by which formula.
"""
