"""Behaviours of the FX flow: which ops are quantized, alone and together, against torch's own flow."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.flows.fx import (
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    default_qat_qconfig,
    default_qconfig,
    float16_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
    per_channel_dynamic_qconfig,
    prepare_fx,
    prepare_qat_fx,
)
from quantc.flows.observers import HistogramObserver, default_weight_observer
from quantc.flows.qconfig import (
    default_reuse_input_qconfig,
    float16_static_qconfig,
    float_qparams_weight_only_qconfig_4bit,
)
from tests.support.fx_behaviours import agrees, run, some, torchs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.ao import quantization as ao
    from torch.ao.nn import quantized as nnq

pytestmark = pytest.mark.filterwarnings("ignore")
jit: Any = torch.jit
DIMS = (1, 2, 3)
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
FUNCTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
TRANSPOSED_FUNCTIONS = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}
QAT = get_default_qat_qconfig_mapping("x86")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def image(dim: int = 2) -> Tensor:
    return torch.randn(2, 3, *[5] * dim)


class Call(nn.Module):
    """A function of inputs and of tensors that it has itself, and what is behind it."""

    def __init__(self, function: Callable[..., Any], *tensors: Tensor, then: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.then = function, nn.Identity() if then is None else then
        for index, tensor in enumerate(tensors):
            self.register_buffer(f"t{index}", tensor)
        self.count = len(tensors)

    def forward(self, x: Any) -> Any:
        return self.then(self.function(x, *(getattr(self, f"t{index}") for index in range(self.count))))


class CallOfTwo(nn.Module):
    """A function of two inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


BEHIND = [None, nn.ReLU(), nn.ReLU(inplace=True), Call(functional.relu), Call(lambda x: functional.relu(x, True))]


def trained(model: nn.Module, *inputs: Tensor) -> Any:
    found = run(model, QAT, *inputs, qat=True).check(0.1)
    assert found.left == []
    return found


@pytest.mark.parametrize("kind", some(["static", "qat", "dynamic"]))
def test_linear_module(kind: str) -> None:
    x = torch.rand(2, 30)
    if kind == "dynamic":
        found = run(nn.Sequential(nn.Linear(30, 4)), {"": default_dynamic_qconfig}, x).check()
        theirs = torchs(found.model, {"": ao.default_dynamic_qconfig}, x)  # pyright: ignore[reportPrivateImportUsage]
        assert float((found.quantized(x) - theirs).abs().max()) < 0.02
        return
    for then in (nn.Identity(), nn.ReLU(), Call(functional.relu), nn.BatchNorm1d(4)):
        model = nn.Sequential(nn.Linear(30, 4), then)
        found = agrees(model, x) if kind == "static" else trained(model, x)
        assert found.kernels.count("linear") == 1


@pytest.mark.parametrize("bias", some([False, True]))
@pytest.mark.parametrize("then", some([None, nn.ReLU(), Call(functional.relu)]))
def test_functional_linear(bias: bool, then: nn.Module | None) -> None:
    tensors = (torch.randn(4, 30), torch.randn(4))[: 1 + bias]
    model, x = Call(functional.linear, *tensors, then=then), torch.rand(2, 30)
    assert len(agrees(model, x).observers) == 2
    assert run(model, {"": default_dynamic_qconfig}, x).check().kernels == ["linear_dynamic"]
    assert "linear" in trained(Call(functional.linear, *tensors, then=then), x).kernels


