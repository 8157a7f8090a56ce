"""Each op of the dialect is a rule of streams, a move, or refused: none is taken for what it is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantc.ir.dialect import op_name
from quantc.recover.coordinates import Coordinates
from quantc.recover.example_run import ExampleRun
from quantc.recover.stream import CannotRotateError, Stream
from quantc.recover.stream_rules import carry
from tests.support.streams import captured


class One(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.weight = name, nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.0
        if self.name == "linear":
            return F.linear(x, self.weight)
        if self.name == "matmul":
            product: Tensor = x @ self.weight
            return product
        if self.name == "batches":
            return x.transpose(0, 2) @ x.transpose(0, 2).transpose(1, 2)
        if self.name == "attention":
            return F.scaled_dot_product_attention(x, x, x)
        real: Tensor = torch.fft.fft(x).real
        return real


def carried(name: str, axis: int) -> dict[str, int | None]:
    """The axes of all that the op connects with its operand, rotated along an axis."""
    program = captured(One(name).eval(), torch.randn(4, 4, 4))
    run = ExampleRun.of(program)
    assert isinstance(run, ExampleRun)
    stream = Stream(program, run)
    first, node = [each for each in program.graph.nodes if each.op == "call_function"][:2]
    stream.join(first, Coordinates.along(3, axis, 4, 4), first)
    while op_name(node) in ("transpose", "cast"):
        carry(stream, node)
        node = node.next
    carry(stream, node)
    found = {value.name: at.axis for value, at in stream.tensors.items() if value is not first}
    return found | {use.role: at.axis for use, at in stream.constants.items()}


def test_products_take_up_what_they_contract_and_pass_on_the_rest() -> None:
    assert carried("linear", 2) == {"w": 1}
    assert carried("linear", 1) == {"linear": 1}
    assert carried("matmul", 2) == {"y": 0}
    assert carried("attention", 2)["scaled_dot_product_attention"] == 2


@pytest.mark.parametrize(("name", "axis"), [("batches", 2), ("attention", 1), ("transform", 2)])
def test_what_mixes_vectors_is_refused(name: str, axis: int) -> None:
    with pytest.raises(CannotRotateError):
        carried(name, axis)
