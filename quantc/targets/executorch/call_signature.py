"""Calling convention of a `.pte`, as data in the file: pytree specs of inputs and outputs, and their non-tensor leaves.

They are written in the text form of programs (`quantc.text.pytree_text`, `quantc.text.literals`). Reading looks up
classes among those already known; it imports nothing and runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict
from torch import fx
from torch.utils import _pytree as pytree

from quantc.errors import LoadError, ParseError
from quantc.ir.program import Program
from quantc.ir.signature import Input, Signature
from quantc.text.lexer import Reader
from quantc.text.literals import Opaque, format_value, no_nodes
from quantc.text.pytree_text import is_name, keyword_names, read_spec, write_spec

T = TypeVar("T")
ADVICE = "write it again with qc.lower(program, 'executorch').save(path)"


class FixedData(BaseModel):
    """A non-tensor input, fixed at capture."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    value: str


class CallData(BaseModel):
    """Pytree specs of a program, and their fixed leaves; None stands for a tensor."""

    model_config = ConfigDict(extra="forbid", strict=True)

    takes: str
    gives: str
    inputs: list[FixedData | None]
    outputs: list[str | None]


@dataclass(frozen=True)
class Convention:
    """Calling convention of a file; without a signature, tensors are passed flat."""

    signature: Signature | None = None
    outputs: tuple[Any, ...] = ()
    """The flat outputs that are no tensors, at their places; for tensors, Ellipsis."""
    why_flat: str = ""
    """The reason why there is no signature; empty if there is one."""


def outputs_of(program: Program) -> tuple[Any, ...]:
    """Flat outputs of a program, Ellipsis in place of each tensor."""
    (output,) = program.graph.find_nodes(op="output")
    given: Any = output.args[0]
    return tuple(... if isinstance(value, fx.Node) else value for value in given)


def call_data(program: Program) -> CallData:
    signature = program.signature
    return CallData(
        takes=write_spec(signature.in_spec),
        gives=write_spec(signature.out_spec),
        inputs=[
            FixedData(name=item.name, value=_text(item.constant)) if item.is_constant else None
            for item in signature.inputs
        ],
        outputs=[None if value is ... else _text(value) for value in outputs_of(program)],
    )


def _text(value: Any) -> str:
    return format_value(value, no_nodes)


# -- reading -------------------------------------------------------------------------------------------------------


def convention_of(
    data: CallData | None, tensors: Sequence[Input], ranges: dict[str, tuple[int, int | None]], where: str
) -> Convention:
    """Calling convention of a file that takes these tensors. LoadError if the data is inconsistent; with a class
    unknown here, tensors are passed flat.
    """
    if data is None:
        return Convention(why_flat="it says nothing of how its tensors are arranged: an older quantc wrote it")
    try:
        takes, gives = (_read(text, read_spec) for text in (data.takes, data.gives))
        fixed = [None if item is None else _constant_input(item) for item in data.inputs]
        outputs = tuple(... if text is None else _read(text, _plain_value) for text in data.outputs)
    except ParseError as error:
        return Convention(why_flat=f"{error.what}; {error.advice}" if error.advice else error.what)
    _check(takes, gives, fixed, outputs, len(tensors), where)
    rest = iter(tensors)
    inputs = tuple(next(rest) if item is None else item for item in fixed)
    return Convention(Signature(inputs, takes, gives, ranges), outputs)


def _read(text: str, read: Callable[[Reader], T]) -> T:
    reader = Reader(text, text, 1)
    found = read(reader)
    reader.end()
    return found


def _constant_input(item: FixedData) -> Input:
    return Input(item.name, is_constant=True, constant=_read(item.value, _plain_value))


def _plain_value(reader: Reader) -> Any:
    found = reader.value()
    if isinstance(found, Opaque):
        reader.fail(f"it holds a {found.kind}, which a file cannot carry")
    return found


def _check(
    takes: pytree.TreeSpec,
    gives: pytree.TreeSpec,
    inputs: Sequence[Input | None],
    outputs: Sequence[Any],
    tensors: int,
    where: str,
) -> None:
    faults = {
        "inputs are not arguments and keywords": not _is_call(takes),
        f"{len(inputs)} inputs in a tree of {takes.num_leaves}": takes.num_leaves != len(inputs),
        f"{len(outputs)} outputs in a tree of {gives.num_leaves}": gives.num_leaves != len(outputs),
        f"{inputs.count(None)} inputs are tensors, and {tensors} are listed": inputs.count(None) != tensors,
    }
    for fault, is_there in faults.items():
        if is_there:
            raise LoadError(f"what the file says of its calls contradicts itself: {fault}", where=where, advice=ADVICE)


def _is_call(spec: pytree.TreeSpec) -> bool:
    if spec.type is not tuple or spec.num_children != 2:
        return False
    arguments, keywords = spec.children()
    return arguments.type is tuple and keywords.type is dict and all(is_name(name) for name in keyword_names(spec))
