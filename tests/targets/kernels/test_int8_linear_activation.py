"""Linear, activation and quantize as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantc.ir.types import TensorType
from quantc.qdq.registration import decomposed_ops
from quantc.targets.kernels.dynamic_linear import Weight
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_linear import OnFbgemm, Reading
from quantc.targets.kernels.int8_linear_activation import ALGORITHM, POST_OPS, fbgemm, onednn
from quantc.targets.kernels.kernel_table import Call, NoKernelError, Placement
from tests.support.by_hand import Builder, aten
from tests.support.linear_families import FAMILIES, gaps, layers, lowered

families = pytest.mark.parametrize("family", list(FAMILIES))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu of tanh": lambda: nn.GELU(approximate="tanh"),
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "mish": nn.Mish,
    "softplus": lambda: nn.Softplus(beta=2.0, threshold=3.0),
    "hardsigmoid": nn.Hardsigmoid,
    "celu": lambda: nn.CELU(0.5),
}


@families
@pytest.mark.parametrize("rows", [1, 60])
@pytest.mark.parametrize("name", list(MODULES))
def test_an_activation_between_layers_is_done_by_the_first(name: str, rows: int, family: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), MODULES[name](), nn.Linear(64, 8))
    x = torch.randn(rows, 48)
    module = lowered(family, model, x)
    found = gaps(module, x)
    assert len(found) == 2
    assert [node.op for node in module.module.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]


def test_an_activation_that_is_read_twice_stays_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Any:
            y = F.gelu(self.first(x))
            return self.second(y), y

    torch.manual_seed(0)
    x = torch.randn(20, 16)
    module = lowered("onednn", Twice(), x)
    gaps(module, x)
    assert [kernel.activation for kernel in layers(module)] == [None, None]


TAKEN: dict[str, tuple[str, list[float], str, Callable[[Tensor], Tensor]]] = {
    "relu": ("relu", [], ALGORITHM, torch.relu),
    "clamp": ("hardtanh", [-0.5, 0.7], ALGORITHM, lambda x: x.clamp(-0.5, 0.7)),
    "gelu": ("gelu", [], "none", F.gelu),
    "gelu of tanh": ("gelu", [], "tanh", lambda x: F.gelu(x, approximate="tanh")),
    "leaky_relu": ("leaky_relu", [0.2], ALGORITHM, lambda x: F.leaky_relu(x, 0.2)),
    "tanh": ("tanh", [], ALGORITHM, torch.tanh),
    "silu": ("swish", [], ALGORITHM, F.silu),
    "hardswish": ("hardswish", [], ALGORITHM, F.hardswish),
}
REFUSED = ("sigmoid", "hardsigmoid", "elu", "mish", "softplus", "clamp", "silu")


def post_op(name: str, scalars: list[float], algorithm: str, scale: float, zero: int, dtype: torch.dtype) -> Any:
    """onednn's own results of a fixed product, and the product itself in float64."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-64, 65, (512, 64), dtype=torch.int8, generator=generator)
    x = torch.randint(0, 256, (64, 64), dtype=torch.uint8, generator=generator)
    scales = torch.rand(512, generator=generator) * 2e-4
    bias = torch.randn(512, generator=generator)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    zeros = torch.zeros(1, dtype=torch.int32)
    found = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 100, packed, scales, zeros, bias, scale, zero, dtype, name, scalars, algorithm
    )
    return found, ((x.double() - 100) @ weight.double().t()) * scales.double() + bias.double()


@pytest.mark.parametrize("op", list(TAKEN))
def test_the_table_of_activations_is_what_the_kernel_does(op: str) -> None:
    name, scalars, algorithm, function = TAKEN[op]
    assert POST_OPS[op.split(" ", maxsplit=1)[0]].name == name
    found, reals = post_op(name, scalars, algorithm, 1.0, 0, torch.float32)
    expected = function(reals)
    assert float((found - expected).abs().max()) <= 1e-6 * float(reals.abs().max())
    low, high = float(expected.min()), float(expected.max())
    scale = (high - low) / 255
    zero = round(-low / scale)
    levels, _ = post_op(name, scalars, algorithm, scale, zero, torch.uint8)
    wanted = (torch.round(expected / scale) + zero).clamp(0, 255)
    assert float((levels - wanted).abs().max()) <= 1
    assert float((levels != wanted).double().mean()) < 1e-3


