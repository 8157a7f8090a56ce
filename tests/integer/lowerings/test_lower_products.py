"""How products are lowered: which op stands for a match, what it refuses, and that the numbers are those of Q/DQ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.ir.types import dtype_of
from quantc.spec.arithmetic import MultiplierForm
from tests.support.named_ops import naming

Model = Callable[..., Tensor]


class Net(nn.Module):
    """A function of tensors, and the constants it reads."""

    def __init__(self, function: Model, **constants: Tensor) -> None:
        super().__init__()
        self.function = function
        self.names = list(constants)
        for name, value in constants.items():
            self.register_buffer(name, value)

    def forward(self, *xs: Tensor) -> Tensor:
        return self.function(*xs, *(getattr(self, name) for name in self.names))


def converted(model: nn.Module, inputs: tuple[Tensor, ...], backend: str, **capture: Any) -> tuple[Program, Program]:
    """The Q/DQ form and the integer form."""
    program = qc.capture(model.eval(), inputs, **capture)
    prepared = qc.prepare(program, backend, config=naming(program, backend))
    qc.calibrate(prepared, [inputs])
    return qc.convert(prepared), qc.convert(prepared, to="integer")


def ops(program: Program) -> list[str]:
    return [op_name(node) for node in program.nodes() if node.op == "call_function"]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def steps_apart(qdq: Program, integer: Program, inputs: tuple[Tensor, ...]) -> float:
    """The largest distance of the results, in steps of the last grid."""
    last = [node for node in qdq.nodes() if ".dequantize_per_tensor" in str(node.target)][-1]
    step = float(last.args[1])  # type: ignore[arg-type]
    return float((qdq(*inputs) - integer(*inputs)).abs().max()) / step


X, Y = drawn(6, 16), drawn(16, 5, seed=1)
VECTOR, MATRIX = drawn(5, seed=2), drawn(6, 5, seed=3)
BATCH = (drawn(2, 6, 16), drawn(2, 16, 5, seed=1))
IMAGE, KERNEL = drawn(2, 4, 9, 9), drawn(6, 4, 3, 3, seed=1)

PRODUCTS: dict[str, tuple[Model, tuple[Tensor, ...], dict[str, Tensor], str]] = {
    "matmul": (lambda x, y: x @ y, (X, Y), {}, "matmul"),
    "matmul, batches": (lambda x, y: x @ y, BATCH, {}, "matmul"),
    "matmul, constant": (lambda x, w: x @ w, (X,), {"w": Y}, "matmul"),
    "vectors": (lambda x, y: x @ y, (X[0], Y[:, 0]), {}, "matmul"),
    "linear, computed": (F.linear, (X, Y.t().contiguous()), {}, "linear"),
    "linear, computed, with a bias": (F.linear, (X, Y.t().contiguous()), {"b": VECTOR}, "linear"),
    "addmm": (lambda x, y, b: torch.addmm(b, x, y), (X, Y), {"b": VECTOR}, "matmul"),
    "addmm, scaled": (lambda x, y, b: torch.addmm(b, x, y, beta=0.5, alpha=-2), (X, Y), {"b": VECTOR}, "matmul"),
    "addmm, without": (lambda x, y, b: torch.addmm(b, x, y, beta=0), (X, Y), {"b": VECTOR * torch.nan}, "matmul"),
    "addmm, a matrix": (lambda x, y, b: torch.addmm(b, x, y, beta=3), (X, Y), {"b": MATRIX}, "matmul"),
    "addmm, computed": (lambda x, y, b: torch.addmm(b, x, y, beta=2), (X, Y, MATRIX), {}, "matmul"),
    "addmm, constant": (lambda x, w, b: torch.addmm(b, x, w, alpha=2), (X,), {"w": Y, "b": VECTOR}, "matmul"),
    "baddbmm": (lambda x, y, b: torch.baddbmm(b, x, y), BATCH, {"b": VECTOR.reshape(1, 1, 5)}, "matmul"),
    "baddbmm, computed": (lambda x, y, b: torch.baddbmm(b, x, y, alpha=0.5), (*BATCH, MATRIX), {}, "matmul"),
    "conv1d": (lambda x, w: F.conv1d(x, w, dilation=2), (IMAGE[..., 0],), {"w": KERNEL[..., 0]}, "conv"),
    "conv2d, alone": (lambda x, w: F.conv2d(x, w, padding=1), (IMAGE[0],), {"w": KERNEL}, "conv"),
    "conv2d, same": (lambda x, w: F.conv2d(x, w, padding="same", dilation=2), (IMAGE,), {"w": KERNEL}, "conv"),
    "conv2d, groups": (lambda x, w: F.conv2d(x, w[:, :2], groups=2), (IMAGE,), {"w": KERNEL}, "conv"),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=(0, 1, 1)), (IMAGE[:, :, None],), {"w": KERNEL[:, :, None]}, "conv"),
    "conv_transpose1d": (
        lambda x, w: F.conv_transpose1d(x, w, stride=2, padding=1, output_padding=1),
        (IMAGE[..., 0],),
        {"w": KERNEL[:4, :, 0]},
        "conv_transpose",
    ),
    "conv_transpose2d, groups": (
        lambda x, w: F.conv_transpose2d(x, w, stride=3, groups=2, dilation=2),
        (IMAGE,),
        {"w": KERNEL[:4]},
        "conv_transpose",
    ),
}


@pytest.mark.parametrize("backend", ["qnnpack", "x86"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_computes_on_integers(name: str, backend: str) -> None:
    function, inputs, constants, op = PRODUCTS[name]
    qdq, integer = converted(Net(function, **constants), inputs, backend)
    integer.verify()
    assert f"quantc.{op}.default" in ops(integer), integer.coverage()
    assert op_names_in_float(integer) <= ({"add", "mul"} if name in ADDED_IN_FLOAT else set())
    if backend == "qnnpack":
        assert steps_apart(qdq, integer, inputs) <= 1.001
        return
    # the result is float; what is left is the rounding of the bias
    expected, found = qdq(*inputs), integer(*inputs)
    assert float((expected - found).abs().max()) <= 3e-4 * float(expected.abs().max())


ADDED_IN_FLOAT = {"addmm, a matrix", "addmm, computed", "baddbmm, computed"}
"""The table gives what is added no role, so it comes in float."""


def op_names_in_float(program: Program) -> set[str]:
    return {op_name(node) for node in program.plan.left_float}


# -- what follows --------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A convolution, to which something quantized is added, between convolutions."""

    def __init__(self, after: Model) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.after = after

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        return self.third(self.after(y + self.second(y)))


