"""Op-by-op agreement of a program's integer form with its Q/DQ form, each op fed the same integers.

Whole programs cannot be compared by counting differing elements: one legal step in one op is seen by every op after it.
So the Q/DQ program is run with each of its quantized tensors replaced by the integer program's value; remaining
differences are due to that op alone.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from quantc.errors import DataError, QuantcError
from quantc.integer.grid import Grid, grid_of
from quantc.ir.batch_inputs import check_batches, leaves_of
from quantc.ir.dialect import WEIGHTED, argument, is_op, op_name
from quantc.ir.program import Program, Stage
from quantc.passes.snap_bias import SnapBias
from quantc.pipeline.numeric_guard import NodeByNode
from quantc.pipeline.pipeline import Pipeline
from quantc.qdq.ops import is_choice, is_dequantize, is_quantize

NEAR_TIE = 1e-3
"""In steps: nearer to a tie than this, either neighbour is right."""
MAX_ROWS = 30


@dataclass(slots=True)
class AgreementRow:
    """One op whose result the integer program computes on integers."""

    node: str
    """Its result in the Q/DQ program."""
    op: str
    rule: str
    module: str
    elements: int = 0
    differ: int = 0
    """Number of unequal elements."""
    worst: int = 0
    """By how many steps, at most."""
    clear: int = 0
    """Elements whose exact value is farther than 1e-3 of a step from a tie."""
    clear_differ: int = 0
    float_error: float | None = None
    """For a result in float: the largest difference, as part of the largest value."""

    @property
    def clear_equal(self) -> float:
        """Fraction of equal elements among those that are not close to a rounding tie."""
        return 1.0 if not self.clear else 1 - self.clear_differ / self.clear

    def to_data(self) -> dict[str, Any]:
        return {**asdict(self), "clear_equal": self.clear_equal}


@dataclass(frozen=True, slots=True)
class Agreement:
    """Every op of the integer form compared with its Q/DQ counterpart. Prints as a table, largest difference first."""

    program: str
    batches: int
    rows: tuple[AgreementRow, ...]

    @property
    def worst(self) -> int:
        """Largest difference of any element, in steps."""
        return max((row.worst for row in self.rows), default=0)

    @property
    def clear_equal(self) -> float:
        """Smallest fraction of equal elements, rounding ties aside, of any op."""
        return min((row.clear_equal for row in self.rows), default=1.0)

    @property
    def float_error(self) -> float | None:
        """Largest error of a float result; None if there is none."""
        return max((row.float_error for row in self.rows if row.float_error is not None), default=None)

    def row(self, node: str) -> AgreementRow | None:
        return next((row for row in self.rows if row.node == node), None)

    def to_data(self) -> dict[str, Any]:
        head = {"program": self.program, "batches": self.batches}
        figures = {name: getattr(self, name) for name in ("worst", "clear_equal", "float_error")}
        return {**head, **figures, "rows": [row.to_data() for row in self.rows]}

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        from quantc.support.terminal import plain_rows

        quantized = sum(row.float_error is None for row in self.rows)
        parts = [f"{self.program}: {len(self.rows)} results of integer ops over {self.batches} batches"]
        if quantized:
            equal = f"at least {self.clear_equal:.4%} equal where no tie is near"
            parts.append(f"{quantized} on integers, at most {self.worst} steps from Q/DQ, {equal}")
        if self.float_error is not None:
            floats = len(self.rows) - quantized
            parts.append(f"{floats} in float, at most {self.float_error:.1e} of their largest value from Q/DQ")
        head = "; ".join(parts)
        rows = sorted(self.rows, key=lambda row: (-row.worst, row.clear_equal, -(row.float_error or 0.0)))
        columns = ("node", "op", "rule", "module", "elements", "differ", "steps", "equal if clear", "float error")
        lines = [head, *plain_rows(columns, [_cells(row) for row in rows[:MAX_ROWS]])]
        if len(rows) > MAX_ROWS:
            lines.append(f"  … and {len(rows) - MAX_ROWS} more: agreement.rows")
        return "\n".join(lines)


def _cells(row: AgreementRow) -> tuple[str, ...]:
    place = (row.node, row.op, row.rule, row.module, str(row.elements), str(row.differ))
    if row.float_error is not None:
        return (*place, "", "", f"{row.float_error:.1e}")
    return (*place, str(row.worst), f"{row.clear_equal:.4%}", "")


def agreement(qdq: Program, integer: Program, batches: Iterable[Any]) -> Agreement:
    """Run both forms of one program on batches and report their agreement, each op fed the same integers.

    `qdq` is the result of `qc.convert(prepared)`, `integer` that of `qc.convert(prepared, to="integer")`. Biases are
    among the integers: the Q/DQ form, which keeps them float, is given those of the integer form.
    """
    if not Stage.QUANTIZED <= qdq.stage < Stage.LOWERED or not integer.plan.lowered.rows:
        raise QuantcError(
            "qc.agreement compares a program in Q/DQ form with its integer form",
            where=f"{qdq.name} is {qdq.stage.label}, {integer.name} is {integer.stage.label}",
            advice='give qc.convert(prepared) first, then qc.convert(prepared, to="integer")',
        )
    _check_twins(qdq, integer)
    check_batches(batches)
    qdq = Pipeline((SnapBias(),)).run_on_copy(qdq)
    comparison = _Comparison(qdq, integer)
    count = 0
    for count, batch in enumerate(batches, start=1):
        comparison.add(leaves_of(qdq, batch, count - 1))
    if not count:
        raise DataError("compared on zero batches", where=integer.name, advice="give at least one batch")
    return Agreement(integer.name, count, tuple(comparison.rows.values()))


def _check_twins(qdq: Program, integer: Program) -> None:
    """Refuse two programs that were not made from one plan: they need not agree."""
    mine, theirs = qdq.plan.qparams, integer.plan.qparams
    apart = [name for name in dict.fromkeys([*mine, *theirs]) if name not in mine or name not in theirs]
    apart += [name for name in mine if name in theirs and not mine[name].equals(theirs[name])]
    if apart:
        raise QuantcError(
            f"the two programs have other scales: {', '.join(apart[:3])}{' and more' if len(apart) > 3 else ''}",
            where=f"{qdq.name} and {integer.name}",
            advice="convert one prepared program to both forms, with the same reduce_range",
        )


class _Integer(NodeByNode):
    """Runs the integer program and keeps its values for nodes of the Q/DQ form, by name."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.names = program.plan.lowered
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        name = self.names.get(n)
        if name is not None:
            self.values[name] = value
        return value


