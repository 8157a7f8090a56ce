"""Accuracy of a quantized program relative to the float one, as a whole and op by op."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from quantc.calibration.state_isolation import Isolation
from quantc.inspect.grid_costs import costs
from quantc.inspect.lockstep import Lockstep, calls_graphs, is_integer
from quantc.inspect.size import Size, size
from quantc.ir.batch_inputs import leaves_of
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.ir.sites import Origin
from quantc.qdq.ops import belongs_to_qdq, is_quantize
from quantc.support.sqnr import as_data, format_sqnr, together

MAX_ROWS = 30
WORTH_TELLING = 0.5
"""Decibels that the result of a float op must cost to be listed among quantized ones."""
COSTS = "costs, dB"
"""Head of the column that says what the whole program gains without an op's grids."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One op of both programs. SQNR is in dB: infinite if they agree to the last bit."""

    node: str
    op: str
    rule: str
    """The rule it was quantized by; empty for float ops."""
    module: str
    source: str
    sqnr: float
    """Of its result in the quantized program, with the error of everything before it."""
    local: float | None
    """Of its result when it alone is quantized, on the float program's values; None if it reads nothing quantized, or cannot be run
    twice."""
    gain: float | None = None
    """Decibels that the whole program gains if the grids of its result and of its constants are left out, the others staying; None
    if that was not measured. A grid counts for the op that makes the tensor, and that of an input for the ops that read it."""
    readers: tuple[str, ...] = ()
    """For a float op that costs something: the nodes that read its result rounded."""

    def to_data(self) -> dict[str, Any]:
        numbers = {"sqnr": as_data(self.sqnr), "local": as_data(self.local), "gain": as_data(self.gain)}
        texts = {name: getattr(self, name) for name in ("node", "op", "rule", "module", "source")}
        return {**texts, **numbers}


