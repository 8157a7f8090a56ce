"""Programs that are written in ONNX by the tests, and how they are held against the Q/DQ form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.ir.program import Program
from quantc.support.sqnr import Noise
from quantc.targets.onnx.onnx_module import OnnxModel
from tests.zoo.case import Case

MARGIN = 10.0
"""In dB: how much closer ONNX comes to the Q/DQ form than that to the float model."""


def quantized(
    model: nn.Module,
    batches: Sequence[tuple[Any, ...]],
    backend: Any = "onnx",
    config: qc.QuantConfig | None = None,
    **options: Any,
) -> Program:
    """A model in Q/DQ form, calibrated with batches; the first is its example."""
    prepared = qc.prepare(qc.capture(model.eval(), batches[0], **options), backend, config=config)
    qc.calibrate(prepared, batches, progress="silent")
    return qc.convert(prepared)


def of_case(case: Case, backend: Any = "onnx") -> tuple[Program, tuple[Any, ...], dict[str, Any]]:
    """A model of the zoo in Q/DQ form, and inputs for it."""
    args, kwargs = case.example()
    program = qc.capture(case.model(), args, example_kwargs=kwargs or None)
    prepared = qc.prepare(program, backend, allow_empty=True)
    names = dict(zip(program.signature.parameters, args, strict=False))
    qc.calibrate(prepared, [{**names, **kwargs}] if kwargs else [args], progress="silent")
    return qc.convert(prepared), args, kwargs


def close(reference: Any, found: Any) -> float:
    """SQNR in dB over all float outputs."""
    noise = Noise()
    noise.add(reference, found)
    return noise.sqnr


def same_arrangement(left: Any, right: Any) -> bool:
    """Whether two results are nested alike, with tensors of the same types."""
    (ours, one), (theirs, other) = pytree.tree_flatten(left), pytree.tree_flatten(right)
    pairs = zip(ours, theirs, strict=True)
    alike = all(
        (a.shape, a.dtype) == (b.shape, b.dtype) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in pairs
    )
    return one == other and alike


def initializers(model: OnnxModel) -> dict[str, int]:
    """The types of constants, by name, as onnx.TensorProto numbers them."""
    return {tensor.name: tensor.data_type for tensor in model.proto.graph.initializer}


def ops(model: OnnxModel) -> list[str]:
    return [node.op_type for node in model.proto.graph.node]


def seeded(make: Any, seed: int = 0) -> Any:
    """What `make` makes, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8))


def image_batches() -> list[tuple[Tensor, ...]]:
    """For `small_cnn`."""
    return [(seeded(lambda: torch.randn(2, 3, 8, 8), seed),) for seed in range(3)]


class Residual(nn.Module):
    """A convolution, to which its input is added."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x) + x)


ADDED = {"add-convolutions": lambda: seeded(lambda: (Residual(), (torch.randn(2, 4, 6, 6),)))}
"""Examples for a rule whose models cannot be made from its pattern alone."""
