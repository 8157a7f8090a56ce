"""fuse: the numbers against eager modules, and what must not change."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.errors import ModeError
from quantc.hooks import Guard, Truth, Verify
from quantc.ir.program import Program
from quantc.passes.fuse import Fuse
from quantc.patterns.fusions import FUSIONS
from quantc.pipeline.pipeline import Pipeline
from tests.support.agree import fingerprint, run

PIPELINE = Pipeline((Fuse(),))
CONVS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[type[nn.Module], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12}


def fused(model: nn.Module, *args: Tensor) -> Program:
    """Captured and fused, with the model left alone."""
    before = fingerprint(model)
    program = PIPELINE.run(qc.capture(model, args, method="fx"), [Truth(), Verify(), Guard()])
    assert fingerprint(model) == before, "the caller's model changed"
    return program


def calls(program: Program) -> list[str]:
    return [node.name for node in program.graph.nodes if node.op == "call_function"]


def error(program: Program, model: nn.Module, *args: Tensor) -> float:
    """The largest difference, relative to the largest magnitude."""
    expected = run(model, args).output
    actual = run(program, args).output
    assert actual.dtype == expected.dtype
    return float((actual - expected).abs().max() / expected.abs().max())


def norm(draw: st.DrawFn, kind: type[nn.Module], channels: int) -> nn.Module:
    """A batch norm with a past."""
    made = cast(
        nn.BatchNorm2d, kind(channels, eps=draw(st.sampled_from([1e-5, 1e-3, 0.1])), affine=draw(st.booleans()))
    )
    assert made.running_mean is not None
    assert made.running_var is not None
    made.running_mean.normal_()
    made.running_var.uniform_(0.1, 3.0)
    if made.affine:
        made.weight.normal_()
        made.bias.normal_()
    return made


Sample = tuple[nn.Sequential, Tensor]


@st.composite
def convolutions(draw: st.DrawFn) -> Sample:
    dims = draw(st.integers(1, 3))
    is_transposed = draw(st.booleans())
    groups, stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    ins, outs = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    size, padding = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if is_transposed and stride > 1:
        options["output_padding"] = draw(st.integers(0, 1))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(draw(st.integers(0, 99)))
        kind = (TRANSPOSED if is_transposed else CONVS)[dims - 1]
        conv = kind(ins, outs, size, bias=draw(st.booleans()), **options)
        model = nn.Sequential(conv, norm(draw, NORMS[dims - 1], outs))
        return model, torch.randn(2, ins, *[6, 7, 5][:dims])


@st.composite
def linears(draw: st.DrawFn) -> Sample:
    ins, outs = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(draw(st.integers(0, 99)))
        model = nn.Sequential(nn.Linear(ins, outs, bias=draw(st.booleans())), norm(draw, nn.BatchNorm1d, outs))
        return model, torch.randn(3, ins)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@settings(max_examples=25)
@given(sample=st.one_of(convolutions(), linears()))
def test_batch_norms_are_folded_to_within_rounding(dtype: torch.dtype, sample: Sample) -> None:
    model, x = sample[0].to(dtype).eval(), sample[1].to(dtype)
    program = fused(model, x)
    assert len(calls(program)) == 1, "the batch norm is still there"
    fresh = torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=dtype)
    assert error(program, model, fresh) <= LIMITS[dtype]


class Affine(nn.Module):
    """A producer, then arithmetic with constants, by channel or with one number."""

    def __init__(self, producer: nn.Module, channels: int, *space: int) -> None:
        super().__init__()
        self.producer = producer
        self.scale = nn.Parameter(torch.rand(channels, *space) + 0.5)
        self.register_buffer("shift", torch.randn(1, channels, *space))

    def forward(self, x: Tensor) -> Any:
        y = self.producer(x) * 0.75
        y = self.scale * y
        y = y + self.shift
        y = (y - self.scale) / self.scale
        return 1 + y


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(
    ("producer", "shape", "space"),
    [
        (nn.Linear(3, 4), (2, 3), ()),
        (nn.Linear(3, 4, bias=False), (2, 5, 3), ()),
        (nn.Conv1d(3, 4, 3), (2, 3, 8), (1,)),
        (nn.Conv2d(4, 4, 3, groups=4), (2, 4, 8, 8), (1, 1)),
        (nn.ConvTranspose2d(4, 4, 3, groups=2, bias=False), (2, 4, 4, 4), (1, 1)),
        (nn.Conv3d(3, 4, 1), (2, 3, 2, 2, 2), (1, 1, 1)),
    ],
    ids=["linear", "linear-3d", "conv1d", "depthwise", "transposed", "conv3d"],
)
def test_arithmetic_with_constants_is_folded_to_within_rounding(
    producer: nn.Module, shape: tuple[int, ...], space: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Affine(copy.deepcopy(producer), 4, *space).to(dtype).eval()
    program = fused(model, torch.randn(shape, dtype=dtype))
    assert len(calls(program)) == 1
    assert error(program, model, torch.randn(shape, dtype=dtype)) <= LIMITS[dtype]


class Shared(nn.Module):
    """One weight, called by a convolution that is normed, one that is not, and read by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 1)
        self.second = nn.Conv2d(4, 4, 1)
        self.second.weight = self.first.weight
        self.bn = nn.BatchNorm2d(4)
        self.mean = self.bn.running_mean
        nn.init.normal_(self.bn.weight)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.first(x)), self.second(x), self.first(x), self.first.weight.sum()


