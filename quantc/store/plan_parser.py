"""Parser of the `plan` section of a program's text, in the form that `quantc.store.plan_text` describes: its lines give the
document that files hold, which is validated and restored as theirs is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from pydantic import JsonValue, TypeAdapter, ValidationError
from torch import Tensor, fx

from quantc.config.config import QuantConfig
from quantc.errors import LoadError, ParseError, QuantcError, suggest
from quantc.ir.decisions import OUTCOMES, Derived, Fixed, Float, Quantize, SameAs, TensorOutcome
from quantc.ir.plan import Part
from quantc.ir.program import LogEntry, Program
from quantc.ir.types import TensorType
from quantc.spec.arithmetic import Arithmetic
from quantc.spec.spec import QuantSpec
from quantc.store.plan_text import FITTED, INLINE, QPARAMS, PlanTensors
from quantc.store.stored_observers import ObserverData, put_observers
from quantc.store.stored_plan import PlanData, nodes_of, plan_of, site_of
from quantc.support.validated import faults_of
from quantc.text.call_parser import read_arguments, read_attributes
from quantc.text.digests import REMEMBERED, digest
from quantc.text.lexer import Reader
from quantc.text.rebuild_modules import TextPosition, check_given, without_numbers

OBSERVERS: TypeAdapter[dict[str, ObserverData]] = TypeAdapter(dict[str, ObserverData])


def read_plan(
    program: Program,
    start: Reader,
    rows: Sequence[Reader],
    constants: Mapping[str, Tensor],
    quantizers: Mapping[str, Any],
) -> None:
    """Give a program the plan of a section, and its observers. ParseError, at the line, on anything that is no plan."""
    reader = _PlanReader(nodes_of(program), constants)
    for row in rows:
        reader.line(row)
    data, observers = reader.data(start)
    try:
        plan, notes = plan_of(data, reader.nodes, reader.tensors, quantizers=quantizers)
        program.plan = plan
        put_observers(program, observers, reader.nodes)
    except LoadError as error:
        reader.fail(error, start)
    remembered = {name: seal for name, seal in reader.digests.items() if digest(reader.tensors.named[name]) is None}
    program.root.__dict__.setdefault(REMEMBERED, {}).update(remembered)
    if notes:
        program.log.append(LogEntry("parse", 0.0, False, tuple(notes)))


class _PlanReader:
    """Collects the lines of a plan as the document that files hold."""

    def __init__(self, nodes: Mapping[str, fx.Node], constants: Mapping[str, Tensor]) -> None:
        self.nodes = nodes
        self.constants = constants
        self.tensors = PlanTensors()
        self.digests: dict[str, str] = {}
        self.uses: dict[Any, int] = {}
        self.places: dict[str, TextPosition] = {}
        """The line of each entry of the document, for messages."""
        self.observers: dict[str, JsonValue] = {}
        self.document: dict[str, Any] = {
            "quantizer": None,
            "config": None,
            "batches": 0,
            **{name: {} for name in ("claims", "left_float", "lowered", "outcomes", "statistics", "instruction_sets")},
            "arithmetic": {},
            "groups": [],
            "fitted": [],
            "fitted_to": {},
            "qparams": [],
        }

    def line(self, reader: Reader) -> None:
        keyword = reader.take()
        readers: dict[str, Callable[[Reader], None]] = {
            "quantizer": self._quantizer,
            "config": self._config,
            "instruction_set": lambda row: self._text(row, "instruction_sets", is_node=False),
            "arithmetic": self._arithmetic,
            "batches": self._batches,
            "claim": self._claim,
            "left_float": lambda row: self._text(row, "left_float"),
            "lowered": lambda row: self._text(row, "lowered"),
            "outcome": self._outcome,
            "group": self._group,
            "observer": self._observer,
            "statistics": self._statistics,
            "fitted": self._fitted,
            "qparams": self._qparams,
        }
        read = readers.get(keyword.text)
        if read is None:
            advice = suggest(keyword.text, list(readers), noun="lines of a plan")
            reader.fail(f"{keyword.text!r} does not begin a line of a plan", at=keyword.start, advice=advice)
        try:
            read(reader)
        except ParseError:
            raise
        except QuantcError as error:
            reader.fail(error.what, at=keyword.start, advice=error.advice)
        reader.end_or_comment()

    def data(self, start: Reader) -> tuple[PlanData, dict[str, ObserverData]]:
        """The document, validated as that of a file is."""
        document = {**self.document, "uses": [OUTCOMES.dump_python(use, mode="json") for use in self.uses]}
        try:
            observers = OBSERVERS.validate_json(json.dumps(self.observers))
            return PlanData.model_validate_json(json.dumps(document)), observers
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"])
            self._place(where, start).fail(faults_of(error)[0])

    def fail(self, error: LoadError, start: Reader) -> NoReturn:
        self._place((error.where or "").removeprefix("plan."), start).fail(error.what, error.advice)

    def _place(self, where: str, start: Reader) -> TextPosition:
        """The line of an entry of the document, as errors name it."""
        known = [name for name in self.places if where == name or where.startswith(f"{name}.")]
        return self.places[max(known, key=len)] if known else TextPosition(start, 0)

    # -- lines -----------------------------------------------------------------------------------------------

    def _key(self, reader: Reader, field: str, *, is_node: bool = False) -> str:
        """The name that a line is about."""
        place = TextPosition(reader, reader.peek().start)
        name = reader.string()
        if f"{field}.{name}" in self.places:
            place.fail(f"{field} of {name!r} are given twice")
        if is_node and name not in self.nodes:
            place.fail(f"unknown node {name[:60]!r}", suggest(name, self.nodes, noun="nodes"))
        self.places[f"{field}.{name}"] = place
        return name

    def _once(self, reader: Reader, field: str) -> None:
        place = TextPosition(reader, 0)
        if field in self.places:
            place.fail(f"{field} is given twice")
        self.places[field] = place

    def _value(self, reader: Reader) -> Any:
        reader.require("=")
        at = reader.peek().start
        value = reader.value()
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            reader.fail("a plan holds text, numbers, lists and dictionaries alone", at=at)
        return value

    def _facts(self, reader: Reader, *allowed: str) -> dict[str, Any]:
        at = reader.peek().start
        facts = read_attributes(reader, *allowed)
        try:
            json.dumps(facts)
        except (TypeError, ValueError):
            reader.fail("a plan holds text, numbers, lists and dictionaries alone", at=at)
        return facts

    def _quantizer(self, reader: Reader) -> None:
        self._once(reader, "quantizer")
        self.document["quantizer"] = {"name": reader.string(), "backends": [], **self._facts(reader, "backends")}

    def _config(self, reader: Reader) -> None:
        self._once(reader, "config")
        self.document["config"] = value = self._value(reader)
        QuantConfig.model_validate_json(json.dumps(value))

    def _arithmetic(self, reader: Reader) -> None:
        name = self._key(reader, "arithmetic")
        self.document["arithmetic"][name] = value = self._value(reader)
        Arithmetic.model_validate_json(json.dumps(value))

    def _batches(self, reader: Reader) -> None:
        self._once(reader, "batches")
        self.document["batches"] = self._value(reader)

    def _text(self, reader: Reader, field: str, *, is_node: bool = True) -> None:
        name = self._key(reader, field, is_node=is_node)
        reader.require("=")
        self.document[field][name] = reader.string()

    def _claim(self, reader: Reader) -> None:
        node = self._key(reader, "claims", is_node=True)
        reader.require("=")
        rule = reader.string()
        part = Part.QUANTIZED.value
        self.document["claims"][node] = {
            "rule": rule,
            "part": part,
            **self._facts(reader, "quantizer", "root", "part", "timing"),
        }

    def _outcome(self, reader: Reader) -> None:
        site = self._key(reader, "outcomes")
        site_of(site, "outcomes")
        reader.require("=")
        self.document["outcomes"][site] = self._use(reader)

    def _group(self, reader: Reader) -> None:
        place = TextPosition(reader, reader.peek().start)
        name = reader.string()
        reader.require("=")
        group = {"name": name, "use": self._use(reader), **self._facts(reader, "source", "values", "places")}
        self.places[f"groups.{len(self.document['groups'])}"] = place
        if any(name == known["name"] for known in self.document["groups"]):
            place.fail(f"the group {name!r} is given twice")
        self.document["groups"].append(group)

    def _observer(self, reader: Reader) -> None:
        node = self._key(reader, "observers", is_node=True)
        reader.require("=")
        group = reader.string()
        self.observers[node] = {"group": group, **self._facts(reader, "where", "enabled")}

    def _statistics(self, reader: Reader) -> None:
        name = self._key(reader, "statistics")
        reader.require("=")
        kind = reader.string()
        facts = self._facts(reader, "share", "values")
        tensors = self._tensors(reader, f"statistics/{name}")
        self.document["statistics"][name] = {"statistics": kind, **facts, "tensors": tensors}

    def _fitted(self, reader: Reader) -> None:
        name = self._key(reader, "fitted")
        self.places[f"fitted_to.{name}"] = self.places[f"fitted.{name}"]
        if (facts := self._facts(reader, "to")) != {}:
            self.document["fitted_to"][name] = facts["to"]
        self._tensors_alone(reader, "fitted", name, FITTED)

    def _qparams(self, reader: Reader) -> None:
        self._tensors_alone(reader, "qparams", self._key(reader, "qparams"), QPARAMS)

    def _tensors_alone(self, reader: Reader, field: str, name: str, wanted: tuple[str, ...]) -> None:
        """The rest of a line, of tensors alone."""
        at = reader.peek().start
        if sorted(self._tensors(reader, f"{field}/{name}")) != sorted(wanted):
            reader.fail(f"{field} are {' and '.join(wanted)}", at=at)
        self.document[field].append(name)

    # -- parts -----------------------------------------------------------------------------------------------

    def _use(self, reader: Reader) -> int:
        """The number of an outcome, among the different ones."""
        token = reader.expect("word", what="an outcome such as quantize(...)")
        if token.text not in _OUTCOMES:
            reader.fail(
                f"unknown outcome {token.text!r}",
                at=token.start,
                advice=suggest(token.text, _OUTCOMES, noun="outcomes"),
            )
        args, kwargs = read_arguments(reader)
        try:
            outcome = _OUTCOMES[token.text](*args, **kwargs)
        except QuantcError as error:
            reader.fail(error.what, at=token.start, advice=error.advice)
        except (TypeError, ValueError) as error:
            reader.fail(f"not an outcome: {str(error).splitlines()[0]}", at=token.start)
        return self.uses.setdefault(outcome, len(self.uses))

    def _tensors(self, reader: Reader, prefix: str) -> list[str]:
        names: list[str] = []
        while reader.peek().kind in ("word", "string"):
            place = TextPosition(reader, reader.peek().start)
            name = reader.string() if reader.peek().kind == "string" else reader.take().text
            if name in names:
                place.fail(f"the tensor {name!r} is given twice")
            names.append(name)
            reader.require(":")
            self.tensors.add(f"{prefix}/{name}", self._tensor(reader, f"{prefix}/{name}", place))
            if not reader.accept(","):
                break
        return names

    def _tensor(self, reader: Reader, name: str, place: TextPosition) -> Tensor:
        kind = reader.type()
        if not isinstance(kind, TensorType) or not all(isinstance(size, int) for size in kind.shape):
            place.fail("this is not the type of a tensor")
        shape = [int(size) for size in kind.shape]
        if reader.accept("="):
            at = reader.peek().start
            value = reader.value()
            if kind.dtype not in INLINE or not isinstance(value, int | float) or any(size != 1 for size in shape):
                reader.fail("only one number is written as it is", at=at)
            try:
                return torch.tensor(value, dtype=kind.dtype).reshape(shape)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                reader.fail(f"no {kind.dtype} is {value!r}: {str(error).splitlines()[0]}", at=at)
        seal = reader.digest()
        if seal is not None:
            self.digests[name] = seal
        given = self.constants.get(name)
        if given is None:
            return without_numbers(kind, place)
        check_given(name, given, kind, seal, place)
        return given


def _spec(text: Any) -> QuantSpec:
    if not isinstance(text, str):
        raise TypeError("a spec is a string")
    return QuantSpec.parse(text)


def _fixed(spec: Any, scale: Any, zero_point: Any) -> Fixed:
    return Fixed(scale, zero_point, _spec(spec))


def _derived(formula: Any, sites: Any) -> Derived:
    return Derived(tuple(site_of(str(site), "outcomes") for site in sites), formula)


_OUTCOMES: dict[str, Callable[..., TensorOutcome]] = {
    "quantize": lambda spec: Quantize(_spec(spec)),
    "fixed": _fixed,
    "same_as": lambda site: SameAs(site_of(str(site), "outcomes")),
    "derived": _derived,
    "float": Float,
}
