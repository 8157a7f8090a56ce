"""Programs written so that XNNPACK's partitioner knows their ops: the same values, other spellings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.ir.program import Program, Stage
from quantc.passes.legalize_xnnpack import is_mean_of_any_number
from quantc.qdq.registration import decomposed_ops
from quantc.targets.executorch.lazy_imports import package
from tests.support.by_hand import Builder
from tests.support.executorch_models import conv, image, net, static, without_data
from tests.support.spelled import spelled, targets

aten = torch.ops.aten


def captured(function: Callable[..., Any], *inputs: Tensor) -> Program:
    return qc.capture(net(lambda self, x: function(x)).eval(), inputs, dynamic_shapes=None)


def same(program: Program, *inputs: Tensor) -> list[str]:
    """The ops of a program that is spelled, which computes the same bits; the program itself is left alone."""
    before = program.dump()
    own = spelled(program)
    assert program.dump() == before
    for got, want in zip(own.run_flat(inputs), program.run_flat(inputs), strict=True):
        assert torch.equal(got, want)
    own.verify()
    return [name for name in targets(own) if name not in ("x", "output")]


X = torch.linspace(-3, 3, 12).reshape(3, 4)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x.clamp(-1, 2), "hardtanh"),
        (lambda x: x.clamp(min=-1), "hardtanh"),
        (lambda x: x.clamp(max=0.5), "hardtanh"),
        (lambda x: x.clamp(min=0), "relu"),
        (lambda x: x.clamp(min=0, max=6), "hardtanh"),
    ],
    ids=["both", "low", "high", "relu", "relu6"],
)
def test_a_clamp_is_a_hardtanh_or_a_relu(function: Callable[..., Any], op: str) -> None:
    assert same(captured(function, X), X) == [op]


def test_a_clamp_without_an_end_keeps_infinity_out_alone() -> None:
    own = spelled(captured(lambda x: x.clamp(max=0.5), X))
    far = torch.full((3, 4), -1e38)
    assert torch.equal(own(far), far)


def test_a_clamp_between_tensors_is_left_alone() -> None:
    assert "hardtanh" not in same(captured(lambda x: torch.clamp(x, min=x.mean()), X), X)


@pytest.mark.parametrize(
    "function",
    [lambda x: x.flatten(), lambda x: x.unsqueeze(1), lambda x: x[None].squeeze(0), lambda x: x.unflatten(1, (2, 2))],
    ids=["flatten", "unsqueeze", "squeeze", "unflatten"],
)
def test_every_view_is_a_reshape(function: Callable[..., Any]) -> None:
    assert set(same(captured(function, X), X)) <= {"reshape"}


def test_a_view_of_two_sizes_that_vary_is_left_alone() -> None:
    sizes = ({0: Dim("a", min=2, max=8), 1: Dim("b", min=2, max=8)},)
    program = qc.capture(net(lambda self, x: x.unsqueeze(1)).eval(), (X,), dynamic_shapes=sizes)
    assert "reshape" not in targets(spelled(program))


def rounded(dtype: torch.dtype, zero_point: int, low: int, high: int) -> Program:
    """x rounded to steps of a half."""
    build, ops = Builder(), decomposed_ops()
    grid = (0.5, zero_point, low, high, dtype)
    levels = build.call(ops.quantize_per_tensor.default, build.input("x", X), *grid)
    back = build.call(ops.dequantize_per_tensor.default, levels, *grid)
    return build.program(build.call(aten.neg.default, back), stage=Stage.QUANTIZED)


def test_bytes_without_a_sign_get_one() -> None:
    program = rounded(torch.uint8, 130, 0, 255)
    same(program, X)
    own = spelled(program)
    grids = [node.args[1:] for node in own.graph.nodes if "quantize_per_tensor" in str(node.target)]
    assert grids == [(0.5, 2, -128, 127, torch.int8)] * 2
    assert own.node("quantize_per_tensor").meta["val"].dtype is torch.int8


@pytest.mark.parametrize(
    ("dtype", "zero_point", "low", "high"),
    [(torch.int8, 0, -4, 3), (torch.uint8, 100, 98, 104), (torch.int8, 5, 0, 127)],
    ids=["narrow", "unsigned", "half"],
)
def test_a_narrow_range_is_a_clamp_before_the_delegate_rounds(
    dtype: torch.dtype, zero_point: int, low: int, high: int
) -> None:
    names = same(rounded(dtype, zero_point, low, high), X)
    assert names[0] == "hardtanh"
    full = rounded(torch.int8, 0, -128, 127)
    assert "hardtanh" not in same(full, X)


def test_a_bias_that_two_layers_share_is_stored_for_each() -> None:
    first, second = conv(), conv()
    second.bias = first.bias
    x = image(1)
    program = static(net(lambda self, x: self.b(self.a(x).relu()), a=first, b=second), x)
    same(program, x)
    own = spelled(program)
    biases = [node.args[2] for node in own.graph.nodes if node.target is aten.conv2d.default]
    assert len(set(biases)) == 2


def test_constants_of_a_norm_have_names_that_begin_with_a_letter() -> None:
    torch.manual_seed(0)
    program = qc.capture(nn.Sequential(nn.BatchNorm2d(4)).eval(), (image(1),), dynamic_shapes=None)
    same(program, image(1))
    own = spelled(program)
    (norm,) = [node for node in own.graph.nodes if node.target is aten.batch_norm.default]
    assert not any(str(node.target)[0].isdigit() for node in norm.all_input_nodes if node.op == "get_attr")


def pooled(batch: Any) -> Program:
    x = image()
    model = nn.Sequential(conv(), nn.AdaptiveAvgPool2d(1)).eval()
    sizes = None if batch is None else ({0: batch},)
    return qc.quantize(qc.capture(model, (x,), dynamic_shapes=sizes), None, [(x,)], "executorch").program


def test_a_mean_over_any_number_of_images_is_a_pool_and_of_a_fixed_number_is_not() -> None:
    for batch, found in ((Dim("batch", max=8), True), (None, False)):
        program = pooled(batch)
        assert any(is_mean_of_any_number(node) for node in program.graph.nodes if node.op == "call_function") is found
        own = spelled(program)
        assert ("avg_pool2d" in targets(own)) is found
        torch.testing.assert_close(own(image()), program(image()))


def test_a_transpose_of_levels_lies_in_order() -> None:
    program = static(net(lambda self, x: self.a(x).transpose(1, -1), a=conv()), image(1))
    names = same(program, image(1))
    assert "permute_copy" in names
    (moved,) = [node for node in spelled(program).graph.nodes if node.target is aten.permute_copy.default]
    assert moved.args[1] == [0, 3, 2, 1]


def test_rows_of_a_table_are_looked_up_as_bytes() -> None:
    pytest.importorskip("executorch")
    package("executorch.exir.passes._quant_patterns_and_replacements")  # has the op
    torch.manual_seed(0)
    indices = torch.tensor([[0, 3], [2, 2]])
    program = without_data(nn.Embedding(8, 4), indices, mode="weight-only")
    own = spelled(program)
    assert any("embedding_byte" in name for name in targets(own))
    torch.testing.assert_close(own(indices), program(indices))


def test_one_run_time_scale_for_several_rows_is_told_and_for_one_row_is_not() -> None:
    torch.manual_seed(0)
    program = without_data(
        nn.Linear(8, 4), torch.randn(1, 8), mode="dynamic", config=qc.QuantConfig().set_all(qc.INT8_DYNAMIC)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fixed = qc.capture(nn.Linear(8, 4).eval(), (torch.randn(1, 8),), dynamic_shapes=None)
        spelled(
            qc.quantize(
                fixed, None, mode="dynamic", backend="executorch", config=qc.QuantConfig().set_all(qc.INT8_DYNAMIC)
            ).program
        )
    with pytest.warns(UserWarning, match="a scale for each row"):
        spelled(program)
