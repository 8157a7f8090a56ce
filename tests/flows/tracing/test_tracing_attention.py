"""The tracing flow on torch.nn's own transformers, which torch keeps in one function and takes short cuts through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.flows.tracing import convert, coverage, prepare

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[False, False, False, False, True], [False, False, False, True, True]])


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False)


CALLS: dict[str, tuple[Any, dict[str, Tensor], int]] = {
    "layer": (layer, {"src": X}, 4),
    "encoder": (encoder, {"src": X}, 8),
    "padded": (encoder, {"src": X, "src_key_padding_mask": MASK}, 8),
    "masked": (encoder, {"src": X, "mask": torch.triu(torch.full((5, 5), float("-inf")), 1)}, 8),
}


@pytest.mark.parametrize("name", CALLS)
def test_transformers_are_quantized_layer_by_layer(name: str) -> None:
    build, inputs, linears = CALLS[name]
    torch.manual_seed(0)
    model = build().eval()
    prepared = prepare(model, [inputs])
    assert str(coverage(prepared)).count("linear") >= linears
    with torch.no_grad():
        prepared(**inputs)
        quantized = convert(prepared)
        real, found = model(**inputs), [quantized(**inputs) for _ in range(4)]
    assert all(torch.equal(found[0], again) for again in found)
    noise = (found[0] - real).square().sum()
    assert 0 < float(noise) < 1e-3 * float(real.square().sum())  # 30 dB