@pytest.mark.parametrize("bias", some([False, True]))
@pytest.mark.parametrize("then", some([None, nn.ReLU()]))
def test_linear_dynamic_fp16(bias: bool, then: nn.Module | None) -> None:
    tensors = (torch.randn(4, 30), torch.randn(4))[: 1 + bias]
    found = run(Call(functional.linear, *tensors, then=then), {"": float16_dynamic_qconfig}, torch.rand(2, 30))
    assert "linear" in found.taken
    expected = found.model(*found.inputs)
    assert torch.allclose(found.quantized(*found.inputs), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("op", some(["linear", "add", "sigmoid"]))
def test_linear_static_fp16(op: str) -> None:
    """float16 activations are none of the flow's formats, nor of torch's own table: such ops stay float32, and say so."""
    model = {"linear": nn.Linear(4, 4), "add": Call(lambda x: x + x), "sigmoid": nn.Sigmoid()}[op]
    found = run(nn.Sequential(model), {"": float16_static_qconfig}, torch.randn(3, 4))
    assert found.left == [op]
    assert torch.equal(found.quantized(*found.inputs), found.model(*found.inputs))
    assert all("the QConfigMapping has nothing for it" in row.reason for row in found.prepared.coverage().rows)


@pytest.mark.parametrize("dim", some(DIMS))
def test_conv_module(dim: int) -> None:
    model = nn.Sequential(CONVS[dim](3, 3, 3))
    assert agrees(model, image(dim)).kernels == ["conv"]
    assert trained(model, image(dim)).kernels == ["conv"]


@pytest.mark.parametrize("dim", some(DIMS))
@pytest.mark.parametrize("bias", some([False, True]))
@pytest.mark.parametrize("then", some([None, nn.ReLU()]))
def test_functional_conv(dim: int, bias: bool, then: nn.Module | None) -> None:
    tensors = (torch.randn(3, 3, *[3] * dim), torch.randn(3))[: 1 + bias]

    def function(x: Tensor, weight: Tensor, shift: Tensor | None = None) -> Any:
        return FUNCTIONS[dim](x, weight, shift, [1] * dim, [0] * dim, [1] * dim, 1)

    found = agrees(Call(function, *tensors, then=then), image(dim))
    assert (found.kernels, len(found.observers)) == (["conv"], 2)


@pytest.mark.parametrize("then", some(BEHIND[1:]))
@pytest.mark.parametrize("dim", some(DIMS))
def test_quantized_conv_relu(dim: int, then: nn.Module) -> None:
    found = agrees(nn.Sequential(CONVS[dim](3, 3, 3), then), image(dim))
    assert (found.kernels, len(found.observers)) == (["conv"], 2)


class Binary(nn.Module):
    """An op on two tensors, or on a tensor and a number, twice: with layers before it or not."""

    def __init__(self, op: Any, layers: bool, number: bool, relu: Any = None) -> None:
        super().__init__()
        self.one: nn.Module = nn.Conv2d(3, 3, 1) if layers else nn.Identity()
        self.two: nn.Module = nn.Conv2d(3, 3, 1) if layers else nn.Identity()
        self.op, self.number, self.relu = op, number, nn.Identity() if relu is None else relu

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, other = self.one(x), 3 if self.number else self.two(y)
        x = self.relu(self.op(x, other))
        out: Tensor = self.relu(self.op(other, x))
        return out


OPS: dict[str, list[Any]] = {
    "add": [operator.add, operator.iadd, torch.add],
    "mul": [operator.mul, operator.imul, torch.mul],
}


@pytest.mark.parametrize("layers", some([False, True]))
@pytest.mark.parametrize("number", some([False, True]))
@pytest.mark.parametrize("op", some([*OPS["add"][:2], *OPS["mul"][:2]]))
def test_add(op: Any, number: bool, layers: bool) -> None:
    model = Binary(op, layers, number)
    found = run(model, {"": default_qconfig}, image() + 0, image()).check(0.2)
    if op.__name__.startswith("i") and not layers:
        assert not found.taken  # it writes to the caller's tensor, which stays as it is
    else:
        assert found.left == []
        kind = "conv2d" if layers and number else op.__name__.removeprefix("i")  # numbers are folded into the layer
        assert found.taken[-1] == kind


@pytest.mark.parametrize("relu", some([nn.ReLU(), torch.relu, functional.relu]))
@pytest.mark.parametrize("op", some([operator.add, operator.imul]))
@pytest.mark.parametrize("number", some([False, True]))
def test_add_relu(op: Any, relu: Any, number: bool) -> None:
    found = run(Binary(op, True, number, relu), {"": default_qconfig}, image(), image()).check(0.2)
    assert found.left == []
    assert len(found.observers) == (3 if number else 6)  # none between an op and its relu


def test_add_relu_multiple_uses_of_relu() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sub = nn.Module()
            self.sub.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.sub.relu(x + y)  # type: ignore[operator]
            return self.sub.relu(x + y)  # type: ignore[operator, no-any-return]

    found = run(Twice(), {"": default_qconfig}, torch.randn(3), torch.randn(3)).check(0.1)
    assert (len(found.observers), found.left) == (4, [])
    traced = jit.trace(found.quantized, found.inputs)
    assert torch.equal(traced(*found.inputs), found.quantized.program(*found.inputs))


@pytest.mark.parametrize("op", some([torch.add, torch.mul]))
def test_quantized_add_qat(op: Any) -> None:
    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(op(self.one(op(x, 1.0)), 1.0))
            out: Tensor = self.two(x)
            return out

    found = run(Numbers(), {"": get_default_qat_qconfig("fbgemm")}, torch.randn(4, 1, 3, 3), qat=True).check(0.2)
    assert found.left == []


def test_int8_input_no_unnecessary_fq() -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.op = nnq.FloatFunctional()

        def forward(self, x: Tensor) -> Any:
            return self.op.add_scalar(x, 0.5)

    custom = {"input_quantized_idxs": [0]}
    prepared = prepare_qat_fx(Scalar(), {"": get_default_qat_qconfig("fbgemm")}, (torch.randn(3),), custom)
    assert {row.op for row in prepared.coverage().rows} == {"add"}


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 2, 2), nn.Conv2d(3, 2, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(y)], 1)


