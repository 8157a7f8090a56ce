"""Example arguments for the ops of the dialect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quantc.ir.dialect import OPS
from quantc.patterns.dsl import op
from quantc.patterns.table import Rule
from quantc.testing.arguments import Wanted
from quantc.testing.choices import Choices, NoExampleError
from quantc.testing.op_examples import OP_EXAMPLES, POSITIVE, RANKS
from quantc.testing.synthesis import models_of


def test_every_op_of_the_dialect_has_an_example() -> None:
    without = [op_.name for op_ in OPS if not models_of(Rule("one", op(op_.name))).made]
    assert without == ["cast", "sym_size"]  # a cast yields another dtype, a size is no tensor


def example(name: str, rank: int | None = None, **decided: int) -> dict[str, Any]:
    choices = Choices({f"{name} {what}": number for what, number in decided.items()})
    return OP_EXAMPLES.complete(Wanted(name, {}, {}, rank, choices, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("name", sorted(name for name in RANKS if name in OP_EXAMPLES.rows))
def test_ops_of_a_fixed_rank_are_given_as_many_axes(name: str) -> None:
    found = example(name)
    first = next(value for value in found.values() if isinstance(value, Tensor))
    assert first.dim() == RANKS[name]


@pytest.mark.parametrize("name", POSITIVE)
def test_operands_that_must_stay_away_from_zero_do(name: str) -> None:
    assert float(example(name)["x"].min()) >= 0.5


def test_convolutions_are_shown_with_one_group_and_with_one_for_each_channel() -> None:
    x, one, each = example("conv2d")["x"], example("conv2d"), example("conv2d", groups=1)
    assert (one["groups"], tuple(one["w"].shape)) == (1, (8, x.shape[1], 3, 3))
    assert (each["groups"], tuple(each["w"].shape)) == (x.shape[1], (8, 1, 3, 3))
    assert functional.conv2d(x, each["w"], each["b"], each["stride"], each["padding"], groups=each["groups"]).shape == (
        x.shape[0], 8, *x.shape[2:],
    )  # fmt: skip


def test_what_feeds_a_product_decides_the_other_operand() -> None:
    y = torch.ones(2, 5, 3)
    wanted = Wanted("matmul", {"y": y}, {}, None, Choices(), torch.Generator())
    made = OP_EXAMPLES.complete(wanted)
    assert (made["x"] @ y).shape == (2, 6, 3)


@pytest.mark.parametrize(("name", "gates"), [("lstm_cell", 4), ("gru_cell", 3), ("rnn_tanh_cell", 1)])
def test_recurrent_cells_have_the_gates_of_torchs(name: str, gates: int) -> None:
    found = example(name)
    size = found["w_hh"].shape[1]
    assert found["w_ih"].shape == (gates * size, found["x"].shape[1])
    assert isinstance(found["hx"], list) == (name == "lstm_cell")


def test_joined_tensors_differ_in_size_of_their_numbers() -> None:
    """So that one grid for all of them is not that of each."""
    for items in (0, 1):
        choices = Choices({"xs items": items})
        found = OP_EXAMPLES.complete(Wanted("cat", {}, {}, 2, choices, torch.Generator().manual_seed(0)))
        assert len(found["xs"]) == 2 + items
        spreads = [float(x.std()) for x in found["xs"]]
        assert spreads[-1] > 1.5 * spreads[0]


def test_tensors_of_different_shapes_cannot_be_joined() -> None:
    known = {"xs": [torch.ones(2, 3), torch.ones(3, 2)]}
    with pytest.raises(NoExampleError, match="shapes"):
        OP_EXAMPLES.complete(Wanted("cat", known, {}, 2, Choices(), torch.Generator()))
