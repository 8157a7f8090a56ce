"""Other spellings of an op become the dialect's, with the same numbers of the same type."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.rewrite.spellings import COPIED_PARTS, SPELLINGS, is_literal
from tests.support.by_hand import Builder, aten

RANDOM = torch.Generator().manual_seed(0)
X, Y = (torch.randn(2, 3, 4, 4, generator=RANDOM) for _ in range(2))
M = torch.randn(3, 4, generator=RANDOM)
INTS = torch.tensor([1, -2, 9])


def built(target: Any, *args: Any) -> tuple[Program, fx.Node]:
    """A program of one call; tensors among the arguments are its inputs, strings its constants named so."""
    build = Builder(lifted_tensor_0=torch.tensor(2.5), state=torch.tensor(2.5))
    count = iter(range(9))

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return [given(item) for item in value]
        if isinstance(value, Tensor):
            return build.input(f"x{next(count)}", value)
        return build.const(value) if isinstance(value, str) and hasattr(build.root, value) else value

    node = build.call(target, *[given(value) for value in args])
    parts = isinstance(build.values[node], tuple | list)
    return build.program(build.call(operator.getitem, node, 0) if parts else node), node


def respelled(program: Program, node: fx.Node) -> fx.Node | None:
    """The replacement, put in place."""
    new = SPELLINGS[node.target](program, node)  # type: ignore[index]
    if new is not None and node.users:
        node.replace_all_uses_with(new)
        program.touch()
    return new


CASES: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "add of a number": ("add", aten.add.Scalar, (X, 2, 3)),
    "sub of a number": ("sub", aten.sub.Scalar, (X, 2)),
    "div of integers": ("div", aten.div.Scalar, (INTS, 2)),
    "multiply": ("mul", aten.multiply.Tensor, (X, Y)),
    "true_divide": ("div", aten.true_divide.Tensor, (INTS, INTS)),
    "rsub": ("sub", aten.rsub.Tensor, (X, Y)),
    "square": ("pow", aten.square.default, (INTS,)),
    "hardtanh": ("clamp", aten.hardtanh.default, (X, -0.5)),
    "relu6": ("clamp", aten.relu6.default, (X * 9,)),
    "clamp_min": ("clamp", aten.clamp_min.default, (X, 0.5)),
    "clamp_min of integers": ("clamp", aten.clamp_min.default, (INTS, 0.5)),
    "clamp_max": ("clamp", aten.clamp_max.default, (X, 0)),
    "clamp_min at zero": ("relu", aten.clamp_min.default, (X, 0)),
    "clamp from zero": ("relu", aten.clamp.default, (X, 0.0)),
    "mm": ("matmul", aten.mm.default, (M, M.t().contiguous())),
    "bmm": ("matmul", aten.bmm.default, (X[0], Y[0])),
    "convolution": ("conv2d", aten.convolution.default, (X, X, None, [2], [1], [1], False, [0], 1)),
    "transposed convolution": (
        "conv_transpose2d",
        aten.convolution.default,
        (X, X[0, :, :2].reshape(3, 2, 2, 2), None, [2, 1], [0, 1], [1, 2], True, [1, 0], 1),
    ),
    "same padding": ("conv2d", aten.conv2d.padding, (X, X[:, :, :3, :3], None, [1, 1], "same", [1, 2])),
    "same padding of an even kernel": ("conv2d", aten.conv2d.padding, (X, X[:, :, :2, :], None, [1, 1], "same")),
    "valid padding": ("conv2d", aten.conv2d.padding, (X, X[:, :, :2, :2], None, [2, 1], "valid")),
    "t": ("transpose", aten.t.default, (M,)),
    "numpy_T": ("permute", aten.numpy_T.default, (X,)),
    "mT": ("transpose", aten.mT.default, (X,)),
    "adjoint": ("transpose", aten.adjoint.default, (X,)),
    "movedim": ("permute", aten.movedim.intlist, (X, [0, -1], [2, 1])),
    "movedim of one": ("permute", aten.movedim.int, (X, 1, -1)),
    "permute of two": ("transpose", aten.permute.default, (X, [0, -1, 2, 1])),
    "expand_as": ("expand", aten.expand_as.default, (X[:1], X)),
    "view_as": ("reshape", aten.view_as.default, (X, X.flatten())),
    "view": ("reshape", aten.view.default, (X, [6, -1])),
    "squeeze of one dim": ("squeeze", aten.squeeze.dims, (X[:1], [0])),
    "narrow": ("slice", aten.narrow.default, (X, 2, 1, 2)),
    "split by sizes": ("split_sizes", aten.split.sizes, (X, [1, 2], 1)),
    "ravel": ("flatten", aten.ravel.default, (X,)),
    "swapaxes": ("transpose", aten.swapaxes.default, (X, 0, 1)),
    "concat": ("cat", aten.concat.default, ([X, Y], 1)),
    "mean": ("mean", aten.mean.default, (X,)),
    "sum of integers": ("sum", aten.sum.default, (INTS,)),
    "std": ("aten.std.correction", aten.std.default, (X, False)),
    "var": ("aten.var.correction", aten.var.dim, (X, [1, 2], True, True)),
    "_softmax": ("softmax", aten._softmax.default, (X, 1, False)),
    "_log_softmax": ("log_softmax", aten._log_softmax.default, (X, -1, False)),
    "upsample to a size": ("upsample_nearest2d", aten.upsample_nearest2d.default, (X, [6, 7])),
    "upsample by a scale": ("upsample_bilinear2d", aten.upsample_bilinear2d.default, (X, [6, 10], False, 1.7, 2.5)),
    "native_layer_norm": ("layer_norm", aten.native_layer_norm.default, (X, [4], None, None, 0.1)),
    "native_group_norm": ("group_norm", aten.native_group_norm.default, (X, None, None, 2, 3, 16, 3, 0.1)),
    "batch norm that does not train": (
        "batch_norm",
        aten._native_batch_norm_legit_no_training.default,
        (X, X[0, :, 0, 1], X[0, :, 1, 0], Y[0, :, 0, 0], Y[0, :, 0, 0].abs(), 0.1, 0.5),
    ),
    "native_dropout": ("dropout", aten.native_dropout.default, (X, 0.5, False)),
    "max pool with indices": ("max_pool2d", aten.max_pool2d_with_indices.default, (X, [2, 2], [1, 1])),
    "permute_copy": ("clone", aten.permute_copy.default, (X, [3, 2, 1, 0])),
    "view_copy": ("clone", aten.view_copy.default, (X, [96])),
}


@pytest.mark.parametrize("name", CASES)
def test_the_dialects_spelling_gives_the_same(name: str) -> None:
    expected, target, args = CASES[name]
    program, node = built(target, *args)
    inputs = program.example_inputs or ()
    before = program(*inputs)
    new = respelled(program, node)
    assert new is not None
    assert op_name(new) == expected
    after = program(*inputs)
    assert after.dtype is before.dtype
    assert torch.equal(after, before)


UNCHANGED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "a clamp": (aten.clamp.default, (X, 0.5)),
    "a clamp of integers, which makes floats": (aten.clamp.default, (INTS, 0.0)),
    "relu6 of integers, which stay integers": (aten.relu6.default, (INTS,)),
    "hardtanh of integers, which stay integers": (aten.hardtanh.default, (INTS,)),
    "a permutation of three": (aten.permute.default, (X, [1, 2, 0, 3])),
    "a product with what is no transposed constant": (aten.matmul.default, (X, Y)),
    "squeeze of two": (aten.squeeze.dims, (X[:1, :1], [0, 1])),
    "a scale that gives another size": (aten.upsample_nearest2d.default, (X, [6, 7], 1.5, 1.5)),
    "one scale of two": (aten.upsample_nearest2d.default, (X, [6, 6], None, 1.5)),
    "filling with a tensor of the model": (aten.fill.Tensor, (X, "state")),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_would_not_be_the_same_stays(name: str) -> None:
    target, args = UNCHANGED[name]
    program, node = built(target, *args)
    assert respelled(program, node) is None


def test_a_reversed_difference_with_a_factor_stays() -> None:
    build = Builder()
    node = build.call(aten.rsub.Tensor, build.input("x", X), build.input("y", Y), alpha=2)
    assert respelled(build.program(node), node) is None


def test_numbers_written_in_the_code_are_filled_in_as_numbers() -> None:
    program, node = built(aten.fill.Tensor, X, "lifted_tensor_0")
    new = respelled(program, node)
    assert new is not None
    assert (new.target, new.args[1]) == (aten.fill.Scalar, 2.5)
    assert [is_literal(name) for name in ("_tensor_constant3", "const_0", "const_w", "my_const_0")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_product_with_a_transposed_constant_is_a_linear() -> None:
    build = Builder(w=torch.arange(20.0).reshape(5, 4), b=torch.arange(5.0), column=torch.ones(2, 1))
    x, w, b = build.input("x", M[:2]), build.const("w"), build.const("b")
    turned = build.call(aten.transpose.int, w, 0, 1)
    calls = {
        aten.matmul.default: (x, turned),
        aten.mm.default: (x, turned),
        aten.addmm.default: (b, x, turned),
    }
    nodes = [build.call(target, *args) for target, args in calls.items()]
    scaled = build.call(aten.addmm.default, b, x, turned, beta=2)
    wide = build.call(aten.addmm.default, build.const("column"), x, turned)
    program = build.program(*nodes)
    before = program(*build.examples)
    for node in nodes:
        new = respelled(program, node)
        assert new is not None
        assert op_name(new) == "linear"
    assert respelled(program, scaled) is None
    assert respelled(program, wide) is None, "a bias has one value a column"
    for one, other in zip(before, program(*build.examples), strict=True):
        torch.testing.assert_close(one, other)


def test_identities_are_their_operand() -> None:
    for target, args in ((aten.permute.default, (X, [0, 1, 2, -1])), (aten.t.default, (INTS,))):
        program, node = built(target, *args)
        assert respelled(program, node) is node.args[0]


def test_an_op_of_several_outputs_stays_if_another_than_the_first_is_read() -> None:
    build = Builder()
    pool = build.call(aten.max_pool2d_with_indices.default, build.input("x", X), [2, 2])
    program = build.program(build.call(operator.getitem, pool, 0), build.call(operator.getitem, pool, 1))
    assert respelled(program, pool) is None


def test_the_setting_of_the_machine_is_that_of_the_dialect() -> None:
    build = Builder()
    x = build.input("x", X)
    own = build.call(aten.layer_norm.default, x, [4], None, None, 1e-5, False)
    usual = build.call(aten.layer_norm.default, x, [4], None, None, 1e-5, True)
    program = build.program(own, usual)
    new = respelled(program, own)
    assert new is not None
    assert new.args[5] is True
    assert respelled(program, usual) is None


def test_copies_of_several_parts_are_marked_for_they_are_views_here() -> None:
    assert aten.split_copy.Tensor in COPIED_PARTS
    assert aten.permute_copy.default not in COPIED_PARTS
    for target in COPIED_PARTS:
        assert target in SPELLINGS
