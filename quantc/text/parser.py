"""Parser of the text that `dump` writes.

Text is data: ops are looked up, never imported or evaluated, and names that would end up in generated code are checked
first. Any syntax error is a ParseError with its line and column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from quantc.errors import ParseError, suggest
from quantc.ir.plan import Annotates
from quantc.ir.program import Program, Stage
from quantc.ir.signature import Signature
from quantc.text.graph_parser import GraphReader
from quantc.text.lexer import Reader
from quantc.text.plan_section import KEYWORD, PlanSection
from quantc.text.printer import default_in_spec, default_out_spec, output_count
from quantc.text.pytree_text import is_name, keyword_names, read_spec
from quantc.text.rebuild_modules import (
    ConstantInstaller,
    TextPosition,
    check_target,
    compile_nested,
    empty_graph_module,
    install,
    opaque_module,
)

_SIZE = re.compile(r"\s*size\s+([A-Za-z_]\w*)\s+in\s+(-?\d{1,18})\.\.(-?\d{1,18})?(\s+auto)?\s*", re.ASCII)
_METHODS_ADVICE = 'the first line reads: program "Name" stage=canonical method=export mode=eval'


def parse(
    text: str,
    constants: Mapping[str, torch.Tensor] | None = None,
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    modules: Mapping[str, nn.Module] | None = None,
    quantizers: Mapping[str, Annotates] | None = None,
) -> Program:
    """Parse a text dump into a Program.

    `constants` holds its tensors by state-dict name (see `quantc.text.digests.constants(program)`); they are used
    without a copy, and must have the digests in the text. Without them the Program is on the meta device: it can be
    inspected, transformed and dumped, but not run. `functions`, `modules` and `quantizers` supply Python functions,
    opaque modules and quantizers that text cannot represent; backends are looked up by name.

    Of the plan, statistics and scales per channel are such constants too. Where they are not given the plan is without
    them, and whatever needs them says so.
    """
    if not isinstance(text, str):
        raise ParseError(f"a dump is a string, not a {type(text).__name__}")
    return _ProgramReader(text, functions or {}, modules or {}, quantizers or {}).read(constants)


@dataclass
class _Header:
    name: str = "program"
    stage: Stage = Stage.CAPTURED
    method: str = "given"
    training: bool = False
    inference_only: tuple[str, ...] = ()
    fixed_mode: str = ""
    ranges: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    opened: frozenset[str] = frozenset()
    in_spec: tuple[pytree.TreeSpec, TextPosition] | None = None
    out_spec: tuple[pytree.TreeSpec, TextPosition] | None = None


class _ProgramReader:
    def __init__(
        self,
        text: str,
        functions: Mapping[str, Callable[..., Any]],
        modules: Mapping[str, nn.Module],
        quantizers: Mapping[str, Annotates],
    ) -> None:
        self.text = text
        self.functions = functions
        self.modules = modules
        self.quantizers = quantizers
        self.plan: PlanSection | None = None
        self.header: _Header | None = None
        self.graphs: dict[str, GraphReader] = {}
        self.aliases: dict[str, tuple[str, TextPosition]] = {}
        self.open: GraphReader | None = None

    def read(self, constants: Mapping[str, torch.Tensor] | None) -> Program:
        last = Reader(self.text, "", 1)
        for number, line in enumerate(self.text.splitlines(), 1):
            last = Reader(self.text, line, number, functions=self.functions)
            first = last.peek()
            if first.kind not in ("end", "comment"):
                self._line(last, first.text)
        if self.header is None:
            last.fail("there is no program in this text", at=0, advice=_METHODS_ADVICE)
        for graph in self.graphs.values():
            graph.finish()
        return self._build(self.header, constants)

    # -- lines -----------------------------------------------------------------------------------------------

    def _line(self, reader: Reader, first: str) -> None:
        if first == "program":
            self._program(reader)
        elif self.header is None:
            reader.fail("a dump begins with a program line", at=0, advice=_METHODS_ADVICE)
        elif self.plan is not None:
            self.plan.rows.append(reader)
        elif first == KEYWORD:
            reader.take()
            reader.end_or_comment()
            self.plan = PlanSection(reader)
        elif first == "graph":
            self._graph(reader)
        elif first in ("inference_only", "fixed_mode", "size", "in_spec", "out_spec"):
            self._fact(reader, first, self.header)
        elif self.open is None:
            reader.fail("nothing may follow a second name of a graph but other graphs and the plan", at=0)
        else:
            reader.scope = self.open
            self.open.statement(reader)

    def _program(self, reader: Reader) -> None:
        if self.header is not None:
            reader.fail("a dump holds one program", at=0)
        reader.take()
        header = _Header(name=reader.string())
        while reader.peek().kind != "end":
            key = reader.expect("word", what="stage=, method= or mode=")
            reader.require("=")
            at = reader.peek().start
            value = reader.string() if reader.peek().kind == "string" else reader.expect("word", what="a word").text
            self._option(header, key.text, value, TextPosition(reader, at))
        self.header = header
        self.open = self.graphs[""] = GraphReader("", TextPosition(reader, 0))

    def _option(self, header: _Header, key: str, value: str, place: TextPosition) -> None:
        stages = {stage.label: stage for stage in Stage}
        if key == "stage" and value in stages:
            header.stage = stages[value]
        elif key == "stage":
            place.fail(f"unknown stage {value!r}", suggest(value, stages, noun="stages"))
        elif key == "method":
            header.method = value
        elif key == "mode" and value in ("train", "eval"):
            header.training = value == "train"
        else:
            place.fail(f"{key}={value} is not known here", _METHODS_ADVICE)

    def _graph(self, reader: Reader) -> None:
        place = TextPosition(reader, reader.take().start)
        path = reader.reference()
        if path in self.graphs or path in self.aliases or not path:
            place.fail(f"graph {path!r} is defined twice" if path else "a nested graph has a name")
        if reader.accept("="):
            self.aliases[path] = (reader.reference(), place)
            self.open = None
        else:
            self.open = self.graphs[path] = GraphReader(path, place)
        reader.end()

    def _fact(self, reader: Reader, keyword: str, header: _Header) -> None:
        place = TextPosition(reader, reader.take().start)
        if keyword == "inference_only":
            header.inference_only += (reader.string(),)
            reader.end()
            return
        if keyword == "fixed_mode":
            header.fixed_mode = reader.string()
            reader.end()
            return
        if keyword == "size":
            self._size(reader, header)
            return
        spec = read_spec(reader)
        reader.end()
        if keyword == "out_spec":
            header.out_spec = (spec, place)
            return
        if not all(is_name(name) for name in keyword_names(spec)):
            place.fail("a keyword argument has a name that is not an identifier")
        header.in_spec = (spec, place)

    def _size(self, reader: Reader, header: _Header) -> None:
        found = _SIZE.fullmatch(reader.line)
        if found is None:
            reader.fail("a dynamic size is written: size s0 in 2..64, size s0 in 2.., or size s0 in 2.. auto")
        low, high = int(found[2]), None if found[3] is None else int(found[3])
        if found[1] in header.ranges:
            reader.fail(f"size {found[1]} is given twice")
        header.ranges[found[1]] = (low, high)
        if found[4] is not None:
            header.opened |= {found[1]}

    # -- building --------------------------------------------------------------------------------------------

    def _build(self, header: _Header, constants: Mapping[str, torch.Tensor] | None) -> Program:
        root = nn.Module()
        owners: dict[str, nn.Module] = {"": root}
        owners.update({path: empty_graph_module() for path in self.graphs if path})
        self._nest(owners)
        for path, graph in self.graphs.items():
            self._values(graph, owners[path])
        rows = [row for graph in self.graphs.values() for row in graph.constants]
        ConstantInstaller(rows, constants).install(owners)
        for path, graph in self.graphs.items():
            module = owners[path]
            if isinstance(module, fx.GraphModule):
                compile_nested(module, graph.graph, graph.place)
        top = self.graphs[""]
        program = Program(top.graph, root, self._signature(header, top), name=header.name, method=header.method)
        program.training, program.stage = header.training, header.stage
        program.inference_only = header.inference_only
        program.fixed_mode = header.fixed_mode
        for graph in self.graphs.values():
            program.origins.rows.update(graph.origins)
            program.modes.rows.update(graph.modes)
            program.counters.rows.update(graph.counters)
        root.train(header.training)
        if self.plan is not None:
            self.plan.read_into(program, constants, self.quantizers)
        return program

    def _nest(self, owners: dict[str, nn.Module]) -> None:
        """Attach each nested graph to the graph that uses it, and check that every @name is defined."""
        places = {path: graph.place for path, graph in self.graphs.items() if path}
        places.update({alias: place for alias, (_, place) in self.aliases.items()})
        for alias, (path, place) in self.aliases.items():
            if path not in self.graphs or not path:
                place.fail(f"unknown graph {path!r}", suggest(path, filter(None, self.graphs), noun="graphs"))
            owners[alias] = owners[path]
        for path, place in places.items():
            parent, _, target = path.rpartition("/")
            if parent not in self.graphs:
                place.fail(f"graph {path!r} lies in {parent!r}, which does not exist")
            install(owners[parent], check_target(target, place), owners[path], place)
        for graph in self.graphs.values():
            for name, place in graph.references:
                path = f"{graph.path}/{name}".lstrip("/")
                if path not in places:
                    place.fail(f"unknown graph {path!r}", suggest(path, places, noun="graphs"))

    def _values(self, graph: GraphReader, owner: nn.Module) -> None:
        """Install opaque modules and plain values, outermost first."""
        for target, (kind, state, place) in sorted(graph.modules.items(), key=lambda item: item[0].count(".")):
            install(owner, target, opaque_module(target, kind, state, self.modules, place), place)
        for target, (value, place) in graph.values.items():
            install(owner, target, value, place)

    def _signature(self, header: _Header, top: GraphReader) -> Signature:
        inputs, outputs = tuple(top.inputs), output_count(top.graph)
        in_spec = default_in_spec(len(inputs)) if header.in_spec is None else header.in_spec[0]
        out_spec = default_out_spec(outputs) if header.out_spec is None else header.out_spec[0]
        if header.in_spec is not None and in_spec.num_leaves != len(inputs):
            header.in_spec[1].fail(f"in_spec arranges {in_spec.num_leaves} inputs, but there are {len(inputs)}")
        if header.out_spec is not None and out_spec.num_leaves != outputs:
            header.out_spec[1].fail(f"out_spec arranges {out_spec.num_leaves} outputs, but there are {outputs}")
        return Signature(inputs, in_spec, out_spec, header.ranges, header.opened)
