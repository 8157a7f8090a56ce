"""Q/DQ context of an op, in a program or in an ExecuTorch graph: neighbouring quantize and dequantize ops, and constants."""

from __future__ import annotations

from torch import fx

WORDS = ("quantize_per_", "quantize_affine", "choose_qparams")


def is_scaling(node: fx.Node) -> bool:
    """True for quantize, dequantize and choose-qparams ops, in any dialect."""
    if node.op != "call_function":
        return False
    if "getitem" in str(node.target):
        return is_scaling(node.all_input_nodes[0])
    return any(word in str(node.target) for word in WORDS)


def is_constant(node: fx.Node) -> bool:
    return node.op in ("get_attr", "placeholder")
