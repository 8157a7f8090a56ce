"""Quantizer interface for exported graphs: specs, annotations, and the base class of quantizers.

Names and fields are torchao's, so code written for it only changes its imports. Quantizers written against torchao
itself work unchanged: `quantc.flows.pt2e.annotations` reads both by their fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from quantc.errors import SpecError

Q_ANNOTATION_KEY = "quantization_annotation"
"""Key of an annotation in `node.meta`."""
EdgeOrNode = tuple[fx.Node, fx.Node] | fx.Node
"""A place: what a node yields, or what one node reads of another, as (producer, reader)."""
ObserverOrFakeQuantize = nn.Module
OperatorPatternType = list[Any]


class InvalidSpecError(SpecError, ValueError):
    """A spec that is not well formed; also a ValueError, as in torchao."""


class QuantizationSpecBase(ABC):  # noqa: B024 - a name to ask for with isinstance, as in torchao
    """Base of the specs of a tensor."""


@dataclass(frozen=True)
class QuantizationSpec(QuantizationSpecBase):
    """Quantized with the qparams that an observer of its own finds."""

    dtype: torch.dtype
    observer_or_fake_quant_ctr: Any
    """Factory of the observer: a class, or the result of its `with_args`."""
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    ch_axis: int | None = None
    is_dynamic: bool = False

    def __post_init__(self) -> None:
        low, high = self.quant_min, self.quant_max
        if low is not None and high is not None and low > high:
            raise InvalidSpecError(f"quant_min {low} is more than quant_max {high}", advice="give them in order")
        if self.ch_axis is not None and self.ch_axis < 0:
            raise InvalidSpecError(f"ch_axis is {self.ch_axis}", advice="count axes from 0")


@dataclass(frozen=True)
class FixedQParamsQuantizationSpec(QuantizationSpecBase):
    """Quantized with a scale and zero point known beforehand."""

    dtype: torch.dtype
    scale: float
    zero_point: int
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    is_dynamic: bool = False


@dataclass(frozen=True)
class SharedQuantizationSpec(QuantizationSpecBase):
    """Quantized like another place."""

    edge_or_node: EdgeOrNode


@dataclass(frozen=True)
class DerivedQuantizationSpec(QuantizationSpecBase):
    """Quantized with qparams that a function derives from the observers of other places, as a bias is."""

    derived_from: list[EdgeOrNode]
    derive_qparams_fn: Callable[[list[ObserverOrFakeQuantize]], tuple[Tensor, Tensor]]
    dtype: torch.dtype
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    ch_axis: int | None = None
    is_dynamic: bool = False


@dataclass
class QuantizationAnnotation:
    """Specs of the operands and the result of a node."""

    input_qspec_map: dict[fx.Node, QuantizationSpecBase | None] = field(default_factory=dict)
    output_qspec: QuantizationSpecBase | None = None
    allow_implicit_sharing: bool = True
    """Let operands share an observer with other uses of the same tensor that request the same."""
    _annotated: bool = False


@dataclass(frozen=True)
class QuantizationConfig:
    """The specs of an op by role; None leaves a role float."""

    input_activation: QuantizationSpec | None
    output_activation: QuantizationSpec | None
    weight: QuantizationSpec | None
    bias: QuantizationSpec | None
    is_qat: bool = False


class OperatorConfig(NamedTuple):
    """Patterns of operators that can be quantized with a config. A pattern lists its ops in the order they run."""

    config: QuantizationConfig
    operators: list[OperatorPatternType]


class Quantizer(ABC):
    """Base of quantizers, which annotate the nodes of an exported graph."""

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        """Rewrite the graph before it is annotated, such as taking attention apart."""
        return model

    @abstractmethod
    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        """Put a `QuantizationAnnotation` on every node that is to be quantized."""

    @abstractmethod
    def validate(self, model: fx.GraphModule) -> None:
        """Raise an error if the annotated graph cannot be run by the backend."""

    def prepare_obs_or_fq_callback(
        self, model: fx.GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, ObserverOrFakeQuantize]
    ) -> None:
        """Change the observers that were made, before they are put into the graph."""
        return

    @classmethod
    def get_supported_operators(cls) -> list[OperatorConfig]:
        """The operators the quantizer supports, with their configs; empty by default."""
        return []


__all__ = [
    "Q_ANNOTATION_KEY",
    "DerivedQuantizationSpec",
    "EdgeOrNode",
    "FixedQParamsQuantizationSpec",
    "InvalidSpecError",
    "ObserverOrFakeQuantize",
    "OperatorConfig",
    "OperatorPatternType",
    "QuantizationAnnotation",
    "QuantizationConfig",
    "QuantizationSpec",
    "QuantizationSpecBase",
    "Quantizer",
    "SharedQuantizationSpec",
]
