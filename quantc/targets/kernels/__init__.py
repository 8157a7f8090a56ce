"""Lowering to CPU kernels: `qc.lower`.

The integer form specifies exactly what each op computes, on plain tensors. Lowering replaces its ops by kernels that
compute the same faster and need packed weights. Packed weights are never saved, copied or shared: they are packed again
where needed.
"""
