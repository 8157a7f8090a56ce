"""Models that were written with torch's own stubs, functional and fused modules: each becomes the one of the same name here.

torch's packages are not imported: their modules are known by where their classes come from.
"""

from __future__ import annotations

from typing import Any

from torch import nn

import quantc.nn.intrinsic as nni
from quantc.nn import stubs
from quantc.nn.quantized.modules import functional_modules

THEIRS: dict[str, Any] = {
    "torch.ao.quantization.stubs": stubs,
    "torch.ao.nn.quantized.modules.functional_modules": functional_modules,
    "torch.ao.nn.intrinsic.modules.fused": nni,
}
"""By the module of torch that has a class: where its namesake is."""


def adopt(model: nn.Module) -> nn.Module:
    """Give modules of torch's their namesakes' classes, in place; they hold the same and run alike."""
    for module in model.modules():
        kind = type(module)
        namesake = getattr(THEIRS.get(kind.__module__), kind.__name__, None)
        if isinstance(namesake, type):
            module.__class__ = namesake
    return model
