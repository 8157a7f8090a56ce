"""Modules that no tracer looks into are held to leaving their inputs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantc.errors import DataError, InputError
from quantc.flows.fx import (
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.fx.kept_whole import watch, watch_like
from quantc.flows.fx.open_sizes import Shapes
from tests.support.eager_small import hooks
from tests.support.fx_small import batches


def test_a_module_that_is_kept_whole_must_not_write_to_its_inputs() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.add_(1) if float(x.sum()) > -1e9 else x

    model = nn.Sequential(nn.Linear(8, 8), Writes(), nn.Linear(8, 8)).eval()
    custom = {"non_traceable_module_class": Writes}
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batches()[0],), custom)
    with torch.no_grad(), pytest.raises(DataError, match="1 is kept whole and writes to a tensor"):
        prepared(batches()[0])


class Writes(nn.Module):
    """Writes to what it is given if it is told to."""

    def forward(self, x: Tensor, *, into: Tensor | None = None) -> Any:
        if into is not None:
            into.add_(1)
        return x * 2


def test_a_module_that_leaves_its_inputs_alone_is_called_as_ever() -> None:
    module, x = Writes(), torch.ones(2)
    watch(module, "part")
    assert module(x).tolist() == [2.0, 2.0]
    with pytest.raises(DataError, match="part") as caught:
        module(x, into=torch.ones(2))
    assert "Writes" in str(caught.value.where)
    assert module(x).tolist() == [2.0, 2.0]


def test_watching_twice_is_watching_once_under_the_later_name() -> None:
    module = Writes()
    watch(module, "first")
    watch(module, "second")
    assert hooks(module) == 2
    with pytest.raises(DataError, match="second"):
        module(torch.ones(2), into=torch.ones(2))


def test_a_copy_is_held_to_the_same() -> None:
    source, plain, copied = Writes(), Writes(), Writes()
    watch_like(source, plain)
    assert hooks(plain) == 0
    watch(source, "part")
    watch_like(source, copied)
    with pytest.raises(DataError, match="part"):
        copied(torch.ones(2), into=torch.ones(2))


def test_tensors_of_inference_mode_have_no_versions_and_pass() -> None:
    module = Writes()
    watch(module, "part")
    with torch.inference_mode():
        assert module(torch.ones(2)).tolist() == [2.0, 2.0]


def test_results_are_held_to_their_shapes() -> None:
    module, x = Writes(), torch.ones(3)
    shapes = Shapes(((7,),), (torch.float32,), pytree.tree_flatten(x)[1])
    watch(module, "part", shapes)
    with pytest.raises(InputError, match="part"):
        module(x)