@pytest.mark.slow
def test_cat() -> None:
    found = run(Joined(), {"": default_qconfig}, image(), image()).check()
    assert (found.left, len(found.observers)) == ([], 5)
    assert len({id(each) for each in found.observers}) == 3  # what is joined, and the result, share one
    assert run(Joined(), QAT, image(), image(), qat=True).check(0.1).left == []


@pytest.mark.parametrize("then", some(BEHIND))
@pytest.mark.parametrize("dim", some([2, 3]))
def test_qbatch_norm(dim: int, then: nn.Module | None) -> None:
    norm = nn.BatchNorm2d(3) if dim == 2 else nn.BatchNorm3d(3)
    found = run(nn.Sequential(norm, then or nn.Identity()), {"": default_qconfig}, image(dim)).check()
    assert (found.left, len(found.observers)) == ([], 2)


ACTIVATIONS: dict[str, list[nn.Module]] = {
    "hardswish": [nn.Hardswish(), nn.Hardswish(inplace=True), Call(functional.hardswish)],
    "elu": [nn.ELU(), nn.ELU(inplace=True), Call(functional.elu)],
    "leaky_relu": [nn.LeakyReLU(0.1), nn.LeakyReLU(0.1, True), Call(functional.leaky_relu)],
    "prelu": [nn.PReLU(), nn.PReLU(3)],
    "layer_norm": [nn.LayerNorm([3, 5, 5]), Call(lambda x: functional.layer_norm(x, [3, 5, 5]))],
    "instance_norm": [nn.InstanceNorm2d(3), Call(functional.instance_norm)],
}


@pytest.mark.parametrize("which", some([(name, i) for name, row in ACTIVATIONS.items() for i in range(len(row))]))
def test_hardswish(which: tuple[str, int]) -> None:
    name, index = which
    model = nn.Sequential(nn.Conv2d(3, 3, 1), ACTIVATIONS[name][index])
    found = run(model, {"": default_qconfig}, image()).check()
    assert (found.taken, len(found.observers)) == (["conv2d", name], 3)
    assert run(model, QAT, image(), qat=True).check(0.1).left == []


@pytest.mark.parametrize("dim", some([1, 3]))
def test_instance_norm_of_other_ranks(dim: int) -> None:
    norm = nn.InstanceNorm1d(3) if dim == 1 else nn.InstanceNorm3d(3)
    assert run(nn.Sequential(norm), {"": default_qconfig}, image(dim)).check().taken == ["instance_norm"]


