"""Functions between bytes as tables, against the ops themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.targets.kernels.kernel_agreement import kernel_agreement
from quantc.targets.kernels.qnnpack_activations import ByteTranslation


class Between(nn.Module):
    """A function of bytes, which a convolution reads."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.second(self.function(F.max_pool2d(self.first(x), 2)))


class ReadTwice(Between):
    """What the function yields is float for somebody else too."""

    def forward(self, x: Tensor) -> Any:
        y = self.function(F.max_pool2d(self.first(x), 2))
        return self.second(y), y


FUNCTIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "sigmoid": (torch.sigmoid, ("sigmoid",)),
    "tanh": (torch.tanh, ("tanh",)),
    "elu": (F.elu, ("elu",)),
    "hardswish": (F.hardswish, ("hardswish",)),
    "silu": (F.silu, ("silu",)),
    "gelu": (F.gelu, ("gelu",)),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), ("leaky_relu",)),
    "several": (lambda x: torch.tanh(F.elu(x) * 3 - 1), ("elu", "tanh", "mul", "sub")),
    "square": (lambda x: x * x, ("mul",)),
}
"""By name: what is computed, and the ops that it is made of."""


SATURATED = pytest.mark.filterwarnings("ignore:sums can saturate")
"""QNNPACK has no sums of 16 bits, so that its backend leaves no room for them: the convolutions are not what is tried."""


def lowered(model: nn.Module, x: Tensor, *in_float: str) -> qc.Lowered:
    """QNNPACK's backend has bytes between all ops; those named are left float."""
    config = qc.QuantConfig()
    for op in in_float:
        config = config.set_op(op, qc.FLOAT)
    prepared = qc.prepare(qc.capture(model.eval(), (x,)), "qnnpack", config=config)
    qc.calibrate(prepared, [(x,)])
    return qc.lower(qc.convert(prepared), "x86")


def tables(module: qc.Lowered) -> list[ByteTranslation]:
    return [kernel for kernel in module.modules() if isinstance(kernel, ByteTranslation)]


@SATURATED
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_function_between_bytes_is_a_table(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12, 12)
    function, ops = FUNCTIONS[name]
    module = lowered(Between(function), x, *ops)
    assert len(tables(module)) == 1
    found = kernel_agreement(module, x)
    assert [gap.steps for gap in found if gap.kernel == ByteTranslation.name] == [0], "\n".join(map(str, found))
    left = {str(node.target) for node in module.module.graph.nodes if node.op == "call_function"}
    assert not left & {f"aten.{op}.default" for op in ops}


@SATURATED
def test_a_table_is_what_the_ops_make_of_every_byte() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12, 12)
    module = lowered(Between(F.silu), x, "silu")
    nodes = list(module.program.module.graph.nodes)
    ops = ("dequantize_per_tensor", "silu", "quantize_per_tensor")
    at = next(
        i for i in range(len(nodes)) if all(op in str(n.target) for op, n in zip(ops, nodes[i : i + 3], strict=False))
    )
    levels = torch.arange(256, dtype=torch.uint8)
    expected: Any = levels
    for node in nodes[at : at + 3]:
        expected = node.target(expected, *node.args[1:], **node.kwargs)
    (table,) = tables(module)
    assert torch.equal(table(levels), expected)
    images = levels.reshape(1, 4, 8, 8)
    last = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(table(last), expected.reshape(1, 4, 8, 8))
    assert table(levels[:0]).shape == (0,)


@SATURATED
def test_what_is_read_as_float_too_is_computed() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12, 12)
    module = lowered(ReadTwice(torch.sigmoid), x, "sigmoid")
    assert not tables(module)
    assert all(gap.steps <= 1 for gap in kernel_agreement(module, x) if "conv" not in gap.kernel)
