"""Saving and loading of programs. Nothing is pickled, and reading a file executes nothing in it.

A file is a safetensors container (`quantc.store.file_versions`) with the program's tensors and, as bytes, one JSON
document: the program's text, as `program.dump(plan=False)` gives it, its plan, and what text does not carry.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from torch import fx

from quantc.capture.pt2.archive_members import inside
from quantc.errors import InputError, LoadError, ParseError, QuantcError, SaveError
from quantc.files.endings import check_ending
from quantc.files.regular_file import as_path
from quantc.ir.judgment import Judgment
from quantc.ir.program import LogEntry, Program, Stage
from quantc.ir.sites import NodeTable, Origin
from quantc.observe.observation_registry import absent_allowed
from quantc.store import file_versions
from quantc.store.file_versions import ADVICE
from quantc.store.program_checks import faults, why_not_tensor
from quantc.store.stored_observers import ObserverData, observer_data, put_observers, with_observed
from quantc.store.stored_plan import PlanData, nodes_of, plan_data, plan_of
from quantc.store.stored_tensors import Record, TensorReader, TensorWriter
from quantc.support.validated import faults_of
from quantc.text.digests import graph_constants
from quantc.text.parser import parse

DOCUMENT = "document"
CONSTANTS = "constants/"
INPUTS = "inputs/"


WRITTEN_BY = f"quantc {version('quantc')}, torch {torch.__version__}"
"""Asked once: who saves may no longer be allowed to read where packages are."""


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Log(_Data):
    name: str
    seconds: float
    changed: bool
    notes: list[str]
    judgments: list[Judgment] = []

    @model_serializer(mode="wrap")
    def _without_empty(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without judgments where there are none: earlier versions read such files."""
        data: dict[str, Any] = dump(self)
        return {name: value for name, value in data.items() if name != "judgments" or value}


class _Origins(_Data):
    """Origins, each written once, and which node has which."""

    known: list[tuple[str, str, str, NonNegativeInt]]
    nodes: dict[str, NonNegativeInt]


class Lowering(_Data):
    """Record of a lowering: everything needed to repeat it."""

    target: str
    choices: dict[str, str]
    """The kernel that runs each op, by name."""
    allow_float: bool
    compile: bool
    pipeline: str = ""
    """The pipeline from the integer form onto kernels; empty for the target's own."""


class _Document(_Data):
    written_by: str
    text: str
    log: list[_Log]
    origins: _Origins
    inputs: list[str | int | float | bool | None] | None
    """For each flat input: the name of its tensor below `inputs/`, or the number it is; None where it is fixed."""
    observers: dict[str, ObserverData]
    plan: PlanData
    records: dict[str, Record]
    lowered: Lowering | None = None
    """In the files of lowered modules alone."""


def save(program: Program, path: str | os.PathLike[str], lowered: Lowering | None = None) -> None:
    """Write a program to a file, atomically. SaveError, naming the node, if it holds what a file cannot."""
    place = as_path(path, SaveError)
    check_ending(place, (".qc",), "a program of quantc's, which qc.load reads")
    program.verify()
    stored, digests = contents(program, lowered)
    file_versions.write(place, stored, digests, file_versions.VERSION if lowered is None else file_versions.LOWERED)


def contents(program: Program, lowered: Lowering | None = None) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors of a program's file, and their known digests. SaveError if it holds what a file cannot."""
    for what, where, advice in faults(program):
        raise SaveError(f"{program.name} cannot be saved: {what}", where=where, advice=advice)
    tensors = TensorWriter()
    for name, tensor in _apart(graph_constants(program)).items():
        tensors.add(f"{CONSTANTS}{name}", tensor)
    names = {node: name for name, node in nodes_of(program).items()}
    document = _Document(
        written_by=WRITTEN_BY,
        text=program.dump("text", plan=False),
        log=[
            _Log(
                name=row.name,
                seconds=row.seconds,
                changed=row.changed,
                notes=[*row.notes],
                judgments=[*row.judgments],
            )
            for row in program.log
        ],
        origins=_origins(program, names),
        inputs=_inputs(program, tensors),
        observers=observer_data(program, names),
        plan=plan_data(with_observed(program), names, tensors),
        records=tensors.records,
        lowered=lowered,
    )
    data = document.model_dump(mode="json", exclude=_left_out(lowered))
    text = json.dumps(data, separators=(",", ":")).encode("ascii")
    return {DOCUMENT: torch.frombuffer(bytearray(text), dtype=torch.uint8), **tensors.stored}, tensors.digests


def _left_out(lowered: Lowering | None) -> dict[str, Any]:
    """Fields that a document does without, as those of earlier versions do."""
    if lowered is None:
        return {"lowered": True}
    return {} if lowered.pipeline else {"lowered": {"pipeline"}}


def load(path: str | os.PathLike[str]) -> Program:
    """Load a program from a file that `save` wrote; for a lowered module, the portable one. LoadError, naming the field, on anything else."""
    return read(path)[0]


def read(path: str | os.PathLike[str]) -> tuple[Program, Lowering | None]:
    """The program in a file, and its lowering record, if any."""
    place = as_path(path, LoadError)
    with inside(str(place)):
        stored = file_versions.read(place)
        try:
            with absent_allowed() as absent:
                document = _document(stored.pop(DOCUMENT, None))
            program = _program(document, stored, absent)
            _check_lowering(program, document.lowered)
            return program, document.lowered
        except LoadError:
            raise
        except ParseError as error:
            where = f"line {error.line}, column {error.column} of the program's text"
            raise LoadError(
                f"its text does not read: {error.what}", where=where, advice=error.advice or ADVICE
            ) from error
        except QuantcError as error:
            raise LoadError(
                f"it does not read: {error.what}", where=error.where, advice=error.advice or ADVICE
            ) from error


