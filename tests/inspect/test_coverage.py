"""Coverage: every op in exactly one state, with the best reason, and multiply-adds that torch counts the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import quantc as qc
from quantc.annotate.annotator import Annotator
from quantc.annotate.quantizer import Backend
from quantc.annotate.reasons import Why
from quantc.errors import AnnotationError
from quantc.inspect.coverage import Coverage, Verdict
from quantc.ir.plan import Claim
from quantc.ir.program import Program
from quantc.passes.annotate import Annotate
from quantc.passes.share import Share
from quantc.patterns import aten
from quantc.patterns.dsl import op, optional
from quantc.patterns.explain_match import Explanation
from quantc.patterns.operand_patterns import const
from quantc.patterns.table import Rule, RuleTable
from quantc.pipeline.pipeline import Pass
from quantc.spec.spec import INT8_WEIGHT, INT16, UINT8
from tests.support.chains import chain
from tests.support.growth import calls, exponent

conv = aten.conv("x", const("w"), const("b?"))
linear = aten.linear("x", const("w"), const("b?"))
TINY = Backend(
    "tiny",
    RuleTable(
        "tiny",
        (
            Rule("conv", conv >> optional(aten.relu), {"x": "act", "w": "weight", "out": "act?"}),
            Rule("linear", linear, {"x": "act", "w": "weight", "out": "act?"}),
            Rule("matmul", aten.matmul, {"x": "act", "y": "act", "out": "act?"}),
            Rule("pool", aten.max_pool, {"x": "pass", "out": "like x"}),
            Rule("flat", op("flatten", "reshape", args="x"), {"x": "pass", "out": "like x"}),
        ),
    ),
    roles={"act": UINT8, "weight": INT8_WEIGHT},
)
"""A backend of this test's own, so that the tables of the real ones can grow."""


