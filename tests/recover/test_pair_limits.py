"""Rounding within what an instruction adds in 16 bits: the proof holds, and the output is nearer."""

from __future__ import annotations

from dataclasses import replace

import torch

import quantc as qc
from quantc.backends.qnnpack import QNNPACK
from quantc.backends.x86 import X86
from quantc.integer.proof.integer_ranges import Levels
from quantc.integer.proof.overflow_report import accumulators
from quantc.recover.fit_rounding import rounded
from quantc.recover.pair_limits import PairLimit
from quantc.spec.formats import DType
from quantc.spec.instruction_sets import PairSums
from quantc.spec.spec import INT8_WEIGHT
from tests.support.recovery import layer_of, linear_case, losses

SUMS = PairSums("unsigned", "saturates", neighbours="adjacent")
BYTES = Levels(0, 255, torch.uint8)


def test_limits_bind_where_levels_can_leave_the_bits() -> None:
    limit = PairLimit(SUMS, BYTES)
    assert limit.binds(INT8_WEIGHT)
    assert not limit.binds(INT8_WEIGHT.but(dtype=DType.INT7))
    assert not PairLimit(SUMS, Levels(0, 127, torch.uint8)).binds(INT8_WEIGHT.but(qmin=-127))


def test_the_bounds_are_the_largest_sums_that_fit() -> None:
    limit = PairLimit(SUMS, BYTES)
    neighbours = limit.neighbours(4, 1)
    assert neighbours is not None
    assert 255 * neighbours.above < 2**15 <= 255 * (neighbours.above + 1)
    assert 255 * neighbours.below <= 2**15 < 255 * (neighbours.below + 1)
    for first, others in enumerate(neighbours.of):
        assert all(first in neighbours.of[other] for other in others)
    order = [2, 0, 3, 1]
    turned = neighbours.ordered(order)
    for place, column in enumerate(order):
        assert sorted(order[other] for other in turned.of[place]) == sorted(neighbours.of[column])


def test_rounding_keeps_the_proof_and_loses_less_than_raised_scales() -> None:
    """`convert` raises scales until all pairs fit, and rounds to nearest. Rounding with feedback moves levels up too: without
    the limits it breaks the proof, and with them it holds."""
    broken = 0
    for seed in range(4):
        case = linear_case(INT8_WEIGHT, X86, seed=seed, outputs=16)
        prepared = case.prepared()
        layer = layer_of(prepared)
        assert layer.limit is not None
        assert bool((layer.qparams.scale > layer.open_qparams.scale).any())
        careless = rounded(replace(layer, limit=None, open_qparams=layer.qparams), "gptq", True)
        broken += int((~layer.fits(careless.weight, careless.qparams)).sum())
        better = qc.recover(prepared, "round", progress="silent")
        programs = [qc.convert(program) for program in (prepared, better)]
        assert [accumulators(program).unsafe for program in programs] == [(), ()]
        fitted = layer_of(better)
        assert bool(fitted.fits(fitted.current, fitted.qparams).all())
        assert torch.equal(fitted.qparams.scale, layer.qparams.scale)  # nothing is raised for what was moved
        raised, kept = (float(losses(prepared, program, case.batches[1::2])[0].sum()) for program in programs)
        assert kept < 0.7 * raised
    assert broken > 0


def test_weights_beside_no_limit() -> None:
    layer = layer_of(linear_case(INT8_WEIGHT, QNNPACK).prepared())
    assert layer.limit is None
    assert layer.grid(layer.qparams).neighbours is None
    assert bool(torch.as_tensor(layer.fits(layer.current, layer.qparams)).all())
