"""Convolutions that find the scale of what they read as they run."""

from __future__ import annotations

import pytest
import torch
import torch.ao.nn.quantized.dynamic as ao_dynamic
from torch import nn

from quantc.nn import qconfig as qconfigs
from quantc.nn import torch_state_dict
from quantc.nn.quantized import dynamic
from tests.support.dynamic_cases import furthest
from tests.support.nn_cases import engine


@pytest.mark.parametrize("name", ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d"])
def test_convolutions(name: str) -> None:
    """torch.ao's find other scales, so both are measured by float: ours are no further from it."""
    with engine("fbgemm"):
        torch.manual_seed(0)
        made = getattr(nn, name)(4, 6, 3)
        made.qconfig = qconfigs.default_dynamic_qconfig
        ours, theirs = getattr(dynamic, name).from_float(made), getattr(ao_dynamic, name).from_float(made)
        x = torch.randn(2, 4, *[7] * int(name[-2]))
        wanted = made(x)
        assert furthest(ours(x), wanted) <= 1.5 * furthest(theirs(x), wanted)
        ours.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(torch_state_dict(ours))
        assert "dynamic" in repr(ours)
