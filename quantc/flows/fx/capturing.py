"""From a user's model to a program for this flow: modules kept whole, and sizes left open."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from quantc.api import capture
from quantc.capture.leaves import leaf_selector
from quantc.errors import CaptureError
from quantc.flows.fx.custom_config import CustomConfigError, PrepareCustomConfig
from quantc.flows.fx.open_sizes import Shapes, batch_dimensions, shapes_of, with_stand_ins
from quantc.program import Program, attribute

Leaf = str | type[nn.Module]


def captured(model: nn.Module, example_inputs: Any, leaves: list[Leaf]) -> tuple[Program, dict[str, Shapes]]:
    """Capture a model by symbolic tracing. Sizes are open wherever the model lets them be.

    Gives the program, and what modules that are kept whole must keep to so that batches can be of any size.
    """
    examples = examples_of(example_inputs)
    every = pytree.tree_map(lambda x: dict.fromkeys(range(x.dim()), Dim.AUTO) if _has_sizes(x) else None, examples)
    batch = batch_dimensions(examples, Dim.AUTO)
    # what comes behind code that cannot be run on open sizes has no types, and could not be quantized
    unknown: set[str] = set()
    for sizes in (every, batch):
        program = _attempt(model, examples, leaves, sizes)
        unknown = set() if program is None else _unknown(program)
        if program is not None and not unknown:
            return program, {}
        if unknown:
            break
    shapes = shapes_of(model, examples, unknown) if unknown else None
    program = None
    if shapes is not None:
        program = _attempt(with_stand_ins(model, shapes), examples, _by_name(model, leaves), batch)
    if program is None or shapes is None or _unknown(program):
        return capture(model, examples, method="fx", leaf=leaves), {}
    for name in shapes:
        attribute(program.root, name).__dict__.pop("forward", None)
    return program, shapes


def _attempt(model: nn.Module, examples: tuple[Any, ...], leaves: list[Leaf], sizes: Any) -> Program | None:
    try:
        with _hushed():
            return capture(model, examples, method="fx", leaf=leaves, dynamic_shapes=sizes)
    except CaptureError:
        return None


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep torch from logging, as errors, that a size cannot be open: that is what an attempt is for."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _has_sizes(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _unknown(program: Program) -> set[str]:
    """The modules that are kept whole and of whose results nothing is known."""
    calls = program.graph.find_nodes(op="call_module")
    return {str(node.target) for node in calls if node.meta.get("val") is None}


def _by_name(model: nn.Module, leaves: list[Leaf]) -> list[Leaf]:
    selector = leaf_selector(model, leaves)
    return [name for name, module in model.named_modules() if name and selector.selects(module, name)]


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
