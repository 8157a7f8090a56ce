"""Overflow proofs of integer sums: bounds from weights and ranges, and range reductions that make overflow impossible."""
