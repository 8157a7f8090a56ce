"""Casts of models in other float dtypes: a copy in float32, its inputs with it, and a note of what was cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.capture.cast_model import as_dtype, cast
from quantc.errors import CaptureError


@pytest.mark.parametrize("given", ["float32", torch.float32])
def test_float32_is_taken_by_name_and_as_itself(given: Any) -> None:
    assert as_dtype(given) is torch.float32


@pytest.mark.parametrize("given", ["float16", torch.bfloat16, "int8", torch.int8, "double"])
def test_nothing_else_is_cast_to(given: Any) -> None:
    with pytest.raises(CaptureError, match="dtype") as caught:
        as_dtype(given)
    assert repr(given) in caught.value.what


def mixed() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].to(torch.bfloat16)
    model[1].to(torch.float64)
    return model


def test_a_copy_is_cast_and_the_model_stays() -> None:
    model = mixed()
    made, _, _, note = cast(model, (), {}, torch.float32)
    assert note == "cast from bfloat16, float64 to float32"
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16, torch.float64}
    counted = dict(made.named_buffers())["1.num_batches_tracked"]
    assert counted.dtype == torch.int64  # not a float, and so not cast
    weight, own = dict(made.named_parameters())["0.weight"], dict(model.named_parameters())["0.weight"]
    assert torch.equal(weight, own.float())


def test_float_inputs_are_cast_wherever_they_are_and_others_stay() -> None:
    half, ids = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.int64)
    _, args, kwargs, _ = cast(mixed(), (half, [ids, {"k": half}], 3), {"mask": half.double()}, torch.float32)
    assert args is not None
    assert args[0].dtype == args[1][1]["k"].dtype == kwargs["mask"].dtype == torch.float32
    assert args[1][0] is ids
    assert args[2] == 3


def test_a_model_that_needs_no_cast_is_itself() -> None:
    model = nn.Linear(2, 2)
    made, args, _, note = cast(model, None, {}, torch.float32)
    assert made is model
    assert args is None
    assert "already" in note
