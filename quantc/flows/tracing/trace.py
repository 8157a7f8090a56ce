"""The record of a model's run: its calls by call site, the program they make, and its fused ops.

All states of one model share one trace.
"""

from __future__ import annotations

import copy
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from quantc.calibration.accumulator import Tally
from quantc.capture.runtime.write_detection import Stamp
from quantc.errors import CalibrationError, DataError, LoadError, QuantcError, SaveError
from quantc.files.sealed_data import parse_json, seal, unseal
from quantc.flows.tracing.call_sites import END, START, Context, OpSite
from quantc.flows.tracing.functions import Kind, kind_of
from quantc.flows.tracing.fused_ops import CallFacts, Unit
from quantc.flows.tracing.fusion_groups import Units
from quantc.ir.program import Program, Stage, attribute
from quantc.observe.store import Statistics
from quantc.spec.observation import Order
from quantc.store import load
from quantc.store.bytes_form import as_bytes, from_bytes

MAGIC = b"a model of the dynamic tracing flow, 2\n"
"""First bytes of the trace in a state dict."""


class Phase(Enum):
    """Treatment of the model's calls."""

    TRACING = "tracing"
    OBSERVING = "observing"
    TRAINING = "training"
    CONVERTED = "converted"


class UnseenOpError(QuantcError):
    """The model took a way over quantizable ops that was never seen: nothing is known of the numbers there."""


