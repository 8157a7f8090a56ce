"""From a user's model to a program for this flow: modules kept whole, and sizes left open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from quantc.capture.export.open_batch import mute_size_logs
from quantc.capture.leaf_modules import leaf_selector
from quantc.errors import CaptureError, InputError
from quantc.flows.fx.custom_config import CustomConfigError, PrepareCustomConfig
from quantc.flows.fx.open_sizes import Shapes, batch_dimensions, shapes_of, tensors_in, with_stand_ins
from quantc.ir.program import Program, attribute
from quantc.ir.types import ScalarType, type_of
from quantc.verbs.capture import capture

Leaf = str | type[nn.Module]


def capture_model(model: nn.Module, example_inputs: Any, leaves: list[Leaf]) -> tuple[Program, dict[str, Shapes]]:
    """Capture a model by symbolic tracing. Sizes are open wherever the model lets them be.

    Gives the program, and what modules that are kept whole must keep to so that batches can be of any size.
    """
    examples = examples_of(example_inputs)
    batch = batch_dimensions(examples, Dim.AUTO)
    # what comes behind code that cannot be run on open sizes has no types, and could not be quantized
    unknown: set[str] = set()
    for sizes, is_asked in _open_sizes(examples):
        program = _attempt(model, examples, leaves, sizes)
        if program is not None and is_asked and not _is_that_of_one(program, model, examples, leaves):
            continue
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


def _open_sizes(examples: tuple[Any, ...]) -> Iterator[tuple[Any, bool]]:
    """Choices of dynamic sizes, the most general first. For a batch of one the batch size is requested as `DYNAMIC`: under
    `AUTO`, a trace takes size 1 for a broadcast and specializes on it."""
    tensors = [x for x in tensors_in(examples) if x.dim()]
    marks = [Dim.DYNAMIC, Dim.AUTO] if tensors and tensors[0].shape[0] == 1 else [Dim.AUTO]
    for mark in marks:
        is_asked = mark is Dim.DYNAMIC
        batch = batch_dimensions(examples, mark)
        flat, arrangement = pytree.tree_flatten(examples)
        every = [dict.fromkeys(range(x.dim()), Dim.AUTO) if _has_sizes(x) else None for x in flat]
        first = arrangement.flatten_up_to(batch)
        both = [x if x is None else {**x, **(open_ or {})} for x, open_ in zip(every, first, strict=True)]
        yield pytree.tree_unflatten(both, arrangement), is_asked
        yield batch, is_asked


def _is_that_of_one(program: Program, model: nn.Module, examples: tuple[Any, ...], leaves: list[Leaf]) -> bool:
    """True if a program traced with a larger batch has the ops of a trace at batch one: a branch on the size may differ."""
    fixed = _attempt(model, examples, leaves, None)
    return fixed is not None and _calls(fixed) == _calls(program)


def _calls(program: Program) -> list[Any]:
    """The ops and operands of a program, size computations left out."""
    places = {node: place for place, node in enumerate(n for n in program.nodes() if not _is_size(n))}
    rows: list[Any] = []
    for node in places:
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        operands = [places.get(leaf, leaf) for leaf in leaves if not _is_size(leaf)]
        rows.append((node.op, str(node.target), [str(operand) for operand in operands]))
    return rows


def _is_size(leaf: Any) -> bool:
    return isinstance(leaf, int) or (isinstance(leaf, fx.Node) and isinstance(type_of(leaf), ScalarType))


def _attempt(model: nn.Module, examples: tuple[Any, ...], leaves: list[Leaf], sizes: Any) -> Program | None:
    try:
        with mute_size_logs():
            program = capture(model, examples, method="fx", leaf=leaves, dynamic_shapes=sizes)
            program.signature.check(*pytree.tree_flatten((examples, {})))
    except (CaptureError, InputError):
        return None
    return program


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
