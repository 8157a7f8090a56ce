"""Call sites: the chain of module calls around a call, each with its own call site, and the instruction of the call.
All iterations of a loop are one site; two lines that call the same module are two."""

from __future__ import annotations

import dis
import sys
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import is_
from types import CodeType, FrameType
from typing import Any

from torch import nn

Key = tuple[Any, ...]
START, END = -1, -2
"""Sentinels before the first step of a module and after its last."""
FIRST_CHILD = -3
BOUNDARIES: set[int] = set()
"""The code, by id, of the functions that intercept a call of a module: what is beyond belongs to the module around it."""


def _with_inner(code: CodeType) -> list[CodeType]:
    """The code of a function, and of the functions in it."""
    inner = [one for const in code.co_consts if isinstance(const, CodeType) for one in _with_inner(const)]
    return [code, *inner]


SKIPPED: set[int] = {
    id(code)
    for function in (nn.Module._call_impl, nn.Module._wrapped_call_impl)
    for code in _with_inner(function.__code__)
}
"""The code, by id, that is no place of the model's: through which a module calls its `forward` if it has hooks, and which
intercepts functions."""


@dataclass(slots=True)
class OpSite:
    """A place where a torch function is called."""

    number: int
    """Of the call, in the order in which they were first made."""
    name: str
    where: str
    """`model.py:12`."""
    leaf: str = ""
    """The module of torch.nn that makes the call, by its path."""
    is_product: bool = False
    """True for an op quantized for its own sake: control flow over it is checked."""
    checked: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """The attributes of modules of torch.nn, by the id of these, with which they were seen to make the call that was recorded."""

    def was_checked(self, module: Any) -> None:
        """A module has made the call, and it was the one that was recorded."""
        if self.number >= 0:
            self.checked[id(module)] = (module, *vars(module).values())

    def is_as_checked(self, module: Any) -> bool:
        """True if the module's attributes are those it had then, so that it makes the same call."""
        held = self.checked.get(id(module), ())
        now = vars(module).values()
        return len(held) == len(now) + 1 and all(map(is_, held, chain((module,), now)))

    def __deepcopy__(self, memo: dict[int, Any]) -> OpSite:
        return OpSite(self.number, self.name, self.where, self.leaf, self.is_product)


@dataclass(slots=True)
class Context:
    """A module as it is called from one place."""

    path: str
    number: int
    parent: Context | None = None
    ops: dict[Key, OpSite] = field(default_factory=dict)
    children: dict[Key, Context] = field(default_factory=dict)
    sequences: dict[tuple[int, ...], None] = field(default_factory=dict)
    """The steps that were seen, run by run: numbers of calls, and of the modules that were called."""
    steps: dict[int, frozenset[int]] = field(default_factory=dict)
    """The successors of each step."""
    leaves: dict[Key, OpSite] = field(default_factory=dict)
    """Once it is converted: the calls of modules of torch.nn that are nothing but one call of a quantized op."""

    def around(self, path: str) -> Context | None:
        """This context or one it is inside of, if it is of the module at a path: recursion comes back to it."""
        context: Context | None = self
        while context is not None and context.path != path:
            context = context.parent
        return context

    def walk(self) -> list[Context]:
        """This context and all inside of it."""
        found: dict[int, Context] = {}
        pending: list[Context] = [self]
        while pending:
            context = pending.pop()
            if context.number not in found:
                found[context.number] = context
                pending.extend(context.children.values())
        return list(found.values())


_CALLS: dict[int, tuple[CodeType, dict[int, int]]] = {}
"""By the id of a function's code, which is held: where the second half of each call is, by where the first is."""


def _instruction(frame: FrameType) -> int:
    """The instruction offset of a frame. Python 3.11 splits a call in two instructions, and reports either."""
    code = frame.f_code
    known = _CALLS.get(id(code))
    if known is None:
        rows = list(dis.get_instructions(code))
        halves = {one.offset: two.offset for one, two in pairwise(rows) if one.opname == "PRECALL"}
        known = _CALLS[id(code)] = (code, halves)
    return known[1].get(frame.f_lasti, frame.f_lasti)


def place_of_call(depth: int) -> Key:
    """The place of the call that is being intercepted."""
    return place_from(sys._getframe(depth))


def place_from(frame: FrameType | None) -> Key:
    """The place of a call that a frame makes, within the module it is made in: the instruction in each function on the way. In
    recursion each function counts once."""
    found: list[int] = []
    while frame is not None:
        number = id(frame.f_code)
        if number in BOUNDARIES:
            break
        if number not in found and number not in SKIPPED:
            found.append(number)
            found.append(_instruction(frame))
        frame = frame.f_back
    return tuple(found)


def source_of_call(depth: int) -> tuple[str, int]:
    """The file and line of the user's code that makes the call that is being intercepted."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(("torch.", "quantc.flows.tracing")):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0
