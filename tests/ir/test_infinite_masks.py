"""Masks: tensors that may hold infinities, for all they do is exclude positions from a softmax."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import quantc as qc
from quantc.ir.infinite_masks import is_mask, masks_rows
from tests.support.programs import Builder, aten

ROWS: dict[str, tuple[bool, Callable[[Tensor, Tensor], Tensor]]] = {
    "added": (True, lambda scores, mask: scores + mask),
    "taken from": (True, lambda scores, mask: mask - scores),
    "laid out anew": (True, lambda scores, mask: scores + mask.reshape(2, 5)[:, None, :]),
    "of heads": (
        True,
        lambda scores, mask: scores + mask.expand(-1, 5, -1).contiguous().transpose(0, 1).transpose(1, 0),
    ),
    "by a product": (True, lambda scores, mask: torch.baddbmm(mask, scores, scores.mT)),
    "subtracted": (False, lambda scores, mask: scores - mask),
    "added times minus one": (False, lambda scores, mask: torch.add(scores, mask, alpha=-1)),
    "bounded": (False, lambda scores, mask: scores + mask.clamp(min=-1e4)),
    "filled": (False, lambda scores, mask: scores + mask.masked_fill(mask < -1e30, -9.0)),
    "turned": (False, lambda scores, mask: scores + mask.mT),
    "joined": (False, lambda scores, mask: torch.cat([scores, mask.expand(-1, 5, -1)], -1)),
    "of another axis": (False, lambda scores, mask: (scores + mask).transpose(1, 2)),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_looked_at_where_they_stay_rows(name: str) -> None:
    expected, join = ROWS[name]

    class Model(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return join(x, mask).softmax(-1)

    program = qc.capture(Model().eval(), (torch.randn(2, 5, 5), torch.zeros(2, 1, 5)), dynamic_shapes=None)
    (entry,) = [node for node in program.graph.find_nodes(op="placeholder") if node.name == "mask"]
    assert is_mask(entry)
    assert masks_rows(entry) == expected


def scored(build: Builder) -> tuple[fx.Node, fx.Node]:
    return build.input("scores", 2, 5), build.input("mask", 2, 5)


def test_a_tensor_that_is_read_by_anything_else_is_no_mask() -> None:
    build = Builder()
    scores, mask = scored(build)
    soft = build.call(aten.softmax.int, build.call(aten.add.Tensor, scores, mask), -1)
    assert is_mask(mask)
    assert is_mask(scores), "nothing else is made of the scores, either"
    build.program(soft, build.call(aten.relu.default, mask))
    assert not is_mask(mask)
    assert is_mask(scores)


def test_a_tensor_that_is_returned_or_never_read_is_no_mask() -> None:
    build = Builder()
    scores, mask = scored(build)
    build.program(build.call(aten.softmax.int, scores, -1), mask)
    assert not is_mask(mask)
    unread = Builder().input("x", 2)
    assert not is_mask(unread)


def test_comparisons_and_questions_about_its_size_do_not_count() -> None:
    build = Builder()
    scores, mask = scored(build)
    build.call(aten.sym_size.int, mask, 0)
    compared = build.call(aten.lt.Scalar, mask, 0.0)
    filled = build.call(aten.masked_fill.Scalar, scores, compared, -1.0)
    build.program(filled)
    assert is_mask(mask), "what is made of it is not float"
    assert not is_mask(scores)


def test_an_infinite_constant_may_also_end_in_a_bound() -> None:
    build = Builder()
    x = build.input("x", 2, 5)
    lowest = build.constant("lowest", torch.tensor(-torch.inf))
    kept = build.call(aten.where.self, build.call(aten.gt.Scalar, x, 0), x, lowest)
    build.program(build.call(aten.amax.default, kept, [-1]))
    assert is_mask(lowest)
    assert not is_mask(x), "an input is not known to be one"


def test_attention_takes_a_mask_and_no_other_operand_is_one() -> None:
    build = Builder()
    q, k, v = (build.input(name, 1, 2, 5, 4) for name in "qkv")
    mask = build.input("mask", 5, 5)
    build.program(build.call(aten.scaled_dot_product_attention.default, q, k, v, mask))
    assert [is_mask(node) for node in (q, k, v, mask)] == [False, False, False, True]
    assert not masks_rows(mask), "attention gives zeros for a row that is masked out"


def test_the_bias_of_a_product_is_handed_on_and_its_factors_are_not() -> None:
    build = Builder()
    bias, x, y = build.input("bias", 1, 5, 5), build.input("x", 1, 5, 5), build.input("y", 1, 5, 5)
    scores = build.call(aten.baddbmm.default, bias, x, y)
    build.program(build.call(aten.softmax.int, scores, -1))
    assert [is_mask(node) for node in (bias, x, y)] == [True, False, False]
    assert masks_rows(bias)
