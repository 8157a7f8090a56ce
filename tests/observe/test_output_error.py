"""The error by Gram matrices against the layer itself, run by torch in float64 on the same data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.calibration.layer_inputs import LayerInput, layer_inputs
from quantc.errors import ObservationError
from quantc.observe.gram import Gram
from quantc.observe.output_error import mean_change, output_error
from tests.support.layer_inputs import prepared_layer

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(12, 5), (7, 12)),
    "linear of sequences": (nn.Linear(12, 5), (2, 6, 12)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1), (3, 4, 11)),
    "conv1d, dilated": (nn.Conv1d(4, 6, 3, padding=2, dilation=2, stride=2), (3, 4, 11)),
    "conv2d": (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 9, 8)),
    "conv2d, strided": (nn.Conv2d(3, 8, (3, 2), stride=(2, 3), padding=(0, 1)), (2, 3, 9, 8)),
    "pointwise": (nn.Conv2d(6, 8, 1), (2, 6, 5, 5)),
    "grouped": (nn.Conv2d(6, 4, 3, groups=2), (2, 6, 6, 6)),
    "depthwise": (nn.Conv2d(5, 5, 3, groups=5, padding=1), (2, 5, 6, 6)),
    "depthwise, two a channel": (nn.Conv2d(5, 10, 3, groups=5), (2, 5, 6, 6)),
    "conv3d": (nn.Conv3d(2, 4, 2, padding=1), (2, 2, 4, 5, 3)),
    "conv3d, grouped": (nn.Conv3d(4, 4, 2, groups=2, stride=2), (2, 4, 4, 6, 4)),
}


def errors(layer: nn.Module, change: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean square and mean of each output channel's change, by torch."""
    twin: Any = type(layer)
    options = {
        name: getattr(layer, name)
        for name in ("stride", "padding", "dilation", "groups")
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }
    run = nn.functional.linear if twin is nn.Linear else getattr(nn.functional, twin.__name__.lower())
    found = run(x.double(), change.double(), None, **options)
    found = found.movedim(-1 if twin is nn.Linear else 1, -1).reshape(-1, change.shape[0])
    return found.square().mean(0), found.mean(0)


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_that_of_the_layer(name: str) -> None:
    layer, shape = LAYERS[name]
    (rows,) = layer_inputs(prepared_layer(layer, shape))
    assert isinstance(rows, LayerInput)
    generator = torch.Generator().manual_seed(0)
    weight: Tensor = layer.weight  # type: ignore[assignment]
    change = torch.randn(weight.shape, generator=generator) * 0.01
    gram, data = Gram.empty({}), [torch.randn(shape, generator=generator) + 0.3 for _ in range(4)]
    for number, x in enumerate(data):
        gram.update(rows.rows(x, number), batch=number)
    square, mean = errors(layer, change, torch.cat(data))
    assert torch.allclose(output_error(change, gram), square, rtol=1e-3)
    assert torch.allclose(mean_change(change, gram), mean, rtol=1e-2, atol=1e-5)
    assert torch.allclose(output_error(change, gram, "free"), square - mean.square(), rtol=1e-3)


def test_another_layers_gram_is_refused() -> None:
    gram = Gram.empty({})
    gram.update(torch.randn(1, 4, 6))
    with pytest.raises(ObservationError, match="does not read 1 groups of 6 channels"):
        output_error(torch.randn(3, 7), gram)
    with pytest.raises(ObservationError, match="nothing was observed"):
        output_error(torch.randn(3, 7), Gram.empty({}))
