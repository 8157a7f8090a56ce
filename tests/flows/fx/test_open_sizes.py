"""Batches of any size behind modules that no tracer looks into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from quantc.errors import InputError
from quantc.flows.fx import (
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.fx.open_sizes import Shapes, batch_dimensions, shapes_of, with_stand_ins
from tests.support.fx_small import batches


def test_a_module_that_is_kept_whole_must_grow_with_the_batch() -> None:
    class Fickle(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x[: max(1, x.shape[0] - 1)] if float(x.sum()) > 1e6 else x * 1.0

    model = nn.Sequential(Fickle(), nn.Linear(8, 8)).eval()
    custom = {"non_traceable_module_class": Fickle}
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batches()[0],), custom)
    prepared(torch.randn(11, 8))
    with pytest.raises(InputError, match=r"gave \[\[5, 8\]\], where \[\[6, 8\]\] was expected"):
        prepared(1e6 * batches()[0].abs())


class Whole(nn.Module):
    """Gives two results: one that grows with the batch, and one that does not."""

    def forward(self, x: Tensor, table: Tensor) -> Any:
        return {"rows": x.repeat(1, 2), "table": table.sum(0).long()}


class Around(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        return self.part(x, torch.ones(5, 4))


def shapes() -> Shapes:
    found = shapes_of(Around(Whole()), (torch.randn(2, 3),), {"part"})
    assert found is not None
    return found["part"]


def test_sizes_that_grow_with_the_batch_are_told_from_those_that_stay() -> None:
    given = [torch.empty(7, 3), torch.empty(5, 4)]
    assert shapes().of(given) == [[7, 6], [4]]


def test_stand_ins_have_the_shapes_dtypes_and_arrangement() -> None:
    made = shapes().stand_in([torch.empty(7, 3), torch.empty(5, 4)])
    assert {name: (tuple(x.shape), x.dtype) for name, x in made.items()} == {
        "rows": ((7, 6), torch.float32),
        "table": ((4,), torch.int64),
    }


def test_a_result_of_another_shape_is_refused() -> None:
    given = [torch.empty(7, 3), torch.empty(5, 4)]
    shapes().check("part", given, {"rows": torch.empty(7, 6), "table": torch.empty(4)})
    with pytest.raises(InputError, match="part") as caught:
        shapes().check("part", given, {"rows": torch.empty(6, 6), "table": torch.empty(4)})
    assert "[7, 3]" in str(caught.value.where)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, table: x.flatten(),  # grows as the product of two sizes does
        lambda x, table: x if len(x) < 3 else x[0],
        lambda x, table: x if len(x) < 3 else x.long(),
        lambda x, table: x.reshape(2, 3),  # refuses another batch
    ],
)
def test_sizes_that_cannot_be_told_are_none(function: Any) -> None:
    class Fickle(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Any:
            return function(x, table)

    assert shapes_of(Around(Fickle()), (torch.randn(2, 3),), {"part"}) is None


def test_running_the_model_leaves_it_its_inputs_and_the_generator_as_they_were() -> None:
    class Learns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor, table: Tensor) -> Any:
            return F.dropout(self.norm(x.add_(1)), 0.5)

    model, x = Around(Learns()).train(), torch.zeros(2, 3)
    state = torch.random.get_rng_state()
    shapes_of(model, (x,), {"part"})
    assert torch.equal(torch.random.get_rng_state(), state)
    assert float(x.sum()) == 0
    assert int(model.state_dict()["part.norm.num_batches_tracked"]) == 0


def test_inputs_of_the_batchs_size_are_left_open() -> None:
    given = ({"x": torch.empty(2, 3), "y": torch.empty(3, 2)}, torch.empty(2), torch.tensor(1.0), "text")
    assert batch_dimensions(given, "open") == ({"x": {0: "open"}, "y": None}, {0: "open"}, None, None)


def test_stand_ins_answer_for_tensors_without_numbers_alone() -> None:
    model = Around(Whole())
    twin: Any = with_stand_ins(model, {"part": shapes()})
    x = torch.randn(4, 3)
    assert torch.equal(twin(x)["rows"], model(x)["rows"])
    with FakeTensorMode() as mode:
        assert tuple(twin.part(mode.from_tensor(x), torch.empty(5, 4))["rows"].shape) == (4, 6)
    assert "forward" not in vars(model.part)


def test_inputs_of_another_size_do_not_grow_with_the_batch() -> None:
    class Second(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Any:
            return table * 2

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Second()

        def forward(self, x: Tensor, table: Tensor) -> Any:
            return self.part(x, table)

    found = shapes_of(Two(), (torch.randn(2, 3), torch.randn(5, 4)), {"part"})
    assert found is not None
    assert found["part"].results == ((5, 4),)
