"""Quantizers written for torchao and ExecuTorch, unchanged: what quantc makes of them is what torchao makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn

from quantc.flows.pt2e import convert_pt2e, prepare_pt2e
from tests.oracle_models import SUBJECTS, Subject
from tests.oracles import Batches, differences, placement, pt2e, worst_op_error


def x86() -> Any:
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as theirs

    return theirs.X86InductorQuantizer().set_global(theirs.get_default_x86_inductor_quantization_config())


def x86_dynamic() -> Any:
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as theirs

    config = theirs.get_default_x86_inductor_quantization_config(is_dynamic=True)
    return theirs.X86InductorQuantizer().set_global(config)


def xnnpack() -> Any:
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as theirs

    return theirs.XNNPACKQuantizer().set_global(theirs.get_symmetric_quantization_config(is_per_channel=True))


def xnnpack_dynamic() -> Any:
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as theirs

    config = theirs.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    return theirs.XNNPACKQuantizer().set_global(config)


def cadence() -> Any:
    """It derives the scale of a bias from those of input and weight."""
    from executorch.backends.cadence.aot.quantizer.quantizer import CadenceDefaultQuantizer

    return CadenceDefaultQuantizer()  # type: ignore[no-untyped-call]


def vulkan() -> Any:
    from executorch.backends.vulkan.quantizer import vulkan_quantizer as theirs

    return theirs.VulkanQuantizer().set_global(theirs.get_symmetric_quantization_config())


QUANTIZERS: list[Callable[[], Any]] = [x86, x86_dynamic, xnnpack, xnnpack_dynamic, cadence, vulkan]


@dataclass(frozen=True)
class Pair:
    """One model quantized by both, on the same calibration data."""

    ours: fx.GraphModule
    theirs: fx.GraphModule
    unseen: Batches


def quantized(model: nn.Module, quantizer: Any, batches: Batches) -> fx.GraphModule:
    prepared = prepare_pt2e(torch.export.export(model, batches[0]).module(), quantizer)  # type: ignore[arg-type]
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)
    return convert_pt2e(prepared)


@pytest.fixture(scope="module", params=QUANTIZERS, ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module", params=SUBJECTS, ids=lambda subject: subject.name)
def pair(request: pytest.FixtureRequest, make: Any) -> Pair:
    subject: Subject = request.param
    batches = subject.batches(4, seed=1)
    ours = quantized(subject.with_norms(), make(), batches)
    return Pair(ours, pt2e(subject.with_norms(), make(), batches), subject.batches(2, seed=2))


def test_placement_and_scales(pair: Pair) -> None:
    """Every operand is quantized by both or by neither, with the same bits."""
    ours = placement(pair.ours)
    assert differences(ours, placement(pair.theirs)) == {}


def test_results(pair: Pair) -> None:
    """Op by op, and of the whole model."""
    error, name = worst_op_error(pair.ours, pair.theirs, pair.unseen[0])
    assert error <= 1e-5, name
    for batch in pair.unseen:
        assert torch.equal(pair.ours(*batch), pair.theirs(*batch))
