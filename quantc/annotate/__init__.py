"""Annotation: quantizers decide, by table or by hand, what becomes of each tensor."""
