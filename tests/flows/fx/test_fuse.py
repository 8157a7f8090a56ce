"""Batch norms folded away, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantc.errors import ModeError
from quantc.flows.fx import (
    fuse_fx,
)
from quantc.flows.fx.fuse import UnfusedWarning
from tests.support.fx_models import Classifier, model_and_data


def test_fusing_alone() -> None:
    model, data = model_and_data("classifier")
    fused = fuse_fx(model, {"preserved_attributes": ["training"]})
    assert not any("batch_norm" in str(node.target) for node in fused.graph.nodes)
    assert torch.allclose(fused(data[0]), model(data[0]), atol=1e-5)
    assert isinstance(model, Classifier)
    assert isinstance(model.norm, nn.BatchNorm2d)
    with pytest.raises(ModeError, match="for inference"):
        fuse_fx(model.train())


def test_fusing_says_what_it_cannot_know() -> None:
    model, data = model_and_data("waves")  # BatchNorm1d takes two axes or three
    with pytest.warns(UnfusedWarning, match="not folded: batch_norm"):
        fuse_fx(model)
    fused = fuse_fx(model, example_inputs=(data[0],))
    assert not any("batch_norm" in str(node.target) for node in fused.graph.nodes)
    assert torch.allclose(fused(data[1]), model(data[1]), atol=1e-5)