def test_weights_that_others_read_are_unchanged() -> None:
    torch.manual_seed(0)
    model, x = Shared().eval(), torch.randn(2, 4, 3, 3)
    program = fused(model, x)
    assert program.log[-1].notes == ("folded 1 conv-bn",)
    for index, (actual, expected) in enumerate(zip(program(x), model(x), strict=True)):
        assert torch.equal(actual, expected) if index else torch.allclose(actual, expected, rtol=1e-5)
    kept = dict(program.root.named_parameters())
    for name in ("first.weight", "first.bias"):
        assert torch.equal(kept[name], model.get_parameter(name))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.bn(y) + y


def test_a_producer_with_two_users_is_left_alone_and_explained() -> None:
    model, x = Residual().eval(), torch.randn(1, 4, 4, 4)
    program = fused(model, x)
    assert not program.log[-1].changed
    assert torch.equal(program(x), model(x))
    assert "conv2d has 2 users" in str(FUSIONS.explain(program, "batch_norm"))


def test_training_mode_is_left_alone_and_explained() -> None:
    model, x = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).train(), torch.randn(2, 4, 4, 4)
    program = fused(model, x)
    assert not program.log[-1].changed
    assert "training = True, wanted training == False" in str(FUSIONS.explain(program, "batch_norm"))


def test_a_fused_program_cannot_be_trained() -> None:
    program = fused(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval(), torch.randn(2, 4, 4, 4))
    with pytest.raises(ModeError, match="was folded into conv2d"):
        program.train()


class Tracking(nn.Module):
    """Keeps the statistics of its batch norm up to date itself, in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        y = self.bn(self.conv(x))
        assert self.bn.running_mean is not None
        self.bn.running_mean.add_(1)
        return y


def test_statistics_that_the_program_writes_to_are_not_folded() -> None:
    model, x = Tracking().eval(), torch.randn(2, 4, 4, 4)
    program = fused(model, x)
    assert not program.log[-1].changed
    assert "stays: the program writes to bn.running_mean" in program.log[-1].notes[0]
    eager = copy.deepcopy(model)
    for _ in range(3):
        assert torch.equal(program(x), eager(x))


def test_half_precision_weights_are_rounded_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).eval().to(torch.bfloat16)
    with torch.no_grad():
        cast(Tensor, model[1].running_mean).normal_()
        cast(Tensor, model[1].weight).normal_()
    program = fused(model, torch.randn(2, 8, dtype=torch.bfloat16))
    exact = copy.deepcopy(model).double()
    scale = cast(Tensor, exact[1].weight) / (cast(Tensor, exact[1].running_var) + 1e-5).sqrt()
    wanted = (cast(Tensor, exact[0].weight) * scale[:, None]).to(torch.bfloat16)
    assert torch.equal(dict(program.root.named_parameters())["0.weight"], wanted)
