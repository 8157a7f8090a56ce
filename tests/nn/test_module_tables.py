"""Which module takes the place of which, beside the tables of torch.ao."""

from __future__ import annotations

from typing import Any

import pytest
import torch.ao.nn.intrinsic as ao_intrinsic
import torch.ao.quantization.quantization_mappings as ao_tables
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from quantc.nn import intrinsic, qat, quantized
from quantc.nn.intrinsic import qat as intrinsic_qat
from quantc.nn.module_tables import DYNAMIC_MODULES, QAT_MODULES, STATIC_MODULES

WITHOUT = {"ConvAdd2d", "ConvAddReLU2d", "LinearLeakyReLU", "LinearTanh"}
"""What torch.ao has for one engine alone, in its FX flow. The last projection of `nn.MultiheadAttention` is swapped with
the whole module, or in the static flow."""


PACKAGES: dict[str, Any] = {
    "torch.ao.nn.intrinsic": intrinsic,
    "torch.ao.nn.intrinsic.qat": intrinsic_qat,
    "torch.ao.nn.qat": qat,
    "torch.ao.nn.qat.dynamic": qat.dynamic,
    "torch.ao.nn.quantized": quantized,
}


def own(theirs: type[nn.Module]) -> type[nn.Module]:
    """The module of quantc of the same name as one of torch.ao; others are torch's own."""
    package = PACKAGES.get(theirs.__module__.partition(".modules.")[0])
    found: type[nn.Module] = theirs if package is None else getattr(package, theirs.__name__)
    return found


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (STATIC_MODULES, ao_tables.DEFAULT_STATIC_QUANT_MODULE_MAPPINGS),
        (DYNAMIC_MODULES, ao_tables.DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS),
        (QAT_MODULES, ao_tables.DEFAULT_QAT_MODULE_MAPPINGS),
    ],
    ids=["static", "dynamic", "training"],
)
def test_what_torch_replaces_becomes_a_module_of_the_same_name(ours: Any, theirs: Any) -> None:
    left_out = WITHOUT if ours is STATIC_MODULES else WITHOUT | {NonDynamicallyQuantizableLinear.__name__}
    known = {
        kind: made for kind, made in theirs.items() if kind.__name__ not in left_out and "Stub" not in kind.__name__
    }
    assert len(known) > 5
    for kind, made in known.items():
        assert ours[own(kind)].__name__ == made.__name__, kind
        assert ours[own(kind)].__module__.startswith("quantc.nn."), kind


def test_every_module_says_it_is_made_of_what_it_replaces() -> None:
    for kind, made in {**QAT_MODULES, **DYNAMIC_MODULES}.items():
        made_of: Any = getattr(made, "_FLOAT_MODULE")  # noqa: B009 - nn.Module has no such attribute
        assert issubclass(kind, made_of), kind


@pytest.mark.parametrize("kind", [nn.ReLU, nn.Tanh, nn.MaxPool2d, nn.Flatten])
def test_modules_that_take_quantized_tensors_stay(kind: type[nn.Module]) -> None:
    assert kind not in STATIC_MODULES


def test_a_trained_norm_is_folded_away() -> None:
    assert STATIC_MODULES[intrinsic_qat.ConvBn2d] is quantized.Conv2d
    assert STATIC_MODULES[intrinsic_qat.LinearBn1d] is quantized.Linear
    assert STATIC_MODULES[intrinsic_qat.ConvBnReLU1d].__name__ == "ConvReLU1d"
    assert intrinsic.ConvBn2d not in STATIC_MODULES  # it must be trained, or fused in float
    assert ao_intrinsic.ConvBn2d not in STATIC_MODULES
