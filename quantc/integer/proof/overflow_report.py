"""Overflow report of a converted program: proven from its weights and ranges, for any input.

Nothing is cached: the bounds are computed from the program each time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.out_dtype import out_dtype

from quantc.errors import PipelineError
from quantc.integer.library import op_of
from quantc.integer.proof.factors import Factors, factors
from quantc.integer.proof.pair_sum_ranges import largest_activation, weight_factors
from quantc.ir.dialect import op_name
from quantc.ir.program import Program, Stage
from quantc.ir.sites import Origin
from quantc.ir.types import tensor_type
from quantc.spec.arithmetic import EXACT, INT32_BITS
from quantc.spec.instruction_sets import INSTRUCTION_SETS, PairSums

PRIMITIVES = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.convolution.default)
"""Primitives that integer matmuls and convolutions decompose to, besides `out_dtype`."""
MAX_ROWS = 40
"""Maximum number of rows in the text."""


class Safety(StrEnum):
    """Verdict on the sums of a conv or matmul."""

    SAFE = "safe"
    SATURATES = "can saturate"
    """Two products can leave the 16 bits they are added in."""
    OVERFLOWS = "can overflow"
    """The accumulator can leave its bits."""
    UNKNOWN = "not known"
    """The number of terms is not known before the program runs."""


@dataclass(frozen=True, slots=True)
class PairBound:
    """Bounds of pair sums on one instruction set."""

    instruction_set: str
    low: int
    high: int
    factors: tuple[tuple[int, float], ...]
    """The output channels whose pairs can leave 16 bits, each with the factor by which its weight scale would have to
    grow at most; for a product of two activations channel 0 stands for all, and the factor is 0."""
    qmax: int | None
    """The largest quantized activation with which none of them can; None if a smaller one would not do."""

    @property
    def is_safe(self) -> bool:
        return not self.factors

    @property
    def worst_factor(self) -> float:
        return max((factor for _, factor in self.factors), default=1.0)


@dataclass(frozen=True, slots=True)
class SumRow:
    """One conv or matmul and the bounds of its sums."""

    node: str
    """Its name; `branch/name` in a nested graph."""
    op: str
    module: str
    source: str
    instruction_set: str
    """The one its backend is for; empty if that is not known."""
    channels: int
    low: int | None
    high: int | None
    """Upper bound of the sums, as `low` is the lower; None if the number of terms is unknown."""
    bits: int | None
    pairs: tuple[PairBound, ...]
    """For each instruction set that adds pairs in 16 bits; none where a factor is wider than 8 bits, and none for a target
    with an arithmetic of its own."""
    accumulator_bits: int = INT32_BITS

    @property
    def saturates_on(self) -> tuple[str, ...]:
        """Instruction sets on which its pair sums can exceed 16 bits."""
        return tuple(pair.instruction_set for pair in self.pairs if not pair.is_safe)

    @property
    def pair(self) -> PairBound | None:
        """Bound on its backend's instruction set; if that is unknown, on the first that adds pairs."""
        asked = [pair for pair in self.pairs if self.instruction_set in ("", pair.instruction_set)]
        return next(iter(asked), None)

    @property
    def safety(self) -> Safety:
        """Verdict for its backend's instruction set; if that is unknown, for all."""
        if self.bits is not None and self.bits > self.accumulator_bits:
            return Safety.OVERFLOWS
        if self.instruction_set in self.saturates_on or (not self.instruction_set and self.saturates_on):
            return Safety.SATURATES
        return Safety.SAFE if self.bits is not None else Safety.UNKNOWN

    @property
    def advice(self) -> str:
        """Smallest change that makes it safe; empty if it is."""
        pair = self.pair
        if self.safety is not Safety.SATURATES or pair is None:
            return ""
        ways = [] if pair.qmax is None else [f"activations up to {pair.qmax}"]
        if pair.worst_factor:
            ways.append(f"scales of {len(pair.factors)} of {self.channels} channels × {pair.worst_factor:.4g}")
        return ", or ".join(ways)

    def to_data(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "verdict": self.safety.value,
            "saturates_on": list(self.saturates_on),
            "advice": self.advice,
        }

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.op, self.module, self.source) if part)
        where = f" on {', '.join(self.saturates_on)}" if self.safety is Safety.SATURATES else ""
        return f"{self.node} ({place}): {self.safety}{where}{f'; {self.advice}' if self.advice else ''}"


