"""Programs on real kernels: `qc.lower`.

A program in integer form says exactly what each op computes, on plain tensors. Here its ops are given to kernels that
compute the same faster, and want their weights packed for it. What is packed is never saved, copied or shared: it is
made again where it is needed.
"""