class Mixed(nn.Module):
    """An op for each verdict and each reason."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.late = nn.Conv2d(4, 4, 1)
        self.pool = nn.MaxPool2d(2)
        self.first = nn.MaxPool2d(2)
        self.head = nn.Linear(36, 5)
        self.other = nn.Linear(5, 5)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.flatten(self.pool(self.late(torch.relu(self.conv(x)))), 1)
        x = self.other(torch.erf(self.head(x)))
        return x + F.linear(x, x[:5].t() @ x[:5])[(index + 1).clamp(max=1)]


@pytest.fixture(scope="module")
def mixed() -> tuple[Program, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    example = (torch.randn(6, 3, 16, 16), torch.tensor([0, 1, 0, 1, 0, 1]))
    return qc.capture(Mixed().eval(), example), example


CONFIG = qc.QuantConfig().set("other", qc.FLOAT)


def prepared_mixed(mixed: tuple[Program, Any]) -> Program:
    return qc.prepare(mixed[0], TINY, config=CONFIG)


def by_node(coverage: Coverage) -> dict[str, tuple[str, str]]:
    return {row.node: (row.verdict.value, row.why.value if row.why else row.rule) for row in coverage.rows}


def test_every_op_is_in_one_state_and_float_ops_have_the_best_reason(mixed: tuple[Program, Any]) -> None:
    prepared = prepared_mixed(mixed)
    coverage = prepared.coverage()
    ops = [node.name for node in prepared.graph.nodes if node.op == "call_function"]
    assert [row.node for row in coverage.rows] == ops
    found = by_node(coverage)
    expected = {
        "max_pool2d": ("float", "not-fed"),
        "conv2d": ("quantized", "conv"),
        "relu": ("quantized", "conv"),
        "conv2d_1": ("quantized", "conv"),
        "max_pool2d_1": ("propagated", "pool"),
        "flatten": ("propagated", "flat"),
        "linear": ("quantized", "linear"),
        "erf": ("float", "no-rule"),
        "linear_1": ("float", "config"),
        "matmul": ("quantized", "matmul"),
        "linear_2": ("float", "refused"),
        "clamp": ("float", "integer"),
    }
    assert {name: found[name] for name in expected} == expected
    assert sum(coverage.counts.values()) == len(coverage.rows) == len({row.node for row in coverage.rows})
    rows = {row.node: row for row in coverage.rows}
    assert "expected a constant tensor for w, found matmul" in rows["linear_2"].reason
    assert rows["linear_2"].rule == "linear"
    assert "other: float" in rows["linear_1"].reason
    assert "x" in rows["max_pool2d"].reason
    assert rows["conv2d"].module == "conv"
    assert rows["conv2d"].source.startswith("test_coverage.py:")
    assert rows["conv2d"].quantizer == "tiny"


def test_the_rows_are_the_same_before_and_after_convert_and_after_loading(
    mixed: tuple[Program, Any], tmp_path: Path
) -> None:
    program, example = mixed
    prepared = qc.prepare(program, "x86", config=CONFIG)
    rows = prepared.coverage().rows
    assert {row.verdict for row in rows} == set(Verdict)
    qc.calibrate(prepared, [example])
    quantized = qc.convert(prepared)
    assert quantized.coverage().rows == rows
    quantized.save(tmp_path / "model.qc")
    assert qc.load(tmp_path / "model.qc").coverage().rows == rows


def test_a_loaded_program_whose_backend_is_not_installed_keeps_its_verdicts(
    mixed: tuple[Program, Any], tmp_path: Path
) -> None:
    program, example = mixed
    prepared = qc.prepare(program, TINY, config=CONFIG)
    qc.calibrate(prepared, [example])
    qc.convert(prepared).save(tmp_path / "model.qc")
    before, after = prepared.coverage(), qc.load(tmp_path / "model.qc").coverage()
    for left, right in zip(before.rows, after.rows, strict=True):
        assert (left.node, left.verdict, left.macs, left.int8_macs) == (
            right.node,
            right.verdict,
            right.macs,
            right.int8_macs,
        )
        assert right.reason
    why = {row.node: row.why for row in after.rows}
    assert why["erf"] in {Why.NOT_RECORDED, Why.NO_RULE}
    assert why["linear_1"] in {Why.CONFIG, Why.SAID}


def test_int8_products_are_those_whose_factors_are_dequantized_in_the_graph(mixed: tuple[Program, Any]) -> None:
    """Against the converted graph, read off by the names of torch's own ops."""
    program, example = mixed
    prepared = qc.prepare(program, TINY)
    coverage = prepared.coverage()
    qc.calibrate(prepared, [example])
    expected: dict[str, bool] = {}
    for node in qc.convert(prepared).graph.nodes:
        factors = {"conv2d": node.args[:2], "linear": node.args[:2], "matmul": node.args[:2]}
        name = str(node.target).split(".")[1] if node.op == "call_function" and "." in str(node.target) else ""
        if name in factors:
            expected[node.name] = all("dequantize_per" in str(factor.target) for factor in factors[name])
    counted = {row.node: row for row in coverage.rows if row.macs}
    assert set(counted) == set(expected)
    assert {name: row.int8_macs == row.macs for name, row in counted.items()} == expected
    assert not all(expected.values())
    assert any(expected.values())
    share = coverage.int8_share
    assert share is not None
    assert share == sum(row.macs or 0 for name, row in counted.items() if expected[name]) / coverage.macs


def test_sixteen_bit_products_are_not_int8() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    wide = qc.prepare(qc.capture(model, (torch.randn(2, 4),)), TINY.but(act=INT16)).coverage()
    assert wide.counts["quantized"] == 1
    assert wide.int8_share == 0


