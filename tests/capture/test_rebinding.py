"""A model that gives a tensor other memory under the name it has is refused with its line, or captured as it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import CaptureError

Run = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    """Two layers and a buffer, and something done in between."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("kept", torch.ones(4, 8))
        self.kept: Tensor
        self.register_buffer("part", self.kept[0])
        self.plain = self.kept[1:3]
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def data_of_a_result(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    y.data = torch.relu(x) + 3.0
    return s.b(y)


def data_made_here(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    y.data = torch.full((4, 8), 3.0)
    return s.b(y)


def data_of_an_input(s: Any, x: Tensor) -> Any:
    x.data = x + 5.0
    return s.b(s.a(x))


def data_of_a_buffer(s: Any, x: Tensor) -> Any:
    s.kept.data = s.kept + 5.0
    return s.b(s.a(x) + s.kept)


def data_of_a_parameter(s: Any, x: Tensor) -> Any:
    s.a.weight.data = torch.full((8, 8), 0.3)
    return s.b(s.a(x))


def data_by_setattr(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    setattr(y, "data", x + 3.0)  # noqa: B010 - as some models do it
    return s.b(y)


def set_in_place(s: Any, x: Tensor) -> Any:
    y, z = s.a(x), x + 3.0
    y.set_(z)
    z.add_(5.0)
    return s.b(y)


def resized(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    y.resize_(2, 8)
    return s.b(y)


def resized_like(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    y.resize_as_(torch.zeros(2, 8))
    return s.b(y)


def swapped(s: Any, x: Tensor) -> Any:
    y, z = s.a(x), x + 3.0
    torch.utils.swap_tensors(y, z)  # type: ignore[no-untyped-call]
    return s.b(y)


def out_of_another_size(s: Any, x: Tensor) -> Any:
    o = torch.zeros(2, 2)
    torch.add(x, 3.0, out=o)
    return s.b(s.a(x) + o)


def part_of_a_written_buffer(s: Any, x: Tensor) -> Any:
    s.kept.mul_(-3.0)
    return s.b(s.a(x) + s.part)


def whole_of_a_written_buffer(s: Any, x: Tensor) -> Any:
    s.part.add_(5.0)
    return s.b(s.a(x) + s.kept)


def attribute_of_a_written_buffer(s: Any, x: Tensor) -> Any:
    s.kept.add_(5.0)
    return s.b(s.a(x)[:2] + s.plain)


def view_of_a_buffer_that_is_assigned(s: Any, x: Tensor) -> Any:
    v = s.kept[0]
    s.kept = s.kept * 3.0
    v.add_(5.0)
    return s.b(s.a(x) + s.kept), v


REFUSED: tuple[Run, ...] = (data_of_a_result, data_made_here, data_of_an_input, data_of_a_buffer, data_of_a_parameter)
REFUSED += (data_by_setattr, set_in_place, resized, resized_like, swapped, out_of_another_size)
REFUSED += (part_of_a_written_buffer, whole_of_a_written_buffer, attribute_of_a_written_buffer)


@pytest.mark.parametrize("method", ["auto", "export", "export-strict", "fx"])
@pytest.mark.parametrize("run", REFUSED, ids=lambda run: run.__name__)
@torch.no_grad()
def test_other_memory_under_an_old_name_is_refused(run: Any, method: Any) -> None:
    with pytest.raises(CaptureError) as caught:
        qc.capture(Model(run).eval(), (torch.randn(4, 8),), method)
    assert caught.value.where is not None
    assert "test_rebinding.py:" in caught.value.where


@pytest.mark.parametrize("method", ["auto", "export", "fx"])
@torch.no_grad()
def test_a_view_of_a_buffer_that_is_assigned_is_not_returned(method: Any) -> None:
    with pytest.raises(CaptureError, match="returns memory of 'kept' and assigns it another tensor"):
        qc.capture(Model(view_of_a_buffer_that_is_assigned).eval(), (torch.randn(4, 8),), method)


def data_added(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    y.data.add_(5.0)
    return s.b(y)


def data_item(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    y.data[0] = 5.0
    return s.b(y)


def buffer_assigned(s: Any, x: Tensor) -> Any:
    s.kept = s.kept + 5.0
    return s.b(s.a(x) + s.kept)


def turned_twice(s: Any, x: Tensor) -> Any:
    y = s.a(x)
    y.t_()
    y.t_()
    return s.b(y)


def out_that_is_empty(s: Any, x: Tensor) -> Any:
    o = torch.empty(0)
    torch.add(x, 3.0, out=o)
    return s.b(s.a(x) + o)


def out_that_is_a_part(s: Any, x: Tensor) -> Any:
    y, o = s.a(x), torch.zeros(4, 16)
    torch.mul(y, x, out=o[:, :8])
    return s.b(y), o


FOLLOWED = (data_added, data_item, buffer_assigned, turned_twice, out_that_is_empty, out_that_is_a_part)


@pytest.mark.parametrize("method", ["auto", "fx"])
@pytest.mark.parametrize("run", FOLLOWED, ids=lambda run: run.__name__)
@torch.no_grad()
def test_writes_to_the_memory_a_tensor_has_are_followed(run: Any, method: Any) -> None:
    model, x = Model(run).eval(), torch.randn(4, 8)
    program = qc.capture(model, (x,), method)
    expected, found = model(x.clone()), program(x.clone())
    torch.testing.assert_close(found, expected)


def test_parameters_may_be_moved_by_torch_while_a_model_is_captured() -> None:
    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.a.float()
            made: Tensor = self.a(x)
            return made

    model, x = Moving().eval(), torch.randn(4, 8)
    torch.testing.assert_close(qc.capture(model, (x,))(x), model(x))