@pytest.mark.parametrize("multiplier", ["float64", "fixed"])
@pytest.mark.parametrize("after", [lambda x: x, F.relu, F.relu6], ids=["nothing", "relu", "clamp"])
def test_a_sum_after_a_convolution_is_rounded_once(after: Model, multiplier: MultiplierForm) -> None:
    torch.manual_seed(0)
    prepared = qc.prepare(qc.capture(Residual(after).eval(), (IMAGE,)), "x86")
    qc.calibrate(prepared, [(IMAGE,)])
    integer = qc.convert(prepared, to="integer", multiplier=multiplier)
    found = {op_name(node): node for node in integer.nodes() if node.op == "call_function"}
    terms: Any = found["quantc.sum.default"].args[0]
    kinds = {(op_name(term), dtype_of(term)) for term in terms}
    assert ("quantc.conv.default", torch.int32) in kinds
    assert len(kinds) == 2
    assert "relu" not in found
    expected = qc.convert(prepared)(IMAGE).detach()
    assert float((expected - integer(IMAGE).detach()).abs().max()) <= 0.02 * float(expected.abs().max())


CURVES: dict[str, nn.Module] = {
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(),
    "gelu": nn.GELU(),
    "leaky_relu": nn.LeakyReLU(),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "elu": nn.ELU(),
    "prelu": nn.PReLU(16, init=0.3),
}


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_after_a_product_takes_the_accumulator(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), CURVES[name], nn.Linear(16, 4))
    qdq, integer = converted(model, (X,), "x86")
    assert "quantc.steps.default" in ops(integer)
    assert name not in ops(integer)
    expected = qdq(X).detach()
    assert float((expected - integer(X).detach()).abs().max()) <= 0.02 * float(expected.abs().max())


def test_a_curve_whose_result_is_read_in_float_stays_in_float() -> None:
    _, integer = converted(nn.Sequential(nn.Linear(16, 16), nn.GELU()), (X,), "x86")
    assert ops(integer)[-2:] == ["quantc.linear.default", "gelu"]


# -- what is refused, and what is split ----------------------------------------------------------------------------


def reasons(program: Program) -> str:
    return "; ".join(program.plan.left_float[node] for node in program.plan.left_float)


def ones(inputs: int) -> nn.Module:
    layer = nn.Linear(inputs, 2, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def test_sums_that_could_overflow_stay_in_float() -> None:
    fitting, beyond = (torch.rand(2, size, generator=torch.Generator().manual_seed(0)) for size in (66_000, 70_000))
    _, integer = converted(ones(66_000), (fitting,), "qnnpack")
    assert "quantc.linear.default" in ops(integer)
    _, integer = converted(ones(70_000), (beyond,), "qnnpack")
    assert "quantc.linear.default" not in ops(integer)
    assert "its accumulator could need 33 bits, and has 32" in reasons(integer)


def test_sums_are_split_as_the_weights_ask_for() -> None:
    x = torch.rand(2, 2048, generator=torch.Generator().manual_seed(0))
    _, integer = converted(ones(2048), (x,), "qnnpack")
    (parts,) = [node.args[5] for node in integer.nodes() if op_name(node) == "quantc.linear.default"]
    assert parts == -(-2048 * 127 * 255 // 2**24)


def test_sums_of_unknown_length_stay_in_float() -> None:
    length = Dim("length", min=4, max=64)
    shapes = ({1: length}, {0: length})
    _, integer = converted(Net(lambda x, y: x @ y), (X, Y), "qnnpack", dynamic_shapes=(shapes,))
    assert "how many products are summed is not known before it runs" in reasons(integer)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Net(lambda x, y: torch.addmm(VECTOR, x, y, alpha=0)), "its product is taken times 0"),
        (Net(lambda x, b, w: F.conv1d(x[None], w, b[:5, 0]), w=drawn(5, 6, 3)), "is not a constant"),
    ],
    ids=["alpha", "bias"],
)
def test_what_has_no_integer_form_says_why(model: nn.Module, reason: str) -> None:
    _, integer = converted(model, (X, Y), "qnnpack")
    assert reason in reasons(integer)
