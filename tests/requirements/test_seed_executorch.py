"""The document on the quantization flow in ExecuTorch, item by item, and its code."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import quantc.flows.executorch as flow
from quantc.errors import CaptureError
from quantc.flows.executorch import exir, export, quantized_linear
from quantc.flows.pt2e import convert_pt2e, prepare_pt2e
from tests.support.oracles import decomposed, sqnr
from tests.support.paths import ROOT
from tests.support.seed_documents import run

aten = torch.ops.aten

CAPTURE = """
# program capture
from torch._export import export
from tests.support.paths import ROOT

m = export.capture_pre_autograd_graph(m, copy.deepcopy(example_inputs))
"""
QDQ = """
def quantized_linear(x_int8, x_scale, x_zero_point, weight_int8, weight_scale, weight_zero_point, bias_fp32, output_scale, output_zero_point):
    x_fp32 = torch.ops.quantized_decomposed.dequantize_per_tensor(
        x_i8, x_scale, x_zero_point, x_quant_min, x_quant_max, torch.int8)
    weight_fp32 = torch.ops.quantized_decomposed.dequantize_per_tensor(
        weight_i8, weight_scale, weight_zero_point, weight_quant_min, weight_quant_max, torch.int8)
    weight_permuted = torch.ops.aten.permute_copy.default(weight_fp32, [1, 0]);
    out_fp32 = torch.ops.aten.addmm.default(bias_fp32, x_fp32, weight_permuted)
    out_i8 = torch.ops.quantized_decomposed.quantize_per_tensor(
        out_fp32, out_scale, out_zero_point, out_quant_min, out_quant_max, torch.int8)
    return out_i8
"""
REFERENCE = """
# Reference Quantized Pattern for quantized linear
def quantized_linear(x_int8, x_scale, x_zero_point, weight_int8, weight_scale, weight_zero_point, bias_fp32, output_scale, output_zero_point):
    x_int16 = x_int8.to(torch.int16)
    weight_int16 = weight_int8.to(torch.int16)
    acc_int32 = torch.ops.out_dtype(torch.mm, torch.int32, (x_int16 - x_zero_point), (weight_int16 - weight_zero_point))
    acc_rescaled_int32 = torch.ops.out_dtype(torch.ops.aten.mul.Scalar, torch.int32, acc_int32, x_scale * weight_scale / output_scale)
    bias_scale = x_scale * weight_scale
    bias_int32 = out_dtype(torch.ops.aten.mul.Tensor, torch.int32, bias_fp32, bias_scale / out_scale)
    out_int8 = torch.ops.aten.clamp(acc_rescaled_int32 + bias_int32 + output_zero_point, qmin, qmax).to(torch.int8)
    return out_int8
"""
SHORT_NAMES = {
    "x_i8": "x_int8",
    "weight_i8": "weight_int8",
    "out_scale": "output_scale",
    "out_zero_point": "output_zero_point",
}
BOUNDS = {
    f"{name}_quant_{end}": -128 if end == "min" else 127 for name in ("x", "weight", "out") for end in ("min", "max")
}
SLIPS = {
    "torch.ops.out_dtype(torch.mm,": "torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default,",
    "(weight_int16 - weight_zero_point)": "(weight_int16 - weight_zero_point).t()",
    "torch.ops.out_dtype(torch.ops.aten.mul.Scalar, torch.int32, acc_int32, ": "rounded(acc_int32.double() * (",
    "x_scale * weight_scale / output_scale)": "x_scale * weight_scale / output_scale))",
    "out_dtype(torch.ops.aten.mul.Tensor, torch.int32, bias_fp32, bias_scale / out_scale)": (
        "rounded(bias_fp32.double() / output_scale)"
    ),
}
"""The weight is stored as (out, in); a bias in steps of the result is bias / output_scale; `out_dtype(mul)` truncates."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def quantizer() -> flow.XNNPACKQuantizer:
    return flow.XNNPACKQuantizer().set_global(flow.get_symmetric_quantization_config())