# -- writing ---------------------------------------------------------------------------------------------------


def _apart(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor once; of several names for one, the text ties the others to the first in alphabetical order."""
    first: dict[int, str] = {}
    for name in sorted(named):
        first.setdefault(id(named[name]), name)
    return {name: named[name] for name in first.values()}


def _origins(program: Program, names: Mapping[fx.Node, str]) -> _Origins:
    known: dict[tuple[str, str, str, int], int] = {}
    nodes: dict[str, int] = {}
    for node, origin in program.origins.rows.items():
        # only the name of the source file: its path on this machine is private
        file = origin.source.rpartition(":")[0]
        row = (origin.module_path, origin.module_type, file, origin.line)
        nodes[names[node]] = known.setdefault(row, len(known))
    return _Origins(known=list(known), nodes=nodes)


def _inputs(program: Program, tensors: TensorWriter) -> list[str | int | float | bool | None] | None:
    given, wanted = program.example_inputs, program.signature.inputs
    if given is None:
        return None
    if len(given) != len(wanted):
        raise _bad_example(program, f"there are {len(given)} example inputs for {len(wanted)}")
    rows: list[str | int | float | bool | None] = []
    for index, (item, leaf) in enumerate(zip(wanted, given, strict=True)):
        if item.is_constant:
            rows.append(None)
        elif isinstance(leaf, torch.Tensor) and why_not_tensor(leaf) is None:
            rows.append(str(index))
            tensors.add(f"{INPUTS}{index}", leaf)
        elif isinstance(leaf, int | float):
            rows.append(leaf)
        else:
            raise _bad_example(program, f"example input {item.name!r} is a {type(leaf).__name__} of a special kind")
    try:
        program.signature.check(given, program.signature.in_spec)
    except InputError as error:
        raise _bad_example(program, f"its example inputs do not fit: {error.what}") from error
    return rows


def _bad_example(program: Program, what: str) -> SaveError:
    advice = "set program.example_inputs to None, or to plain tensors"
    return SaveError(f"{program.name} cannot be saved: {what}", where="example_inputs", advice=advice)


# -- reading ---------------------------------------------------------------------------------------------------


def _document(stored: torch.Tensor | None) -> _Document:
    if stored is None or stored.dtype != torch.uint8 or stored.dim() != 1:
        raise LoadError(f"the tensor {DOCUMENT!r} is missing, or is not bytes", advice=ADVICE)
    try:
        return _Document.model_validate_json(stored.numpy().tobytes())
    except ValidationError as error:
        raise LoadError(f"its document does not read: {'; '.join(faults_of(error)[:3])}", advice=ADVICE) from error


def _program(document: _Document, stored: Mapping[str, torch.Tensor], absent: Sequence[str]) -> Program:
    tensors = TensorReader(document.records, stored)
    program = parse(document.text, tensors.take_all(CONSTANTS))
    is_converted = program.stage >= Stage.QUANTIZED
    for told in absent if not is_converted else ():
        raise LoadError(
            f"it observes by what is not here: {told}", where="plan", advice="install the package that offers it"
        )
    nodes = nodes_of(program)
    program.log = [
        LogEntry(row.name, row.seconds, row.changed, tuple(row.notes), tuple(row.judgments)) for row in document.log
    ]
    program.origins = _origin_table(document.origins, nodes)
    program.example_inputs = _example_inputs(program, document.inputs, tensors)
    program.plan, notes = plan_of(document.plan, nodes, tensors, needs_statistics=not is_converted)
    put_observers(program, document.observers, nodes)
    for what, where, _ in faults(program):
        raise LoadError(f"a file may not hold this: {what}", where=where, advice=ADVICE)
    tensors.finish()
    program.verify()
    if notes:
        program.log.append(LogEntry("load", 0.0, False, tuple(notes)))
    return program


def _check_lowering(program: Program, lowered: Lowering | None) -> None:
    if lowered is None:
        return
    if program.stage < Stage.LOWERED:
        raise LoadError("the program was not lowered", where="lowered", advice=ADVICE)
    for name in sorted(lowered.choices.keys() - nodes_of(program).keys()):
        raise LoadError(f"unknown node {name[:60]!r}", where="lowered.choices", advice=ADVICE)


def _origin_table(data: _Origins, nodes: Mapping[str, fx.Node]) -> NodeTable[Origin]:
    known = [Origin(*row) for row in data.known]
    table: NodeTable[Origin] = NodeTable()
    for name, index in data.nodes.items():
        if name not in nodes or index >= len(known):
            raise LoadError(f"unknown node {name[:60]!r}, or no origin {index}", where="origins.nodes", advice=ADVICE)
        table[nodes[name]] = known[index]
    return table


def _example_inputs(
    program: Program, rows: list[str | int | float | bool | None] | None, tensors: TensorReader
) -> tuple[Any, ...] | None:
    if rows is None:
        return None
    if len(rows) != len(program.signature.inputs):
        raise LoadError(f"{len(rows)} inputs for {len(program.signature.inputs)}", where="inputs", advice=ADVICE)
    leaves: list[Any] = []
    for row, item in zip(rows, program.signature.inputs, strict=True):
        if item.is_constant:
            leaves.append(item.constant)
        else:
            leaves.append(tensors.take(f"{INPUTS}{row}") if isinstance(row, str) else row)
    program.signature.check(leaves, program.signature.in_spec)
    return tuple(leaves)
