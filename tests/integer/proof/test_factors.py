"""The factors of products, read from both forms of a program, and how far their sums reach."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from quantc.integer.proof.factors import Factors, Weights, factors, layout_of, weight_by_channel
from quantc.integer.proof.integer_ranges import Levels
from quantc.integer.semantics import load
from quantc.spec.instruction_sets import INSTRUCTION_SETS, PairSums
from tests.support.by_hand import aten
from tests.support.qdq_by_hand import SIGNED, QdqBuilder, drawn, integers

load()
NODE = fx.Graph().placeholder("x")
MADDUBS = PairSums("unsigned", "saturates")


@pytest.mark.parametrize(
    ("op", "layout"),
    [
        ("linear", "rows"),
        ("conv3d", "rows"),
        ("conv_transpose1d", "transposed"),
        ("matmul", "columns"),
        ("addmm", "columns"),
    ],
)
def test_output_channels_lie_where_the_op_has_them(op: str, layout: str) -> None:
    assert layout_of(op) == layout


def test_weights_are_stored_and_centered() -> None:
    w = torch.tensor([[1, -128], [127, 0]], dtype=torch.int8)
    plain = Weights.of(w, torch.zeros((), dtype=torch.int64), lambda w: w.unsqueeze(-1))
    assert plain.centered is plain.levels
    moved = Weights.of(w, torch.tensor([[100], [-100]]), lambda w: w.unsqueeze(-1))
    assert moved.centered[:, :, 0].tolist() == [[-99, -228], [227, 100]]
    assert moved.multiplied is moved.levels
    unsigned = Weights.of(w.view(torch.uint8), torch.tensor(128), lambda w: w.unsqueeze(-1))
    assert unsigned.multiplied[:, :, 0].tolist() == [[-127, 0], [-1, -128]]  # uint8 is shifted to int8


# -- sums ----------------------------------------------------------------------------------------------------------


def held(w: Tensor, x: Levels, bias: Tensor | None = None) -> Factors:
    return Factors(NODE, x, Weights.of(w, torch.zeros((), dtype=torch.int64), lambda w: w.unsqueeze(-1)), bias)


def test_accumulators_reach_what_the_worst_input_makes_of_them() -> None:
    found = held(
        torch.tensor([[3, -4], [5, 6]], dtype=torch.int8), Levels(0, 255, torch.uint8, 100), torch.tensor([7, 0])
    )
    reach = found.accumulators()
    assert reach is not None
    assert reach.high.tolist() == [3 * 155 + 4 * 100 + 7, 11 * 155]
    assert reach.low.tolist() == [-(3 * 100 + 4 * 155), -11 * 100]
    assert found.channels == 2


def test_two_activations_reach_as_far_as_their_ranges_if_their_number_is_known() -> None:
    x, y = Levels(0, 255, torch.uint8, 0), Levels(-128, 127, torch.int8, 0)
    reach = Factors(NODE, x, y, count=3).accumulators()
    assert reach is not None
    assert (reach.lowest, reach.highest) == (-3 * 255 * 128, 3 * 255 * 127)
    assert Factors(NODE, x, y).accumulators() is None
    assert Factors(NODE, x, y).channels == 1


def test_eight_bit_instructions_are_for_bytes_on_both_sides() -> None:
    byte, wide = Levels(0, 255, torch.uint8, 0), Levels(0, 255, torch.int16, 0)
    w = torch.ones(1, 1, dtype=torch.int8)
    assert held(w, byte).is_bytes
    assert not held(w, wide).is_bytes
    assert not Factors(NODE, byte, wide, count=1).is_bytes


def test_pairs_of_two_activations_may_both_be_the_farthest() -> None:
    found = Factors(NODE, Levels(0, 255, torch.uint8, 0), Levels(0, 255, torch.uint8, 0), count=9)
    assert found.pairs(MADDUBS).highest == 2 * 255 * 127  # uint8 is shifted to int8
    assert found.pairs(MADDUBS).lowest == -2 * 255 * 128
    assert found.pairs(MADDUBS, 100).lowest == -2 * 100 * 128


def test_the_decisive_weights_reach_as_far_as_all_of_them() -> None:
    w = integers(4, 9, seed=3)
    found = held(w, Levels(0, 255, torch.uint8, 0))
    for row, reach in zip(w.tolist(), found.pairs(MADDUBS).high.tolist(), strict=True):
        assert reach == 255 * sum(sorted((max(value, 0) for value in row), reverse=True)[:2])
    adjacent = INSTRUCTION_SETS["avx2"].pairs
    assert adjacent is not None
    assert bool((found.pairs(adjacent).high <= found.pairs(MADDUBS).high).all())


# -- from programs -------------------------------------------------------------------------------------------------


def only(build: QdqBuilder, *outputs: fx.Node) -> Factors:
    (found,) = factors(build.done(*outputs))
    return found


def test_a_linear_layer_has_its_bias_in_steps_of_the_accumulator() -> None:
    build = QdqBuilder()
    w, scales = integers(3, 4), torch.tensor([0.5, 0.25, 2.0])
    x = build.fake(build.input("x", drawn(2, 4)), 0.125, 9)
    bias = build.constant("b", torch.tensor([1.0, 1.0, -4.1]))
    node = build.call(aten.linear.default, x, build.by_channel("w", w, scales), bias)
    found = only(build, node)
    assert found.x == Levels(0, 255, torch.uint8, 9)
    assert isinstance(found.other, Weights)
    assert torch.equal(found.other.levels[:, :, 0], w)
    assert found.bias is not None
    assert found.bias.tolist() == [16, 32, -16]


def test_a_constant_may_be_the_first_factor_of_a_matmul() -> None:
    build = QdqBuilder()
    w = integers(3, 4)
    x = build.fake(build.input("x", drawn(4, 2)), 0.125, 9)
    stored = build.dequantize(build.constant("w", w), 0.5, 0, SIGNED)
    found = only(build, build.call(aten.matmul.default, stored, x))
    assert found.x.zero_point == 9
    assert isinstance(found.other, Weights)
    assert torch.equal(found.other.levels[:, :, 0], w)


def test_a_matmul_of_two_activations_sums_over_the_last_axis() -> None:
    build = QdqBuilder()
    x, y = build.fake(build.input("x", drawn(3, 5)), 0.125, 9), build.fake(build.input("y", drawn(5, 2)), 0.5, 3)
    found = only(build, build.call(aten.matmul.default, x, y))
    assert (found.count, found.x.zero_point) == (5, 9)
    assert found.other == Levels(0, 255, torch.uint8, 3)


def test_products_with_a_float_factor_do_not_count() -> None:
    build = QdqBuilder()
    x = build.input("x", drawn(2, 4))
    w = build.by_channel("w", integers(3, 4), torch.ones(3))
    node = build.call(aten.linear.default, x, w, None)
    half = build.call(torch.ops.quantc.dequantize_float.default, build.constant("h", drawn(3, 4).half()), None, None)
    other = build.call(aten.linear.default, build.fake(x, 0.5), half, None)
    assert list(factors(build.done(node, other))) == []


def test_a_transposed_convolution_has_its_channels_for_each_group() -> None:
    build = QdqBuilder()
    w = integers(4, 3, 2)
    node = build.call(
        aten.conv_transpose1d.default,
        build.fake(build.input("x", drawn(1, 4, 5)), 0.5),
        build.by_channel("w", w, torch.tensor([1.0, 2.0, 4.0]), axis=1),
        build.constant("b", torch.tensor([1.0] * 6)),
        [1],
        [0],
        [0],
        2,
    )
    found = only(build, node)
    assert isinstance(found.other, Weights)
    assert torch.equal(found.other.levels, weight_by_channel(node, w))
    assert torch.equal(found.other.levels[4], w[2:, 1])  # the second channel of the second group
    assert found.bias is not None
    assert found.bias.tolist() == [2, 1, 0, 2, 1, 0]  # in steps of a half, of 1, and of 2


def test_an_op_of_the_integer_form_says_its_zero_points_itself() -> None:
    build = QdqBuilder()
    w = integers(3, 4)
    x = build.input("x", torch.zeros(2, 4, dtype=torch.uint8))
    kept = [
        build.constant("w", w),
        build.constant("z", torch.tensor([1, 2, 3])),
        build.constant("b", torch.arange(3).int()),
    ]
    node = build.call(
        torch.ops.quantc.linear.default, x, 7, *kept, 1, build.constant("m", torch.tensor(0.5).double()), None, 0, 0, 255,
        torch.uint8,
    )  # fmt: skip
    found = only(build, node)
    assert found.x == Levels(0, 255, torch.uint8, 7)
    assert isinstance(found.other, Weights)
    assert torch.equal(found.other.centered[:, :, 0].long(), w.long() - torch.tensor([[1], [2], [3]]))
    assert found.bias is not None
    assert found.bias.tolist() == [0, 1, 2]