def prepared(model: nn.Module | None = None, x: Tensor = X) -> fx.GraphModule:
    made = prepare_pt2e(export.capture_pre_autograd_graph(model or network(), (x,)), quantizer())
    with torch.no_grad():
        made(x)
    return made


def layer() -> dict[str, Any]:
    """The arguments of a quantized linear layer."""
    generator = torch.Generator().manual_seed(7)
    return {
        "x_int8": torch.randint(-128, 128, (32, 40), dtype=torch.int8, generator=generator),
        "x_scale": 0.02,
        "x_zero_point": 3,
        "weight_int8": torch.randint(-127, 128, (24, 40), dtype=torch.int8, generator=generator),
        "weight_scale": 0.01,
        "weight_zero_point": 0,
        "bias_fp32": torch.randn(24, generator=generator),
        "output_scale": 0.05,
        "output_zero_point": -5,
    }


def exact(given: dict[str, Any]) -> Any:
    """The real numbers that the integers stand for, in steps of the result."""
    x = given["x_int8"].numpy().astype(np.int64) - given["x_zero_point"]
    w = given["weight_int8"].numpy().astype(np.int64) - given["weight_zero_point"]
    scale = float(np.float32(given["x_scale"])) * float(np.float32(given["weight_scale"]))
    real = (x @ w.T) * scale + given["bias_fp32"].double().numpy()
    return real / float(np.float32(given["output_scale"])) + given["output_zero_point"]


# -- the code --------------------------------------------------------------------------------------------------------


def test_the_code_of_step_1_runs() -> None:
    given = {"copy": copy, "m": network(), "example_inputs": (X,)}
    left = run(CAPTURE, {"from torch._export import export": "from quantc.flows.executorch import export"}, {}, given)
    assert isinstance(left["m"], fx.GraphModule)


def test_the_code_of_the_default_representation_runs() -> None:
    import torch.ao.quantization.fx._decomposed

    written = run(QDQ, {}, SHORT_NAMES, {"torch": torch, **BOUNDS})["quantized_linear"]
    difference = written(**layer()).int() - quantized_linear(**layer()).int()
    assert int(difference.abs().max()) <= 1


def test_the_code_of_the_reference_representation_runs() -> None:
    """Read so that it is right it is within a step of quantc's, which rounds once and not twice."""

    def rounded(x: Tensor) -> Tensor:
        return x.round().to(torch.int32)

    given = {"torch": torch, "rounded": rounded, "qmin": -128, "qmax": 127}
    written = run(REFERENCE, {}, SLIPS, given)["quantized_linear"]
    difference = (written(**layer()).int() - quantized_linear(**layer()).int()).abs()
    assert int(difference.max()) <= 1
    assert 0.05 < float((difference > 0).float().mean()) < 0.4


# -- the items -------------------------------------------------------------------------------------------------------


def item_4_1() -> None:
    """`export.capture_pre_autograd_graph(m, copy.deepcopy(example_inputs))`."""
    module = export.capture_pre_autograd_graph(network(), copy.deepcopy((X,)))
    assert torch.equal(module(X), network()(X))


def item_4_2() -> None:
    """`exir.capture` is another name for it."""
    assert exir.capture is export.capture_pre_autograd_graph


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def item_4_3() -> None:
    """A model that cannot be captured: the line, and the catalogue of what can be."""
    with pytest.raises(CaptureError, match="could not be captured") as caught:
        export.capture_pre_autograd_graph(Branching(), (X,))
    assert "exportdb" in str(caught.value)
    assert "test_seed_executorch.py" in str(caught.value)


def item_4_4() -> None:
    """The result of capture is an fx.GraphModule."""
    assert isinstance(export.capture_pre_autograd_graph(network(), (X,)), fx.GraphModule)


def item_4_5() -> None:
    """Each backend has its own Quantizer."""
    assert issubclass(flow.XNNPACKQuantizer, flow.Quantizer)
    assert issubclass(flow.ComposableQuantizer, flow.Quantizer)


