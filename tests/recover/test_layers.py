"""The layers that can be fitted, and the reasons why others cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import mode_config, quantizer_of
from quantc.backends.x86 import X86
from quantc.calibration.collect import Collect
from quantc.config.config import QuantConfig
from quantc.ir.program import Program
from quantc.recover.layers import Layer, layers_of, spread
from quantc.spec.formats import DType, PerChannel, PerGroup, PerTensor, PerToken, Timing
from quantc.spec.granularity import Share
from quantc.spec.numerics import QParams, fake_quantize
from quantc.spec.spec import FP16_WEIGHT, INT8_WEIGHT
from tests.support.recovery import ALL_ROWS, TAKES, layer_of, linear_case

INT4_TABLE = INT8_WEIGHT.but(dtype=DType.INT4, timing=Timing.WEIGHT_ONLY)


class Tied(nn.Module):
    """One table for two products, of which one has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.two(torch.relu(self.one(x)))
        return found


def prepared(model: nn.Module, shape: tuple[int, ...], batches: int = 4, config: QuantConfig | None = None) -> Program:
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(shape, generator=generator) for _ in range(batches)]
    program = qc.prepare(qc.capture(model.eval(), (data[0],), dynamic_shapes=None), "x86", config=config)
    qc.calibrate(program, data, collect=ALL_ROWS, progress="silent")
    return program


@pytest.mark.parametrize("share", [PerTensor(), PerChannel(axis=0), PerChannel(axis=-1), PerGroup(axis=1, size=4)])
def test_each_weight_has_its_scale(share: Share) -> None:
    weight, spec = torch.randn(6, 8), INT8_WEIGHT.but(granularity=share, dtype=DType.INT4)
    shape = {PerTensor(): (), PerChannel(axis=0): (6,), PerChannel(axis=-1): (8,)}.get(share, (6, 2))
    count = torch.Size(shape).numel()
    qparams = QParams(torch.arange(1, count + 1).reshape(shape) / 8, torch.arange(count).reshape(shape) % 3)
    scale, zero_point = spread(qparams, weight, spec)
    expected = ((weight / scale).round() + zero_point).clamp(spec.qmin, spec.qmax).sub(zero_point) * scale
    assert torch.equal(expected, fake_quantize(weight, qparams, spec))


def test_scales_that_weights_cannot_have() -> None:
    spec = INT8_WEIGHT.but(granularity=PerTensor())
    object.__setattr__(spec, "granularity", PerToken())
    with pytest.raises(qc.QuantcError, match="are not of weights"):
        spread(QParams(torch.ones(2), torch.zeros(2)), torch.ones(2, 2), spec)


def test_a_layer_is_rounded_to_nearest_until_it_is_fitted() -> None:
    case = linear_case()
    program = case.prepared()
    layer = layer_of(program)
    assert torch.equal(layer.current, fake_quantize(layer.weight, layer.qparams, layer.spec))
    assert torch.equal(layer.weight_at(layer.levels(layer.current, layer.qparams), layer.qparams), layer.current)
    assert layer.shift is None
    again = layer_of(qc.recover(program, progress="silent"))
    assert torch.equal(again.weight, layer.weight)
    assert not torch.equal(again.current, layer.current)
    assert again.shift is not None
    rows = torch.cat(case.batches[1::2]).double()
    change, bias = (again.weight - again.current).double(), again.shift[0]
    torch.testing.assert_close(
        again.error(again.current, again.shift)[0], (rows @ change.T - bias).square().mean(0), rtol=1e-3, atol=0
    )
    torch.testing.assert_close(again.power()[0], (rows @ layer.weight.double().T).square().mean(0), rtol=1e-3, atol=0)


def test_a_weight_of_two_readers_is_one_layer() -> None:
    program = prepared(Tied(), (16, 6))
    layer = layer_of(program)
    assert [read.node.name for read in layer.reads] == ["linear", "linear_1"]
    assert layer.bias is None  # no bias takes up the mean of both
    rows = layer.objective.fit.rows
    assert rows == 4 * 16  # the even batches of both
    better = qc.recover(program, "rescale,round", progress="silent")
    assert qc.convert(better)(torch.randn(16, 6)).shape == (16, 6)


@pytest.mark.parametrize(
    ("model", "config", "batches", "reason"),
    [
        (nn.Linear(4, 4), QuantConfig().set("*", FP16_WEIGHT), 4, "its format is fp16, which has no grid"),
        (nn.Linear(4, 4), None, 1, "only one half of the batches reached it: there is nothing to judge on"),
    ],
)
def test_why_a_layer_is_not_fitted(model: nn.Module, config: QuantConfig | None, batches: int, reason: str) -> None:
    assert [found[1] for found in _refused(prepared(nn.Sequential(model), (8, 4), batches, config))] == [reason]


def test_why_a_layer_that_was_left_out_is_not_fitted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    data = [torch.randn(8, 4) for _ in range(4)]
    program = qc.prepare(qc.capture(model, (data[0],)), "x86")
    qc.calibrate(program, data, collect=Collect(without=("2",)), progress="silent")
    first, second = layers_of(program, "auto")
    assert isinstance(first, Layer)
    assert isinstance(second, tuple)
    assert second[1] == "no Gram matrix was collected of what it reads"
    config = QuantConfig().set("0", qc.FLOAT)
    left = prepared(model, (8, 4), config=config)
    assert len(list(layers_of(left, "auto"))) == 1  # what stays float is none of its business


def _refused(program: Program) -> list[tuple[str, str]]:
    return [found for found in layers_of(program, "auto") if isinstance(found, tuple)]


def test_rows_of_a_table_are_kept_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    table = nn.Embedding(30, 16)
    with torch.no_grad():
        table.weight.copy_(torch.randn(30, 16, generator=generator) ** 3)
    data = [torch.randint(0, 24, (4, 6), generator=generator) for _ in range(8)]
    backend = replace(X86, takes=TAKES, modes={**X86.modes, "weight-only": INT4_TABLE})
    config = mode_config(quantizer_of(backend), "weight-only")
    program = qc.prepare(qc.capture(nn.Sequential(table).eval(), (data[0],)), backend, config=config)
    qc.calibrate(program, data, collect="recover", progress="silent")
    better = qc.recover(program, progress="silent")
    (scales,), (levels,), (bias,) = (each for _, each in better.recovery().passes[-3:])
    assert scales.fate == "kept"
    assert "of 30 rows" in scales.reason  # those that no batch asked for stay as they are
    assert levels.reason == "each of its weights meets an input of its own, and the nearest level is the best"
    assert bias.reason == "it has no bias of its own"
    odd = torch.cat(data[1::2])
    wanted = program(odd)
    before, after = (float((qc.convert(each)(odd) - wanted).detach().square().sum()) for each in (program, better))
    assert after < 0.97 * before
