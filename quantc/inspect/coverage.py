"""Coverage: every op of a program is quantized, propagated, or float with a reason."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from torch import fx

from quantc.annotate.float_view import float_view
from quantc.annotate.left_float import ops_of
from quantc.annotate.operand_forms import Forms
from quantc.annotate.reasons import Reason, Reasons, Why
from quantc.calibration.underflow import Coarse, coarse_groups
from quantc.errors import AnnotationError
from quantc.inspect.techniques import HEAD as TECHNIQUE
from quantc.inspect.techniques import count_techniques, in_words, with_techniques
from quantc.integer.proof.overflow_report import Accumulators, accumulators, why_not_provable
from quantc.ir.dialect import op_name
from quantc.ir.mac_count import MultiplyAdds, example_sizes, is_product, products
from quantc.ir.plan import Claim, Part
from quantc.ir.program import Program, Stage
from quantc.ir.sites import Origin
from quantc.passes.remove_fake_quantize import as_inference_has_it
from quantc.spec.formats import Timing

MAX_ROWS = 40
"""Maximum number of rows of each kind in the text."""
BY_OP = ("op", "quantized", "propagated", "float", TECHNIQUE, "multiply-adds", "int8")


class Verdict(StrEnum):
    """State of an op: quantized, propagated or float."""

    QUANTIZED = "quantized"
    PROPAGATED = "propagated"
    FLOAT = "float"


VerdictName = Literal["quantized", "propagated", "float"]


@dataclass(frozen=True, slots=True)
class Row:
    """One op and its verdict."""

    node: str
    """Its name; `branch/name` in a nested graph."""
    op: str
    verdict: Verdict
    technique: str
    """One of "static", "dynamic" and "weight-only"; empty if no rule took it."""
    rule: str
    """The rule that took it; for a float op the rule that came nearest, if any did."""
    quantizer: str
    why: Why | None
    """The kind of reason for which it is float."""
    reason: str
    module: str
    source: str
    macs: int | None
    """Its multiply-adds; None where they are not known."""
    int8_macs: int
    """Multiply-adds whose factors are all 8-bit integers."""

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.module, self.source) if part)
        return f"{self.node} ({self.op}{f', {place}' if place else ''}): {self.verdict}, {self.reason}"


@dataclass(frozen=True, slots=True)
class Coverage:
    """Every op of a program in exactly one of three states. Prints as tables; `to_json()` for machine reading."""

    program: str
    stage: str
    quantizer: str
    rows: tuple[Row, ...]
    accumulators: Accumulators | None = None
    """Accumulator bounds, once the weights are integers."""
    coarse: tuple[Coarse, ...] = ()
    """Tensors that are too small for the smallest scale, once calibration has seen them."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Tensors that are quantized, but likely wrong."""
        return tuple(map(str, self.coarse))

    @property
    def counts(self) -> dict[str, int]:
        """Number of ops by verdict."""
        found = Counter(row.verdict for row in self.rows)
        return {verdict.value: found[verdict] for verdict in Verdict}

    @property
    def techniques(self) -> dict[str, int]:
        """Numbers of static, dynamic and weight-only ops; propagated ones are not counted."""
        return count_techniques(row.technique for row in self.rows if row.verdict is not Verdict.PROPAGATED)

    @property
    def macs(self) -> int:
        """Multiply-adds of all ops, as far as known."""
        return sum(row.macs or 0 for row in self.rows)

    @property
    def int8_macs(self) -> int:
        return sum(row.int8_macs for row in self.rows)

    @property
    def int8_share(self) -> float | None:
        """Fraction of the multiply-adds with 8-bit integer factors; None if there are none."""
        return self.int8_macs / self.macs if self.macs else None

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Ops whose multiply-adds are unknown."""
        return tuple(row.node for row in self.rows if row.macs is None)

    def rows_for(self, verdict: Verdict | VerdictName) -> tuple[Row, ...]:
        """Ops with a verdict, in program order."""
        wanted = Verdict(verdict)
        return tuple(row for row in self.rows if row.verdict is wanted)

    def row(self, node: str) -> Row | None:
        """Row of a node; None if it has none."""
        return next((row for row in self.rows if row.node == node), None)

    def to_data(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "stage": self.stage,
            "quantizer": self.quantizer,
            "counts": self.counts,
            "techniques": self.techniques,
            "integer_ops": self.integer_ops,
            "macs": self.macs,
            "int8_macs": self.int8_macs,
            "int8_share": self.int8_share,
            "uncounted": list(self.uncounted),
            "rows": [row.to_data() for row in self.rows],
            "warnings": list(self.warnings),
            "accumulators": None if self.accumulators is None else self.accumulators.to_data(),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False)

    @property
    def is_integer(self) -> bool:
        """True if the program is in integer form: everything that is not float computes on integers."""
        return self.stage == Stage.LOWERED.label

    @property
    def integer_ops(self) -> int:
        """Number of ops that compute on integers."""
        return len(self.rows) - self.counts[Verdict.FLOAT] if self.is_integer else 0

    @property
    def headline(self) -> str:
        """Totals, in one line."""
        taken, handed_on, in_float = (
            f"{count} {verdict}{self._techniques_text(verdict)}" for verdict, count in self.counts.items()
        )
        states = f"{taken}, {handed_on}, {in_float}"
        if self.is_integer:
            states = f"{self.integer_ops} on integers ({taken}, {handed_on}), {in_float}"
        share = self.int8_share
        products = "no multiply-adds" if share is None else f"{share:.1%} of {self.macs:,} multiply-adds int8 × int8"
        unknown = f"; not counted: {len(self.uncounted)} ops of unknown size" if self.uncounted else ""
        return (
            f"{self.program} for {self.quantizer or 'no backend'}: {len(self.rows)} ops, {states}; {products}{unknown}"
        )

    def _techniques_text(self, verdict: Verdict | str) -> str:
        """The techniques of the ops of a verdict, in brackets; nothing where all are static."""
        words = in_words(row.technique for row in self.rows_for(Verdict(verdict)))
        return f" ({words})" if words else ""

    def __str__(self) -> str:
        from quantc.support.terminal import plain_rows

        lines = [self.headline, *(f"warning: {text}" for text in self.warnings)]
        if self.rows:
            lines += ["", "by op", *plain_rows(*with_techniques(BY_OP, self._by_op()))]
        for verdict in (Verdict.FLOAT, Verdict.QUANTIZED, Verdict.PROPAGATED):
            rows = self.rows_for(verdict)
            if rows:
                lines += ["", verdict.value, *plain_rows(*_table(rows))]
            if len(rows) > MAX_ROWS:
                lines.append(f"  … and {len(rows) - MAX_ROWS} more: coverage.rows_for({verdict.value!r})")
        return "\n".join([*lines, *self._sums()])

    def _sums(self) -> list[str]:
        """Accumulator summary: in full if something is not safe."""
        found = self.accumulators
        if found is None or not found.rows:
            return []
        return ["", f"accumulators: {found.headline}", *(found.table(found.unsafe) if found.unsafe else ())]

    def _by_op(self) -> list[tuple[str, ...]]:
        by_op: dict[str, list[Row]] = {}
        for row in self.rows:
            by_op.setdefault(row.op, []).append(row)
        found: list[tuple[int, tuple[str, ...]]] = []
        for op, rows in by_op.items():
            counts = Counter(row.verdict for row in rows)
            macs = sum(row.macs or 0 for row in rows)
            int8 = f"{sum(row.int8_macs for row in rows) / macs:.1%}" if macs else ""
            told = in_words(row.technique for row in rows)
            cells = (op, *(str(counts[verdict] or "") for verdict in Verdict), told, f"{macs:,}" if macs else "", int8)
            found.append((macs, cells))
        found.sort(key=lambda item: (-item[0], item[1][0]))
        return [cells for _, cells in found]


def _table(rows: tuple[Row, ...]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The first rows of a verdict, with column heads."""
    shown = rows[:MAX_ROWS]
    cells = [(row.node, row.op, row.technique, row.module, row.source, row.reason) for row in shown]
    return with_techniques(("node", "op", TECHNIQUE, "module", "source", "why"), cells)


