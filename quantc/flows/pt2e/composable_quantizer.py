"""`ComposableQuantizer`: several quantizers one after another, each leaving alone what was annotated before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from quantc.errors import AnnotationError
from quantc.flows.pt2e.quantizer import Q_ANNOTATION_KEY, EdgeOrNode, ObserverOrFakeQuantize, OperatorConfig, Quantizer


class AnnotationChangedError(AnnotationError, RuntimeError):
    """A quantizer changed what another had annotated; also a RuntimeError, as in torchao."""


class ComposableQuantizer(Quantizer):
    """Quantizers in the order in which they have their choice. Any quantizer can be a member, of this package or not."""

    def __init__(self, quantizers: Sequence[Any]) -> None:
        if not quantizers:
            raise AnnotationError("no quantizers to compose", advice="give at least one")
        self.quantizers = list(quantizers)

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        for quantizer in self.quantizers:
            model = quantizer.transform_for_annotation(model)
        return model

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        before: dict[fx.Node, Any] = {}
        for quantizer in self.quantizers:
            quantizer.annotate(model)
            after = {node: node.meta[Q_ANNOTATION_KEY] for node in model.graph.nodes if Q_ANNOTATION_KEY in node.meta}
            changed = [node for node, annotation in before.items() if after.get(node) is not annotation]
            if changed:
                what = "changed" if changed[0] in after else "removed"
                raise AnnotationChangedError(
                    f"{type(quantizer).__name__} {what} the annotation of {changed[0].name}",
                    where=changed[0].format_node(),
                    advice="let it leave alone nodes that have an annotation, or put it first",
                )
            before = after
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Each member checks the graph, except that specs of one backend say nothing of another's."""
        if len(self.quantizers) == 1:
            self.quantizers[0].validate(model)

    def prepare_obs_or_fq_callback(
        self, model: fx.GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, ObserverOrFakeQuantize]
    ) -> None:
        for quantizer in self.quantizers:
            callback = getattr(quantizer, "prepare_obs_or_fq_callback", None)
            if callback is not None:
                callback(model, edge_or_node_to_obs_or_fq)

    def get_supported_operators(self) -> list[OperatorConfig]:  # type: ignore[override]
        """The supported operators of all members."""
        return [row for quantizer in self.quantizers for row in quantizer.get_supported_operators()]


__all__ = ["AnnotationChangedError", "ComposableQuantizer"]
