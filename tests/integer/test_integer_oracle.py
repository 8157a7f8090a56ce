"""The oracle itself: its sums are those of torch, its rounding that of Python, and it sees what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.ir.program import Program
from tests.support import integer_oracle_sums as sums
from tests.support.integer_oracle import Oracle
from tests.support.integer_oracle_functions import FUNCTIONS, normalized, softmax
from tests.support.integer_oracle_judge import Judge
from tests.support.integer_oracle_models import kit_trials
from tests.support.integer_oracle_values import Steps, Terms

modest = settings(max_examples=25)
sizes = st.integers(1, 3)


def integers(seed: int, *shape: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(-300, 300, shape)


# -- sums --------------------------------------------------------------------------------------------------------

CONVS: dict[int, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    1: (F.conv1d, F.conv_transpose1d),
    2: (F.conv2d, F.conv_transpose2d),
    3: (F.conv3d, F.conv_transpose3d),
}


@modest
@given(st.data(), st.integers(1, 3), sizes, sizes, sizes, sizes, st.integers(0, 2), st.integers(1, 2))
def test_convolutions_are_those_of_torch(
    data: st.DataObject, rank: int, groups: int, inputs: int, outputs: int, stride: int, padding: int, dilation: int
) -> None:
    kernel = [data.draw(sizes) for _ in range(rank)]
    x = integers(1, 2, groups * inputs, *[7] * rank)
    w = integers(2, groups * outputs, inputs, *kernel)
    options = ([stride] * rank, [padding] * rank, [dilation] * rank, groups)
    plain = sums.convolve(x, w, *options)
    theirs = CONVS[rank][0](torch.tensor(x).double(), torch.tensor(w).double(), None, *options)
    assert np.array_equal(plain, theirs.numpy())

    more = data.draw(st.integers(0, stride - 1))
    padding = min(padding, dilation * (min(kernel) - 1))
    w = integers(2, groups * inputs, outputs, *kernel)
    lists = ([stride] * rank, [padding] * rank, [more] * rank)
    turned = sums.convolve_transposed(x, w, *lists, [dilation] * rank, groups)
    wide = (torch.tensor(x).double(), torch.tensor(w).double(), None, *lists, groups, [dilation] * rank)
    assert np.array_equal(turned, CONVS[rank][1](*wide).numpy())


@modest
@given(sizes, st.integers(1, 4), st.integers(0, 2), st.booleans(), st.booleans())
def test_averages_are_those_of_torch(kernel: int, stride: int, padding: int, ceil_mode: bool, counts: bool) -> None:
    padding = min(padding, kernel // 2)
    x = integers(3, 2, 3, 7, 8)
    windows = [sums.pool_windows(size, kernel, stride, padding, ceil_mode, counts) for size in (7, 8)]
    total, places = sums.sum_windows(x, windows)
    theirs = F.avg_pool2d(torch.tensor(x).double(), kernel, stride, padding, ceil_mode, counts)
    assert np.allclose(total / places, theirs.numpy(), rtol=1e-12)
    assert total.shape == tuple(theirs.shape)


@modest
@given(st.integers(1, 9), st.integers(1, 9))
def test_adaptive_averages_are_those_of_torch(size: int, outputs: int) -> None:
    x = integers(4, 2, 3, size)
    total, places = sums.sum_windows(x, [sums.adaptive_windows(size, outputs)])
    theirs = F.adaptive_avg_pool1d(torch.tensor(x).double(), outputs)
    assert np.allclose(total / places, theirs.numpy(), rtol=1e-12)


# -- rounding ----------------------------------------------------------------------------------------------------


@modest
@given(
    st.lists(st.integers(-(2**20), 2**20), min_size=1, max_size=20),
    st.integers(-6, 6),
    st.integers(-20, 20),
)
def test_rounding_is_that_of_python(levels: Sequence[int], places: int, zero_point: int) -> None:
    """With powers of two for scales every product is exact, and Python's `round` goes to even too."""
    scale = np.asarray(2.0**places)
    steps = Steps(scale, np.asarray(zero_point), None, -128, 127, torch.int8)
    made = Terms(((np.asarray(levels), np.asarray(1.0)),)).onto(steps)
    exact = [round(Fraction(level) / Fraction(float(scale))) + zero_point for level in levels]
    assert made.tolist() == [min(max(level, -128), 127) for level in exact]


# -- functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_those_of_torch(name: str) -> None:
    x = torch.linspace(-8, 8, 401, dtype=torch.float64)
    graph = torch.fx.Graph()
    target = getattr(torch.ops.aten, name).default
    node = graph.call_function(target, (graph.placeholder("x"),))
    ours = FUNCTIONS[name](x.numpy(), node)
    assert np.allclose(ours, target(x).numpy(), rtol=1e-12, atol=1e-13)


def test_norms_and_softmax_are_those_of_torch() -> None:
    x = torch.linspace(-3, 5, 96, dtype=torch.float64).reshape(4, 24).sin() * 7
    assert np.allclose(softmax(x.numpy(), -1), torch.softmax(x, -1).numpy(), rtol=1e-12)
    assert np.allclose(normalized(x.numpy(), (-1,), 1e-5), F.layer_norm(x, [24]).numpy(), rtol=1e-10)


# -- whole programs ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Products, a residual sum, a pool, a join and a move."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        one = self.first(x).relu()
        two = (self.second(one) + one).relu()
        both = torch.cat([F.avg_pool2d(two, 2), F.max_pool2d(one, 2)], 1)
        result: Tensor = self.last(both.mean((2, 3)).flatten(1))
        return result


def forms(backend: str) -> tuple[Program, Program, Tensor]:
    torch.manual_seed(3)
    x = torch.randn(4, 3, 8, 8)
    prepared = qc.prepare(qc.capture(Block().eval(), (x,)), backend)
    qc.calibrate(prepared, [(x,)])
    return qc.convert(prepared), qc.convert(prepared, to="integer"), x


@pytest.mark.parametrize("backend", ["executorch", "qnnpack", "x86"])
def test_a_whole_program_is_exact_end_to_end(backend: str) -> None:
    """Not fed anything on the way: all the bits of the output depend on all the roundings before it."""
    qdq, integer, x = forms(backend)
    left = {node.name for node in integer.plan.left_float.rows}
    (output,) = Oracle(qdq, left).run([x])["output"]
    assert torch.equal(integer(x), output)


def test_the_oracle_is_not_the_qdq_program() -> None:
    """Float32 rounds on the way: if the oracle did so too, it would be no oracle."""
    trials = kit_trials("qnnpack", "average")
    judges = [Judge.of(trial) for trial in trials]
    differing = 0
    for judge in judges:
        exact = Oracle(judge.qdq).run(judge.inputs)["output"]
        differing += sum(
            int((ours.double() != theirs.double()).sum())
            for ours, theirs in zip(exact, judge.qdq.run_flat(judge.inputs), strict=True)
        )
    assert differing > 0


@pytest.mark.parametrize("hint", ["multiplier", "bias"])
def test_a_constant_that_is_wrong_is_seen(hint: str) -> None:
    trial = next(trial for trial in kit_trials("qnnpack", "linear"))
    judge = Judge.of(trial)
    assert judge.differences({}) == []
    (node,) = [node for node in judge.integer.graph.find_nodes(op="get_attr") if hint in node.name]
    tensor = judge.integer.tensor(node)
    assert tensor is not None
    with torch.no_grad():
        tensor.copy_(tensor * 1.01 if tensor.is_floating_point() else tensor + math.ceil(2**10))
    assert judge.differences({})
