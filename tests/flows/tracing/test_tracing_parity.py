"""The tracing flow beside the export flow, on models that both take: the same scales, results and kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.annotate.quantizer import mode_config, quantizer_of
from quantc.bench.networks import MobileNetV2, Sequences, TextEncoder, ViT, resnet18
from quantc.flows.tracing import convert, coverage, prepare
from tests.support.traced_runs import EXPORTED, MODELS, Counted, calibrated, floats, seeded, sqnr, trace_of
from tests.zoo import BY_NAME

ZOO = (
    "mlp", "resnet_block", "resnet_downsample", "convnext_block", "mbconv", "dense_block", "unet", "pyramid", "vit", "bert",
    "gpt_masked", "lstm_tagger", "gru_tagger", "elman", "audio_conv1d", "video_conv3d", "conv_transpose_decoder", "tied_weights",
    "shared_module", "shared_weight", "containers", "inplace_residual", "functional_conv_net", "spell_dtypes", "group_norm",
    "frozen_batch_norm", "function_style", "dict_in_and_out",
)  # fmt: skip
Build = Callable[[], tuple[nn.Module, tuple[Any, ...]]]
NETWORKS: dict[str, Build] = {
    "resnet18": lambda: (resnet18(), (torch.randn(2, 3, 32, 32),)),
    "mobilenet v2": lambda: (MobileNetV2(), (torch.randn(2, 3, 32, 32),)),
    "vision transformer": lambda: (ViT(32, 2, 2, 32, 8), (torch.randn(2, 3, 32, 32),)),
    "encoder of tokens": lambda: (TextEncoder(32, 2, 2, 8, 64), (torch.randint(0, 64, (2, 8)),)),
    "lstm": lambda: (Sequences(16), (torch.randn(2, 5, 16),)),
}
LINEAR = ("mlp", "vit", "bert", "lstm_tagger", "tied_weights", "containers", "function_style", *list(NETWORKS)[2:])
"""Models with linears or recurrent layers, which are all that has a dynamic form."""
SETTINGS = [
    *((name, "x86", "static") for name in (*NETWORKS, *ZOO)),
    *((name, "qnnpack", "static") for name in (*list(NETWORKS)[2:], *ZOO)),
    *((name, "x86", "dynamic") for name in LINEAR),
    *((name, "qnnpack", "dynamic") for name in ("mlp", "bert")),
]


def another(leaf: Any) -> Any:
    return torch.randn_like(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def build(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    if name in NETWORKS:
        model, example = NETWORKS[name]()
        return model.eval(), example
    return BY_NAME[name].model(), BY_NAME[name].inputs(2)


def ran(quantized: nn.Module, *inputs: Any) -> tuple[list[Any], Counted]:
    """What a model gives time after time: at once, step by step, recorded; and the ops that ran the second time, when no
    weights are packed and nothing is recorded."""
    found = [quantized(*inputs)]
    with Counted() as counted:
        found.append(quantized(*inputs))
    found.extend(quantized(*inputs) for _ in range(4))
    return found, counted


def integer_ops(counted: Counted) -> int:
    """Ops of int8 engines that are no products: sums and the like."""
    names = ("quantized.add", "quantized.mul", "quantized.cat", "quantized.hardswish", "quantized.leaky_relu")
    return sum(count for op, count in counted.ops.items() if op.startswith(names))


def engines(counted: Counted) -> set[str]:
    """Whose kernels of convolutions run."""
    return {op.partition(".")[0] for op in counted.ops if "conv" in op}


QUICK = (
    "encoder of tokens",
    "lstm_tagger",
    "convnext_block",
    "frozen_batch_norm",
    "function_style",
    "mlp",
)


@pytest.mark.parametrize(
    ("name", "backend", "mode"),
    [
        pytest.param(
            *row,
            marks=()
            if row[0] in QUICK or (row[1:] == ("x86", "static") and row[0] not in NETWORKS)
            else pytest.mark.slow,
        )
        for row in SETTINGS
    ],
)
def test_scales_and_results_are_those_of_the_export_flow(name: str, backend: str, mode: Any) -> None:
    model, example = build(name)
    config = mode_config(quantizer_of(backend), mode) if mode != "static" else None
    program = qc.prepare(qc.capture(model, example, method="export", dynamic_shapes=None), backend, config=config)
    prepared = prepare(model, example, backend=backend, mode=mode)
    batches = [pytree.tree_map(another, example) for _ in range(3)]
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)
    if mode == "static":
        qc.calibrate(program, batches, progress="silent")
    exported, quantized = qc.convert(program), convert(prepared)
    ours, theirs = trace_of(quantized).held.plan.qparams, exported.plan.qparams
    assert ours
    assert sorted(ours) == sorted(theirs)
    for group, row in theirs.items():
        torch.testing.assert_close(ours[group].scale, row.scale, rtol=1e-6, atol=0)
        assert torch.equal(ours[group].zero_point, row.zero_point)
    lowered = qc.lower(exported, backend)
    with torch.no_grad():
        expected, by_graph = model(*batches[0]), lowered(*batches[0])
        found, counted = ran(quantized, *batches[0])
        for row in found:
            for a, b in zip(floats(row), floats(by_graph), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # a step is far more
        assert counted.int8 or name == "elman"  # which has kernels of its own
        assert sqnr(expected, found[-1]) > min(sqnr(expected, by_graph), 60) - 0.5
        with Counted() as by_kernels:
            lowered(*batches[0])
    assert counted.float_products == by_kernels.float_products
    assert counted.int8 >= by_kernels.int8  # a graph may take several linears as one
    assert integer_ops(counted) == integer_ops(by_kernels)
    assert engines(counted) == engines(by_kernels)


@pytest.mark.parametrize("name", MODELS)
def test_every_product_of_the_float_model_runs_on_an_int8_kernel(name: str) -> None:
    model, examples, _ = seeded(name)
    quantized = convert(calibrated(model, examples))
    with torch.no_grad():
        for example in examples:
            with Counted() as of_floats:
                expected = model(*example)
            found, counted = ran(quantized, *example)
            assert of_floats.float_products > 1
            assert (counted.int8, counted.float_products) == (of_floats.float_products, 0)
            assert all(sqnr(expected, row) > 30 for row in found)


@pytest.mark.parametrize("name", EXPORTED)
def test_noise_is_that_of_the_export_flow(name: str) -> None:
    model, examples, _ = seeded(name)
    quantized = convert(calibrated(model, examples))
    exported = qc.quantize(model, examples[0], examples * 3, backend="x86")
    with torch.no_grad():
        expected, theirs = model(*examples[0]), exported.program(*examples[0])
        assert sqnr(expected, quantized(*examples[0])) > sqnr(expected, theirs) - 0.5


class Scaled(nn.Module):
    """Arithmetic between two linears, which is folded into the first."""

    def __init__(self, between: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.linspace(0.2, 3.0, 8))
        self.between = between

    def forward(self, x: Tensor) -> Any:
        return self.second(self.between(self.first(x), self.gain))


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "x * gain": lambda x, gain: x * gain,
    "gain * x": lambda x, gain: gain * x,
    "multiply": torch.multiply,
    "mul by keywords": lambda x, gain: torch.mul(input=gain, other=x),
    "3 * x": lambda x, gain: 3 * x,
    "divide": torch.divide,
    "true_divide": lambda x, gain: x.true_divide(gain),
    "subtract": lambda x, gain: x.subtract(gain),
    "gain + x": lambda x, gain: gain + x,
    "in place": lambda x, gain: x.mul_(gain),
    "two of them": lambda x, gain: gain * (x - gain),
    "an op of torch.ops": torch.ops.aten.mul.Tensor,
    "dropout, then a product": lambda x, gain: gain * F.dropout(x, training=False),
    "a cast, then a product": lambda x, gain: x.to(torch.float32).contiguous() * gain,
}


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
@pytest.mark.parametrize("how", SPELLINGS)
def test_what_is_folded_into_a_product_is_computed_once(how: str, backend: str) -> None:
    torch.manual_seed(0)
    model, x = Scaled(SPELLINGS[how]).eval(), torch.randn(16, 8)
    prepared = prepare(model, x, backend=backend)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(prepared(x), expected, rtol=1e-5, atol=1e-5)
        found, counted = ran(convert(prepared), x)
        assert all(sqnr(expected, row) > 30 for row in found)
        assert (counted.int8, counted.float_products) == (2, 0)


class Passes(nn.Module):
    """Gives what it is given, as a path that is dropped in training does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) if self.training else x