class _Comparison(NodeByNode):
    """Runs the Q/DQ program, fed the integer program's values, in float32 and beside it in float64."""

    def __init__(self, qdq: Program, integer: Program) -> None:
        super().__init__(qdq)
        self.program = qdq
        self.integer = _Integer(integer)
        self.rows: dict[str, AgreementRow] = {}
        self.exact: dict[fx.Node, Any] = {}
        """The result of each node in float64, from the same integers."""
        self.found: dict[fx.Node, tuple[Tensor, Tensor]] = {}
        """Scale and zero point of dequantize ops for which they are found as the program runs."""

    @torch.no_grad()
    def add(self, leaves: Sequence[Any]) -> None:
        self.integer.values = {}
        self.integer.run(*leaves, enable_io_processing=False)
        self.env, self.exact, self.found, self.args_iter = {}, {}, {}, iter(leaves)
        for node in self.program.graph.nodes:
            if node.op == "output":
                return
            self.env[node], self.exact[node] = self._both(node)
            for old in self.user_to_last_uses.get(node, []):
                self.env.pop(old, None)
                self.exact.pop(old, None)

    def _both(self, node: fx.Node) -> tuple[Any, Any]:
        """Value of a node: the Q/DQ program's, unless the integer program has its own; and the exact one."""
        value = self.run_node(node)
        grid = grid_of(self.program, node)
        if is_quantize(node) and grid is not None:
            levels = self.exact[node.all_input_nodes[0]] / _along(grid, value, grid.scale)
            return self._settle(node, value, levels + _along(grid, value, grid.zero_point))
        if is_choice(node) or is_quantize(node):
            return value, value  # scales found as it runs: both forms find the same of the same numbers
        if node in self.found:
            scale, zero_point = self.found[node]
            return value, (self.env[node.all_input_nodes[0]].double() - zero_point) * scale
        if isinstance(node.target, HigherOrderOperator) or (grid is not None and grid.group is not None):
            return value, _as_double(value)  # computed in float32 inside; scales of groups are those of weights
        if is_dequantize(node) and grid is not None:
            source = self.env[node.all_input_nodes[0]]
            real = (source.double() - _along(grid, source, grid.zero_point)) * _along(grid, source, grid.scale)
            return value, real
        if node.op in ("placeholder", "get_attr"):
            return value, _as_double(value)
        args, kwargs = map_arg((node.args, node.kwargs), self.exact.__getitem__)
        exact, more = _as_double(getattr(self, node.op)(node.target, args, kwargs)), self._bias_rounding(node)
        exact = exact if more is None else exact + more
        return self._settle(node, value, exact)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        chosen = [item for item in n.args[1:3] if isinstance(item, fx.Node) and item.target is operator.getitem]
        if is_dequantize(n) and len(chosen) == 2:
            self.found[n] = (self.env[chosen[0]].double(), self.env[chosen[1]])
        more = self._bias_rounding(n)
        return value if more is None else (value.double() + more).to(value.dtype)

    def _bias_rounding(self, node: fx.Node) -> Tensor | None:
        """By how much a constant bias changes as it is rounded to steps of an accumulator, where these are found as the
        program runs."""
        of_two = is_op(node, "addmm")
        found = self.found.get(argument(node, "x")) if of_two or is_op(node, *WEIGHTED) else None
        if found is None:
            return None
        weight, bias = argument(node, "y" if of_two else "w"), argument(node, "b")
        grid, real = grid_of(self.program, weight), self.program.tensor(bias) if isinstance(bias, fx.Node) else None
        if grid is None or grid.group is not None or real is None or real.dim() != 1:
            return None
        given, scale = real.double() * (argument(node, "beta") if of_two else 1), grid.scale
        if scale.dim():  # with groups, a transposed convolution has its scales again for each group
            scale = scale.repeat(max(given.numel() // scale.numel(), 1))
        step = found[0] * scale * (argument(node, "alpha") if of_two else 1)
        more = torch.round(given / step) * step - given
        trailing = 0 if of_two else self.env[weight].dim() - 2
        return more.reshape(-1, *[1] * trailing) if trailing else more

    def _settle(self, node: fx.Node, value: Any, exact: Any) -> tuple[Any, Any]:
        """The value that goes on from here, and its exact twin; noted if the integer program has one of its own."""
        twin = self.integer.values.get(node.name)
        if not isinstance(twin, Tensor) or not isinstance(value, Tensor):
            return value, value if is_quantize(node) else exact
        row = self._row(node)
        if value.is_floating_point():
            _note_float(row, value, twin)
            return twin, twin.double()
        _note_levels(row, value, twin, exact)
        return twin, twin

    def _row(self, node: fx.Node) -> AgreementRow:
        if node.name not in self.rows:
            made_by = node.all_input_nodes[0] if is_quantize(node) else node
            claim = self.program.plan.claims.get(made_by)
            origin = self.program.origins.get(made_by)
            rule, module = (claim.rule if claim else ""), (origin.module_path if origin else "")
            self.rows[node.name] = AgreementRow(node.name, op_name(made_by), rule, module)
        return self.rows[node.name]


def _note_float(row: AgreementRow, value: Tensor, twin: Tensor) -> None:
    row.elements += value.numel()
    row.differ += int((value != twin).sum())
    if value.numel():
        largest = float(value.abs().max()) or 1.0
        row.float_error = max(row.float_error or 0.0, float((value - twin).abs().max()) / largest)


def _note_levels(row: AgreementRow, value: Tensor, twin: Tensor, exact: Tensor) -> None:
    apart = (value.long() - twin.long()).abs()
    clear = (exact - exact.floor() - 0.5).abs() > NEAR_TIE
    row.elements += value.numel()
    row.differ += int((apart > 0).sum())
    row.worst = max(row.worst, int(apart.max()) if apart.numel() else 0)
    row.clear += int(clear.sum())
    row.clear_differ += int(((apart > 0) & clear).sum())


def _along(grid: Grid, x: Tensor, values: Tensor) -> Tensor:
    """Scales or zero points, shaped to broadcast to a tensor."""
    return values if grid.axis is None else values.reshape([-1 if dim == grid.axis else 1 for dim in range(x.dim())])


def _as_double(value: Any) -> Any:
    """A value with every float tensor in float64."""
    return pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, value)