def coverage(program: Program) -> Coverage:
    """Coverage of a prepared program."""
    check_prepared(program)
    program = as_inference_has_it(program) if program.is_live else program
    judge = Judge(program)
    return Coverage(
        program.name,
        program.stage.label,
        judge.quantizer,
        tuple(judge.row(path, node) for path, node in ops_of(judge.program)),
        accumulators(program) if why_not_provable(program) is None else None,
        tuple(coarse_groups(program)),
    )


def check_prepared(program: Program) -> None:
    if program.stage < Stage.ANNOTATED:
        raise AnnotationError(
            f"{program.name} was not prepared, so nothing is decided about its ops",
            where=f"its stage is {program.stage.label}",
            advice='call prepared = qc.prepare(program, "x86") and ask the result',
        )


def _first_reader(node: fx.Node, among: set[fx.Node]) -> fx.Node:
    """The node that what follows a node leads to."""
    while node not in among and node.users:
        node = next(iter(node.users))
    return node


class Judge:
    """Determines verdicts for the nodes of one program. Backend tables are tried at most once for all of them."""

    def __init__(self, program: Program) -> None:
        view = float_view(program)
        self.program = program if program.stage >= Stage.QUANTIZED else view
        """Its nodes are the ones to ask for: observers are not among them."""
        self.is_integer = program.stage >= Stage.LOWERED
        self.reasons = Reasons(view)
        self.sizes = example_sizes(program)
        self.forms = Forms(self.program)
        self._twins: dict[tuple[str, str], fx.Node] = {
            (path, node.name): node for path, graph in view.graphs() for node in graph.nodes
        }

    @property
    def quantizer(self) -> str:
        quantizer = self.program.plan.quantizer
        if quantizer is not None:
            return quantizer.name
        return "+".join(dict.fromkeys(claim.quantizer for claim in self.program.plan.claims.rows.values()))

    def twin(self, path: str, node: fx.Node) -> fx.Node:
        """Counterpart of a node in the program without Q/DQ ops."""
        return self._twins[path, node.name]

    def row(self, path: str, node: fx.Node) -> Row:
        """Row of a node of `program`."""
        macs, int8 = self._multiply_adds(node)
        origin = self.program.origins.get(node) or Origin()
        name = f"{path}/{node.name}" if path else node.name
        place = (origin.module_path, origin.source)
        return Row(name, op_name(node), *self._judge(path, node), *place, macs, int8)

    def _judge(self, path: str, node: fx.Node) -> tuple[Verdict, str, str, str, Why | None, str]:
        """Verdict, technique, rule, quantizer, and why."""
        claim = self.program.plan.claims.get(node)
        if self.is_integer and node in self.program.plan.left_float:
            return self._in_float(node, claim)
        if claim is not None:
            verdict = Verdict.PROPAGATED if claim.part is Part.PROPAGATED else Verdict.QUANTIZED
            how = "" if claim.timing is Timing.STATIC else f", {claim.timing.value}"
            by = f"{'on integers, ' if self.is_integer else ''}by {claim.rule} of {claim.quantizer}{how}"
            return verdict, claim.timing.value, claim.rule, claim.quantizer, None, by
        if self.forms.is_quantized(node):
            reason = "it reads quantized tensors; by which rule is not recorded"
            return Verdict.QUANTIZED, self.forms.timing(node).value, "", "", None, reason
        found = self.why_float(path, node)
        nearest = found.refusal or found.follower
        rule = nearest.rule.name if nearest is not None else ""
        by = found.trial.backend.name if found.trial is not None else ""
        return Verdict.FLOAT, "", rule, by, found.why, found.text

    def _in_float(self, node: fx.Node, claim: Claim | None) -> tuple[Verdict, str, str, str, Why | None, str]:
        """Verdict for a node that lower-integer left in float."""
        reason = self.program.plan.left_float[node]
        if claim is None:
            return Verdict.FLOAT, "", "", "", Why.SAID, reason
        if claim.timing is Timing.WEIGHT_ONLY:
            reason = "its weight is stored quantized, and it computes in float"
        return Verdict.FLOAT, claim.timing.value, claim.rule, claim.quantizer, Why.NOT_INTEGER, reason

    def why_float(self, path: str, node: fx.Node) -> Reason:
        """Reason why no rule claimed a node."""
        return self.reasons(self.twin(path, node))

    def _multiply_adds(self, node: fx.Node) -> tuple[int | None, int]:
        """All of a node's multiply-adds, its steps' among them, and those of 8-bit integers.

        An op that no rule took computes in float, whatever the tensors it reads were before."""
        total, int8 = 0, 0
        is_taken = self.forms.is_quantized(node) and not (self.is_integer and node in self.program.plan.left_float)
        for step in (*self._steps.get(node, ()), node):
            found = products(step, self.sizes)
            if found is None:
                return None, 0
            total += sum(product.count for product in found)
            int8 += sum(product.count for product in found if is_taken and self._is_int8(step, product))
        return total, int8

    @cached_property
    def _steps(self) -> dict[fx.Node, list[fx.Node]]:
        """In integer form: the products that are a step of another node, by that node."""
        if not self.is_integer:
            return {}
        listed = {node for _, node in ops_of(self.program)}
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.program.nodes():
            if is_product(node) and node not in listed:
                found.setdefault(_first_reader(node, listed), []).append(node)
        return found

    def _is_int8(self, node: fx.Node, product: MultiplyAdds) -> bool:
        return all(self.forms.reads_bytes(node, factor) for factor in product.factors)
