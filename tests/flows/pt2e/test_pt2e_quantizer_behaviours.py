"""Behaviours that code written for XNNPACKQuantizer and X86InductorQuantizer relies on, one test for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quantc.errors import AnnotationError, ConfigError
from quantc.flows.pt2e import (
    X86InductorQuantizer,
    XNNPACKQuantizer,
    convert_pt2e,
    get_symmetric_quantization_config,
    move_exported_model_to_eval,
    prepare_pt2e,
    prepare_qat_pt2e,
)
from quantc.flows.pt2e.x86_inductor_quantizer import get_default_x86_inductor_quantization_config
from tests.support.pt2e_quantizers import converted, count, exported

aten = torch.ops.aten
Q, DQ, DQ_CHANNEL = "quantize_per_tensor.default", "dequantize_per_tensor.default", "dequantize_per_channel.default"
DYNAMIC = "quantize_per_tensor.tensor"
IMAGE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SYMMETRIC = get_symmetric_quantization_config(is_per_channel=True)
X86 = get_default_x86_inductor_quantization_config()


def xnnpack(**keywords: Any) -> XNNPACKQuantizer:
    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(**{"is_per_channel": True} | keywords))


def x86(**keywords: Any) -> X86InductorQuantizer:
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config(**keywords))


def counts(module: fx.GraphModule) -> tuple[int, int, int]:
    return count(module, Q), count(module, DQ), count(module, DQ_CHANNEL)


# -- XNNPACK -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2])
def test_convolutions(dim: int) -> None:
    kind: Any = getattr(nn, f"Conv{dim}d")
    model, x = nn.Sequential(kind(3, 4, 3), kind(4, 4, 3)), torch.randn(1, 3, *[8] * dim)
    assert counts(converted(model, (x,), xnnpack())) == (3, 3, 2)


@pytest.mark.parametrize("shape", [(9, 8), (9, 10, 11, 8)])
@pytest.mark.parametrize("is_relu", [False, True])
def test_linears(shape: tuple[int, ...], is_relu: bool) -> None:
    layers = [nn.Linear(8, 16), *([nn.ReLU()] if is_relu else []), nn.Linear(16, 8)]
    made = converted(nn.Sequential(*layers), (torch.randn(shape),), xnnpack())
    assert counts(made) == (3, 3, 2)
    assert count(made, "linear.default") == 2


def test_linears_with_sizes_that_are_open() -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(4, 3, 8)
    batch = {0: torch.export.Dim("batch")}
    prepared = prepare_pt2e(exported(model, (x,), dynamic_shapes=(batch,)), xnnpack())
    prepared(x)
    made = convert_pt2e(prepared)
    assert counts(made) == (2, 2, 1)
    assert made(torch.randn(7, 3, 8)).shape == (7, 3, 8)


class Following(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 3, 3), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return self.fc(nn.functional.hardtanh(self.conv(x).relu()).view(-1, 6))


def test_ops_that_hand_on_share_the_scale() -> None:
    prepared = prepare_pt2e(exported(Following().eval(), (IMAGE,)), xnnpack())
    prepared(IMAGE)
    (view,) = prepared.graph.find_nodes(op="call_function", target=aten.view.default)
    before = getattr(prepared, str(view.args[0].target))
    after = getattr(prepared, str(next(iter(view.users)).target))
    assert before is after
    assert counts(convert_pt2e(prepared))[2] == 2


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.foo_bar = nn.Linear(5, 5)
        self.sub = nn.Sequential(nn.Linear(5, 5))

    def forward(self, x: Tensor) -> Any:
        return self.sub(self.foo_bar(x))


def weights(module: fx.GraphModule) -> list[bool]:
    """For each linear, whether its weight is quantized."""
    return [
        "dequantize" in str(node.args[1].target) for node in module.graph.nodes if node.target is aten.linear.default
    ]


X = (torch.randn(3, 5),)


@pytest.mark.parametrize("setter", ["name", "type"])
def test_a_part_alone(setter: str) -> None:
    quantizer = XNNPACKQuantizer()
    if setter == "name":
        quantizer.set_module_name("sub", SYMMETRIC)
    else:
        quantizer.set_module_type(nn.Sequential, SYMMETRIC)
    made = converted(Nested(), X, quantizer)
    assert weights(made) == [False, True]
    assert counts(made) == (2, 2, 1)
    assert weights(converted(Nested(), X, XNNPACKQuantizer().set_module_name("foo_bar", SYMMETRIC))) == [True, False]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(3, 16)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.fc(self.pool((self.b(y) + self.c(y)).relu()).flatten(1))


def test_a_class_of_modules_alone() -> None:
    made = converted(Residual(), (IMAGE,), XNNPACKQuantizer().set_module_type(nn.Linear, SYMMETRIC))
    assert counts(made) == (2, 2, 1)
    assert weights(made) == [True]


def test_a_filter_of_nodes() -> None:
    made = converted(
        Residual(), (IMAGE,), xnnpack().set_filter_function(lambda node: node.target is aten.linear.default)
    )
    assert counts(made) == (2, 2, 1)
    quantizer = xnnpack().set_filter_function(lambda node: "linear" not in node.name)
    assert weights(converted(Residual(), (IMAGE,), quantizer)) == [False]
    assert "linear" in quantizer.left_float


@pytest.mark.parametrize("keywords", [{}, {"weight_qmin": -8, "weight_qmax": 7}, {"is_qat": True}])
@pytest.mark.parametrize("shape", [(9, 8), (2, 3, 4, 8)])
def test_dynamic_linears(keywords: dict[str, Any], shape: tuple[int, ...]) -> None:
    is_qat = keywords.get("is_qat", False)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), torch.randn(shape)
    made = converted(model, (x,), xnnpack(is_dynamic=True, **keywords), is_qat=is_qat)
    assert (count(made, "choose_qparams.tensor"), count(made, DYNAMIC), count(made, DQ_CHANNEL)) == (2, 2, 2)
    ends = {node.args[4:6] for node in made.graph.nodes if str(node.target).endswith(DQ_CHANNEL)}
    assert ends == {(keywords.get("weight_qmin", -127), keywords.get("weight_qmax", 127))}


class Arithmetic(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.kind == "add":
            x = x + y
            x += y
        elif self.kind == "mul":
            x = x * y
            x *= y
        return x


@pytest.mark.parametrize("kind", ["add", "mul"])
def test_arithmetic_in_place(kind: str) -> None:
    made = converted(Arithmetic(kind), (IMAGE, IMAGE + 1), xnnpack())
    assert counts(made)[:2] == (4, 5)


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Any:
        x = 3 + self.conv(x)
        x = x * 3
        x += 3
        return x


def test_arithmetic_with_numbers_stays_float_with_a_reason() -> None:
    quantizer = xnnpack()
    made = converted(Scalars(), (IMAGE,), quantizer)
    assert counts(made) == (2, 2, 1)
    assert {"add", "mul", "add_"} == set(quantizer.left_float)
    assert all("expected a tensor" in reason for reason in quantizer.left_float.values())


@pytest.mark.parametrize("kind", ["huge", "long"])
def test_arithmetic_that_has_no_8_bit_form(kind: str) -> None:
    """Nothing is left to quantize, and that is said, with the reason."""

    class Odd(nn.Module):
        t: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("t", torch.tensor([100]))

        def forward(self, x: Tensor) -> Tensor:
            return x * 3.4028235e38 if kind == "huge" else (x + self.t) * self.t

    with pytest.raises(AnnotationError, match="annotated nothing"):
        prepare_pt2e(exported(Odd().eval(), (IMAGE,)), xnnpack())
    empty = prepare_pt2e(exported(Odd().eval(), (IMAGE,)), xnnpack(), allow_empty=True)
    assert counts(convert_pt2e(empty)) == (0, 0, 0)


def test_joining_a_tensor_with_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return torch.cat([y, y])

    quantizer = xnnpack()
    made = converted(Twice(), (IMAGE,), quantizer)
    (cat,) = made.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert all("dequantize" in str(operand.target) for operand in cat.args[0])
    assert "single tensor" in quantizer.left_float["cat"]


def test_a_recurrent_layer_between_products() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.gru = nn.Linear(2, 2), nn.GRU(2, 2)

        def forward(self, x: Tensor, h: Tensor) -> Any:
            y, last = self.gru(1 * self.fc(x), 1 * h)
            return 1 * y, 1 * last

    torch.manual_seed(0)
    quantizer, inputs = xnnpack(), (torch.randn(4, 3, 2), torch.randn(1, 3, 2))
    model = Recurrent()
    made = converted(model, inputs, quantizer)
    assert "gru" in quantizer.left_float
    for found, wanted in zip(made(*inputs), model(*inputs), strict=True):
        torch.testing.assert_close(found, wanted, atol=0.05, rtol=0)


# -- training ------------------------------------------------------------------------------------------------------


def trained(model: nn.Module, quantizer: Any, x: Tensor = IMAGE, **keywords: Any) -> tuple[Any, Any]:
    prepared = prepare_qat_pt2e(exported(model.train(), (x,), **keywords), quantizer)
    prepared(x)
    return prepared, convert_pt2e(move_exported_model_to_eval(prepared))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU()
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.relu(self.norm(self.conv(x))))


def test_folded_weights_and_biases_keep_their_source() -> None:
    _, made = trained(Backbone(), xnnpack(is_qat=True), strict=True)
    convs = list(made.graph.find_nodes(op="call_function", target=aten.conv2d.default))
    sources = []
    for conv in convs:
        bias = conv.args[2]
        assert bias.op == "get_attr"
        for key in ("source_fn_stack", "nn_module_stack", "stack_trace"):
            assert bias.meta.get(key) == conv.meta.get(key), key
        assert bias.meta["source_fn_stack"]
        sources.append(bias.meta["source_fn_stack"][0][0])
    assert len(set(sources)) == 2


def test_ops_that_training_adds_have_the_modules_of_their_convolution() -> None:
    prepared, _ = trained(Backbone(), xnnpack(is_qat=True))
    added = [node for node in prepared.graph.nodes if node.target is aten.mul.Tensor]
    assert len(added) == 2
    assert all(node.meta.get("nn_module_stack") for node in added)


def test_counters_go_with_their_norms() -> None:
    _, made = trained(Backbone(), xnnpack(is_qat=True))
    assert not [node for node in made.graph.nodes if "num_batches_tracked" in str(node.target)]
    assert not [node for node in made.graph.nodes if node.target is aten.add_.Tensor]
    assert count(made, "batch_norm.default") == 0


def test_a_counter_that_is_read_stays() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Any:
            y = self.norm(self.conv(x))
            count: Any = self.norm.num_batches_tracked
            return y + count.to(y.dtype)

    _, made = trained(Counting(), xnnpack(is_qat=True))
    assert [node for node in made.graph.nodes if "num_batches_tracked" in str(node.target)]
    assert torch.equal(made(IMAGE), made(IMAGE))  # it counts in training only
    assert int(made.get_buffer("norm.num_batches_tracked")) == 1


def test_norms_are_folded_in_training_mode_too() -> None:
    prepared = prepare_qat_pt2e(exported(Backbone().train(), (IMAGE,)), xnnpack(is_qat=True))
    prepared(IMAGE)
    assert count(convert_pt2e(prepared), "batch_norm.default") == 0


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        y += x
        return self.relu(y)


@pytest.mark.parametrize("make", [xnnpack, x86])
def test_adding_in_place_in_training(make: Any) -> None:
    torch.manual_seed(0)
    model = InPlace()
    prepared, made = trained(model, make(is_qat=True))
    torch.testing.assert_close(made(IMAGE), model(IMAGE), atol=0.1, rtol=0)
    prepared(IMAGE).sum().backward()
    assert prepared.conv.weight.grad is not None


# -- x86 -----------------------------------------------------------------------------------------------------------

UNARY = [nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU]


@pytest.mark.parametrize("is_inplace", [False, True])
@pytest.mark.parametrize("unary", UNARY)
@pytest.mark.parametrize("is_qat", [False, True])
def test_convolutions_with_what_follows_them(unary: Any, is_inplace: bool, is_qat: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), unary(inplace=is_inplace), nn.Conv2d(4, 4, 3), unary(inplace=is_inplace))
    made = converted(model, (IMAGE,), x86(is_qat=is_qat), is_qat=is_qat)
    assert counts(made) == (2, 2, 2)
    torch.testing.assert_close(made(IMAGE), model(IMAGE), atol=0.1, rtol=0)


@pytest.mark.parametrize("is_qat", [False, True])
def test_convolutions_that_are_added(is_qat: bool) -> None:
    torch.manual_seed(0)
    model = Residual()
    made = converted(model, (IMAGE,), x86(is_qat=is_qat), is_qat=is_qat)
    assert counts(made)[2] == 4
    torch.testing.assert_close(made(IMAGE), model(IMAGE), atol=0.1, rtol=0)


def test_dynamic_linears_of_x86() -> None:
    for is_qat in (False, True):
        made = converted(nn.Linear(5, 5), X, x86(is_dynamic=True, is_qat=is_qat), is_qat=is_qat)
        assert (count(made, "choose_qparams.tensor"), count(made, DYNAMIC), count(made, DQ_CHANNEL)) == (1, 1, 1)


def test_a_range_that_is_reduced() -> None:
    made = converted(nn.Conv2d(3, 4, 3), (IMAGE,), x86(reduce_range=True))
    assert {node.args[3:5] for node in made.graph.nodes if str(node.target).endswith(Q)} == {(0, 127)}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        scores = torch.matmul(self.q(x), self.k(x).transpose(-2, -1)) / 5**0.5
        return torch.matmul(scores.softmax(-1), self.v(x))


def test_a_class_is_left_out_by_the_names_of_torchao() -> None:
    assert weights(converted(Attention(), X, x86().set_function_type_qconfig(torch.matmul, None))) == [True] * 3
    quantizer = x86().set_module_type_qconfig(nn.Linear, None)
    with pytest.raises(AnnotationError, match="annotated nothing"):
        prepare_pt2e(exported(nn.Sequential(nn.Linear(5, 5)).eval(), X), quantizer)
    made = converted(Residual(), (IMAGE,), x86().set_function_type_qconfig(nn.functional.linear, None))
    assert (weights(made), counts(made)[2]) == ([False], 3)
    made = converted(Residual(), (IMAGE,), x86().set_module_type_qconfig(nn.Conv2d, None))
    assert (weights(made), counts(made)[2]) == ([True], 1)


def test_modules_by_name_of_x86() -> None:
    only = X86InductorQuantizer().set_module_name_qconfig("v", X86)
    assert weights(converted(Attention(), X, only)) == [False, False, True]
    assert weights(converted(Attention(), X, x86().set_module_name_qconfig("q", None))) == [False, True, True]
    nested = X86InductorQuantizer().set_module_name_qconfig("sub.0", X86)
    assert weights(converted(Nested(), X, nested)) == [False, True]
    assert weights(converted(Nested(), X, x86().set_module_name_qconfig("foo_bar", None))) == [False, True]


def test_names_count_before_classes_of_x86() -> None:
    by_class = X86InductorQuantizer().set_module_name_qconfig("v", None).set_module_type_qconfig(nn.Linear, X86)
    assert weights(converted(Attention(), X, by_class)) == [True, True, False]
    by_name = X86InductorQuantizer().set_module_name_qconfig("v", X86).set_module_type_qconfig(nn.Linear, None)
    assert weights(converted(Attention(), X, by_name)) == [False, False, True]


@pytest.mark.parametrize("is_qat", [False, True])
def test_static_and_dynamic_modules_of_x86(is_qat: bool) -> None:
    static = get_default_x86_inductor_quantization_config(is_qat=is_qat)
    dynamic = get_default_x86_inductor_quantization_config(is_qat=is_qat, is_dynamic=True)
    quantizer = X86InductorQuantizer().set_module_name_qconfig("q", static).set_module_name_qconfig("v", dynamic)
    made = converted(Attention(), X, quantizer, is_qat=is_qat)
    assert weights(made) == [True, False, True]
    assert (count(made, Q), count(made, DYNAMIC), count(made, DQ_CHANNEL)) == (1, 1, 2)


def test_names_that_are_wrong() -> None:
    with pytest.raises(ConfigError, match="nothing_here"):
        converted(Attention(), X, x86().set_module_name_qconfig("nothing_here", None))
    with pytest.raises(ConfigError, match="no operator"):
        x86().set_function_type_qconfig(torch.linalg.svd, None)
