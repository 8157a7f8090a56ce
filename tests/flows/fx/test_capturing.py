"""From a user's model to a program of this flow: modules kept whole, and sizes left open."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import InputError
from quantc.flows.fx import (
    convert_fx,
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.fx.capturing import capture_model, examples_of, leaves_of
from quantc.flows.fx.custom_config import CustomConfigError, PrepareCustomConfig
from tests.support.fx_models import model_and_data


def test_batches_of_any_size_calibrate() -> None:
    model, _ = model_and_data("classifier")
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (torch.randn(2, 3, 16, 16),))
    for shape in ((1, 3, 16, 16), (5, 3, 24, 20)):
        prepared(torch.randn(shape))
    assert convert_fx(prepared)(torch.randn(3, 3, 18, 18)).shape == (3, 5)
    with pytest.raises(InputError, match="size 4 in dimension 1"):
        prepared(torch.randn(2, 4, 16, 16))


def test_a_lone_tensor_or_a_list_is_taken_for_the_arguments() -> None:
    x = torch.zeros(1)
    assert examples_of(x) == (x,)
    assert examples_of([x, 2]) == (x, 2)
    with pytest.raises(CustomConfigError, match="dict"):
        examples_of({"x": x})


def test_sizes_are_open_where_the_model_lets_them_be() -> None:
    program, shapes = capture_model(nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(3, 4), [])
    assert shapes == {}
    assert program(torch.randn(7, 4)).shape == (7, 4)
    with pytest.raises(InputError):
        program(torch.randn(7, 5))


def test_a_size_that_the_model_depends_on_stays_fixed() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.reshape(3, 2, 2) + 1 if x.shape[0] == 3 else x

    program, _ = capture_model(Fixed().eval(), torch.randn(3, 4), [])
    assert program(torch.randn(3, 4)).shape == (3, 2, 2)
    with pytest.raises(InputError):
        program(torch.randn(7, 4))


def test_batches_are_open_behind_modules_that_are_kept_whole() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 2 if float(x.detach().sum()) > 0 else x * 3

    model = nn.Sequential(nn.Linear(4, 4), Odd(), nn.Linear(4, 2)).eval()
    program, shapes = capture_model(model, torch.randn(3, 4), [Odd])
    assert set(shapes) == {"1"}
    x = torch.randn(6, 4)
    torch.testing.assert_close(program(x), model(x))


def test_what_is_kept_whole_is_what_configs_name() -> None:
    custom = PrepareCustomConfig().set_non_traceable_module_names("a").set_standalone_module_name("b", None, ())
    custom.set_non_traceable_module_classes([nn.ReLU, nn.GRU]).set_standalone_module_class(nn.Linear, None, ())
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    assert leaves_of(model, custom) == ["a", "b", nn.ReLU, nn.Linear]


def test_classes_are_kept_whole_with_those_derived_of_them() -> None:
    class Own(nn.ReLU):
        pass

    custom = PrepareCustomConfig().set_non_traceable_module_classes([nn.ReLU])
    assert leaves_of(nn.Sequential(Own()), custom) == [nn.ReLU]
