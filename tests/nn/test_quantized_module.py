"""What all quantized modules have in common: the grid of their result, and how they are saved and loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import ObservationError, RefusedError, SpecError
from quantc.nn import observers, quantized
from quantc.nn.quantized import dynamic
from quantc.nn.quantized_module import QuantizedModule, grid_of


def test_formats_stay() -> None:
    made = quantized.Linear(4, 2)
    before = made.state_dict()
    for change in (made.half, made.double, made.float):
        change()
        after = made.state_dict()
        assert all(after[name].dtype is tensor.dtype for name, tensor in before.items())


def test_a_bias_that_is_missing_is_missed() -> None:
    for kind in (quantized.Linear, dynamic.Linear):
        made = kind(4, 2)
        with pytest.raises(RuntimeError, match=r"Missing key\(s\).*bias"):
            made.load_state_dict(kind(4, 2, bias_=False).state_dict())
        with pytest.raises(RuntimeError, match="has the shape"):
            made.load_state_dict(kind(5, 2).state_dict())
    bare = {name: value for name, value in dynamic.Linear(4, 2).state_dict().items() if "scale" not in name}
    with pytest.raises(RuntimeError, match="no weight_scale"):
        dynamic.Linear(4, 2).load_state_dict(bare)
    with pytest.raises(RuntimeError, match="Unexpected"):
        quantized.Linear(4, 2).load_state_dict({**quantized.Linear(4, 2).state_dict(), "other": torch.zeros(1)})


class Scaled(QuantizedModule):
    """A module of one tensor."""

    held = ("factor",)


def test_a_tensor_that_is_not_there_is_missed_by_name() -> None:
    module = Scaled()
    with pytest.raises(SpecError, match="Scaled has no factor"):
        module.tensor("factor")
    module.hold("factor", torch.ones(2))
    assert module.tensor("factor").tolist() == [1.0, 1.0]


def test_holding_another_tensor_forgets_kernels() -> None:
    module = Scaled()
    module.kernels.made("key", lambda: print)
    module.hold("factor", torch.ones(2))
    assert module.kernels.get("key") is None


def test_state_dicts_hold_the_grid_and_the_dtype_of_levels() -> None:
    module, other = Scaled(), Scaled()
    module.hold("factor", torch.ones(2, 3))
    module.set_grid(0.1, -3)
    module.out_dtype = torch.int8
    assert sorted(module.state_dict()) == ["factor", "scale", "zero_point"]
    other.load_state_dict(module.state_dict())
    assert (other.grid, other.out_dtype) == ((0.1, -3), torch.int8)
    assert other.grid_text() == "scale=0.1, zero_point=-3, dtype=torch.int8"
    assert other.tensor("factor").data_ptr() != module.tensor("factor").data_ptr()


def test_a_module_that_is_made_of_no_float_module_says_so() -> None:
    with pytest.raises(RefusedError, match="Scaled") as caught:
        Scaled.from_float(nn.ReLU())
    assert caught.value.where == "ReLU"


def test_the_grid_of_results_is_that_of_their_observer() -> None:
    observer = observers.MinMaxObserver(dtype=torch.qint8)
    observer(torch.tensor([-1.0, 1.55]))
    scale, zero_point, dtype = grid_of(observer, "Linear")
    assert scale == pytest.approx(0.01)
    assert (zero_point, dtype) == (-28, torch.int8)


@pytest.mark.parametrize("observer", [None, nn.Identity()])
def test_results_that_nobody_observed_have_no_grid(observer: Any) -> None:
    with pytest.raises(ObservationError, match="Linear"):
        grid_of(observer, "Linear")


def test_grids_of_results_are_whole_and_of_integers() -> None:
    by_channel = observers.PerChannelMinMaxObserver()
    by_channel(torch.randn(3, 4))
    floats = observers.FixedQParamsObserver(0.5, 0, dtype=torch.float16)
    for observer, word in ((by_channel, "3 scales"), (floats, "float16")):
        with pytest.raises(SpecError, match=word):
            grid_of(observer, "Linear")