# -- multiply-adds ---------------------------------------------------------------------------------------------------


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Call(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


PRODUCTS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, groups=2), ((2, 4, 17),)),
    "conv2d": (lambda: nn.Conv2d(4, 8, (3, 2), padding=1, dilation=2), ((2, 4, 9, 11),)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), ((1, 6, 8, 8),)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), ((1, 2, 4, 5, 6),)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), ((2, 4, 5, 5),)),
    "linear": (lambda: nn.Linear(7, 5), ((2, 3, 7),)),
    "matmul": (lambda: Call(torch.matmul), ((2, 3, 4, 5), (2, 3, 5, 6))),
    "matmul-2d": (lambda: Call(torch.matmul), ((4, 5), (5, 6))),
    "bmm": (lambda: Call(torch.bmm), ((3, 4, 5), (3, 5, 2))),
    "addmm": (lambda: Call(torch.addmm), ((4, 6), (4, 5), (5, 6))),
    "baddbmm": (lambda: Call(torch.baddbmm), ((2, 4, 6), (2, 4, 5), (2, 5, 6))),
    "einsum": (lambda: Call(lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y)), ((2, 3, 4, 5), (2, 3, 6, 5))),
    "einsum-dots": (lambda: Call(lambda x, y: torch.einsum("...ij,kj->...ik", x, y)), ((2, 3, 4, 5), (7, 5))),
    "einsum-implicit": (lambda: Call(lambda x, y: torch.einsum("ij,jk", x, y)), ((4, 5), (5, 6))),
    "sdpa": (Attend, ((2, 3, 8, 16), (2, 3, 6, 16), (2, 3, 6, 16))),
    "lstm": (lambda: nn.LSTM(5, 4, num_layers=2, bidirectional=True, batch_first=True), ((2, 3, 5),)),
    "gru": (lambda: nn.GRU(5, 4), ((3, 2, 5),)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_multiply_adds_are_half_the_flops_that_torch_counts(name: str) -> None:
    torch.manual_seed(0)
    make, shapes = PRODUCTS[name]
    model, example = make().eval(), tuple(torch.randn(shape) for shape in shapes)
    in_parts = torch.backends.mkldnn.flags(enabled=False)  # attention and layers that torch can count
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), in_parts:
        model(*example)
    assert counter.get_total_flops() > 0
    coverage = qc.prepare(qc.capture(model, example), TINY, allow_empty=True).coverage()
    assert 2 * coverage.macs == counter.get_total_flops()
    assert coverage.uncounted == ()


def test_dynamic_sizes_count_as_in_the_example_inputs_and_are_unknown_without() -> None:
    model, example = nn.Sequential(nn.Linear(4, 3)).eval(), (torch.randn(7, 4),)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = qc.capture(model, example, dynamic_shapes=({0: batch},))
    prepared = qc.prepare(program, TINY)
    assert prepared.coverage().macs == 7 * 4 * 3
    prepared.example_inputs = None
    coverage = prepared.coverage()
    assert coverage.rows[0].macs is None
    assert coverage.uncounted == ("linear",)
    assert coverage.int8_share is None
    assert "not counted: 1 ops" in str(coverage)


# -- other programs --------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def right(x: Tensor) -> Tensor:
            return torch.erf(self.a(x))

        def left(x: Tensor) -> Tensor:
            return torch.relu(self.b(x))

        result: Tensor = torch.cond(x.sum() > 0, right, left, (x,))
        return result


def test_nested_graphs_are_covered_with_their_path() -> None:
    prepared = qc.prepare(qc.capture(Branches().eval(), (torch.randn(2, 4),)), TINY)
    rows = {row.node: row for row in prepared.coverage().rows}
    inside = {name for name in rows if "/" in name}
    assert {name.rpartition("/")[2] for name in inside} >= {"linear", "erf"}
    assert len([name for name in inside if rows[name].op == "linear"]) == 2
    assert all(rows[name].macs == 2 * 4 * 4 for name in inside if rows[name].op == "linear")
    erf = next(rows[name] for name in inside if rows[name].op == "erf")
    assert erf.why is Why.NO_RULE
    assert prepared.explain(erf.node).row == erf


def test_a_program_with_observers_has_the_same_rows(mixed: tuple[Program, Any]) -> None:
    prepared = prepared_mixed(mixed)
    rows = prepared.coverage().rows
    observed = qc.Pipeline.parse("insert-observers").run(prepared.clone())
    assert any(node.op == "call_module" for node in observed.graph.nodes)
    assert observed.coverage().rows == rows


def test_opaque_ops_say_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus()).eval()
    program = qc.capture(model, (torch.randn(2, 4),), "fx", leaf="1")
    linear, kept = qc.prepare(program, TINY, allow_empty=True).coverage().rows
    assert kept.why is Why.OPAQUE
    assert "no rule can name it" in kept.reason
    assert linear.why is Why.REFUSED, "the module that was kept may write to it"


def test_several_quantizers_each_have_their_rows() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.erf(x) @ x.t()

    table = RuleTable("erfs", (Rule("erf", op("erf", args="x"), {"x": "act", "out": "act"}),))
    erfs = Backend("erfs", table, roles={"act": UINT8})
    prepared = qc.prepare(qc.capture(Two().eval(), (torch.randn(3, 4),)), [erfs, TINY])
    found = {row.node: (row.rule, row.quantizer) for row in prepared.coverage().rows_for("quantized")}
    assert found == {"erf": ("erf", "erfs"), "matmul": ("matmul", "tiny")}
    assert prepared.coverage().quantizer == "erfs+tiny"


