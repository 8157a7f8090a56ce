"""Random eager programs, quantized on a grid so fine that rounding hardly shows: they compute what the model computes.

What is wrong in structure (an operand that reads another tensor, a scale shared with the wrong place, a tensor
quantized before it is written to) shows at once, and rounding does not.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.backends.qnnpack import QNNPACK
from quantc.backends.x86 import X86
from quantc.hooks import Truth, Verify
from quantc.ir.decisions import Fixed
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.spec import INT16
from tests.support.agree import fingerprint
from tests.support.laws import captured, law
from tests.support.random_programs import WILD, Net, inputs, nets

STEADY = tuple(kind for kind in WILD if kind not in ("mask", "mask_", "mixed_", "layer_norm"))
"""Without what jumps: comparisons turn the last bit of their input into a whole number."""
WEIGHT = INT16.but(role="weight")
FINE = {
    "act": INT16,
    "weight": WEIGHT.but(granularity=PerChannel(axis=0)),
    "weight-transposed": WEIGHT.but(granularity=PerChannel(axis=1)),
    "weight-whole": WEIGHT.but(granularity=PerTensor()),
}
UNITS = {"unit": Fixed(2.0**-15, 0, INT16), "signed-unit": Fixed(2.0**-15, 0, INT16)}
BACKENDS: dict[str, Backend] = {
    "x86": replace(X86, roles=FINE, takes=()),
    "qnnpack": replace(QNNPACK, roles={**FINE, **UNITS}, takes=()),
}
TOLERANCE = 5e-3
"""Of the largest number of an output. Sixteen steps in a row may each double what the first has rounded."""


def check_quantizing(net: Net, backend: Backend) -> None:
    program = captured(net)
    before = program.dump("text"), fingerprint(net)
    hooks = [Truth(), Verify()]
    prepared = qc.pipelines.prepare(backend, allow_empty=True).run_on_copy(program, hooks)
    if not prepared.plan.groups:
        return
    given_inputs = inputs(1)
    qc.calibrate(prepared, [copy.deepcopy(given_inputs)])
    quantized = qc.pipelines.convert(backend).run(prepared.clone(), hooks)
    assert (program.dump("text"), fingerprint(net)) == before
    with torch.no_grad():
        expected = copy.deepcopy(net)(*copy.deepcopy(given_inputs))
        actual = quantized(*copy.deepcopy(given_inputs))
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    if not theirs.numel() or not theirs.is_floating_point():
        assert torch.equal(ours, theirs)
        return
    allowed = TOLERANCE * max(float(theirs.abs().max()), 1.0)
    assert float((ours - theirs).abs().max()) <= allowed


@pytest.mark.parametrize("name", BACKENDS)
def test_quantized_on_a_fine_grid_programs_compute_the_same(name: str) -> None:
    @law(25)
    @given(net=nets(STEADY))
    def check(net: Net) -> None:
        check_quantizing(net, BACKENDS[name])

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_at_length(name: str) -> None:
    strategy: st.SearchStrategy[Net] = nets(STEADY, most=25)
    law(600)(given(strategy)(lambda net: check_quantizing(net, BACKENDS[name])))()
