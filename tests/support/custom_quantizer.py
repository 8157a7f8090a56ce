"""A quantizer as tutorials teach to write them: conv, linear and add, a pool that shares the scale of its input, a sigmoid
with a fixed scale, and biases derived from input and weight."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from quantc.errors import AnnotationError
from quantc.flows.observers import MinMaxObserver, PerChannelMinMaxObserver
from quantc.flows.pt2e import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)
from quantc.flows.pt2e.quantizer import ObserverOrFakeQuantize, QuantizationSpecBase

aten = torch.ops.aten
ACT = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-128,
    quant_max=127,
    qscheme=torch.per_tensor_affine,
    observer_or_fake_quant_ctr=MinMaxObserver.with_args(eps=2**-12),
)
WEIGHT = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-127,
    quant_max=127,
    qscheme=torch.per_channel_symmetric,
    ch_axis=0,
    observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=2**-12),
)
SIGMOID = FixedQParamsQuantizationSpec(
    dtype=torch.uint8, scale=1 / 256, zero_point=0, quant_min=0, quant_max=255, qscheme=torch.per_tensor_affine
)


def derive(observers: list[ObserverOrFakeQuantize]) -> tuple[Tensor, Tensor]:
    """The scale of a bias: that of the sums it is added to."""
    (x_scale, _), (w_scale, _) = (observer.calculate_qparams() for observer in observers)  # type: ignore[operator]
    scale = x_scale * w_scale
    return scale, torch.zeros_like(scale, dtype=torch.int32)


class CustomQuantizer(Quantizer):
    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.nodes:
            if node.target in (aten.conv2d.default, aten.linear.default):
                self._product(node)
            elif node.target is aten.add.Tensor:
                self._set(node, dict.fromkeys(node.all_input_nodes, ACT), ACT)
            elif node.target is aten.max_pool2d.default:
                source = node.args[0]
                shared = SharedQuantizationSpec((source, node))
                self._set(node, {source: ACT}, shared)
            elif node.target is aten.sigmoid.default:
                self._set(node, {node.args[0]: ACT}, SIGMOID)
        return model

    def _product(self, node: fx.Node) -> None:
        x, weight, bias = node.all_input_nodes
        derived = DerivedQuantizationSpec(
            derived_from=[(x, node), (weight, node)],
            derive_qparams_fn=derive,
            dtype=torch.int32,
            quant_min=-(2**31),
            quant_max=2**31 - 1,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
        )
        self._set(node, {x: ACT, weight: WEIGHT, bias: derived}, ACT)

    @staticmethod
    def _set(node: fx.Node, inputs: dict[fx.Node, QuantizationSpecBase | None], output: QuantizationSpecBase) -> None:
        node.meta["quantization_annotation"] = QuantizationAnnotation(inputs, output, _annotated=True)

    def validate(self, model: fx.GraphModule) -> None:
        for node in model.graph.nodes:
            if node.target is aten.conv2d.default and len(node.args) > 6 and node.args[6] != 1:
                raise AnnotationError(f"{node.name} has groups", advice="leave it float")


class Network(nn.Module):
    """One of each op that the quantizer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.b = nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(4 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x))
        x = torch.max_pool2d(x + self.b(x), 2)
        result: Tensor = torch.sigmoid(self.fc(x.flatten(1)))
        return result
