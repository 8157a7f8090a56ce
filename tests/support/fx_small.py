"""Two linear layers and their data, prepared by the FX flow and calibrated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantc.flows.fx import (
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.fx.observed_module import ObservedGraphModule


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(6, 8) for _ in range(4)]


def prepared_layers(custom: Any = None, mapping: Any = None) -> ObservedGraphModule:
    mapping = get_default_qconfig_mapping() if mapping is None else mapping
    prepared = prepare_fx(layers(), mapping, (batches()[0],), custom)
    for x in batches():
        prepared(x)
    return prepared
