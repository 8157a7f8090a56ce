"""A small model for each family of ops, and the rule that takes it in each backend; None where it stays float."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.ir.program import Program

Forward = Callable[..., Any]
NAMES = ("x86", "qnnpack", "executorch")
"""The backends that the cases are for."""


class Net(nn.Module):
    """Some modules, and a function of them and the inputs."""

    def __init__(self, forward: Forward, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self._forward = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def captured(forward: Any, x: Tensor, **modules: nn.Module) -> Program:
    """A function of some modules and `x`, as a program."""
    return qc.capture(Net(forward, modules).eval(), (x,), method="fx")


def image() -> Tensor:
    return torch.randn(2, 4, 8, 8)


def decided(program: Program, backend: str) -> tuple[dict[str, str], set[str]]:
    """What a backend decides on a program: the rule of each claimed node, and the sites that are quantized."""
    plan = qc.prepare(program, backend).plan
    return {node.name: claim.rule for node, claim in plan.claims.rows.items()}, {str(site) for site in plan.outcomes}


def sqnr(expected: Any, actual: Any) -> float:
    """Of everything a model returns, in dB."""
    signal, found = (torch.cat([leaf.flatten() for leaf in pytree.tree_leaves(given)]) for given in (expected, actual))
    noise = (signal - found).double().norm()
    return math.inf if noise == 0 else 20 * math.log10(float(signal.double().norm() / noise))


@dataclass(frozen=True)
class Case:
    """A family, the op that stands for it, how the model is made, and the rules by backend."""

    family: str
    op: str
    make: Callable[[], tuple[nn.Module, Tensor]]
    x86: str | None = None
    qnnpack: str | None = None
    executorch: str | None = None

    def rule(self, backend: str) -> str | None:
        found = getattr(self, backend)
        return found if isinstance(found, str) else None


def images() -> Tensor:
    return torch.randn(2, 4, 8, 8)


def rows() -> Tensor:
    return torch.randn(3, 6, 8)


def net(
    forward: Forward, data: Callable[[], Tensor], **modules: Callable[[], nn.Module]
) -> Callable[[], tuple[nn.Module, Tensor]]:
    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return Net(forward, {name: module() for name, module in modules.items()}).eval(), data()

    return make


def between(forward: Callable[[Tensor], Any]) -> Callable[[], tuple[nn.Module, Tensor]]:
    """An op between two convolutions, which want quantized tensors."""

    def run(self: Any, x: Tensor) -> Any:
        return self.last(forward(self.first(x)))

    return net(run, images, first=lambda: nn.Conv2d(4, 4, 3, padding=1), last=lambda: nn.LazyConv2d(3, 1))


def after_linear(forward: Callable[[Tensor], Tensor]) -> Callable[[], tuple[nn.Module, Tensor]]:
    """An op between two linears."""

    def run(self: Any, x: Tensor) -> Any:
        return self.last(forward(self.first(x)))

    return net(run, rows, first=lambda: nn.Linear(8, 8), last=lambda: nn.LazyLinear(5))


def single(*modules: Callable[[], nn.Module], data: Callable[[], Tensor] = images) -> Callable[[], Any]:
    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return nn.Sequential(*(module() for module in modules)).eval(), data()

    return make


def lines() -> Tensor:
    return torch.randn(2, 4, 12)


def volumes() -> Tensor:
    return torch.randn(2, 4, 5, 5, 5)


def tokens() -> Tensor:
    return torch.randint(0, 20, (3, 5))


def everywhere(family: str, op: str, make: Callable[[], tuple[nn.Module, Tensor]], rule: str) -> Case:
    return Case(family, op, make, rule, rule, rule)


def on_servers(family: str, op: str, make: Callable[[], tuple[nn.Module, Tensor]], rule: str) -> Case:
    """What x86 and qnnpack have and XNNPACK's delegate has not."""
    return Case(family, op, make, rule, rule)


