"""Coverage counts what executes: each multiply-add by the formats its factors really have, as a look at the calls shows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import quantc as qc
from quantc.errors import AnnotationError
from quantc.ir.program import Program
from tests.support.training import assert_converts_exactly

BYTES = (torch.int8, torch.uint8)


class Attention(nn.Module):
    """Products of layers, and of activations with one another: by matmul, and by attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = torch.softmax(torch.matmul(q, k.transpose(-2, -1)), -1)
        out: Tensor = self.out(torch.matmul(scores, v) + functional.scaled_dot_product_attention(q, k, v))
        return out


def convs() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1))


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


MODELS: dict[str, tuple[Any, str, tuple[int, ...]]] = {
    "convs": (convs, "2", (2, 3, 8, 8)),
    "linears": (linears, "2", (4, 8)),
    "attention": (Attention, "k", (2, 5, 8)),
}
FORMATS = {
    "default": None,
    "float": qc.FLOAT,
    "int16": qc.INT16,
    "dynamic": qc.UINT8_DYNAMIC.but(qmax=127),
    "weight-only": qc.INT8_WEIGHT_ONLY,
    "4 bits": qc.INT8_NARROW_WEIGHT.but(qmin=-7, qmax=7, eps=2.0**-12),
}


FEW = ("executorch", "onnx")
REFUSED = {*((backend, "int16") for backend in ("x86", "qnnpack", "executorch")), ("executorch", "dynamic")}
"""Formats that a backend cannot run."""


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts multiply-adds by what products are called with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total, self.int8 = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = str(func)
        tensors = [value for value in args if isinstance(value, Tensor) and value.dim() >= 2]
        if name.startswith(("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")):
            self.total += made.numel() * tensors[-2].shape[-1]
        elif name.startswith("aten.convolution."):
            self.total += made.numel() * math.prod(args[1].shape[1:])
        elif "scaled_dot_product" in name:
            self.total += 2 * math.prod(args[0].shape) * args[1].shape[-2]
        elif name.startswith("quantc.") and (depth := self._depth(name, tensors)):
            result = made[0] if isinstance(made, tuple) else made
            self.total += result.numel() * depth
            asked = 0 if "both_dynamic" in name else 1 if "dynamic" in name else 2
            is_float = any(value.is_floating_point() for value in tensors[:2]) and "dynamic" not in name
            in_bytes = sum(value.dtype in BYTES for value in tensors[:2])
            self.int8 += result.numel() * depth if in_bytes >= asked and not is_float else 0
        return made

    @staticmethod
    def _depth(name: str, tensors: list[Tensor]) -> int:
        if name.startswith("quantc.conv"):
            return math.prod(tensors[1].shape[1:])
        return tensors[0].shape[-1] if name.startswith(("quantc.linear", "quantc.matmul")) else 0


def prepared(model: str, backend: str, form: str, **how: Any) -> tuple[Program, Tensor]:
    torch.manual_seed(0)
    build, layer, shape = MODELS[model]
    x = torch.randn(*shape)
    spec = FORMATS[form]
    config = qc.QuantConfig() if spec is None else qc.QuantConfig().set(layer, spec)
    made = qc.prepare(qc.capture(build().eval(), (x,)), backend, config=config, **how)
    if not how:
        qc.calibrate(made, [x], progress="silent")
    return made, x


CASES = [
    pytest.param(
        backend, model, form, marks=() if backend in FEW and form in ("default", "int16") else pytest.mark.slow
    )
    for backend in ("x86", "qnnpack", "executorch", "onnx")
    for model in MODELS
    for form in FORMATS
]


@pytest.mark.parametrize(("backend", "model", "form"), CASES)
def test_coverage_counts_what_executes(backend: str, model: str, form: str) -> None:
    if (backend, form) in REFUSED:
        with pytest.raises(AnnotationError, match="cannot run"):
            prepared(model, backend, form)
        return
    made, x = prepared(model, backend, form)
    integer = qc.convert(made, to="integer")
    with torch.no_grad(), Counted() as counted:
        integer.module(x)
    for program in (made, qc.convert(made), integer):
        found = program.coverage()
        assert (found.macs, found.int8_macs) == (counted.total, counted.int8), f"{program.stage.label}: {found}"


def test_attention_in_float_is_not_counted_as_int8() -> None:
    """XNNPACK multiplies no activations with one another on integers, though what it reads came quantized."""
    made, _ = prepared("attention", "executorch", "default")
    found = made.coverage()
    by_op = {op: sum(row.int8_macs for row in found.rows if row.op == op) for op in ("linear", "matmul", "sdpa")}
    assert by_op["linear"] > 0
    assert by_op["matmul"] == by_op["sdpa"] == 0


# -- 16 bits -----------------------------------------------------------------------------------------------------------


def test_int16_on_a_layer_is_what_its_producer_yields() -> None:
    made, x = prepared("convs", "onnx", "int16")
    program = qc.convert(made)
    read = [node for node in program.nodes() if str(node.target).startswith("quantized_decomposed.quantize_per_tensor")]
    kinds = [node.args[-1] for node in read]
    assert kinds == [torch.uint8, torch.int16, torch.uint8, torch.uint8], "it is rounded once, to 16 bits"
    exact = _first_two(convs(), x)
    rounded = _value(program, read[1].args[0], x)
    assert len(rounded.unique()) > 256, "more levels than 8 bits have"  # type: ignore[no-untyped-call]
    assert rounded.shape == exact.shape
    onnx = pytest.importorskip("onnxruntime")
    assert onnx
    torch.testing.assert_close(qc.lower(program, "onnx")(x), program(x), atol=1e-6, rtol=0)


def _first_two(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model[1](model[0](x))
    return found


def _value(program: Program, node: Any, x: Tensor) -> Tensor:
    seen: dict[str, Tensor] = {}

    class Run(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            made = super().run_node(n)
            seen[n.name] = made
            return made

    Run(program.module).run(x)
    return seen[node.name]


def test_others_read_what_they_did_beside_int16() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.fine, self.plain = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.first(x)
            return self.fine(y), self.plain(y)

    x = torch.randn(2, 3, 6, 6)
    program = qc.capture(Two().eval(), (x,))
    results = []
    for config in (qc.QuantConfig(), qc.QuantConfig().set("fine", qc.INT16)):
        made = qc.prepare(program, "onnx", config=config)
        qc.calibrate(made, [x], progress="silent")
        results.append(qc.convert(made))
    assert torch.equal(results[0](x)[1], results[1](x)[1])
    exact = program(x)[0]
    assert (results[1](x)[0] - exact).norm() < (results[0](x)[0] - exact).norm()


def test_int16_of_what_was_handed_on_in_8_bits_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1)).eval()
    x = torch.randn(2, 3, 8, 8)
    program = qc.capture(model, (x,))
    with pytest.raises(AnnotationError, match="hands on what was rounded to uint8") as caught:
        qc.prepare(program, "onnx", config=qc.QuantConfig().set("2", qc.INT16))
    assert "max_pool2d" in str(caught.value)
    made = qc.prepare(program, "onnx", config=qc.QuantConfig().set("0", qc.INT16).set("1", qc.INT16).set("2", qc.INT16))
    qc.calibrate(made, [x], progress="silent")
    assert qc.convert(made).coverage().int8_macs == 0


def test_int16_trains_as_it_is_converted() -> None:
    made, x = prepared("convs", "onnx", "int16", qat=True)
    made(x)
    assert_converts_exactly(made, x)
