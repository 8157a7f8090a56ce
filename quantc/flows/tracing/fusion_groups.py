"""Group the calls of a model into fused ops, by the prepared program and the calls its nodes come from."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from torch import fx

from quantc.calibration.observed_tensors import observed_tensors
from quantc.capture.runtime.tracing import INPUT, SeenAt
from quantc.flows.tracing.fused_ops import CallFacts, Derived, Operand, Path, Unit, behind_put_in, is_put_in
from quantc.ir.dialect import is_op, op_name, traits_of
from quantc.ir.op_row import Trait
from quantc.ir.plan import Part
from quantc.ir.program import TRAINED, Program, Stage
from quantc.ir.site_index import operand_nodes
from quantc.ir.types import dtype_of

FOLDED = frozenset({"add", "sub", "mul", "div", "rsub", "batch_norm"})
"""Ops that the `fuse` pass makes part of the convolution or linear before them."""


class Units:
    """The fused ops of a prepared program, by the calls that they do the work of."""

    def __init__(self, program: Program, calls: Sequence[CallFacts]) -> None:
        self.calls = calls
        self.program = program
        self.nodes: dict[str, fx.Node] = {node.name: node for node in program.graph.nodes}
        self.of_call: dict[int, list[fx.Node]] = {}
        for node in program.graph.nodes:
            origin = program.origins.get(node)
            if isinstance(origin, SeenAt) and node.op in ("call_function", "call_module") and not is_put_in(node):
                self.of_call.setdefault(origin.call, []).append(node)
        # the first of them: a call that gives its argument back has that one's node
        self.owner = {name: call.number for call in reversed(calls) for name in call.makes}
        self.observed = observed_tensors(program) if program.stage >= Stage.SHARED else {}
        self.lost: list[str] = []
        """Nodes to quantize that `build` cannot map to whole calls, as when a backend decomposes attention: they would silently run in
        float."""

    def value(self, name: str) -> fx.Node | None:
        """The node that has the value which a node of the captured program had."""
        seen: set[str] = set()
        while name not in self.nodes:
            if name in seen or name not in self.owner:
                return None
            seen.add(name)
            call = self.calls[self.owner[name]]
            nodes = self.of_call.get(call.number, [])
            if nodes:  # if another result of the call is there, this is one that nobody reads
                return None if any(made in self.nodes for made in call.makes) else nodes[-1]
            if not call.reads:
                return None
            if call.computes:  # it is folded, or nobody reads what has become of it
                return self._fold_target(call) if call.may_fold else None
            name = call.reads[1 if call.name == "copy_" and len(call.reads) > 1 else 0]
        return self.nodes[name]

    def _fold_target(self, call: CallFacts) -> fx.Node | None:
        """The node into which the `fuse` pass folded a call."""
        found = (self.value(name) for name, parameter in zip(call.reads, call.parameters, strict=True) if not parameter)
        return next((node for node in found if node is not None and node.op != "get_attr"), None)

    def several(self) -> list[str]:
        """Nodes of calls that became several ops, of which one could be quantized and another not: they are left float."""
        found: list[str] = []
        for nodes in self.of_call.values():
            ops = [node for node in nodes if op_name(node) != "getitem" and "getitem" not in node.name]
            if len(ops) > 1 and not all(_moves(node) for node in ops):
                found.extend(node.name for node in ops)
        return found

    def build(self) -> dict[int, Unit]:
        """The fused op that each call is part of."""
        matches: dict[str, list[fx.Node]] = {}
        for node, claim in self.program.plan.claims.rows.items():
            matches.setdefault(claim.root, []).append(node)
        found: dict[int, Unit] = {}
        for root, nodes in matches.items():
            if all(map(_moves, nodes)):
                continue  # moved as it comes, whoever calls it
            writing = [node for node in nodes if self._writes_others(node)]
            if writing:  # what it writes to is memory, where floats are
                self.lost.extend(node.name for node in writing)
                continue
            unit = self._unit(root, sorted(nodes))
            if unit is None or any(call in found for call in unit.members):
                self.lost.extend(node.name for node in nodes)
            else:
                found.update(dict.fromkeys(unit.members, unit))
        return found

    def _writes_others(self, node: fx.Node) -> bool:
        number = _call_of(self.program, node)
        return number is not None and self.calls[number].writes_others

    def _unit(self, root: str, nodes: list[fx.Node]) -> Unit | None:
        last = self.nodes.get(root)
        own = set(nodes)
        if last is None or any(_call_of(self.program, node) is None for node in nodes):
            return None
        calls = {_call_of(self.program, node) for node in nodes}
        if any(node not in own for call in calls for node in self.of_call.get(call or 0, [])):
            return None
        direct = {call for call in calls if call is not None}
        members = sorted(direct | self._find_folded(own, direct))
        operands = list(self._operands(nodes, own))
        if None in operands:
            return None
        claim = self.program.plan.claims[last]
        rows = [self.calls[number] for number in members]
        if any(row.gives_view for row in rows):
            return None  # another tensor that shares memory, which bytes cannot
        makes = {row.number: row.makes[0] for row in rows if row.makes}
        made = set(makes.values())
        return Unit(
            root,
            f"{claim.rule} of {claim.quantizer}",
            tuple(members),
            tuple(operand for operand in operands if operand is not None),
            constants={
                row.number: [pair for pair in zip(row.paths, row.parameters, strict=True) if pair[1]] for row in rows
            },
            links={
                row.number: [pair for pair in zip(row.paths, row.reads, strict=True) if pair[1] in made] for row in rows
            },
            makes=makes,
            in_place=frozenset(row.number for row in rows if row.gives_first),
            passive=frozenset(row.number for row in rows if not row.computes),
            derived=self._find_derived(members, operands),
            own=frozenset(node.name for node in nodes),
            is_product=claim.part is Part.QUANTIZED
            and any(name for number in direct for name in self.calls[number].parameters),
        )

    def _find_derived(
        self, members: Iterable[int], operands: Iterable[Operand | None]
    ) -> dict[int, list[tuple[Path, Derived]]]:
        taken = {(operand.call, operand.position) for operand in operands if operand is not None}
        found: dict[int, list[tuple[Path, Derived]]] = {}
        for number in members:
            for row in self.calls[number].derived:
                if (number, row.position) not in taken:
                    found.setdefault(number, []).append((self.calls[number].paths[row.position], row))
        return found

    def watched(self) -> dict[int, dict[int, tuple[str, ...]]]:
        """The groups that observe each result of each call, by result number. Inputs are call -1."""
        last: dict[fx.Node, int] = {}
        for call in self.calls:  # what is folded into an op gives the value that it has
            if call.number in self.of_call or call.computes:
                values = (self.value(name) for name in call.makes)
                last.update({node: call.number for node in values if node in self.observed})
        found: dict[int, dict[int, tuple[str, ...]]] = {}
        for node, number in last.items():
            places = [index for index, name in enumerate(self.calls[number].makes) if self.value(name) is node]
            groups = tuple(group.name for group in self.observed[node])
            found.setdefault(number, {}).update(dict.fromkeys(places, groups))
        for node in self.program.graph.find_nodes(op="placeholder"):
            if node in self.observed and str(node.target).startswith(INPUT):
                index = int(str(node.target).removeprefix(INPUT))
                found.setdefault(-1, {})[index] = tuple(group.name for group in self.observed[node])
        return found

    def rounding(self) -> dict[int, list[tuple[int, str]]]:
        """In training: the fake quantizers of tensors that calls outside of fused ops read, by position."""
        found: dict[int, list[tuple[int, str]]] = {}
        for number, nodes in self.of_call.items():
            reads = [self.value(name) for name in self.calls[number].reads]
            for node in nodes:
                for read in operand_nodes(node):
                    value = behind_put_in(read)
                    if read.op == "call_module" and TRAINED in str(read.target) and value in reads:
                        found.setdefault(number, []).append((reads.index(value), str(read.target)))
        return found

    def _find_folded(self, own: set[fx.Node], members: set[int]) -> set[int]:
        """The calls without a node of their own that a fused op replaces: folded ones, and no-ops between its members."""
        found: set[int] = set()
        read = {name for number in members for name in self.calls[number].reads}
        for call in reversed(self.calls):
            if call.number in self.of_call or not call.is_used or not call.reads or not call.makes:
                continue
            if self.value(call.makes[0]) in own and (call.computes or not read.isdisjoint(call.makes)):
                found.add(call.number)
                read.update(call.reads)
        return found

    def _operands(self, nodes: list[fx.Node], own: set[fx.Node]) -> Iterable[Operand | None]:
        for node in nodes:
            call = self.calls[_call_of(self.program, node) or 0]
            taken: set[int] = set()
            for read in operand_nodes(node):
                value = behind_put_in(read)
                if value in own or value.op == "get_attr" or is_put_in(value):
                    continue
                position = next(
                    (
                        index
                        for index, name in enumerate(call.reads)
                        if index not in taken and self.value(name) is value
                    ),
                    None,
                )
                if position is None:
                    yield None
                    continue
                taken.add(position)
                groups = tuple(group.name for group in self.observed.get(value, ()))
                yield Operand(call.number, position, call.paths[position], value.name, dtype_of(value), groups)


def _call_of(program: Program, node: fx.Node) -> int | None:
    origin = program.origins.get(node)
    return origin.call if isinstance(origin, SeenAt) else None


def _moves(node: fx.Node) -> bool:
    """True if an op only moves elements, so that it can run on bytes."""
    if node.target is operator.getitem:
        return True
    is_window = any(is_op(node, name) for name in ("pad", "max_pool1d", "max_pool2d", "max_pool3d", "relu", "clamp"))
    return Trait.PRESERVES_VALUES in traits_of(node) and not is_window