class LastOutput(nn.Module):
    """A recurrent module without its state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)[0]


class Cell(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        made = self.inner(x[:, 0])
        return made[0] if isinstance(made, tuple) else made


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 8)

    def forward(self, x: Tensor) -> Any:
        return self.bag(x)


def two_branches(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], tuple[nn.Module, Tensor]]:
    """An op of two tensors that come quantized, because convolutions read them too."""

    def run(self: Any, x: Tensor) -> Any:
        left, right = F.max_pool2d(self.a(x), 2), F.max_pool2d(self.b(x), 2)
        return self.c(left), self.d(right), self.last(combine(left, right))

    convs = {name: (lambda: nn.Conv2d(4, 4, 1)) for name in "abcd"}
    return net(run, images, **convs, last=lambda: nn.LazyConv2d(3, 1))


def beside(forward: Callable[[Tensor], Tensor]) -> Callable[[], tuple[nn.Module, Tensor]]:
    """An op of an image that comes quantized, because a convolution reads it too."""

    def run(self: Any, x: Tensor) -> Any:
        pooled = F.max_pool2d(self.first(x), 2)
        return self.other(pooled), self.last(forward(pooled))

    convs = {name: (lambda: nn.Conv2d(4, 4, 1)) for name in ("first", "other")}
    return net(run, images, **convs, last=lambda: nn.LazyConv2d(3, 1))


def beside_linear(forward: Callable[[Tensor], Tensor]) -> Callable[[], tuple[nn.Module, Tensor]]:
    """The same for rows."""

    def run(self: Any, x: Tensor) -> Any:
        turned = self.first(x).transpose(0, 1)
        return self.other(turned), self.last(forward(turned))

    linears = {name: (lambda: nn.Linear(8, 8)) for name in ("first", "other")}
    return net(run, rows, **linears, last=lambda: nn.LazyLinear(5))


def matrix(*shape: int) -> Callable[[], nn.Module]:
    return lambda: nn.ParameterList([nn.Parameter(torch.randn(shape))])


PRODUCTS = [
    Case("conv1d", "conv1d", single(lambda: nn.Conv1d(4, 6, 3), data=lines), "conv", "conv", "conv-static"),
    everywhere("conv2d", "conv2d", single(lambda: nn.Conv2d(4, 6, 3, groups=2)), "conv"),
    on_servers("conv3d", "conv3d", single(lambda: nn.Conv3d(4, 6, 3), data=volumes), "conv"),
    on_servers(
        "conv_transpose1d",
        "conv_transpose1d",
        single(lambda: nn.ConvTranspose1d(4, 6, 3), data=lines),
        "conv-transpose",
    ),
    everywhere("conv_transpose2d", "conv_transpose2d", single(lambda: nn.ConvTranspose2d(4, 6, 3)), "conv-transpose"),
    on_servers(
        "conv_transpose3d",
        "conv_transpose3d",
        single(lambda: nn.ConvTranspose3d(4, 6, 3), data=volumes),
        "conv-transpose",
    ),
    on_servers(
        "grouped transposed",
        "conv_transpose2d",
        single(lambda: nn.ConvTranspose2d(4, 6, 3, groups=2)),
        "conv-transpose-grouped",
    ),
    everywhere("linear", "linear", single(lambda: nn.Linear(8, 5), data=rows), "linear"),
    on_servers(
        "linear, computed weight",
        "linear",
        net(lambda self, x: F.linear(x, x[0]), rows),
        "linear-computed",
    ),
    on_servers("matmul", "matmul", net(lambda self, x: x @ x[0].T, rows), "matmul"),
    on_servers("bmm", "matmul", net(lambda self, x: torch.bmm(x, x.mT), rows), "matmul"),
    on_servers(
        "matmul with a constant", "matmul", net(lambda self, x: x @ self.w[0], rows, w=matrix(8, 5)), "matmul-constant"
    ),
    on_servers("addmm", "addmm", net(lambda self, x: torch.addmm(x[2], x[0], x[1].T @ x[2]), rows), "addmm"),
    on_servers(
        "addmm with a constant",
        "addmm",
        net(lambda self, x: torch.addmm(x[1], x[0], self.w[0]), rows, w=matrix(8, 8)),
        "addmm-constant",
    ),
    on_servers("baddbmm", "baddbmm", net(lambda self, x: torch.baddbmm(x[..., :6], x, x.mT), rows), "baddbmm"),
    everywhere("embedding", "embedding", single(lambda: nn.Embedding(20, 8), data=tokens), "embedding"),
    on_servers("embedding_bag", "embedding_bag", single(Bag, data=tokens), "embedding-bag"),
    on_servers("lstm", "lstm", single(lambda: LastOutput(nn.LSTM(8, 5, 2)), data=rows), "lstm"),
    on_servers("gru", "gru", single(lambda: LastOutput(nn.GRU(8, 5, bidirectional=True)), data=rows), "gru"),
    on_servers("rnn", "rnn_tanh", single(lambda: LastOutput(nn.RNN(8, 5)), data=rows), "rnn"),
    on_servers("lstm cell", "lstm_cell", single(lambda: Cell(nn.LSTMCell(8, 5)), data=rows), "lstm-cell"),
    on_servers("gru cell", "gru_cell", single(lambda: Cell(nn.GRUCell(8, 5)), data=rows), "gru-cell"),
    on_servers("rnn cell", "rnn_tanh_cell", single(lambda: Cell(nn.RNNCell(8, 5)), data=rows), "rnn-cell"),
    on_servers(
        "rnn cell with relu",
        "rnn_relu_cell",
        single(lambda: Cell(nn.RNNCell(8, 5, nonlinearity="relu")), data=rows),
        "rnn-cell",
    ),
]


def residual(self: Any, x: Tensor) -> Any:
    return self.last(torch.relu(self.b(torch.relu(self.a(x))) + x))


def residual_swapped(self: Any, x: Tensor) -> Any:
    return self.last(x + self.b(torch.relu(self.a(x))))


CONVS = {"a": lambda: nn.Conv2d(4, 4, 1), "b": lambda: nn.Conv2d(4, 4, 1), "last": lambda: nn.Conv2d(4, 3, 1)}
LINEARS = {"a": lambda: nn.Linear(8, 8), "b": lambda: nn.Linear(8, 8), "last": lambda: nn.Linear(8, 3)}

SUMS = [
    Case("conv + add + relu", "add", net(residual, images, **CONVS), "conv-add", "add", "add-images"),
    Case("add + conv", "add", net(residual_swapped, images, **CONVS), "conv-add", "add", "add-images"),
    Case("linear + add + relu", "add", net(residual, rows, **LINEARS), "linear-add", "add"),
    Case(
        "linear + linear",
        "add",
        net(lambda self, x: self.last(self.a(x) + self.b(x)), rows, **LINEARS),
        "linear-add",
        "add",
        "add",
    ),
    Case("add", "add", two_branches(torch.add), "add", "add", "add-images"),
    everywhere("sub", "sub", two_branches(torch.sub), "sub"),
    everywhere("mul", "mul", two_branches(torch.mul), "mul"),
    Case("add a number", "add", between(lambda x: torch.relu(x.tanh() + 0.5)), None, "add-number"),
    Case("subtract a number", "sub", between(lambda x: x.tanh() - 0.5), None, "sub-number"),
    Case("subtract from a number", "rsub", between(lambda x: 1 - x.tanh()), None, "sub-from-number"),
    Case("multiply by a number", "mul", between(lambda x: x.tanh() * 0.5), None, "mul-number"),
    Case("divide by a number", "div", between(lambda x: x.tanh() / 3), None, "div-number"),
    on_servers("sum", "sum", beside_linear(lambda x: x.sum(1)), "sum"),
]

FUSED = [
    everywhere("relu", "relu", between(torch.relu), "conv"),
    everywhere("relu6", "clamp", between(F.relu6), "conv"),
    everywhere("hardtanh", "clamp", after_linear(F.hardtanh), "linear"),
    Case("hardswish", "hardswish", between(F.hardswish), "conv", "activation"),
    Case("silu", "silu", between(F.silu), "conv", "activation"),
    Case("gelu", "gelu", after_linear(F.gelu), "linear", "activation"),
    Case("leaky_relu", "leaky_relu", after_linear(F.leaky_relu), "linear", "activation"),
    Case("tanh", "tanh", after_linear(torch.tanh), "linear", "tanh"),
    Case("sigmoid", "sigmoid", after_linear(torch.sigmoid), "linear", "sigmoid"),
    Case("elu", "elu", after_linear(F.elu), "linear", "activation"),
    Case(
        "prelu",
        "prelu",
        net(
            lambda self, x: self.last(self.act(self.first(x))),
            rows,
            first=lambda: nn.Linear(8, 8),
            act=nn.PReLU,
            last=lambda: nn.Linear(8, 5),
        ),
        "linear-prelu",
        "prelu",
    ),
    Case("hardsigmoid", "hardsigmoid", between(F.hardsigmoid), None, "sigmoid"),
    Case("softmax", "softmax", after_linear(lambda x: x.softmax(-1)), None, "softmax"),
    everywhere("relu alone", "relu", between(lambda x: F.relu(F.max_pool2d(x, 2))), "clamp"),
]

NORMS = [
    Case(f"{family} alone", op, between(forward) if data is images else after_linear(forward), None, rule)
    for family, op, forward, data, rule in (
        ("layer_norm", "layer_norm", lambda x: F.layer_norm(x, (8,)), rows, "layer-norm"),
        ("rms_norm", "rms_norm", lambda x: F.rms_norm(x, (8,)), rows, "rms-norm"),
        ("group_norm", "group_norm", lambda x: F.group_norm(x, 2), images, "group-norm"),
        ("instance_norm", "instance_norm", F.instance_norm, images, "instance-norm"),
    )
]
NORMS.append(
    Case("batch_norm alone", "batch_norm", single(lambda: nn.BatchNorm2d(4), nn.ReLU), None, "batch-norm"),
)

MOVES = [
    everywhere("max_pool", "max_pool2d", between(lambda x: F.max_pool2d(x, 2)), "max-pool"),
    on_servers("avg_pool", "avg_pool2d", beside(lambda x: F.avg_pool2d(x, 2)), "average"),
    Case(
        "adaptive_avg_pool",
        "adaptive_avg_pool2d",
        beside(lambda x: F.adaptive_avg_pool2d(x, 1)),
        "average",
        "average",
        "adaptive-avg-pool",
    ),
    Case("mean", "mean", beside(lambda x: x.mean((2, 3), keepdim=True)), "average", "average", "mean"),
    Case("mean of rows", "mean", beside_linear(lambda x: x.mean(1)), "average"),
    on_servers("amax", "amax", after_linear(lambda x: x.amax(1)), "extreme"),
    everywhere("cat", "cat", two_branches(lambda a, b: torch.cat([a, b], 1)), "cat"),
    on_servers("stack", "stack", two_branches(lambda a, b: torch.stack([a, b], 1).flatten(1, 2)), "stack"),
    on_servers("interpolate nearest", "upsample_nearest2d", between(lambda x: F.interpolate(x, None, 2.0)), "upsample"),
    on_servers(
        "interpolate bilinear",
        "upsample_bilinear2d",
        beside(lambda x: F.interpolate(x, None, 2.0, "bilinear")),
        "upsample-linear",
    ),
    on_servers("pad", "pad", between(lambda x: F.pad(x, (1, 1, 2, 0))), "pad"),
    on_servers("pad reflect", "pad", between(lambda x: F.pad(x, (1, 1, 2, 0), "reflect")), "pad"),
    on_servers("pixel_shuffle", "pixel_shuffle", between(lambda x: F.pixel_shuffle(x, 2)), "shuffle"),
    on_servers("channel_shuffle", "channel_shuffle", between(lambda x: F.channel_shuffle(x, 2)), "shuffle"),
    everywhere("reshape", "reshape", after_linear(lambda x: x.reshape(9, 16)), "reshape"),
    everywhere("flatten", "flatten", after_linear(lambda x: x.flatten(1)), "reshape"),
    everywhere("unflatten", "unflatten", after_linear(lambda x: torch.unflatten(x, 2, (2, 4))), "reshape"),
    everywhere("squeeze", "squeeze", after_linear(lambda x: x[:, :1].squeeze(1)), "reshape"),
    everywhere("unsqueeze", "unsqueeze", after_linear(lambda x: x.unsqueeze(1)), "reshape"),
    everywhere("transpose", "transpose", after_linear(lambda x: x.transpose(1, 2)), "transpose"),
    everywhere("permute", "permute", after_linear(lambda x: x.permute(2, 0, 1)), "transpose"),
    everywhere("slice", "slice", between(lambda x: x[:, :, 2:6]), "slice"),
    on_servers("slice with steps", "slice", between(lambda x: x[:, :, ::2]), "slice"),
    everywhere("select", "select", after_linear(lambda x: x[:, 1]), "slice"),
    everywhere("split", "split", between(lambda x: torch.cat(torch.split(x, 2, 2)[:2], 2)), "split"),
    everywhere("chunk", "chunk", between(lambda x: x.chunk(2, 1)[0]), "split"),
    everywhere("unbind", "unbind", after_linear(lambda x: x.unbind(1)[2]), "split"),
    on_servers("expand", "expand", after_linear(lambda x: x[:, :1].expand(3, 4, 8)), "expand"),
    on_servers("repeat", "repeat", after_linear(lambda x: x.repeat(1, 2, 1)), "expand"),
    on_servers("flip", "flip", between(lambda x: x.flip(2)), "flip"),
    on_servers("roll", "roll", between(lambda x: x.roll(1, 2)), "flip"),
    on_servers("index", "index", between(lambda x: x[:, :, torch.tensor([0, 3])]), "gather"),
    on_servers("index_select", "index_select", between(lambda x: x.index_select(2, torch.tensor([1, 2]))), "gather"),
    on_servers(
        "gather",
        "gather",
        between(lambda x: x.gather(3, torch.zeros(2, 4, 8, 2, dtype=torch.int64))),
        "gather",
    ),
]

CASES = [*PRODUCTS, *SUMS, *FUSED, *NORMS, *MOVES]
