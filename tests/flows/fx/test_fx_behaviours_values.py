"""Behaviours of the FX flow: arguments that are no tensors, results of all kinds, and values that are not quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from quantc.flows.fx import (
    convert_fx,
    default_qconfig,
    float16_dynamic_qconfig,
    get_default_qconfig,
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.qconfig import float16_static_qconfig
from tests.support.fx_behaviours import run, some

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Asked(nn.Module):
    """Layers around a function that is given something beside its tensor."""

    def __init__(self, function: Callable[..., Tensor], features: int) -> None:
        super().__init__()
        self.conv, self.pool, self.last = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Linear(features, 2)
        self.function = function

    def forward(self, x: Tensor, y: Any, z: Any) -> Tensor:
        x = torch.flatten(self.pool(functional.relu(self.conv(x))), 1)
        out: Tensor = self.last(self.function(x, y, z))
        return out


ARGUMENTS: dict[str, tuple[Callable[..., Tensor], int, Any, Any]] = {
    "masked_fill_nontensor_args_not_observed": (lambda x, y, z: x.masked_fill(y, z), 54, torch.randn(54) > 0, 0.1),
    "permute_nontensor_args_not_observed": (lambda x, y, z: x.permute(y, z), 54, 0, 1),
    "repeat_nontensor_args_not_observed": (lambda x, y, z: x.repeat(y, z), 54, 2, 1),
    "reshape_nontensor_args_not_observed": (lambda x, y, z: x.reshape(-1, y), 9, 9, None),
    "size_nontensor_args_not_observed": (lambda x, y, z: x.reshape((-1, x.size(y))), 54, 1, None),
    "transpose_nontensor_args_not_observed": (lambda x, y, z: x.transpose(y, z), 5, 0, 1),
    "torch_transpose_nontensor_args_not_observed": (lambda x, y, z: torch.transpose(x, 0, 1), 5, 0, 1),
    "unsqueeze_nontensor_args_not_observed": (lambda x, y, z: x.unsqueeze(y), 54, 1, None),
    "unsqueeze__nontensor_args_not_observed": (lambda x, y, z: x.unsqueeze_(y), 54, 1, None),
    "torch_unsqueeze_nontensor_args_not_observed": (lambda x, y, z: torch.unsqueeze(x, 1), 54, 1, None),
    "view_nontensor_args_not_observed": (lambda x, y, z: x.view(-1, y), 9, 9, None),
    "propagate_dtypes_for_known_nodes_list_args": (lambda x, y, z: x.reshape(y), 9, [-1, 9], None),
    "propagate_dtypes_for_known_nodes_split_list_args": (lambda x, y, z: x.reshape([y, z]), 9, -1, 9),
    "propagate_dtypes_for_known_nodes_tuple_args": (lambda x, y, z: x.reshape(y), 9, (-1, 9), None),
    "propagate_dtypes_for_known_nodes_split_tuple_args": (lambda x, y, z: x.reshape((y, z)), 9, -1, 9),
    "propagate_dtypes_for_known_nodes_dict_args": (
        lambda x, y, z: x.transpose(y["first"], y["second"]),
        5,
        {"first": 0, "second": 1},
        None,
    ),
    "propagate_dtypes_for_known_nodes_dict_tuple_args": (lambda x, y, z: x.reshape(y["a"]), 9, {"a": (-1, 9)}, None),
    "propagate_dtypes_for_known_nodes_dict_split_tuple_args": (
        lambda x, y, z: x.reshape((y["a"], y["b"])),
        9,
        {"a": -1, "b": 9},
        None,
    ),
}


@pytest.mark.parametrize("name", some(ARGUMENTS, keep=4))
def test_masked_fill_nontensor_args_not_observed(name: str) -> None:
    function, features, y, z = ARGUMENTS[name]
    inputs = (torch.randn(5, 3, 10, 10), y, z)
    prepared = prepare_fx(Asked(function, features).eval(), {"": get_default_qconfig("fbgemm")}, inputs)
    seen: list[Any] = []
    for observer in (module for key, module in prepared.named_children() if key.startswith("activation_post")):
        observer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    prepared(*inputs)
    assert seen
    assert all(isinstance(x, Tensor) and x.dtype is torch.float32 for x in seen)
    assert torch.isfinite(convert_fx(prepared)(*inputs)).all()


class Lambda(nn.Module):
    """A function on what a layer makes."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *args: Any) -> Any:
        return self.function(self.layers, *args)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.add(x, x.ndim - 2),
        lambda m, x: x.view([-1, x.size(1), *([1] * (x.ndim - 2))]),
        lambda m, x: x.view(x.shape),
    ],
)
def test_getattr_with_nontensor_result(function: Any) -> None:
    found = run(Lambda(function), {"": default_qconfig}, torch.rand(4, 4, 4, 4))
    assert torch.allclose(found.quantized(*found.inputs), found.model(*found.inputs), atol=0.05)


