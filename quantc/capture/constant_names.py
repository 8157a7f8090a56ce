"""Names for tensor literals in the code of `forward`: the same with every capture method."""

from __future__ import annotations

from torch import nn

from quantc.ir.program import Program
from quantc.rewrite.spellings import is_literal


def name_literals(program: Program) -> None:
    """Rename them to const_0, const_1, … in order of use."""
    found = [node for node in program.graph.find_nodes(op="get_attr") if is_literal(str(node.target))]
    values = {name: program.root._buffers.pop(name) for name in dict.fromkeys(str(node.target) for node in found)}
    fresh: dict[str, str] = {}
    for node in found:
        old = str(node.target)
        if old not in fresh:
            fresh[old] = _free_name(program.root, len(fresh))
            program.root.register_buffer(fresh[old], values[old], persistent=False)
        node.target = fresh[old]
    for name in [name for name in program.root._buffers if is_literal(name) and name not in fresh.values()]:
        del program.root._buffers[name]
    program.touch()


def _free_name(root: nn.Module, start: int) -> str:
    count = start
    while hasattr(root, f"const_{count}"):
        count += 1
    return f"const_{count}"