@dataclass(frozen=True)
class Plain:
    """A quantizer without a table."""

    name: str = "plain"

    def transforms(self) -> tuple[Pass, ...]:
        return ()

    def annotate(self, annotator: Annotator) -> None:
        nodes = [node for node in annotator.program.graph.nodes if "linear" in node.name]
        annotator.claim(nodes[:1], Claim(self.name, "first", nodes[0].name))
        annotator.operand(nodes[0], 0, qc.Quantize(UINT8))
        annotator.leave(nodes[1], "one is enough")

    def validate(self, program: Program) -> None:
        return

    def supported_operators(self) -> tuple[str, ...]:
        return ("linear",)

    def explain(self, program: Program, node: str) -> Explanation:
        return Explanation(self.name, node, "", (), 0)


def test_a_quantizer_without_a_table_is_covered_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    prepared = qc.prepare(qc.capture(model, (torch.randn(2, 4),)), Plain())
    rows = prepared.coverage().rows
    assert [(row.op, row.why) for row in rows] == [
        ("linear", None),
        ("relu", Why.NO_RULE),
        ("linear", Why.SAID),
        ("linear", Why.NOT_RECORDED),
    ]
    assert rows[2].reason == "one is enough"


# -- the value -------------------------------------------------------------------------------------------------------


def test_coverage_prints_totals_first_and_is_json(mixed: tuple[Program, Any]) -> None:
    coverage = prepared_mixed(mixed).coverage()
    text = str(coverage)
    first = text.splitlines()[0]
    assert first.startswith("Mixed for tiny: ")
    assert f"{coverage.counts['float']} float" in first
    assert "int8 × int8" in first
    assert "tiny has no rule for erf" in text
    data = json.loads(coverage.to_json())
    assert data == json.loads(json.dumps(coverage.to_data()))
    assert [row["node"] for row in data["rows"]] == [row.node for row in coverage.rows]
    assert data["counts"] == coverage.counts
    assert {row["why"] for row in data["rows"] if row["verdict"] == "float"} >= {"config", "no-rule", "refused"}


def test_long_tables_are_cut_and_say_so() -> None:
    model = nn.Sequential(*(nn.Softplus() for _ in range(50)), nn.Linear(3, 3)).eval()
    text = str(qc.prepare(qc.capture(model, (torch.randn(1, 3),)), TINY).coverage())
    assert "… and 10 more: coverage.rows_for('float')" in text


def test_a_program_that_was_not_prepared_is_refused(mixed: tuple[Program, Any]) -> None:
    for ask in (mixed[0].coverage, lambda: mixed[0].explain("conv2d")):
        with pytest.raises(AnnotationError, match="Mixed was not prepared") as caught:
            ask()
        assert "qc.prepare" in str(caught.value.advice)


def test_nothing_quantized_is_refused_with_the_reasons() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 4)).double().eval()
    program = qc.capture(model, (torch.randn(2, 4, dtype=torch.float64),))
    with pytest.raises(AnnotationError, match="nothing was quantized") as caught:
        qc.prepare(program, TINY)
    assert "linear (one of 2 linear): linear of tiny: input_1 is f64[batch,4]" in str(caught.value.where)
    assert "softplus" in str(caught.value.where)
    assert "allow_empty=True" in str(caught.value.advice)
    coverage = qc.prepare(program, TINY, allow_empty=True).coverage()
    assert coverage.counts == {"quantized": 0, "propagated": 0, "float": 3}


@pytest.mark.parametrize("left", ["quantized", "float"])
def test_work_grows_with_the_program_and_no_faster(left: str) -> None:
    config = qc.QuantConfig().set_op("conv2d", qc.FLOAT) if left == "float" else None
    costs: dict[int, float] = {}
    for blocks in (20, 40, 80):
        prepared = qc.prepare(chain(blocks), TINY, config=config, allow_empty=True)
        costs[blocks] = calls(prepared.coverage)
    assert exponent(costs) < 1.1


@pytest.mark.slow
def test_a_hundred_thousand_nodes() -> None:
    program = chain(12_000)
    assert len(program.graph.nodes) > 100_000
    qc.Pipeline((Annotate(backend=qc.TableQuantizer(TINY)), Share())).run(program)
    coverage = program.coverage()
    assert coverage.counts == {"quantized": 12_000, "propagated": 0, "float": 36_000}
    assert coverage.int8_share == 1
