"""Small models, their inputs, and the whole PT2 export flow in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from quantc.flows.pt2e import (
    QuantizationSpec,
    XNNPACKQuantizer,
    convert_pt2e,
    get_symmetric_quantization_config,
    prepare_pt2e,
)
from quantc.nn import observers
from tests.support.oracles import Batches
from tests.support.pt2e_quantizers import Annotating


def captured(model: nn.Module, batches: Batches, *, strict: bool = False) -> Any:
    return torch.export.export(model, batches[0], strict=strict).module()


def run(model: Any, batches: Batches) -> Any:
    with torch.no_grad():
        for batch in batches:
            model(*batch)
    return model


def quantized(model: nn.Module, quantizer: Any, batches: Batches, *, strict: bool = False) -> fx.GraphModule:
    return convert_pt2e(run(prepare_pt2e(captured(model, batches, strict=strict), quantizer), batches))


aten = torch.ops.aten
Q, DQ = "quantize_per_tensor.default", "dequantize_per_tensor.default"
Q_CHANNEL, DQ_CHANNEL = "quantize_per_channel.default", "dequantize_per_channel.default"
UINT8 = QuantizationSpec(torch.uint8, observers.MinMaxObserver, 0, 255, torch.per_tensor_affine)
INT8 = QuantizationSpec(torch.int8, observers.MinMaxObserver, -128, 127, torch.per_tensor_affine)
NOTHING = QuantizationSpec(torch.float32, observers.PlaceholderObserver)
IMAGE = (torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0)),)


def xnnpack(**keywords: Any) -> XNNPACKQuantizer:
    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(**keywords))


def conv(bias: Any = NOTHING, weight: Any = INT8, output: Any = UINT8) -> Annotating:
    return Annotating(aten.conv2d.default, (UINT8, weight, bias), output)