def test_norm_weight_bias() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return functional.layer_norm(functional.linear(x, w, b), [5, 5], weight=scale, bias=shift)

    tensors = (torch.randn(5, 5), torch.zeros(5), torch.randn(5, 5), torch.randn(5, 5))
    found = run(Call(function, *tensors), get_default_qconfig_mapping(), torch.rand(5, 5)).check()
    assert (found.taken, len(found.observers)) == (["linear", "layer_norm"], 3)


def test_bmm_int_reference() -> None:
    """Products of matrices are quantized, which torch leaves float."""
    found = run(CallOfTwo(torch.bmm), {"": get_default_qconfig("fbgemm")}, torch.randn(2, 2, 2), torch.randn(2, 2, 2))
    assert found.check(0.1).taken == ["matmul"]


@pytest.mark.slow
def test_clamp() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu6, self.relu6_ = nn.Conv2d(3, 2, 2), nn.ReLU6(), nn.ReLU6(True)
            self.hardtanh, self.hardtanh_ = nn.Hardtanh(), nn.Hardtanh(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.relu6(self.conv(x))
            self.relu6_(x)
            x = torch.clamp(functional.relu6(x), -3, 3).clamp(-2.5, 2.5)
            x = self.hardtanh(x)
            self.hardtanh_(x)
            return functional.hardtanh(x)

    found = run(Clamped(), {"": default_qconfig}, image()).check()
    assert found.left == []
    assert trained(Clamped(), image()).left == []


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.sigmoid, self.hardsigmoid = nn.Conv2d(3, 3, 3), nn.Sigmoid(), nn.Hardsigmoid()
        self.tanh, self.softmax = nn.Tanh(), nn.Softmax(dim=0)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.sigmoid(self.conv(x))).sigmoid()
        x = functional.hardsigmoid(self.hardsigmoid(x))
        x = torch.tanh(self.tanh(x)).tanh()
        out: Tensor = self.softmax(x)
        return out


@pytest.mark.parametrize("qat", some([False, True]))
def test_fixed_qparams_ops(qat: bool) -> None:
    mapping = QAT if qat else get_default_qconfig_mapping()
    found = run(Fixed(), mapping, torch.rand(3, 3, 3, 3), qat=qat)
    assert found.left == []
    expected, made = found.model(*found.inputs), found.quantized(*found.inputs)
    assert float((made - expected).abs().max()) < 0.02
    last = found.prepared.program.plan.groups[-1].outcome
    assert (last.scale, last.zero_point) == (1 / 256, 0)


def test_fixed_qparams_ops_qint8() -> None:
    activation = HistogramObserver.with_args(qscheme=torch.per_tensor_symmetric, dtype=torch.quint8)
    mapping = get_default_qconfig_mapping().set_global(QConfig(activation, default_weight_observer))
    model = Call(lambda x: torch.sigmoid(x.sigmoid()).tanh())
    found = run(model, mapping, torch.randn(2, 2, 2)).check(0.2)
    assert (found.count("quantize_per_tensor.default"), found.left) == (8, [])  # both ways, for four tensors


def test_fixed_qparams_ops_wrong_qconfig() -> None:
    model = nn.Sequential(nn.Sigmoid(), nn.Tanh(), Call(torch.sigmoid), Call(lambda x: x.tanh()))
    found = run(model, QConfigMapping().set_global(default_qconfig), torch.randn(2, 2))
    assert (found.taken, found.observers) == ([], [])
    assert torch.equal(found.quantized(*found.inputs), model(*found.inputs))


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda x: functional.relu((x + 3) * 3 + 3),
    "flatten": lambda x: torch.flatten(x).reshape([-1]).view(-1),
    "transposed": lambda x: x.transpose(1, 2).contiguous().permute(0, 2, 3, 1),
    "dropped": lambda x: functional.dropout(x, training=False),
    "repeated": lambda x: torch.repeat_interleave(x.repeat_interleave(3, 1), 3, 1),
    "relus": lambda x: functional.relu(x.relu(), inplace=True),
    "squeezed": lambda x: torch.squeeze(x.unsqueeze(0), 0),
    "detached": lambda x: x.detach().repeat(4, 2, 1, 1),
    "stacked": lambda x: torch.stack([x, x], 0),
    "pooled": lambda x: functional.max_pool2d(x, 2),
    "lists": lambda x: [x, (x, x)][1][0],  # type: ignore[index]
}
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "average": lambda x: functional.avg_pool2d(x, 2),
    "adaptive": lambda x: functional.adaptive_avg_pool2d(x, (1, 1)),
    "mean": lambda x: torch.mean(x, [2, 3], False),
    "mean method": lambda x: x.mean([2, 3], True),
    "nearest": lambda x: functional.interpolate(x, 4, mode="nearest"),
    "bilinear": lambda x: functional.interpolate(x, 4, mode="bilinear"),
}


