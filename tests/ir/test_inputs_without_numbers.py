"""Inputs and programs that have no numbers, or none that lie in order, are refused by name in every form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.errors import CaptureError, ConfigError, InputError
from quantc.text.digests import constants

ODD: dict[str, Callable[[], Tensor]] = {
    "meta": lambda: torch.empty(4, 8, device="meta"),
    "sparse": torch.eye(8)[:4].to_sparse,
    "csr": torch.eye(8)[:4].to_sparse_csr,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(8), torch.ones(8)]),
}


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()


def forms() -> Iterator[Callable[[Tensor], Any]]:
    x = torch.randn(4, 8)
    program = qc.capture(layers(), (x,))
    prepared = qc.prepare(program, "x86")
    yield program
    yield lambda batch: qc.calibrate(prepared, [batch])
    qc.calibrate(prepared, [x])
    quantized = qc.convert(prepared)
    yield quantized
    yield qc.convert(prepared, to="integer")
    yield lambda batch: qc.compare(program, quantized, [batch])
    for target in ("x86", "qnnpack", "executorch", "onnx"):
        lowered = qc.lower(quantized, target)
        yield lowered
        for _ in range(4):  # what is met often is recorded
            lowered(x)
        yield lowered
    yield qc.quantize(layers(), (x,), mode="dynamic")


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore:.*(beta|prototype) s.*")
def test_batches_without_numbers_in_order_are_refused_by_name(name: str) -> None:
    for call in forms():
        with pytest.raises(InputError, match=r"on (the )?meta|layout|nested"):
            call(ODD[name]())


@pytest.mark.parametrize("name", [name for name in ODD if name != "meta"])
@pytest.mark.filterwarnings("ignore:.*(beta|prototype) s.*")
def test_example_inputs_are_dense(name: str) -> None:
    with pytest.raises(CaptureError, match=r"layout|nested"):
        qc.capture(layers(), (ODD[name](),))


def test_a_program_parsed_without_its_constants_does_not_run() -> None:
    x = torch.randn(4, 8)
    program = qc.capture(layers(), (x,))
    prepared = qc.prepare(program, "x86")
    qc.calibrate(prepared, [x])
    quantized = qc.convert(prepared)
    for made in (program, quantized, qc.convert(prepared, to="integer")):
        with pytest.raises(InputError, match="parsed without its constants"):
            qc.parse(str(made))(x)
    hollow = qc.parse(str(quantized))
    for target in ("x86", "qnnpack", "onnx", "executorch"):
        with pytest.raises(InputError, match="parsed without its constants"):
            qc.lower(hollow, target)
    with pytest.raises(InputError, match="parsed without its constants"):
        qc.calibrate(qc.prepare(qc.parse(str(program)), "x86"), [x])
    for form in ("qdq", "integer"):
        with pytest.raises(InputError, match="parsed without its constants"):
            qc.convert(qc.parse(str(prepared)), to=form)
    torch.testing.assert_close(qc.parse(str(program), constants(program))(x), program(x))
    assert qc.parse(str(program))(x.to("meta")).shape == (4, 8)


def test_a_plain_tensor_without_numbers_is_no_garbage() -> None:
    text = """program "N" stage=captured method=given mode=eval
  input %x : f32[2]
  const %one = "one" : f32[] tensor
  %sum : f32[2] = add(%x, %one)
  output (%sum,)
"""
    x = torch.ones(2)
    with pytest.raises(InputError, match="parsed without its constants"):
        qc.parse(text)(x)
    assert torch.equal(qc.parse(text, {"one": torch.tensor(1.0)})(x), x + 1)


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).as_strided((x.shape[0], 8), (8, 1)))


@pytest.mark.parametrize("method", ["export", "fx"])
def test_as_strided_runs_on_kernels_under_a_batch_that_varies(method: Any) -> None:
    x = torch.randn(4, 8)
    program = qc.capture(Strided().eval(), (x,), method, dynamic_shapes=({0: Dim("n")},))
    quantized = qc.quantize(program, None, [(x,), (x[:2],)], "x86").program
    lowered = qc.lower(quantized, "x86")
    for count in (3, 4, 1):
        torch.testing.assert_close(lowered(x[:count]), quantized(x[:count]), rtol=0, atol=0.05)


class PartOut(Strided):
    def forward(self, x: Tensor) -> Any:
        y, o = self.a(x), torch.zeros(x.shape[0], 16)
        torch.mul(y, x, out=o[:, :8])
        return self.b(y), o


@pytest.mark.parametrize("method", ["auto", "fx"])
@pytest.mark.parametrize("shapes", [None, ({0: Dim("n")},)], ids=["fixed", "open"])
def test_out_that_is_a_part_runs_in_every_form(method: Any, shapes: Any) -> None:
    model, x = PartOut().eval(), torch.randn(4, 8)
    program = qc.capture(model, (x,), method, dynamic_shapes=shapes)
    with pytest.raises(InputError, match="while gradients are recorded"):
        program(x)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(program(x), expected)
        quantized = qc.quantize(program, None, [(x,)], "x86").program
        for form in (quantized, qc.lower(quantized, "x86")):
            torch.testing.assert_close(form(x), expected, rtol=0, atol=0.1)


@pytest.mark.parametrize("use", [None, 3, torch.int8, nn.Linear, [qc.INT8]])
def test_a_rule_of_a_config_says_what_becomes_of_a_tensor(use: Any) -> None:
    config = qc.QuantConfig()
    calls: tuple[Callable[[], Any], ...] = (
        lambda: config.set("0", use),
        lambda: config.set(nn.Linear, use),
        lambda: config.set_all(use),
        lambda: config.set_op("linear", use),
        lambda: config.set_node("linear", use),
        lambda: config.set_edge("0", "1", use),
    )
    for call in calls:
        with pytest.raises(ConfigError, match="is nothing that a tensor can become") as caught:
            call()
        assert "qc.FLOAT" in str(caught.value.advice)