@dataclass(frozen=True, slots=True)
class Vanished:
    """A quantized tensor, and the fraction of its non-zero values that become zero: those below half a step."""

    node: str
    module: str
    share: float
    readers: tuple[str, ...] = ()
    """The nodes that read it quantized."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A quantized program compared with the float one. Prints as a table, costliest ops first."""

    program: str
    batches: int
    sqnr: float
    """Of all outputs together, in dB."""
    outputs: tuple[float, ...]
    """Of each output; NaN for one without floats."""
    layers: tuple[Layer, ...]
    """In the order of the program."""
    size: Size
    notes: tuple[str, ...] = ()
    largest: tuple[float, ...] = ()
    """The largest difference of a number, output by output."""
    vanished: tuple[Vanished, ...] = ()
    """The tensors of which something becomes zero, in the order of the program."""

    def worst(self, count: int | None = None) -> tuple[Layer, ...]:
        """Ops with the largest error of their own, worst first."""
        own = [layer for layer in self.layers if layer.local is not None]
        return tuple(sorted(own, key=lambda layer: _cost(layer.local))[:count])

    def costliest(self, count: int | None = None) -> tuple[Layer, ...]:
        """Ops that cost the whole program most; then those of which that was not measured, as in `worst`."""
        measured = [
            layer for layer in self.layers if layer.gain is not None and (layer.rule or layer.gain >= WORTH_TELLING)
        ]
        measured.sort(key=lambda layer: -(layer.gain or 0.0))
        return tuple([*measured, *(layer for layer in self.worst() if layer.gain is None)][:count])

    def farthest(self, count: int | None = None) -> tuple[Layer, ...]:
        """Ops farthest from the reference, whatever the cause; ops that agree exactly are omitted."""
        apart = [layer for layer in self.layers if layer.sqnr != math.inf]
        return tuple(sorted(apart, key=lambda layer: _cost(layer.sqnr))[:count])

    def layer(self, node: str) -> Layer | None:
        """Row of a node; None if it has none."""
        return next((layer for layer in self.layers if layer.node == node), None)

    def to_data(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "batches": self.batches,
            "sqnr": as_data(self.sqnr),
            "outputs": [as_data(output) for output in self.outputs],
            "largest": [as_data(difference) for difference in self.largest],
            "size": self.size.to_data(),
            "layers": [layer.to_data() for layer in self.layers],
            "vanished": [asdict(each) for each in self.vanished],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        from quantc.support.terminal import plain_rows

        dB = f"SQNR {format_sqnr(self.sqnr)}{' dB' if math.isfinite(self.sqnr) else ''}"  # noqa: N806 - the unit
        lines = [f"{self.program}: {dB} over {self.batches} batches; {self.size}"]
        worst = self.costliest()
        rows = [
            (
                layer.node,
                layer.op,
                layer.rule,
                layer.module,
                layer.source,
                format_gain(layer.gain),
                format_sqnr(layer.local),
                format_sqnr(layer.sqnr),
            )
            for layer in worst[:MAX_ROWS]
        ]
        heads = ("node", "op", "rule", "module", "source", COSTS, "alone, dB", "here, dB")
        lines += ["what each quantized op costs, the worst first", *plain_rows(heads, rows)] if rows else []
        if len(worst) > MAX_ROWS:
            lines.append(f"  … and {len(worst) - MAX_ROWS} more: comparison.costliest()")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def format_gain(gain: float | None) -> str:
    """The cost of an op; empty where it was not measured."""
    return "" if gain is None else f"{gain:.2f}"


def _cost(local: float | None) -> float:
    return -math.inf if local is None or math.isnan(local) else local


def compare_programs(reference: Program, quantized: Program, batches: Iterable[Any]) -> Comparison:
    """Comparison of two programs of one form over batches, in lockstep; see `qc.compare`."""
    lockstep = Lockstep(reference, quantized)
    isolation, own = Isolation(reference), Isolation(quantized)
    count, gains = 0, dict[str, float]()
    for index, batch in enumerate(batches):
        expected, leaves = leaves_of(reference, batch, index), leaves_of(quantized, batch, index)
        with isolation.batch(index, expected) as given, own.batch(index, leaves) as taken:
            lockstep.run(given, taken)
        if not count:
            gains = dict(costs(reference, quantized, expected, together(lockstep.outputs).sqnr))
        count += 1
    outputs = tuple(noise.sqnr for noise in lockstep.outputs)
    return Comparison(
        program=quantized.name,
        batches=count,
        sqnr=together(lockstep.outputs).sqnr,
        outputs=outputs,
        layers=tuple(_layers(quantized, lockstep, gains)),
        size=size(reference, quantized),
        notes=tuple(_notes(quantized, lockstep)),
        largest=tuple(lockstep.largest),
        vanished=tuple(_find_vanished(quantized, lockstep)),
    )


def _layers(quantized: Program, lockstep: Lockstep, gains: Mapping[str, float]) -> Iterator[Layer]:
    for node in quantized.graph.nodes:
        noise = lockstep.cumulative.get(node.name)
        if noise is None or not noise.count:
            continue
        origin = quantized.origins.get(node) or Origin()
        claim = quantized.plan.claims.get(node)
        own = lockstep.local.get(node.name)
        place = (origin.module_path, origin.source)
        rule = "" if claim is None else claim.rule
        local = None if own is None else own.sqnr
        readers = tuple(_quantized_readers(node)) if claim is None and node.name in gains else ()
        yield Layer(node.name, op_name(node), rule, *place, noise.sqnr, local, gains.get(node.name), readers)


def _find_vanished(quantized: Program, lockstep: Lockstep) -> Iterator[Vanished]:
    named = {node.name: node for node in quantized.graph.nodes}
    for name, (zeros, count) in lockstep.vanished.items():
        if zeros:
            origin = quantized.origins.get(named[name]) or Origin()
            yield Vanished(name, origin.module_path, zeros / count, tuple(_quantized_readers(named[name])))


def _quantized_readers(node: fx.Node) -> list[str]:
    """The nodes that read a tensor through quantize and dequantize ops."""
    found: dict[str, None] = {}
    pending = [user for user in node.users if is_quantize(user)]
    while pending:
        for user in pending.pop().users:
            if belongs_to_qdq(user):
                pending.append(user)
            elif user.op != "output":
                found[user.name] = None
    return list(found)


def _notes(quantized: Program, lockstep: Lockstep) -> Iterator[str]:
    if lockstep.apart:
        names = ", ".join(node.name for node in lockstep.apart[:5])
        more = f" and {len(lockstep.apart) - 5} more" if len(lockstep.apart) > 5 else ""
        yield f"{len(lockstep.apart)} nodes have no counterpart in the float program: {names}{more}"
    if is_integer(quantized):
        yield "ops that compute on integers are not compared one by one: qc.agreement(qdq, integer, batches) does that"
    elif not lockstep.can_repeat:
        yield "no op was measured alone: the program writes in place, or holds modules of which nothing is known"
    nested = [node.name for node in quantized.graph.nodes if calls_graphs(node)]
    if nested:
        yield f"ops inside the graphs that {', '.join(nested)} call are not compared one by one"
    for index, noise in enumerate(lockstep.outputs):
        if not noise.count:
            yield f"output {index} holds no floats and is not compared"