def asserted(m: Any, x: Tensor) -> Tensor:
    x = m[0](x)
    torch._assert(x.size(1) == 1, "one channel")  # type: ignore[no-untyped-call]
    return x


def test_assert_on_size_after_quant_layer() -> None:
    assert run(Lambda(asserted, nn.Conv2d(1, 1, 1)), {"": default_qconfig}, torch.rand(4, 1, 4, 4)).check().kernels


@pytest.mark.parametrize("again", some([False, True]))
def test_fp32_sum(again: bool) -> None:
    def function(m: Any, x: Tensor) -> Any:
        x = torch.stack([m[0](x)])
        return m[1](torch.sum(x, dim=0)) if again else torch.sum(x)

    model = Lambda(function, nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1))
    found = run(model, {"": default_qconfig}, torch.rand(4, 1, 4, 4))
    assert found.left == ["sum"]
    step = 0.02 * 64  # of each of the elements that are added up
    assert float((found.quantized(*found.inputs) - found.model(*found.inputs)).abs().max()) < step


def test_boolean_tensor() -> None:
    def function(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(mask.unsqueeze(0).unsqueeze(1), 1)

    found = run(Lambda(function), {"": default_qconfig}, torch.rand(1, 2, 3, 4), torch.rand(3, 4) > 0.5)
    assert found.observers == []
    assert torch.equal(found.quantized(*found.inputs), found.model(*found.inputs))


def test_chunk() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        one, two = torch.chunk(x, 2)
        return one + two

    found = run(Lambda(function), {"": default_qconfig}, torch.rand(2, 2, 2, 2)).check()
    assert "add" in found.taken


@pytest.mark.parametrize("index", some([0, 1, 2]))
def test_getitem(index: int) -> None:
    functions: list[Any] = [
        (lambda m, x: x[0], torch.rand(1, 2)),
        (lambda m, xs: torch.sigmoid(xs[0]), [torch.rand(1, 2)]),
        (lambda m, x: (x.shape[:2], torch.sigmoid(x))[1], torch.rand(1, 2, 3, 4)),
    ]
    function, given = functions[index]
    found = run(Lambda(function), get_default_qconfig_mapping(), given).check()
    assert len(found.observers) == (0 if index == 0 else 2)  # of a tensor, and not of what it was taken from


@pytest.mark.parametrize("back", some([False, True]))
def test_shape_followed_by_quantized_op(back: bool) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        x = m[0](x)
        torch._assert(x.shape == x.shape, "")  # type: ignore[no-untyped-call]
        return m[1](x.view(x.size(0), 2, 3, 3) if back else x)  # type: ignore[no-any-return]

    found = run(
        Lambda(function, nn.Conv2d(2, 2, 2), nn.Conv2d(2, 2, 2)), {"": default_qconfig}, torch.randn(2, 2, 4, 4)
    )
    assert found.check().left == []
    assert sum("quantize" in row.op and "dequantize" not in row.op for row in found.quantized.placed) <= 1


@fx.wrap
def _several(x: Tensor) -> list[Tensor]:
    return list(torch.split(x, 1, 1))


def test_no_obs_between_unmatched_node_and_copy_node() -> None:
    def function(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = _several(x)
        return parts[0] + 1, parts[1]

    found = run(Lambda(function), {"": default_qconfig}, torch.randn(4, 4, 4, 4))
    for made, expected in zip(found.quantized(*found.inputs), found.model(*found.inputs), strict=True):
        assert torch.allclose(made, expected, atol=0.05)


class Given(nn.Module):
    """A function with the weights of a layer, as attributes that are no parameters."""

    def __init__(self, features: int = 5) -> None:
        super().__init__()
        self.w, self.b = torch.randn(features, features), torch.randn(features)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.w, self.b)


def test_fold_quant_dequant() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        x = torch.cat((x,), 1)
        rows = x.size()
        return m[0](x) * rows[0]  # type: ignore[no-any-return]

    mapping = {"": None, "object_type": [(functional.linear, default_qconfig)]}
    found = run(Lambda(function, Given()), mapping, torch.rand(5, 5)).check()
    assert (found.count("dequantize_per_tensor.default"), found.taken) == (3, ["linear"])  # input, weight, result


def test_qparams_fqn() -> None:
    """Scales go by the ops they belong to: `quantized.state_dict()` and the plan name them."""

    def function(m: Any, x: Tensor) -> Tensor:
        return m[1](m[0](torch.cat((x,), 1))) * x.size(0)  # type: ignore[no-any-return]

    mapping = {"": None, "object_type": [(functional.linear, default_qconfig)]}
    found = run(Lambda(function, Given(), Given()), mapping, torch.rand(5, 5))
    assert sum(name.endswith("weight_quantized") or "_quantized" in name for name in found.quantized.state_dict()) == 2
    assert {"linear:in0", "linear:out0", "linear_1:out0"} <= {
        group.name for group in found.prepared.program.plan.groups
    }


def test_dict_output() -> None:
    def function(m: Any, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"output": m[0](x["input"])}

    found = run(Lambda(function, nn.Conv2d(1, 1, 1)), {"": default_qconfig}, {"input": torch.randn(1, 1, 1, 1)})
    assert list(found.quantized(*found.inputs)) == ["output"]


def test_output_lists_and_dicts() -> None:
    def function(m: Any, x: Tensor) -> Any:
        x = m[0](x)
        return {"foo": [x]}, [{"foo": [[x]]}]

    found = run(Lambda(function, nn.Conv2d(1, 1, 1)), {"": default_qconfig}, torch.randn(1, 1, 1, 1))
    first, second = found.quantized(*found.inputs)
    assert torch.equal(first["foo"][0], second[0]["foo"][0][0])


def test_return_none() -> None:
    found = run(Lambda(lambda m, x: None), {"": default_qconfig}, torch.randn(1))
    assert found.quantized(*found.inputs) is None


def test_attention() -> None:
    def function(m: Any, x: Tensor) -> Any:
        q, k, v = (part.contiguous().view(-1, 1).transpose(0, 1) for part in m[0](x).chunk(3, dim=0))
        torch._assert(k.size(1) == 1, "one key")  # type: ignore[no-untyped-call]
        return q * k + torch.mm(k, v)

    mapping = {"": None, "object_type": [(nn.Conv2d, default_qconfig)]}
    found = run(Lambda(function, nn.Conv2d(1, 1, 1)), mapping, torch.randn(3, 1, 1, 1)).check()
    assert found.taken == ["conv2d"]


def test_not_used() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        x = x + x
        x.sigmoid_()
        return x

    mapping = get_default_qconfig_mapping().set_global(float16_static_qconfig)
    found = run(Lambda(function), mapping, torch.randn(3))
    assert torch.allclose(found.quantized(*found.inputs), torch.sigmoid(2 * found.inputs[0]), atol=1 / 256)


def test_mul_add_fp16_config() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        return m[1](m[0](x * 5 + 5))  # type: ignore[no-any-return]

    found = run(Lambda(function, Given(), Given()), {"": float16_dynamic_qconfig}, torch.rand(5, 5))
    assert torch.allclose(found.quantized(*found.inputs), found.model(*found.inputs), rtol=1e-2, atol=0.2)


def test_sub_scalar() -> None:
    found = run(Lambda(lambda m, x: x + 1 - 1 + 3 - 4), {"": default_qconfig}, torch.rand(3)).check()
    assert found.taken.count("add") >= 2


@pytest.mark.parametrize("ask", some([lambda x: x.size(0), lambda x: x.shape[0]]))
@pytest.mark.parametrize("relu", some([False, True]))
@pytest.mark.parametrize("engine", some(["x86", "qnnpack"]))
def test_linear_size_view(ask: Any, relu: bool, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.quantized, "engine", engine)

    def function(m: Any, x: Tensor) -> Tensor:
        x = m[1](m[0](x))
        return x.view(ask(x), 1, 4, 8)

    model = Lambda(function, nn.Linear(16, 32), nn.ReLU() if relu else nn.Identity())
    found = run(model, get_default_qconfig_mapping(engine), torch.randn(5, 16)).check()
    assert found.left == []