def item_4_6() -> None:
    """prepare inserts observers where the quantizer has annotated nodes."""
    nodes = prepared().graph.nodes
    assert sum(str(node.target).startswith("activation_post_process_") for node in nodes) == 5
    assert any("quantization_annotation" in node.meta for node in nodes)


def item_4_7() -> None:
    """Calibration is running the model; it computes what it did."""
    with torch.no_grad():
        assert torch.allclose(prepared()(X), network()(X))


def item_4_8() -> None:
    """convert makes a quantized model."""
    with torch.no_grad():
        assert sqnr(network()(X), convert_pt2e(prepared())(X)) > 25


def item_4_9() -> None:
    """It is a reference: it runs anywhere, in torch's own ops."""
    spaces = {
        str(node.target).partition(".")[0]
        for node in convert_pt2e(prepared()).graph.nodes
        if node.op == "call_function"
    }
    assert spaces == {"aten", "quantized_decomposed"}


def item_4_10() -> None:
    """dq -> float op -> q for all quantized operators."""
    converted = convert_pt2e(prepared())
    for node in converted.graph.find_nodes(op="call_function", target=aten.linear.default):
        assert [decomposed(operand, "dequantize") for operand in node.all_input_nodes] == [True, True, False]


def item_4_11() -> None:
    """The signature of the example."""
    assert quantized_linear(**layer()).dtype is torch.int8


def item_4_12() -> None:
    """dequantize_per_tensor(x, scale, zp, qmin, qmax, int8) for activation and weight."""
    converted = convert_pt2e(prepared())
    (node, _) = converted.graph.find_nodes(op="call_function", target=aten.linear.default)
    x, weight, _ = node.all_input_nodes
    for operand, low in ((x, -128), (weight, -127)):
        assert str(operand.target) == "quantized_decomposed.dequantize_per_tensor.default"
        assert operand.args[3:] == (low, 127, torch.int8)


def item_4_13() -> None:
    """permute_copy and addmm after lowering to the edge dialect; export keeps linear."""
    assert convert_pt2e(prepared()).graph.find_nodes(op="call_function", target=aten.linear.default)
    edge = pytest.importorskip("executorch.exir").to_edge(torch.export.export(convert_pt2e(prepared()), (X,)))
    calls = {str(node.target) for node in edge.exported_program().graph.nodes}
    assert any("permute_copy" in call for call in calls)
    assert any("addmm" in call for call in calls)


def item_4_14() -> None:
    """quantize_per_tensor(out, ..., int8)."""
    converted = convert_pt2e(prepared())
    (_, last) = converted.graph.find_nodes(op="call_function", target=aten.linear.default)
    (quantize,) = last.users
    assert str(quantize.target) == "quantized_decomposed.quantize_per_tensor.default"
    assert quantize.args[3:] == (-128, 127, torch.int8)


def reference() -> fx.GraphModule:
    return convert_pt2e(prepared(), use_reference_representation=True)


def targets(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def item_4_15() -> None:
    """quantize and dequantize are spelled out in primitives."""
    assert not [target for target in targets(reference()) if "quantized_decomposed" in target]
    assert {"aten.round.default", "aten.clamp.default"} <= set(targets(reference()))


def item_4_16() -> None:
    """`convert_pt2e(..., use_reference_representation=True)`."""
    with torch.no_grad():
        assert sqnr(convert_pt2e(prepared())(X), reference()(X)) > 25


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.cumsum(self.a(x), 1))


def item_4_17() -> None:
    """Selected ops on integers, all others stay float between q and dq."""
    found = targets(convert_pt2e(prepared(Summed().eval()), use_reference_representation=True))
    assert found.count("out_dtype") == 2
    assert "aten.cumsum.default" in found