@pytest.mark.parametrize("name", some([*SHAPES, *VALUES]))
def test_general_shape_ops(name: str) -> None:
    function = {**SHAPES, **VALUES}[name]
    found = run(nn.Sequential(nn.Conv2d(3, 3, 3), Call(function)), {"": default_qconfig}, image()).check(0.1)
    assert found.left == []


def test_ave_pool_with_custom_cfg() -> None:
    custom = {"input_quantized_idxs": [0]}
    found = prepare_fx(nn.Sequential(nn.AvgPool2d(3)).eval(), {"": default_qconfig}, (image(),), custom)
    found(image())
    from quantc.flows.fx import convert_fx

    given = torch.quantize_per_tensor(image(), 0.05, 128, torch.quint8)
    expected = functional.avg_pool2d(given.dequantize(), 3)
    assert float((convert_fx(found)(given) - expected).abs().max()) < 0.1


def test_copy_node_fp32_input() -> None:
    found = run(Call(lambda x: x.relu()), {"": default_reuse_input_qconfig}, torch.randn(4))
    assert torch.equal(found.quantized(*found.inputs), found.inputs[0].relu())


@pytest.mark.parametrize("qat", some([False, True]))
def test_float_functional(qat: bool) -> None:
    class Operations(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.ModuleList(nnq.FloatFunctional() for _ in range(6))

        def forward(self, x: Tensor) -> Any:
            f: Any = self.f
            x = f[1].add_scalar(f[0].add(x, x), 3)
            x = f[3].mul_scalar(f[2].mul(x, x), 3)
            return f[5].cat([f[4].add_relu(x, x)])

    mapping = {"": default_qat_qconfig if qat else default_qconfig}
    found = run(Operations(), mapping, torch.rand(3, 3), qat=qat).check(0.1)
    assert found.left == []


TABLES = [float_qparams_weight_only_qconfig, float_qparams_weight_only_qconfig_4bit]


@pytest.mark.parametrize("qconfig", some([*TABLES, None, default_qconfig]))
def test_embedding(qconfig: Any) -> None:
    indices = torch.randint(0, 10, (32,))
    found = run(nn.Sequential(nn.Embedding(10, 12)), {"": qconfig}, indices)
    assert found.taken == (["embedding"] if qconfig in TABLES else [])
    assert found.observers == []
    worst = float((found.quantized(indices) - found.model(indices)).abs().max())
    assert worst <= {0: 0.02, 1: 0.3}.get(TABLES.index(qconfig) if qconfig in TABLES else 2, 0.0)


@pytest.mark.parametrize("qconfig", some([*TABLES, None, default_qconfig]))
def test_embedding_bag(qconfig: Any) -> None:
    inputs = (torch.randint(0, 10, (32,)), torch.tensor([0, 19, 20, 28, 28, 32]))
    model = Bag()
    found = run(model, {"": qconfig}, *inputs)
    assert found.taken == (["embedding_bag"] if qconfig in TABLES else [])
    worst = float((found.quantized(*inputs) - model(*inputs)).abs().max())
    assert worst <= {0: 0.02, 1: 0.3}.get(TABLES.index(qconfig) if qconfig in TABLES else 2, 1e-6)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(10, 12, include_last_offset=True)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        out: Tensor = self.emb(indices, offsets)
        return out


DYNAMIC = [per_channel_dynamic_qconfig, default_dynamic_qconfig, float16_dynamic_qconfig]
CELLS = {
    "LSTMCell": nn.LSTMCell(2, 2),
    "GRUCell": nn.GRUCell(2, 2),
    "RNNTanh": nn.RNNCell(2, 2),
    "RNNReLU": nn.RNNCell(2, 2, nonlinearity="relu"),
    "LSTM": nn.LSTM(2, 2),
    "GRU": nn.GRU(2, 2),
}


@pytest.mark.parametrize("name", some(CELLS))
@pytest.mark.parametrize("index", some(range(3)))
def test_rnn(name: str, index: int) -> None:
    model, qconfig = nn.Sequential(CELLS[name]), DYNAMIC[index]
    x = torch.randn(10, 3, 2) if name in ("LSTM", "GRU") else torch.randn(3, 2)
    found = run(model, {"object_type": [(type(CELLS[name]), qconfig)]}, x).check(0.1)
    assert len(found.taken) == 1


@pytest.mark.parametrize("dim", some(DIMS))
@pytest.mark.parametrize("then", some([None, nn.ReLU()]))
@pytest.mark.parametrize("function", some([False, True]))
def test_conv_transpose_not_reference(dim: int, then: nn.Module | None, function: bool) -> None:
    weight = torch.randn(3, 3, *[3] * dim)
    model = Call(TRANSPOSED_FUNCTIONS[dim], weight) if function else TRANSPOSED[dim](3, 3, 3)
    found = run(nn.Sequential(model, then or nn.Identity()), get_default_qconfig_mapping(), image(dim)).check()
    assert (found.left, found.taken[0]) == ([], f"conv_transpose{dim}d")


@pytest.mark.parametrize("dim", some([1, 2]))
def test_conv_transpose_1d(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    model = nn.Sequential(TRANSPOSED[dim](1, 1, 1))
    agrees(model, torch.randn(4, 1, *[4] * dim), mapping=ao.get_default_qconfig_mapping("qnnpack"))


@pytest.mark.parametrize("groups", some([1, 2]))
def test_convtranspose_per_channel_fails_early(groups: int) -> None:
    """It need not fail: channels of the result lie on the other axis, and have their scales there."""
    model = nn.Sequential(nn.ConvTranspose2d(4, 8, 2, groups=groups))
    found = run(model, {"": get_default_qconfig("fbgemm")}, torch.randn(2, 4, 5, 5)).check(0.03)
    weight = next(group for group in found.prepared.program.plan.groups if group.name.endswith("in1"))
    assert weight.outcome.spec.granularity.axis == 1
    assert found.kernels == ["conv_transpose"]


@pytest.mark.slow
def test_qmatmul() -> None:
    assert agrees(CallOfTwo(torch.matmul), torch.randn(2, 2), torch.randn(2, 2)).taken == ["matmul"]


MOVES = {
    "pixel_shuffle": (nn.PixelShuffle(2), lambda x: functional.pixel_shuffle(x, 2), 2),
    "pixel_unshuffle": (nn.PixelUnshuffle(2), lambda x: functional.pixel_unshuffle(x, 2), 32),
    "channel_shuffle": (nn.ChannelShuffle(2), lambda x: functional.channel_shuffle(x, 2), 8),
    "narrow": (Call(lambda x: torch.narrow(x, 1, 0, 4)), lambda x: x.narrow(1, 0, 4), 4),
}


def config_of(backend: str) -> Any:
    from torch.ao.quantization import backend_config as configs

    return configs.get_fbgemm_backend_config() if backend == "fbgemm" else configs.get_qnnpack_backend_config()


@pytest.mark.parametrize("name", some(MOVES))
@pytest.mark.parametrize("layer", some([False, True]))
@pytest.mark.parametrize("backend", some(["fbgemm", "qnnpack", None]))
def test_pixel_shuffle(name: str, layer: bool, backend: str | None) -> None:
    module, function, channels = MOVES[name]
    if name == "channel_shuffle" and backend:
        pytest.skip("torch's tables for these backends have no pattern for it")
    body = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), module if layer else Call(function))
    model = Call(lambda x, bias: body(x) + bias, torch.randn(channels, 1, 1))
    model.body = body
    mapping = get_default_qconfig_mapping(backend or "x86")
    found = run(model, mapping, torch.randn(1, 8, 6, 6), backend_config=config_of(backend) if backend else None).check()
    assert found.left == []
