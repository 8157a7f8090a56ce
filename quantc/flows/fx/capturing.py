"""From a user's model to a program for this flow: modules kept whole, and sizes left open."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from quantc.api import capture
from quantc.errors import CaptureError
from quantc.flows.fx.custom_config import CustomConfigError, PrepareCustomConfig
from quantc.program import Program

Leaf = str | type[nn.Module]


def captured(model: nn.Module, example_inputs: Any, leaves: list[Leaf]) -> Program:
    """Capture a model by symbolic tracing. Sizes are open wherever the model lets them be."""
    examples = examples_of(example_inputs)
    open_sizes = pytree.tree_map_only(torch.Tensor, lambda x: dict.fromkeys(range(x.dim()), Dim.AUTO), examples)
    open_sizes = pytree.tree_map(lambda x: x if isinstance(x, dict) else None, open_sizes, is_leaf=_is_size)
    try:
        program = capture(model, examples, method="fx", leaf=leaves, dynamic_shapes=open_sizes)
    except CaptureError:
        return capture(model, examples, method="fx", leaf=leaves)
    unknown = [node for node in program.graph.find_nodes(op="call_module") if node.meta.get("val") is None]
    # what comes behind code that cannot be run on open sizes has no types, and could not be quantized
    return capture(model, examples, method="fx", leaf=leaves) if unknown else program


def _is_size(value: Any) -> bool:
    return isinstance(value, dict) and all(found is Dim.AUTO for found in value.values())


def examples_of(given: Any) -> tuple[Any, ...]:
    """The example inputs as a tuple; a lone tensor will do."""
    if isinstance(given, torch.Tensor):
        return (given,)
    if isinstance(given, list | tuple):
        return tuple(given)
    raise CustomConfigError(
        f"example_inputs is a {type(given).__name__}", advice="give a tuple of the model's arguments, such as (x,)"
    )


def leaves_of(model: nn.Module, custom: PrepareCustomConfig) -> list[Leaf]:
    """The modules that are kept whole: named, of a class, swapped, or prepared on their own."""
    names: list[Leaf] = [*custom.non_traceable_module_names, *custom.standalone_module_names]
    swapped = [kind for kinds in custom.float_to_observed_mapping.values() for kind in kinds]
    classes = [*custom.non_traceable_module_classes, *custom.standalone_module_classes, *swapped]
    present = {type(module) for module in model.modules()}
    # names must be right, but a list of classes may be one for many models
    return names + [kind for kind in dict.fromkeys(classes) if any(issubclass(found, kind) for found in present)]