NOTHINGS: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "dropout": nn.Dropout,
    "an empty sequential": nn.Sequential,
    "a module of the model's own": Passes,
    "several of them": lambda: nn.Sequential(nn.Sequential(), nn.Identity(), Passes(), nn.Dropout()),
}


class WithNothing(nn.Module):
    def __init__(self, nothing: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.nothing = nothing

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.nothing(self.first(x)))
        return F.relu(self.nothing(self.second(y)) + y)


@pytest.mark.parametrize("how", NOTHINGS)
def test_what_does_nothing_may_stand_inside_of_a_fused_op(how: str) -> None:
    torch.manual_seed(0)
    model, x = WithNothing(NOTHINGS[how]()).eval(), torch.randn(2, 4, 6, 6)
    prepared = prepare(model, x)
    program = qc.prepare(qc.capture(model, (x,)), "x86")
    with torch.no_grad():
        prepared(x)
        qc.calibrate(program, [(x,)], progress="silent")
        lowered = qc.lower(qc.convert(program), "x86")
        found, counted = ran(convert(prepared), x)
        assert all(torch.equal(row, lowered(x)) for row in found)
        assert (counted.int8, counted.float_products) == (2, 0)


def test_modules_without_parameters_are_observed_where_their_results_count() -> None:
    torch.manual_seed(0)
    model: Any = BY_NAME["pools"].model()
    example = BY_NAME["pools"].inputs(2)
    prepared = prepare(model, example, backend="qnnpack")
    with torch.no_grad():
        for _ in range(3):
            prepared(*example)
    (row,) = [row for name, row in trace_of(convert(prepared)).held.plan.qparams.items() if name == "cat:in0"]
    with torch.no_grad():
        joined = torch.cat([model.ceil(*example), model.partial(F.pad(example[0], (0, 1, 0, 1)))], 1)
    low, high = (float(row.scale) * (level - int(row.zero_point)) for level in (0, 255))
    step = float(row.scale)
    assert low < float(joined.min()) + 2 * step
    assert high > float(joined.max()) - 2 * step