class Trace:
    """The recorded calls of one model and its program."""

    def __init__(self, context: Context, target: str) -> None:
        self.context = context
        self.target = target
        """The target whose kernels run the converted model."""
        self.phase = Phase.TRACING
        self.program: Program | None = None
        self.captured: Program | None = None
        """As it was seen, before anything was decided."""
        self.calls: tuple[CallFacts, ...] = ()
        self.units: dict[int, Unit] = {}
        self.watched: dict[int, dict[int, tuple[str, ...]]] = {}
        self.reasons: tuple[str, ...] = ()
        """Reasons why the trace is not stable; empty if it is."""
        self.trees: tuple[Any, Any] | None = None
        """The pytree specs of the model's inputs and results."""
        self.fixed: dict[int, tuple[tuple[Any, Any], ...]] = {}
        """The arguments of each call that are no tensors."""
        self.hooked: frozenset[str] = frozenset()
        """The names of functions that are part of quantized ops."""
        self.rounding: dict[int, list[tuple[int, str]]] = {}
        """In training: the fake quantizers of tensors that other calls read."""
        self.bounds: dict[str, Any] = {}
        """Lookups in the model itself, by path of the module that is called from outside."""
        self.made_of: dict[str, str] = {}
        """The digests of the weights that quantized ops were made of, by name."""
        self.recipe: Callable[[Program], Program] | None = None
        """The preparation of the captured program."""
        self._kinds: dict[Any, Kind] = {}
        self.lock = threading.Lock()

    def kind_of(self, func: Any) -> Kind:
        """The kind of a torch function in this model, cached."""
        found = self._kinds.get(func)
        if found is None:
            found = self._kinds[func] = kind_of(func, self.hooked)
        return found

    # -- deciding --------------------------------------------------------------------------------------------------

    def decided(self, program: Program, phase: Phase) -> None:
        """Take a program that was prepared."""
        self.program, self.phase = program, phase
        found = Units(program, self.calls)
        self.units = found.build()
        self.watched = found.watched() if phase is Phase.OBSERVING else {}
        if phase is Phase.TRAINING:
            for unit in {id(unit): unit for unit in self.units.values()}.values():
                unit.settle_training(program)
            self.rounding = {call: rows for call, rows in found.rounding().items() if call not in self.units}
        self.fixed = {call.number: call.fixed for call in self.calls}
        self.hooked = frozenset(self.calls[number].name for number in self.units)
        self._kinds = {}
        self._find_steps()

    def converted(self, program: Program) -> None:
        """Take the program that was made of it by `convert`."""
        if self.phase is Phase.TRAINING:  # dropout is gone
            self.units = Units(program, self.calls).build()
        self.program, self.phase = program, Phase.CONVERTED
        self.watched, self.rounding = {}, {}
        self.bounds = {}
        for unit in {id(unit): unit for unit in self.units.values()}.values():
            unit.settle(program)
        for context in self.context.walk():
            calls = Counter(key[:-2] for key, site in context.ops.items() if site.leaf)
            context.leaves = {
                key[:-2]: site
                for key, site in context.ops.items()
                if site.leaf and calls[key[:-2]] == 1 and self._reads_first(site.number)
            }

    def _reads_first(self, number: int) -> bool:
        """True if a call is part of a fused op and reads, beside weights, nothing but its first argument."""
        unit = self.units.get(number)
        if unit is None or unit.derived.get(number):
            return False
        return all(path == (0, 0) for path, _ in unit.links[number]) and all(
            path == (0, 0) for _, path in unit.by_call.get(number, ())
        )

    def _find_steps(self) -> None:
        """Compute the successors of each step, among quantized calls of `PRODUCTS` and the modules that contain any."""
        contexts = self.context.walk()
        busy = {number for number, unit in self.units.items() if unit.is_product}
        busy |= {row.number for row in contexts if any(site.number in busy for site in row.ops.values())}
        changed = True
        while changed:  # modules around busy ones are, and recursion may go round
            changed = False
            for context in contexts:
                if context.number not in busy and any(child.number in busy for child in context.children.values()):
                    busy.add(context.number)
                    changed = True
        for context in contexts:
            steps: dict[int, set[int]] = {}
            for sequence in context.sequences:
                kept = [START, *(step for step in sequence if step in busy), END]
                for before, after in pairwise(kept):
                    steps.setdefault(before, set()).add(after)
            context.steps = {step: frozenset(after) for step, after in steps.items()}
        self.busy = frozenset(busy)

    busy: frozenset[int] = frozenset()
    """The calls and contexts that control flow is watched over."""

    # -- statistics ------------------------------------------------------------------------------------------------

    def tally(self) -> Tally:
        """A new tally for the statistics of one run."""
        program = self.held
        before = {name: seen for name, seen in program.plan.statistics.items() if seen.order is Order.MATTERS}
        with torch.inference_mode(False), torch.no_grad():
            made = Tally(program, before)
            made.begin()
        return made

    def commit(self, tally: Tally) -> None:
        """A run is whole: what it has seen counts."""
        program = self.held
        with self.lock, torch.inference_mode(False), torch.no_grad():
            tally.commit(None)
            statistics = program.plan.statistics
            for name, part in tally.whole.totals.items():
                before = statistics.get(name)
                if before is None or part.order is Order.MATTERS:
                    statistics[name] = part
                else:
                    statistics[name] = before.merge(part)
            program.plan.batches += 1
            program.stage = max(program.stage, Stage.CALIBRATED)

    @property
    def sites(self) -> dict[int, OpSite]:
        """The places of calls, by number."""
        return {site.number: site for context in self.context.walk() for site in context.ops.values()}

    @property
    def weights(self) -> frozenset[str]:
        """The parameters and buffers of the model that quantized ops are made of, by name."""
        members = {call for unit in self.units.values() for call in unit.members}
        derived = [row for unit in self.units.values() for rows in unit.derived.values() for _, row in rows]
        sources = {name for row in derived for name in row.sources}
        return frozenset({name for call in members for name in self.calls[call].parameters if name} | sources)

    @property
    def is_converted(self) -> bool:
        return self.phase is Phase.CONVERTED

    @property
    def held(self) -> Program:
        if self.program is None:
            raise CalibrationError("the model was not traced", advice="call prepare(model, example_inputs) first")
        return self.program

    # -- saving ----------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes | None:
        """The trace without code: digests of the weights, and the statistics or the program as `Program.save` writes it. None
        before there is either, and in training, where tensors hold it all."""
        if self.phase not in (Phase.OBSERVING, Phase.CONVERTED):
            return None
        plan = self.held.plan
        is_converted = self.phase is Phase.CONVERTED
        statistics = None if is_converted else Statistics(plan.statistics, {"batches": plan.batches})
        content = as_bytes(self.held.save) if statistics is None else statistics.to_bytes()
        facts = json.dumps(seal({"phase": self.phase.value, "made_of": self.made_of}))
        return MAGIC + facts.encode() + b"\n" + content

    def from_bytes(self, content: bytes, weights: Mapping[str, Tensor]) -> None:
        """Resume from the result of `to_bytes`, of the same model and the same examples; `weights` came with it."""
        magic, head, content = [*content.split(b"\n", 2), b"", b""][:3]
        facts = unseal(parse_json(head.decode(errors="replace")), needed=True) if magic + b"\n" == MAGIC else {}
        if facts.get("phase") != self.phase.value:
            raise LoadError(
                f"this is the state of a model in another phase, {facts.get('phase', 'unknown')}, and not {self.phase.value}",
                where=self.held.name,
                advice="load the state of a prepared model into a prepared one, and of a converted one into a converted one",
            )
        made_of: dict[str, str] = facts["made_of"]
        if self.phase is Phase.CONVERTED:
            loaded = from_bytes(content, load)
            self._check_alike(loaded)
            self.converted(loaded)
        else:
            kept = Statistics.from_bytes(content)
            if made_of != self.made_of:
                self._prepare_again({name: tensor for name, tensor in weights.items() if name in made_of})
            plan = self.held.plan
            plan.statistics = dict(kept.sites)
            plan.batches = int(str(kept.notes["batches"]))
            if plan.batches:
                self.held.stage = max(self.held.stage, Stage.CALIBRATED)
        self.made_of = dict(made_of)

    def _prepare_again(self, weights: Mapping[str, Tensor]) -> None:
        """Make the program of other weights: what was folded is folded anew."""
        if self.captured is None or self.recipe is None:
            raise CalibrationError("the model was not traced", advice="call prepare(model, example_inputs) first")
        captured = self.captured.clone()
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in weights.items():
                held = attribute(captured.root, name)
                if held is not None and held.shape == tensor.shape:
                    held.copy_(tensor)
            program = self.recipe(captured)
        self._check_alike(program)
        self.captured = captured
        self.decided(program, self.phase)

    def _check_alike(self, other: Program) -> None:
        if {node.name for node in other.graph.nodes} != {node.name for node in self.held.graph.nodes}:
            raise LoadError(
                "this is the state of another model",
                where=self.held.name,
                advice="prepare a model with the same weights alike first: on others it may take other ways",
            )

    def tie(self, constants: Mapping[str, Tensor]) -> None:
        """In training: share the model's own parameters and buffers with the program."""
        root, is_other = self.held.root, False
        for name, tensor in constants.items():
            held = attribute(root, name)
            if held is None or held is tensor:
                continue
            owner, _, last = name.rpartition(".")
            module = root.get_submodule(owner)
            rows: Any = module._parameters if last in module._parameters else module._buffers
            rows[last], is_other = tensor, True
        if is_other:
            self.held.touch()
        for unit in self.units.values():  # torch.func.functional_call puts others into the program itself
            unit.computes.clear()

    # -- copies ----------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SaveError(
            "a model of the dynamic tracing flow cannot be pickled: which call is which goes by code in memory",
            where=self.held.name,
            advice="save its state_dict(), and load that into a model that was prepared and converted alike",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Trace:
        twin = Trace.__new__(Trace)
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            if name not in ("lock", "units", "program", "captured", "bounds", "_kinds", "calls", "trees", "recipe"):
                setattr(twin, name, copy.deepcopy(value, memo))
        twin.lock = threading.Lock()
        twin.captured, twin.calls, twin.trees, twin.recipe = self.captured, self.calls, self.trees, self.recipe
        twin.bounds, twin._kinds = {}, {}
        twin.units = {}
        twin.program = None if self.program is None else self.program.clone()
        if twin.program is not None and self.program is not None:
            if twin.program.is_live:  # the model trains the very tensors of the program
                twin.program.root = copy.deepcopy(self.program.root, memo)
            twin.units = _copy_units(self.units)
            if twin.phase is Phase.TRAINING:
                for unit in twin.units.values():
                    unit.settle_training(twin.program)
        return twin


