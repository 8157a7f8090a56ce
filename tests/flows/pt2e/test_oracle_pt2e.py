"""x86 against torchao's PT2E with its X86InductorQuantizer, on the same spec: placement, numbers, results."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx

import quantc as qc
from quantc.backends.x86 import X86
from quantc.ir.decisions import Quantize
from quantc.spec.spec import INT8_WEIGHT
from tests.support.named_ops import naming
from tests.support.oracle_models import SUBJECTS, Subject
from tests.support.oracles import EPS, Batches, differences, min_max, placement, pt2e, whole_sqnr, worst_op_error

SAME_SPEC = min_max(X86.but(weight=INT8_WEIGHT))
"""With the whole range of int8 for weights, as theirs has it."""

BEFORE_MOVE = "quantized before a pool, a join or a move instead of after it: the elements are the same"
AVERAGED = "averaged in float and quantized afterwards, with its own narrower scale; theirs averages in uint8"

DIFFERENCES: dict[str, dict[str, str]] = {
    "add_on_the_left": {"max_pool2d#0[0]": BEFORE_MOVE, "max_pool2d#1[0]": BEFORE_MOVE},
    "inverted": dict.fromkeys(("adaptive_avg_pool2d#0[0]", "flatten#0[0]", "linear#0[0]"), AVERAGED),
    "pooled": {"max_pool2d#0[0]": BEFORE_MOVE},
    "joined": dict.fromkeys(("cat#0[0]", "cat#0[1]", "cat#1[0]", "cat#1[1]"), BEFORE_MOVE),
    "attending": dict.fromkeys(
        (*(f"reshape#{index}[0]" for index in range(4)), *(f"permute#{index}[0]" for index in range(5))), BEFORE_MOVE
    ),
    "moved": {"flatten#0[0]": BEFORE_MOVE, "permute#0[0]": BEFORE_MOVE},
}
"""Where the x86 table places quantization elsewhere than theirs, by operand, and why."""


def quantizer() -> Any:
    """Theirs, with min-max observers in place of its histograms, and told to take matmul as we do."""
    from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
    from torchao.quantization.pt2e.quantizer import QuantizationSpec
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    act = QuantizationSpec(
        dtype=torch.uint8,
        quant_min=0,
        quant_max=255,
        qscheme=torch.per_tensor_affine,
        observer_or_fake_quant_ctr=MinMaxObserver.with_args(eps=EPS),
    )
    weight = QuantizationSpec(
        dtype=torch.int8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
        observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=EPS),
    )
    default = x86.get_default_x86_inductor_quantization_config()
    config = dataclasses.replace(default, input_activation=act, output_activation=act, weight=weight)
    made = x86.X86InductorQuantizer().set_global(config)
    return made.set_function_type_qconfig(torch.matmul, config)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One model quantized by both, on the same calibration data."""

    subject: Subject
    model: torch.nn.Module
    ours: fx.GraphModule
    theirs: fx.GraphModule
    unseen: Batches


@pytest.fixture(scope="module", params=SUBJECTS, ids=lambda subject: subject.name)
def pair(request: pytest.FixtureRequest) -> Pair:
    subject: Subject = request.param
    model, batches = subject.model(), subject.batches(4, seed=1)
    program = qc.capture(model, batches[0])
    prepared = qc.prepare(program, SAME_SPEC, config=naming(program, SAME_SPEC))
    qc.calibrate(prepared, batches)
    ours = qc.convert(prepared, reduce_range="no").module  # theirs makes no room for pairs in 16 bits
    return Pair(subject, model, ours, pt2e(subject.model(), quantizer(), batches), subject.batches(64, seed=2))


def test_placement_and_qparams(pair: Pair) -> None:
    """Every operand that is not listed is quantized by both or by neither, with the same bits."""
    found = differences(placement(pair.ours), placement(pair.theirs))
    expected = DIFFERENCES.get(pair.subject.name, {})
    assert found.keys() == expected.keys(), "\n".join(f"{name}: {text}" for name, text in found.items())


def test_products_are_int8(pair: Pair) -> None:
    """What theirs multiplies in int8 so do we: the differences lie between the products, not in them."""
    products = ("conv1d#", "conv2d#", "linear#", "matmul#")
    for name, reads in placement(pair.ours).items():
        if name.startswith(products):
            assert all(read is not None for read in reads), name


def test_op_by_op(pair: Pair) -> None:
    """Given what their op reads, our op with our weights yields the same."""
    error, name = worst_op_error(pair.ours, pair.theirs, pair.unseen[0])
    assert error <= 1e-5, name


def test_sqnr_is_not_lower(pair: Pair) -> None:
    ours, theirs = (whole_sqnr(pair.model, result, pair.unseen) for result in (pair.ours, pair.theirs))
    assert ours >= theirs - 0.1


def test_the_comparison_can_fail() -> None:
    """A scale one bit off, and an operand left float, are both seen."""
    subject = next(subject for subject in SUBJECTS if subject.name == "perceptron")
    batches = subject.batches(4, seed=1)
    theirs = pt2e(subject.model(), quantizer(), batches)
    other_eps = SAME_SPEC.but(act=Quantize(X86.outcome("act").spec.but(observe="minmax", eps=0.5)))
    fewer = qc.QuantConfig().set_op("relu", qc.FLOAT).set_node("linear_2", qc.FLOAT)
    for backend, config in ((other_eps, None), (SAME_SPEC, fewer)):
        prepared = qc.prepare(qc.capture(subject.model(), batches[0]), backend, config=config)
        qc.calibrate(prepared, batches)
        assert differences(placement(qc.convert(prepared, reduce_range="no").module), placement(theirs))
