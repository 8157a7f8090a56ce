"""Which module of which model is running, as errors name it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantc.nn.module_path import running_module


class Asks(nn.Module):
    """Notes what it is called while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.heard.append(running_module())
        return x


def test_the_innermost_module_is_named_by_its_path_in_the_outermost() -> None:
    inner = Asks()
    nn.Sequential(nn.Identity(), nn.Sequential(nn.ReLU(), inner))(torch.zeros(1))
    assert inner.heard == ["1.1 (Asks)"]


def test_a_module_that_is_called_alone_is_the_model_itself() -> None:
    inner = Asks()
    inner(torch.zeros(1))
    assert inner.heard == ["the model itself (Asks)"]


def test_a_module_in_two_places_is_named_by_the_first() -> None:
    inner = Asks()
    nn.Sequential(inner, inner)(torch.zeros(1))
    assert inner.heard == ["0 (Asks)", "0 (Asks)"]


def test_a_module_that_is_no_part_of_the_model_has_no_path() -> None:
    inner = Asks()

    class Hides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = inner(x)
            return made

    Hides()(torch.zeros(1))
    assert inner.heard == ["the model itself (Asks)"]


def test_outside_of_all_modules_there_is_none() -> None:
    assert running_module() == ""
