"""Tables of module replacements, derived from the modules: each names the float module it replaces."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from quantc.nn import intrinsic, qat, quantized
from quantc.nn.intrinsic import qat as intrinsic_qat
from quantc.nn.intrinsic import quantized as intrinsic_quantized
from quantc.nn.intrinsic.quantized import dynamic as intrinsic_dynamic
from quantc.nn.quantized import dynamic

Mapping = dict[type[nn.Module], type[nn.Module]]


def _by_float_module(*packages: ModuleType) -> Mapping:
    """The modules of packages by their float modules."""
    named: list[Any] = [getattr(package, name) for package in packages for name in package.__all__]
    return {module._FLOAT_MODULE: module for module in named if getattr(module, "_FLOAT_MODULE", None) is not None}


def _from_trained(static: Mapping) -> Mapping:
    """The same for modules that were trained: they become what the float modules that they are made of do."""
    norms = {
        intrinsic.ConvBn1d: quantized.Conv1d,
        intrinsic.ConvBn2d: quantized.Conv2d,
        intrinsic.ConvBn3d: quantized.Conv3d,
        intrinsic.ConvBnReLU1d: intrinsic_quantized.ConvReLU1d,
        intrinsic.ConvBnReLU2d: intrinsic_quantized.ConvReLU2d,
        intrinsic.ConvBnReLU3d: intrinsic_quantized.ConvReLU3d,
        intrinsic.LinearBn1d: quantized.Linear,
    }
    becomes: Any = {**static, **norms}
    return {trained: becomes[made_of] for made_of, trained in QAT_MODULES.items() if made_of in becomes}


QAT_MODULES: Mapping = _by_float_module(qat, intrinsic_qat)
"""For training, by float module."""
DYNAMIC_MODULES: Mapping = {
    nn.Linear: dynamic.Linear,
    nn.LSTM: dynamic.LSTM,
    nn.GRU: dynamic.GRU,
    nn.RNN: dynamic.RNNBase,
    nn.LSTMCell: dynamic.LSTMCell,
    nn.GRUCell: dynamic.GRUCell,
    nn.RNNCell: dynamic.RNNCell,
    nn.MultiheadAttention: dynamic.MultiheadAttention,
    nn.Embedding: quantized.Embedding,
    nn.EmbeddingBag: quantized.EmbeddingBag,
    qat.dynamic.Linear: dynamic.Linear,
    **_by_float_module(intrinsic_dynamic),
}
"""With scales that are found as they run, by float module; tables of embeddings have none to find."""
_STATIC = {
    **_by_float_module(quantized, intrinsic_quantized),
    nn.ReLU6: quantized.ReLU6,
    nn.Dropout: quantized.Dropout,
    NonDynamicallyQuantizableLinear: quantized.Linear,
}
del _STATIC[nn.Tanh]
STATIC_MODULES: Mapping = {**_STATIC, **_from_trained(_STATIC)}
"""Quantized, by float module and by the module it was trained as. ReLU and Tanh stay: they take quantized tensors as well,
and need no observer, since their grids are known."""