def _copy_units(units: Mapping[int, Unit]) -> dict[int, Unit]:
    """Copies of fused ops without their computations, which are rebuilt on first use."""
    copies: dict[int, Unit] = {}
    made: dict[int, Unit] = {}
    for number, unit in units.items():
        if id(unit) not in copies:
            twin = copy.copy(unit)
            twin.computes, twin.direct, twin._building = {}, None, threading.Lock()
            copies[id(unit)] = twin
        made[number] = copies[id(unit)]
    return made


class Watch:
    """Statistics of one run of a prepared model. Each tensor counts once for a group, however often it is read, and again
    after a write."""

    def __init__(self, trace: Trace) -> None:
        self.tally = trace.tally()
        self.seen: dict[tuple[str, int], Stamp] = {}

    def hand_out(self, tensors: Iterable[Tensor]) -> None:
        """Others have the memory of tensors from now on, and write to it without torch counting."""
        for tensor in tensors:
            for stamp in self.seen.values():
                if stamp.shares_memory(tensor):
                    stamp.watch()

    def copy(self, made: Tensor, of: Iterable[Tensor]) -> None:
        """A call that computes nothing has made a tensor of others, as `cat` of one does: what was counted is not counted again."""
        for source in of:
            if source.shape == made.shape and torch.equal(source, made):
                groups = [group for group, number in self.seen if number == id(source)]
                self.seen.update({(group, id(made)): Stamp(made) for group in groups})

    def observe(self, groups: Iterable[str], x: Any, where: Callable[[], str]) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return
        for group in groups:
            stamp = self.seen.get((group, id(x)))
            if stamp is not None and stamp.holds:
                continue
            self.seen[group, id(x)] = Stamp(x)
            seat = self.tally.seats[group]
            before = seat.part.non_finite
            with torch.inference_mode(False), torch.no_grad():  # statistics outlive the mode they are taken in
                seat.part.update(x.detach(), where=where())
            if seat.part.non_finite > before:
                raise DataError(
                    f"{seat.part.non_finite - before} of {x.numel()} values are NaN or infinite",
                    where=where(),
                    advice="look for the op that makes them and correct the model or the data",
                )


__all__ = ["Phase", "Sequence", "Trace", "UnseenOpError", "Watch"]
