"""Quantization inside higher-order ops: branches, loops, scans, maps, regions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.ao.quantization import MinMaxObserver

import quantc as qc
from quantc.errors import CalibrationError, ConfigError, ModeError
from quantc.hooks import Guard, Truth, Verify
from quantc.ir.decisions import FLOAT
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.passes.sink_constants import SinkConstants
from quantc.pipeline.pipeline import Pipeline
from quantc.pipeline.registry import BACKENDS
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.spec.spec import UINT8
from quantc.text.digests import constants
from quantc.text.parser import parse
from tests.support.agree import assert_same, fingerprint
from tests.support.control_flow import (
    CASES,
    Case,
)

CALIBRATION = range(1, 25)
UNSEEN = range(100, 116)

# -- models ----------------------------------------------------------------------------------------------------


def named(name: str) -> Case:
    return CASES[name]


each = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))


@cache
def float_form(name: str) -> Program:
    return qc.capture(CASES[name].model(), CASES[name].batch(0))


def captured(case: Case) -> Program:
    """A copy: tests may change it."""
    name = next(name for name, known in CASES.items() if known is case)
    return float_form(name).clone()


def quantized(case: Case, config: qc.QuantConfig | None = None) -> Program:
    prepared = qc.prepare(captured(case), "x86", config=config)
    qc.calibrate(prepared, [case.batch(seed) for seed in CALIBRATION], progress="silent")
    return qc.convert(prepared)


def sqnr(model: Callable[..., Any], other: Callable[..., Any], batches: list[tuple[Any, ...]]) -> float:
    signal = noise = 0.0
    with torch.no_grad():
        for batch in batches:
            expected, actual = model(*batch), other(*batch)
            signal += float(expected.square().sum())
            noise += float((expected - actual).square().sum())
    return 10 * float(torch.log10(torch.tensor(signal / noise)))


def int8_weights(program: Program) -> dict[str, int]:
    """How many ops read an int8 constant through a dequantize, by graph."""
    found: dict[str, int] = {}
    for path, graph in program.graphs():
        for node in graph.nodes:
            if is_dequantize(node) and isinstance(node.args[0], fx.Node):
                weight = program.tensor(node.args[0])
                if weight is not None and weight.dtype == torch.int8:
                    found[path] = found.get(path, 0) + len(node.users)
    return found


# -- quantized inside ------------------------------------------------------------------------------------------


@each
def test_what_is_inside_is_quantized(case: Case) -> None:
    model = case.model()
    before = fingerprint(model)
    program = qc.capture(model, case.batch(0))
    text = program.dump("text")
    prepared = qc.prepare(program, "x86")
    qc.calibrate(prepared, [case.batch(seed) for seed in CALIBRATION], progress="silent")
    result = qc.convert(prepared)
    result.verify()
    assert program.dump("text") == text
    assert fingerprint(model) == before
    assert int8_weights(result) == case.weights
    claimed = {graph: path for path, graph in prepared.graphs()}
    inside = {claimed[node.graph] for node in prepared.plan.claims}
    assert inside >= set(case.weights)
    with torch.no_grad():
        assert_same(program(*case.batch(0)), model(*case.batch(0)))  # torch compiles a model's branches at every call
    assert sqnr(program, result, [case.batch(seed) for seed in UNSEEN]) > 25
    floats = [
        name for name, value in result.root.state_dict().items() if value.dtype == torch.float32 and value.dim() > 1
    ]
    assert not floats, "float weights are kept beside the int8 ones"


@each
def test_it_leaves_quantc_in_one_piece(case: Case, tmp_path: Any) -> None:
    """torch.export, torch.compile, text and files give the same numbers; export fails silently on nested constants."""
    result, batch = quantized(case), case.batch(200)
    with torch.no_grad():
        expected = result(*batch)
        assert_same(torch.compile(result.module, backend="eager")(*batch), expected)
    assert_same(torch.export.export(result.module, batch).module()(*batch).detach(), expected)
    again = parse(result.dump("text"), constants(result))
    assert again.dump("text") == result.dump("text")
    assert_same(again(*batch).detach(), expected)
    result.save(tmp_path / "model.quantc")
    assert_same(qc.load(tmp_path / "model.quantc")(*batch).detach(), expected)


def test_each_branch_has_statistics_of_its_own() -> None:
    case = named("cond")
    model = case.model()
    backend = BACKENDS["x86"].but(act=UINT8.but(observe="minmax"))
    prepared = qc.prepare(qc.capture(model, case.batch(0)), backend)
    batches = [case.batch(seed) for seed in CALIBRATION]
    qc.calibrate(prepared, batches, progress="silent")
    result = qc.convert(prepared)
    for path, is_taken in (("true_graph_0", True), ("false_graph_0", False)):
        observer: Any = MinMaxObserver(dtype=torch.quint8, quant_min=0, quant_max=255, eps=2.0**-12)
        for (x,) in batches:
            if bool(x.mean() > 0) is is_taken:
                observer(x)
        scale, zero_point = observer.calculate_qparams()
        graph = dict(result.graphs())[path]
        first = next(node for node in graph.nodes if is_quantize(node))
        assert first.args[1:3] == (float(scale), int(zero_point))


def test_loops_are_observed_at_every_step() -> None:
    """The carried value of later steps is not the input: its range must be in the statistics."""
    case = named("while_loop")
    model = case.model()
    backend = BACKENDS["x86"].but(act=UINT8.but(observe="minmax"))
    prepared = qc.prepare(qc.capture(model, case.batch(0)), backend)
    x = torch.linspace(0.1, 0.2, 64).reshape(4, 16)
    qc.calibrate(prepared, [(x, torch.tensor(3))], progress="silent")
    observer: Any = MinMaxObserver(dtype=torch.quint8, quant_min=0, quant_max=255, eps=2.0**-12)
    hidden = x
    with torch.no_grad():
        for _ in range(3):
            observer(hidden)
            hidden = torch.tanh(model.fc(hidden))  # type: ignore[operator]
    scale, zero_point = observer.calculate_qparams()
    graph = dict(qc.convert(prepared).graphs())["while_loop_body_graph_0"]
    first = next(node for node in graph.nodes if is_quantize(node))
    assert first.args[1:3] == (float(scale), int(zero_point))


def test_a_batch_norm_in_a_branch_is_folded() -> None:
    prepared = qc.prepare(captured(named("cond")), "x86")
    assert not [node for node in prepared.nodes() if "batch_norm" in str(node.target)]


# -- branches not taken, and config ------------------------------------------------------------------------------


def positive(seed: int) -> tuple[Tensor]:
    torch.manual_seed(seed)
    return (torch.randn(4, 3, 8, 8).abs(),)


def test_a_branch_no_batch_entered_is_an_error_that_says_what_to_do() -> None:
    program = captured(named("cond"))
    prepared = qc.prepare(program, "x86")
    qc.calibrate(prepared, [positive(seed) for seed in range(4)], progress="silent")
    with pytest.raises(CalibrationError) as raised:
        qc.convert(prepared)
    assert "no batch entered false_graph_0" in raised.value.what
    assert "conv2d" in (raised.value.where or "")
    assert 'config.set_node("false_graph_0/*", FLOAT)' in (raised.value.advice or "")

    config = qc.QuantConfig().set_node("false_graph_0/*", FLOAT)
    prepared = qc.prepare(program, "x86", config=config)
    qc.calibrate(prepared, [positive(seed) for seed in range(4)], progress="silent")
    result = qc.convert(prepared)
    assert int8_weights(result) == {"true_graph_0": 1, "": 1}
    reasons = [reason for node, reason in prepared.plan.left_float.rows.items() if node.name == "conv2d"]
    assert len(reasons) == 1
    assert "as the config says: node false_graph_0/*" in reasons[0]


def test_a_nested_graph_goes_as_a_whole_with_what_is_in_it() -> None:
    result = quantized(named("nested"), qc.QuantConfig().set_node("true_graph_0/*", FLOAT))
    assert int8_weights(result) == {"false_graph_0": 2}


def test_a_module_inside_a_branch_goes_by_its_name() -> None:
    result = quantized(named("cond"), qc.QuantConfig().set("sparse", FLOAT))
    assert int8_weights(result) == {"true_graph_0": 1, "": 1}


@pytest.mark.parametrize("method", ["export", "export-strict"])
def test_a_module_inside_a_branch_goes_by_its_class(method: Any) -> None:
    case = named("nested")
    program = qc.capture(case.model(), case.batch(0), method)
    config = qc.QuantConfig().set(nn.Linear, FLOAT).set("c", UINT8)
    prepared = qc.prepare(program, "x86", config=config)
    qc.calibrate(prepared, [case.batch(seed) for seed in CALIBRATION], progress="silent")
    assert int8_weights(qc.convert(prepared)) == {"false_graph_0": 1}
    of_all = {origin.class_name for node, origin in program.origins.rows.items() if node.graph is not program.graph}
    assert of_all == {"Linear", "Nested"}


def test_a_nested_graph_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="false_graph_0"):
        qc.prepare(captured(named("cond")), "x86", config=qc.QuantConfig().set_node("false_graph/*", FLOAT))


# -- sinking -----------------------------------------------------------------------------------------------------


@each
def test_sinking_keeps_every_bit(case: Case) -> None:
    program = captured(case)
    sunk = program.clone()
    Pipeline((SinkConstants(),)).run(sunk, [Truth(), Verify(), Guard()])
    calls = [node for node in sunk.nodes() if "higher_order" in str(node.target) or "cond" in node.name]
    assert not [operand for node in calls for operand in node.all_input_nodes if sunk.tensor(operand) is not None]
    for seed in UNSEEN:
        with torch.no_grad():
            assert_same(sunk(*case.batch(seed)), program(*case.batch(seed)))
    again = parse(sunk.dump("text"), constants(sunk))
    assert again.dump("text") == sunk.dump("text")
    before = {value.data_ptr() for value in program.root.state_dict().values()}
    assert not before & {value.data_ptr() for value in sunk.root.state_dict().values()}
    with pytest.raises(ModeError, match="moved into nested graphs"):
        sunk.train()


def test_nothing_is_copied() -> None:
    sunk = captured(named("nested"))
    Pipeline((SinkConstants(),)).run(sunk)
    assert len({value.data_ptr() for value in sunk.root.state_dict().values()}) == 6


def test_a_program_in_training_mode_is_left_alone() -> None:
    program = qc.capture(named("map").model().train(), named("map").batch(0))
    text = program.dump("text")
    Pipeline((SinkConstants(),)).run(program, [Truth()])
    assert program.dump("text") == text
    assert "gradients" in program.log[-1].notes[0]


# -- regions that set a mode -------------------------------------------------------------------------------------


class Regions(nn.Module):
    """A linear in each kind of region."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            x = self.a(x)
        with torch.autocast("cpu", enabled=False):
            x = self.b(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.c(x)


def test_regions_are_quantized_or_say_why_not() -> None:
    torch.manual_seed(0)
    model = Regions().eval()
    program = qc.capture(model, (torch.randn(256, 8),))
    assert len(list(program.graphs())) == 2
    prepared = qc.prepare(program, "x86")
    claimed = {
        origin.module_path for node in prepared.plan.claims if (origin := prepared.origins.get(node)) is not None
    }
    assert claimed == {"a", "b"}
    path, graph = list(prepared.graphs())[1]
    inside = next(node for node in graph.nodes if op_name(node) == "linear")
    assert "bf16" in str(prepared.explain(f"{path}/{inside.name}"))
    assert f"{path}/{inside.name}" in str(prepared.coverage())
    qc.calibrate(prepared, [torch.randn(256, 8) for _ in range(8)], progress="silent")
    result = qc.convert(prepared)
    x = torch.randn(256, 8)
    with torch.no_grad():
        assert result(x).dtype == torch.bfloat16
        assert sqnr(lambda x: model(x).float(), lambda x: result(x).float(), [(x,)]) > 25


UNKNOWN = """program "Hinted" stage=canonical method=export mode=eval
  input %x : f32[4,8]
  const %w = "w" : f32[8,8] buffer
  %hints : (f32[4,8]) = higher_order.hints_wrapper(@body, (%x, %w), {}, {"hint": True})
  %getitem : f32[4,8] = operator:getitem(%hints, 0)
  %out : f32[4,8] = linear(%getitem, %w)
  output (%out,)
graph @body
  input %x : f32[4,8]
  input %w : f32[8,8]
  %linear : f32[4,8] = linear(%x, %w)
  output (%linear,)
"""


def test_graphs_of_unknown_ops_are_skipped_with_the_reason() -> None:
    torch.manual_seed(0)
    prepared = qc.prepare(parse(UNKNOWN, {"w": torch.randn(8, 8)}), "x86")
    assert [node.name for node in prepared.plan.claims] == ["out"]
    inside = prepared.node("body/linear")
    assert "nothing is known of how higher_order.hints_wrapper runs" in prepared.plan.left_float[inside]
    qc.calibrate(prepared, [torch.randn(4, 8)], progress="silent")
    assert int8_weights(qc.convert(prepared)) == {"": 1}


class Whole(nn.Module):
    """Kept opaque: a program holds such a module as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        return x * self.weight


def test_a_module_kept_whole_keeps_its_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), Whole()).eval()
    prepared = qc.prepare(qc.capture(model, (torch.randn(256, 8),), leaf=Whole), "x86")
    qc.calibrate(prepared, [torch.randn(256, 8) for _ in range(8)], progress="silent")
    assert sqnr(model, qc.convert(prepared), [(torch.randn(256, 8),)]) > 25