@dataclass(frozen=True, slots=True)
class Accumulators:
    """Bounds of every conv and matmul of a program. Prints as a table; `to_json()` for machine reading."""

    program: str
    rows: tuple[SumRow, ...]

    @property
    def unsafe(self) -> tuple[SumRow, ...]:
        """Rows not proven safe on their backend's instruction set, worst first."""
        found = [row for row in self.rows if row.safety is not Safety.SAFE]
        return tuple(sorted(found, key=lambda row: -_excess(row)))

    @property
    def is_safe(self) -> bool:
        return not self.unsafe

    @property
    def bits(self) -> int:
        """Bits of the widest accumulator with known bounds."""
        return max((row.bits or 0 for row in self.rows), default=0)

    def row(self, node: str) -> SumRow | None:
        """Row of a node; None if it has none."""
        return next((row for row in self.rows if row.node == node), None)

    @property
    def headline(self) -> str:
        if not self.rows:
            return "no products of integers"
        parts = [f"{len(self.rows)} products of integers, accumulators of at most {self.bits} bits"]
        for safety in Safety:
            found = [row for row in self.rows if row.safety is safety]
            if found:
                sets = dict.fromkeys(name for row in found for name in row.saturates_on)
                on = f" on {', '.join(sets)}" if safety is Safety.SATURATES else ""
                parts.append(f"{len(found)} {safety}{on}")
        return "; ".join(parts)

    def table(self, rows: Sequence[SumRow]) -> list[str]:
        """Rows as lines of text, up to a maximum."""
        from quantc.support.terminal import plain_rows

        heads = ("node", "op", "module", "accumulator", "bits", "16-bit pairs", "verdict", "the least that helps")
        lines = plain_rows(heads, [_cells(row) for row in rows[:MAX_ROWS]])
        return [*lines, f"  … and {len(rows) - MAX_ROWS} more"] if len(rows) > MAX_ROWS else lines

    def __str__(self) -> str:
        text = f"{self.program}: {self.headline}"
        return "\n".join([text, *self.table(self.rows)]) if self.rows else text

    def to_data(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "bits": self.bits,
            "is_safe": self.is_safe,
            "rows": [row.to_data() for row in self.rows],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False)


def why_not_provable(program: Program) -> str | None:
    """Reason why a program's sums cannot be analysed; None if they can."""
    if program.stage < Stage.FOLDED:
        return f"{program.name} has no integer weights yet"
    if any(_is_primitive_product(node) for node in program.nodes()):
        return (
            f"the products of {program.name} are spelled out in ATen primitives, which do not say what their ranges are"
        )
    return None


def _is_primitive_product(node: fx.Node) -> bool:
    if node.target is out_dtype:
        return True
    kind = tensor_type(node)
    return node.target in PRIMITIVES and kind is not None and not kind.dtype.is_floating_point


def accumulators(program: Program) -> Accumulators:
    """Bounds of the sums of every conv and matmul of a converted program."""
    why = why_not_provable(program)
    if why is not None:
        raise PipelineError(
            why,
            where=f"its stage is {program.stage.label}",
            advice='ask what qc.convert(prepared) gives, or qc.convert(prepared, to="integer")',
        )
    paths = {graph: path for path, graph in program.graphs()}
    targets = program.plan.instruction_sets
    return Accumulators(program.name, tuple(_row(program, found, paths, targets) for found in factors(program)))


def _row(program: Program, found: Factors, paths: dict[fx.Graph, str], targets: dict[str, str]) -> SumRow:
    node, path = found.node, paths[found.node.graph]
    origin = program.origins.get(node) or Origin()
    claim = program.plan.claims.get(node)
    own_arithmetic = None if claim is None else program.plan.arithmetic.get(claim.quantizer)
    reach = found.accumulators()
    own = op_of(node.target)
    return SumRow(
        node=f"{path}/{node.name}" if path else node.name,
        op=op_name(node) if own is None else f"quantc.{own.name}",
        module=origin.module_path,
        source=origin.source,
        instruction_set=targets.get(claim.quantizer, "") if claim is not None else "",
        channels=found.channels,
        low=None if reach is None else reach.lowest,
        high=None if reach is None else reach.highest,
        bits=None if reach is None else reach.bits,
        pairs=tuple(_pair_bounds(found)) if found.is_bytes and own_arithmetic is None else (),
        accumulator_bits=(own_arithmetic or EXACT).accumulator_bits,
    )


def _pair_bounds(found: Factors) -> Iterator[PairBound]:
    bounds: dict[PairSums, PairBound] = {}  # several instruction sets add pairs alike
    for instructions in INSTRUCTION_SETS.values():
        sums = instructions.pairs
        if sums is None:
            continue
        if sums not in bounds:
            bounds[sums] = _pair_bound(found, instructions.name, sums)
        yield replace(bounds[sums], instruction_set=instructions.name)


def _pair_bound(found: Factors, name: str, sums: PairSums) -> PairBound:
    reach = found.pairs(sums)
    unsafe = reach.beyond(sums.bits).nonzero().flatten().tolist()
    if not unsafe:
        return PairBound(name, reach.lowest, reach.highest, (), found.x.qmax)
    needed = weight_factors(found, sums)
    named = tuple((channel, needed[channel] if needed else 0.0) for channel in unsafe)
    return PairBound(name, reach.lowest, reach.highest, named, largest_activation(found, sums))


def _excess(row: SumRow) -> float:
    """Overshoot of a row relative to its bits."""
    pair = row.pair
    return max(pair.high / 2**15, -pair.low / 2**15) if pair is not None else (row.bits or 0) / row.accumulator_bits


def _cells(row: SumRow) -> tuple[str, ...]:
    pair = row.pair
    sums = "not known" if row.low is None else f"{row.low:,} .. {row.high:,}"
    pairs = "" if pair is None else f"{pair.low:,} .. {pair.high:,}"
    return row.node, row.op, row.module, sums, str(row.bits or ""), pairs, row.safety.value, row.advice
