"""Cross-Grams: the Gram of both models' rows side by side."""

from __future__ import annotations

import torch

from quantc.observe.cross_gram import CrossGram
from quantc.spec.statistic import Scale


def test_its_blocks_are_the_products_of_both() -> None:
    generator = torch.Generator().manual_seed(0)
    found = CrossGram.empty({})
    floats = torch.randn(2, 40, 7, generator=generator)
    quantized = floats + torch.randn(2, 40, 7, generator=generator) * 0.1
    found.update_pair(quantized, floats)
    expected = quantized.double().mT @ floats.double()
    assert torch.allclose(found.across(), expected, atol=5e-3, rtol=0)
    assert torch.allclose(found.of_quantized(), quantized.double().mT @ quantized.double(), atol=5e-3, rtol=0)
    assert found.carried(Scale(torch.ones(7))) is None
