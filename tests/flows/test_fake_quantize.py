"""Fake quantizers under the names they have in torch, at their public path."""

from __future__ import annotations

import torch
import torch.ao.quantization.fake_quantize as theirs

from quantc.flows import fake_quantize


def test_the_names_are_torchs() -> None:
    public = {name for name in vars(theirs) if name.startswith(("default_", "fused_", "enable_", "disable_"))}
    classes = {name for name in vars(theirs) if name.endswith(("FakeQuantize", "FakeQuantizeBase"))}
    assert set(fake_quantize.__all__) <= {name for name in public | classes if not name.startswith("_")}
    rounding = {name for name in public if name.startswith("default_") and not name.endswith("_observer")}
    assert rounding <= set(fake_quantize.__all__)


def test_the_hook_that_pickled_models_name_makes_room_for_scales_by_channel() -> None:
    """States with a scale for each channel are loaded into fresh fake quantizers."""
    seen, fresh = (fake_quantize.default_per_channel_weight_fake_quant() for _ in range(2))
    seen(torch.randn(5, 3))
    fresh.load_state_dict(seen.state_dict())
    assert torch.equal(fresh.scale, seen.scale)
    assert fresh.scale.shape == (5,)
    assert "_make_room" in vars(fake_quantize)
