"""Detection of mode-dependent arguments in user code.

`nn.Dropout` follows its mode by definition. `F.dropout(x, p, self.training)` follows it, `F.dropout(x, p, True)` does
not, and in a graph the two look the same. So where the user's own code reads `training`, the model is captured in the
other mode too and the two programs are compared: arguments that differ follow the mode. If more than arguments differs,
the program is valid only for the mode it was captured in, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from quantc.capture.mode_flags import FLAGS
from quantc.ir.dialect import arguments
from quantc.ir.program import Program
from quantc.ir.sites import ModeValue

Recapture = Callable[[], Program]
"""Captures the model again, in the other mode, into a canonical program."""


def settle_modes(program: Program, model: nn.Module, recapture: Recapture) -> None:
    """Correct `program.modes`, which capture filled by the values of the flags."""
    own_code = readers_of_mode(model)
    unsure = [node for node in program.modes if node.target in FLAGS and not _is_torch_module(program, node)]
    if not own_code:
        # nothing but torch's modules asks for the mode, so a flag given anywhere else is always the same
        for node in unsure:
            program.modes.drop(node)
        return
    other = recapture()
    reason = _compare(program, other)
    if reason is not None:
        program.fixed_mode = f"{own_code[0]} reads self.training, and {reason}"


def readers_of_mode(model: nn.Module) -> list[str]:
    """Functions of the user's modules that read an attribute called `training`: `Net.forward (model.py:12)`."""
    found: dict[str, None] = {}
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] in ("torch", "builtins"):
                continue
            for function in vars(base).values():
                code = getattr(getattr(function, "__func__", function), "__code__", None)
                if isinstance(code, CodeType) and any("training" in inner.co_names for inner in _codes(code)):
                    file = code.co_filename.rpartition("/")[2]
                    found[f"{code.co_qualname} ({file}:{code.co_firstlineno})"] = None
    return list(found)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_torch_module(program: Program, node: fx.Node) -> bool:
    origin = program.origins.get(node)
    return origin is not None and origin.module_type.startswith("torch.nn.")


def _compare(program: Program, other: Program) -> str | None:
    """Note the arguments that differ between two modes of a model; why that is not all, if it is not."""
    trained, inferred = (program, other) if program.training else (other, program)
    modes: dict[fx.Node, ModeValue] = {}
    places: dict[fx.Node, fx.Node] = {}
    for left, right in zip_longest(_steps(trained), _steps(inferred)):
        if left is None or right is None:
            return "there is more to compute in one mode than in the other"
        places[left] = right
        if left.op != right.op or left.target != right.target:
            return f"{trained.describe(left)} in training is {inferred.describe(right)} in inference"
        found = _differences(left, right, places)
        if found is None or len(found) > 1:
            return f"{trained.describe(left)} has other operands in training than in inference"
        for row in found:
            modes[left if program is trained else right] = row
    for node in [node for node in program.modes if node not in modes]:
        program.modes.drop(node)
    program.modes.rows.update(modes)
    return None


def _steps(program: Program) -> Iterator[fx.Node]:
    """The nodes of a program without the batch counters of norms, which `train` and `eval` insert and remove."""
    counters = set(program.counters.rows.values())
    for node in program.nodes():
        source = node.args[0] if node.target is torch.ops.aten.add_.Tensor else node
        if isinstance(source, fx.Node) and source.op == "get_attr" and source.target in counters:
            continue
        yield node


def _differences(left: fx.Node, right: fx.Node, places: dict[fx.Node, fx.Node]) -> list[ModeValue] | None:
    """The numbers and flags that differ between two calls; None if anything else does."""
    if not _same(left.kwargs, right.kwargs, places):
        return None
    count = max(len(left.args), len(right.args))
    found: list[ModeValue] = []
    for index, (a, b) in enumerate(zip(_pad_defaults(left, count), _pad_defaults(right, count), strict=True)):
        if _same(a, b, places):
            continue
        if not isinstance(a, bool | float) or type(a) is not type(b) or not isinstance(b, bool | float):
            return None
        found.append(ModeValue(index, train=a, eval=b))
    return found


def _pad_defaults(node: fx.Node, count: int) -> list[Any]:
    """A call's arguments with the defaults that were left out."""
    missing = arguments(node.target)[len(node.args) : count] if isinstance(node.target, OpOverload) else ()
    return [*node.args, *(row.default for row in missing), *[None] * (count - len(node.args) - len(missing))]


def _same(left: Any, right: Any, places: dict[fx.Node, fx.Node]) -> bool:
    if isinstance(left, fx.Node):
        return places.get(left) is right
    if isinstance(left, list | tuple):
        is_list = isinstance(right, list | tuple) and len(left) == len(right)
        return is_list and all(_same(a, b, places) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict):
        is_dict = isinstance(right, dict) and left.keys() == right.keys()
        return is_dict and all(_same(left[key], right[key], places) for key in left)
    return type(left) is type(right) and bool(left == right)