@pytest.mark.parametrize("name", REFUSED)
def test_activations_that_are_not_in_the_table_are_refused_by_the_kernel(name: str) -> None:
    with pytest.raises(RuntimeError, match="unsupported"):
        post_op(name, [], ALGORITHM, 1.0, 0, torch.float32)


def test_every_activation_of_the_table_is_tried() -> None:
    assert {name.split(" ")[0] for name in TAKEN} == set(POST_OPS)


# -- makers, on graphs written by hand -----------------------------------------------------------------------------------

GRID = (0.05, 10, 0, 255, torch.uint8)
LEVELS = torch.randint(-64, 65, (5, 8), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
BIAS = torch.linspace(-1, 1, 5)
X = torch.randint(0, 256, (40, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def call(*ops: tuple[Any, ...], grid: tuple[Any, ...] = GRID, also: bool = False, dtype: Any = torch.float32) -> Call:
    """A linear layer on a kernel, some ops after it, and the quantize op that ends them."""
    build = Builder()
    node = build.input("x", X)
    ending = Ending(torch.full((5,), 0.001), 0, 0, 255, dtype)
    layer = OnFbgemm(Weight(LEVELS, ending.multiplier, BIAS), Reading(100, 255), ending)
    build.root.add_module("kernel_linear", layer)
    made = build.graph.create_node("call_module", "kernel_linear", (node,))
    build.values[made] = torch.zeros(40, 5)
    made.meta["val"] = TensorType(torch.float32, (40, 5))
    for target, *rest in ops:
        made = build.call(target, made, *rest)
    rounded = build.call(decomposed_ops().quantize_per_tensor.default, made, *grid)
    return Call(build.program(*([rounded, made] if also else [rounded])), rounded)


FUNCTIONS: dict[str, tuple[tuple[Any, ...], Callable[[Tensor], Tensor]]] = {
    "relu": ((aten.relu.default,), torch.relu),
    "gelu": ((aten.gelu.default,), F.gelu),
    "clamp": ((aten.clamp.default, -0.5, 0.7), lambda x: x.clamp(-0.5, 0.7)),
    "leaky_relu": ((aten.leaky_relu.default, 0.2), lambda x: F.leaky_relu(x, 0.2)),
    "sigmoid, which onednn has not": ((aten.sigmoid.default,), torch.sigmoid),
}


@families
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("bounds", [(0, 255), (5, 90)])
def test_the_kernel_rounds_what_the_function_makes_of_the_product(
    name: str, family: str, bounds: tuple[int, int]
) -> None:
    op, function = FUNCTIONS[name]
    placement = {"fbgemm": fbgemm, "onednn": onednn}[family](call(op, grid=(0.05, 10, *bounds, torch.uint8)))
    assert isinstance(placement, Placement)
    assert placement.kernel.family == family
    assert [node.name for node in placement.inputs] == ["x"]
    for x in (X, X[:1]):
        sums = (x.numpy().astype(np.int64) - 100) @ LEVELS.numpy().astype(np.int64).T
        reals = function(torch.from_numpy(sums * 0.001 + BIAS.double().numpy()))
        expected = ((reals / 0.05).round() + 10).clamp(*bounds)
        found = placement.kernel(x)
        assert float((found - expected).abs().max()) <= 1
        assert float((found != expected).float().mean()) < 0.05


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: call((aten.gelu.default,), also=True), "read by others too"),
        (lambda: call((aten.gelu.default,), grid=(0.05, 10, -128, 127, torch.int8)), "not rounded to uint8"),
        (lambda: call((aten.softmax.int, -1)), "not an activation of a linear layer alone"),
        (lambda: call((aten.tanh.default,), (aten.gelu.default,)), "not an activation of a linear layer"),
        (call, "not an activation of a linear layer"),
        (lambda: call((aten.gelu.default,), dtype=torch.uint8), "not an activation of a linear layer"),
        (lambda: call((aten.clamp.default, None, 0.5)), "not a number"),
    ],
    ids=["read twice", "int8", "softmax", "two functions", "none", "bytes", "half a clamp"],
)
def test_what_is_no_activation_of_a_linear_layer_is_refused(made: Callable[[], Call], reason: str) -> None:
    with pytest.raises(NoKernelError, match=reason):
        onednn(made())