def test_what_a_backend_takes_apart_is_said_to_be_float() -> None:
    """qnnpack quantizes attention in parts, of which the model calls none."""
    model, example = BY_NAME["gpt_sdpa"].model(), BY_NAME["gpt_sdpa"].inputs(2)
    prepared = prepare(model, example, backend="qnnpack")
    with torch.no_grad():
        prepared(*example)
        quantized = convert(prepared)
        quantized(*example)
        with Counted() as counted:
            quantized(*example)
    assert counted.int8 == 4
    rows = [line for line in str(coverage(prepared)).splitlines() if line.lstrip().startswith(("matmul", "softmax"))]
    assert all("float" in line or "quantized" not in line for line in rows)
    text = str(coverage(prepared))
    assert "by matmul of qnnpack" not in text
    assert "by softmax of qnnpack" not in text


def test_the_numbers_of_one_layer_by_hand() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 4), torch.randn(32, 8)
    prepared = prepare(nn.Sequential(layer).eval(), x)
    with torch.no_grad():
        prepared(x)
        quantized = convert(prepared)
        weight, bias = layer.weight, layer.bias
        rows = trace_of(quantized).held.plan.qparams
        scale, zero_point = float(rows["linear:in0"].scale), int(rows["linear:in0"].zero_point)
        step = rows["linear:in1"].scale
        used = weight.abs().amax(1) / step
        # rows whose sums a kernel could cut off use less of the range
        assert float(used.max()) == pytest.approx(127, abs=0.6)
        assert float(used.min()) > 60
        levels = (torch.round(x / scale) + zero_point).clamp(0, 255) - zero_point
        packed = torch.round(weight / step[:, None]).clamp(-128, 127)
        by_hand = (levels.double() @ packed.double().T) * scale * step + bias
        half = scale * float(step.max()) / 2  # the bias is a whole number of steps
        torch.testing.assert_close(quantized(x), by_hand.float(), rtol=1e-5, atol=half + 1e-5)
