"""The integers that quantized tensors can hold: by their grids, through moves, and by the tables they come from."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from quantc.integer.proof.integer_ranges import Levels, levels_before, levels_of
from quantc.integer.semantics import load
from quantc.ir.types import TensorType
from quantc.qdq.choose_qparams import CHOOSE
from quantc.qdq.registration import decomposed_ops
from tests.support.by_hand import aten
from tests.support.qdq_by_hand import SIGNED, QdqBuilder, drawn, integers

load()
quantc_ops = torch.ops.quantc


def test_a_range_less_its_zero_point() -> None:
    assert Levels(0, 255, torch.uint8, 100).centered == (-100, 155)
    assert Levels(-128, 127, torch.int8, 0).centered == (-128, 127)
    # an unknown zero point may be at either end
    assert Levels(0, 127, torch.uint8).centered == (-127, 127)


@pytest.mark.parametrize(
    ("dtype", "signed", "is_byte"),
    [(torch.uint8, False, True), (torch.int8, True, True), (torch.int16, True, False), (torch.int32, True, False)],
)
def test_the_dtype_tells_sign_and_width(dtype: torch.dtype, signed: bool, is_byte: bool) -> None:
    assert (Levels(0, 1, dtype).signed, Levels(0, 1, dtype).is_byte) == (signed, is_byte)


# -- the Q/DQ form -------------------------------------------------------------------------------------------------


def test_what_a_dequantize_reads_is_on_its_grid() -> None:
    build = QdqBuilder()
    x = build.input("x", drawn(2, 3))
    known = build.fake(x, 0.5, 7, (0, 127, torch.uint8))
    channels = build.by_channel("w", integers(2, 3), torch.ones(2))
    come = build.run_time(x)
    build.done(known, channels, come)
    assert levels_before(known) == Levels(0, 127, torch.uint8, 7)
    assert levels_before(channels) == Levels(*SIGNED, None)  # there are several
    assert levels_before(come) == Levels(0, 255, torch.uint8, None)


@pytest.mark.parametrize("zero_point", [128, None])
def test_a_grid_that_is_found_as_it_runs_may_have_a_known_zero_point(zero_point: int | None) -> None:
    from operator import getitem

    build = QdqBuilder()
    x = build.input("x", drawn(2, 3))
    choice = build.call(CHOOSE, x, True, zero_point, 0, 255, 1e-6)
    numbers = [build.call(getitem, choice, index) for index in range(2)]
    ops, ends = decomposed_ops(), (0, 255, torch.uint8)
    levels = build.call(ops.quantize_per_token.default, x, *numbers, *ends)
    real = build.call(ops.dequantize_per_token.default, levels, *numbers, *ends, torch.float32)
    build.done(real)
    assert levels_before(real) == Levels(0, 255, torch.uint8, zero_point)


# -- the integer form ----------------------------------------------------------------------------------------------


class Integers(QdqBuilder):
    """Ops of the integer form."""

    def rescaled(self, x: fx.Node, qmin: int, qmax: int) -> fx.Node:
        half = self.constant(f"half_{qmin}_{qmax}", torch.tensor(0.5).double())
        return self.call(quantc_ops.requantize.default, x, 0, half, None, 0, qmin, qmax, torch.uint8)


def start() -> tuple[Integers, fx.Node]:
    build = Integers()
    return build, build.input("x", torch.arange(24).reshape(2, 3, 4).to(torch.uint8))


def ends(build: QdqBuilder, node: fx.Node, zero_point: object = 0) -> tuple[int, int]:
    found = levels_of(build.done(node), node, zero_point)
    return found.qmin, found.qmax


def test_an_op_yields_what_it_clamps_to_and_an_input_anything() -> None:
    build, x = start()
    assert ends(build, x) == (0, 255)
    build, x = start()
    assert ends(build, build.rescaled(x, 3, 200)) == (3, 200)
    build, x = start()
    clamped = build.call(aten.clamp.default, build.call(aten.to.dtype, x, torch.int32), 5, 90)
    assert ends(build, build.call(aten.to.dtype, clamped, torch.uint8)) == (5, 90)


def test_moves_hand_on_what_they_were_given() -> None:
    build, x = start()
    moved = build.call(aten.reshape.default, build.rescaled(x, 3, 200), [6, 4])
    first, _ = (build.call(aten.select.int, moved, 0, index) for index in range(2))
    assert ends(build, build.call(aten.flip.default, first, [0])) == (3, 200)


def test_a_join_has_the_lowest_and_the_highest_of_its_parts() -> None:
    build, x = start()
    parts = [build.rescaled(x, 3, 50), build.rescaled(x, 10, 200)]
    assert ends(build, build.call(aten.cat.default, parts, 1)) == (3, 200)


def test_other_ops_may_yield_anything() -> None:
    build, x = start()
    assert ends(build, build.call(aten.add.Tensor, build.rescaled(x, 3, 50), 1)) == (0, 255)


def test_a_table_has_what_it_has() -> None:
    build, x = start()
    table = build.constant("table", torch.arange(256).clamp(20, 31).to(torch.uint8))
    assert ends(build, build.call(quantc_ops.lookup.default, x, table, 0)) == (20, 31)


def test_zero_points_are_numbers_or_constants_of_one() -> None:
    build, x = start()
    one, two = build.constant("one", torch.tensor([9])), build.constant("two", torch.tensor([1, 2]))
    program = build.done(x)
    assert [levels_of(program, x, given).zero_point for given in (4, None, one, two)] == [4, 0, 9, None]


def test_a_node_without_a_tensor_is_refused() -> None:
    build, x = start()
    program = build.done(x)
    x.meta["val"] = None
    with pytest.raises(ValueError, match="x is no tensor"):
        levels_of(program, x, 0)
    x.meta["val"] = TensorType(torch.int8, (2, 3, 4))
    assert levels_of(program, x, 0) == Levels(-128, 127, torch.int8, 0)
