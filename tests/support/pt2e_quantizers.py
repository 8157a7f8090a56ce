"""Quantizers for tests of the PT2 export flow: they say what they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from quantc.flows.pt2e import QuantizationAnnotation, Quantizer, convert_pt2e, prepare_pt2e, prepare_qat_pt2e


class Annotating(Quantizer):
    """Annotates every node of a target: its operands with the specs in order, and what it yields."""

    def __init__(self, target: Any, operands: tuple[Any, ...] = (), output: Any = None, **keywords: Any) -> None:
        self.target, self.operands, self.output, self.keywords = target, operands, output, keywords

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.nodes:
            if node.op == "call_function" and node.target == self.target:
                read = dict(zip(node.all_input_nodes, self.operands, strict=False))
                node.meta["quantization_annotation"] = QuantizationAnnotation(
                    read, self.output, _annotated=True, **self.keywords
                )
        return model

    def validate(self, model: fx.GraphModule) -> None:
        pass


class Doing(Quantizer):
    """Annotates by a function of a node, which gives an annotation or None."""

    def __init__(self, annotation_of: Callable[[fx.Node], Any]) -> None:
        self.annotation_of = annotation_of

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.nodes:
            annotation = self.annotation_of(node) if node.op == "call_function" else None
            if annotation is not None:
                node.meta["quantization_annotation"] = annotation
        return model

    def validate(self, model: fx.GraphModule) -> None:
        pass


def exported(model: nn.Module, inputs: tuple[Tensor, ...], **keywords: Any) -> Any:
    return torch.export.export(model, inputs, **keywords).module()


def converted(
    model: nn.Module, inputs: tuple[Tensor, ...], quantizer: Any, *, is_qat: bool = False, **keywords: Any
) -> Any:
    """Exported, prepared, run once, and converted."""
    prepare = prepare_qat_pt2e if is_qat else prepare_pt2e
    prepared = prepare(exported(model.train(is_qat), inputs), quantizer)
    prepared(*inputs)
    return convert_pt2e(prepared, **keywords)


def count(module: fx.GraphModule, name: str) -> int:
    """How many ops of a graph have a name, such as `quantize_per_tensor.default`."""
    return sum(node.op == "call_function" and str(node.target).partition(".")[2] == name for node in module.graph.nodes)


def described(spec: Any) -> tuple[Any, ...] | None:
    """What two specs of different libraries have in common."""
    if spec is None:
        return None
    made = spec.observer_or_fake_quant_ctr
    kind = getattr(getattr(made, "p", None), "func", made)
    return spec.dtype, spec.quant_min, spec.quant_max, spec.qscheme, spec.ch_axis, spec.is_dynamic, kind.__name__
