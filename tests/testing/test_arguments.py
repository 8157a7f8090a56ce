"""Arguments of ops in generated models: what the pattern fixes, and what an example supplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantc.patterns.checks import at_least, differs, equals, one_of
from quantc.testing.arguments import SHAPES, ExampleTable, Wanted
from quantc.testing.choices import Choices, NoExampleError


def wanted(
    op: str = "conv2d", known: Any = None, checks: Any = None, rank: int | None = None, **decided: int
) -> Wanted:
    taken = {f"{op} {name}": number for name, number in decided.items()}
    return Wanted(op, known or {}, checks or {}, rank, Choices(taken), torch.Generator().manual_seed(0))


def test_an_operand_that_is_made_is_handed_on() -> None:
    made = torch.ones(2, 3)
    call = wanted("add", {"x": made, "y": None})
    assert call.x() is made
    assert call.tensor("x") is made
    assert call.tensor("y") is None
    assert call.lacks("y")
    assert not call.lacks("x")
    assert not call.lacks("z")


def test_a_new_operand_has_the_axes_that_are_asked_for() -> None:
    assert wanted().x(rank=3).shape == SHAPES[3]
    assert wanted(rank=2).x().shape == SHAPES[2]
    assert wanted().x().shape == SHAPES[4]
    assert wanted().x(shape=(5, 1)).shape == (5, 1)
    with pytest.raises(NoExampleError, match="conv2d reads 4 axes"):
        wanted(known={"x": torch.ones(2, 3)}).x(rank=4)


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert torch.equal(wanted().randn(3), wanted().randn(3))
    whole = wanted().whole(5, 200)
    assert (int(whole.min()), int(whole.max())) == (0, 4)


def test_products_with_a_weight_are_about_as_large_as_their_input() -> None:
    call = wanted()
    made = call.randn(500, 64) @ call.weight(32, 64).t()
    assert float(made.std()) == pytest.approx(1.0, abs=0.1)


def test_values_that_fit_the_checks_are_shown_one_after_the_other() -> None:
    assert wanted().attr("groups", 1, 8) == 1
    assert wanted(groups=1).attr("groups", 1, 8) == 8
    assert wanted(checks={"groups": differs(1)}).attr("groups", 1, 8) == 8
    assert wanted(known={"groups": 4}).attr("groups", 1, 8) == 4
    assert wanted().attr("groups") is None


@pytest.mark.parametrize(
    ("check", "value"),
    [(equals(3), [3, 3]), (at_least(2), [2, 2]), (one_of(5, 7), [5, 5]), (equals((3, 4)), [3, 4])],
)
def test_what_the_checks_ask_for_is_as_wide_as_the_argument(check: Any, value: Any) -> None:
    assert wanted(checks={"stride": check}).attr("stride", [1, 1]) == value


def test_axes_are_counted_from_the_front_and_are_those_of_the_tensor() -> None:
    x = torch.ones(2, 3, 4)
    assert wanted("cat").axis(x) == 1
    assert wanted("cat").axis(x[0, 0]) == 0  # which has no second axis
    assert wanted("cat", checks={"dim": equals(-1)}).axis(x) == 2


def test_an_op_that_needs_one_tensor_needs_no_example() -> None:
    table = ExampleTable()
    assert table.complete(wanted("relu", rank=2))["x"].shape == SHAPES[2]
    with pytest.raises(NoExampleError, match="linear"):
        table.complete(wanted("linear"))


def test_what_the_pattern_fixes_has_the_last_word() -> None:
    table = ExampleTable()

    @table.of("softmax", "log_softmax")
    def example(call: Wanted) -> dict[str, Any]:
        return {"x": call.x(), "dim": -1}

    assert table.complete(wanted("softmax"))["dim"] == -1
    assert table.complete(wanted("log_softmax", {"dim": 1}))["dim"] == 1
    assert example(wanted("softmax"))["dim"] == -1


def test_attributes_that_only_the_checks_know_are_added() -> None:
    found = ExampleTable().complete(wanted("gelu", checks={"approximate": equals("tanh")}))
    assert found["approximate"] == "tanh"