def item_4_18() -> None:
    """x and weight are widened from int8 before zero points are subtracted."""
    widths = {node.args[1] for node in reference().graph.nodes if str(node.target) == "aten.to.dtype"}
    widths |= {node.args[1] for node in reference().graph.nodes if "convert_element_type" in str(node.target)}
    assert torch.int16 in widths or torch.int32 in widths


def item_4_19() -> None:
    """Products are summed in int32, by out_dtype."""
    products = [node for node in reference().graph.nodes if str(node.target) == "out_dtype"]
    assert len(products) == 2
    assert all(node.args[1] is torch.int32 for node in products)


def item_4_20() -> None:
    """The accumulator is rescaled by x_scale * weight_scale / output_scale, rounded and not cut off."""
    given = layer()
    nearest = np.clip(np.rint(exact(given)), -128, 127)
    assert np.abs(quantized_linear(**given).numpy() - nearest).max() <= 1
    assert (quantized_linear(**given).numpy() == nearest).mean() > 0.998


def item_4_21() -> None:
    """The bias counts as bias / output_scale, whatever the document's formula: 40 of them are not lost."""
    given: dict[str, Any] = layer() | {"bias_fp32": torch.full((24,), 2.0)}
    without: dict[str, Any] = layer() | {"bias_fp32": torch.zeros(24)}
    moved = np.clip(exact(given), -128, 127) - np.clip(exact(without), -128, 127)
    found = quantized_linear(**given).numpy().astype(int) - quantized_linear(**without).numpy().astype(int)
    assert np.abs(found - moved).max() <= 1
    assert np.median(found) == 2.0 / 0.05


def item_4_22() -> None:
    """Output zero point, clamp, int8."""
    far: dict[str, Any] = layer() | {"output_scale": 1e-4}
    result = quantized_linear(**far)
    assert result.dtype is torch.int8
    assert {int(result.min()), int(result.max())} == {-128, 127}


def item_4_23() -> None:
    """The weight is (out, in), and is transposed."""
    assert quantized_linear(**layer()).shape == (32, 24)


def item_4_24() -> None:
    """One rounding, half to even."""
    one: dict[str, Any] = {
        "x_scale": 1.0,
        "x_zero_point": 0,
        "weight_scale": 1.0,
        "weight_zero_point": 0,
        "output_zero_point": 0,
    }
    x = torch.tensor([[1], [2], [3], [5], [-1], [-3]], dtype=torch.int8)
    weight = torch.ones(1, 1, dtype=torch.int8)
    result = quantized_linear(x_int8=x, weight_int8=weight, bias_fp32=None, output_scale=2.0, **one)
    assert result.flatten().tolist() == [0, 1, 2, 2, 0, -2]


def item_4_25() -> None:
    """The list of ops with an integer form is published."""

    page = (ROOT / "docs" / "integer-form.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page or name in page for name in ("linear", "conv2d", "add", "max_pool2d"))


def item_4_26() -> None:
    """Lowering: edge dialect, partition, program; and it runs."""
    runtime = pytest.importorskip("executorch.runtime").Runtime.get()
    converted = convert_pt2e(prepared())
    program = flow.to_executorch(converted, (X,))
    calls = [str(node.target) for node in program.exported_program().graph.nodes if node.op == "call_function"]
    assert any("executorch_call_delegate" in call for call in calls)
    (result,) = runtime.load_program(program.buffer).load_method("forward").execute([X])
    with torch.no_grad():
        step = float(converted(X).abs().max()) / 100
        assert float((result - converted(X)).abs().max()) <= 2 * step


def item_4_slips() -> None:
    """The reference form was announced as work in progress; here it is complete: it runs for every rule that has one."""
    assert "out_dtype" in targets(reference())


SLOW = {"4.13", "4.26"}
ITEMS = {
    name.removeprefix("item_").replace("_", "."): check for name, check in globals().items() if name.startswith("item_")
}


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, check in ITEMS.items()],
)
def test_item(check: Any) -> None:
    check()


def test_every_item_has_its_test() -> None:
    assert set(ITEMS) == {*(f"4.{number}" for number in range(1, 27)), "4.slips"}
