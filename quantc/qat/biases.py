"""Training of biases on the accumulator's grid, for backends that add them to integer sums."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from quantc.integer.bias_grid import round_bias
from quantc.ir.dialect import WEIGHTED, is_op
from quantc.ir.program import TRAINED, Program, attribute
from quantc.qat.fake import FakeQuantizer, HandedOn, RunTimeScale
from quantc.qat.fake_quantize_insertion import is_dropout, put_module
from quantc.qat.straight_through import passed_through
from quantc.spec.formats import PerGroup, PerTensor


class SnappedBias(nn.Module):
    """A bias rounded to multiples of input scale times weight scale, like the pass `snap-bias`."""

    def __init__(self, x: FakeQuantizer, weight: FakeQuantizer) -> None:
        super().__init__()
        self.__dict__["factors"] = (x, weight)  # not as children: they have names of their own
        x.is_parent = weight.is_parent = True

    def forward(self, bias: Tensor | None) -> Tensor | None:
        x, weight = (factor.current for factor in self.__dict__["factors"])
        if bias is None or x is None or weight is None:
            return bias
        scale = x.scale.detach().double() * weight.scale.detach().double()
        return passed_through(bias, round_bias(bias.detach(), scale))


def snap_trained_biases(program: Program) -> int:
    """Round the biases of fake-quantized convs and linears during training; their number."""
    count = 0
    for _, graph in program.graphs():
        for node in list(graph.nodes):
            if not is_op(node, *WEIGHTED) or len(node.args) < 3 or not isinstance(node.args[2], fx.Node):
                continue
            x, weight = (_fake(program, operand) for operand in node.args[:2])
            if x is None or weight is None or not _adds_integers(x, weight):
                continue
            bias = node.args[2]
            target = put_module(program, graph, TRAINED, f"{node.name}_bias", SnappedBias(x, weight))
            rounded = program.emit(target, (bias,), before=node, like=bias, name=f"snap_{node.name}_bias")
            node.args = (*node.args[:2], rounded, *node.args[3:])
            count += 1
    if count:
        program.touch()
    return count


def _fake(program: Program, node: Any) -> FakeQuantizer | None:
    """Fake quantizer of an operand; None if there is none."""
    while isinstance(node, fx.Node) and is_dropout(program, node):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    module = attribute(program.owner(node.graph), str(node.target))
    found = module.__dict__["fake"] if isinstance(module, HandedOn) else module
    return found if isinstance(found, FakeQuantizer) else None


def _adds_integers(x: FakeQuantizer, weight: FakeQuantizer) -> bool:
    """True if the accumulator has a static scale, per tensor or per channel."""
    if any(isinstance(fake, RunTimeScale) or fake.spec.dtype.is_float for fake in (x, weight)):
        return False
    return isinstance(x.spec.granularity, PerTensor) and not isinstance(weight.spec.granularity, PerGroup)
