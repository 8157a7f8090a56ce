"""Lowerings of Q/DQ matches to integer ops, one module per op family."""
