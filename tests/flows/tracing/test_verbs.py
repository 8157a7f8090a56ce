"""prepare and convert of the tracing flow, and what one can ask of such a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import CaptureError, ConfigError, InputError, QuantcError, UnknownNameError
from quantc.flows import tracing
from quantc.flows.tracing import convert, prepare
from quantc.ir.decisions import FLOAT
from tests.support.traced_models import (
    Capturable,
)
from tests.support.traced_runs import (
    Counted,
    calibrated,
    images,
    seeded,
    sqnr,
)


def test_dynamic_mode() -> None:
    model, examples, _ = seeded("item-driven branches")
    prepared = prepare(model, examples, mode="dynamic")
    quantized = convert(prepared)  # no data is needed
    with torch.no_grad():
        for example in examples:
            with Counted() as counted:
                found = quantized(*example)
            assert counted.float_products == 0
            assert sqnr(model(*example), found) > 25


def test_config_leaves_modules_float() -> None:
    model, examples, _ = seeded("what both flows take")
    config = qc.QuantConfig().set("tail", FLOAT)
    quantized = convert(calibrated(model, examples, config=config))
    with torch.no_grad(), Counted() as counted:
        quantized(*examples[0])
    assert counted.float_products == 2
    with pytest.raises(ConfigError):
        prepare(model, examples, config=qc.QuantConfig().set("tale", FLOAT))


def test_qnnpack() -> None:
    model, examples, _ = seeded("what both flows take")
    quantized = convert(calibrated(model, examples, backend="qnnpack"))
    with torch.no_grad():
        assert sqnr(model(*examples[0]), quantized(*examples[0])) > 25


def test_to_program_of_a_stable_trace() -> None:
    model, examples, _ = seeded("what both flows take")
    prepared = calibrated(model, examples)
    program = tracing.to_program(prepared)
    lowered = qc.lower(qc.convert(program), "x86")
    with torch.no_grad():
        made = lowered(*examples[0])
        assert torch.equal(made, convert(prepared)(*examples[0]))
    unstable = prepare(*seeded("data-dependent early exit")[:2])
    with pytest.raises(CaptureError, match="not stable"):
        tracing.to_program(unstable)


def test_coverage_and_explain() -> None:
    model, examples, _ = seeded("data-dependent early exit")
    prepared = prepare(model, examples)
    text = str(tracing.coverage(prepared))
    assert "by conv of x86" in str(tracing.explain(prepared, "conv2d"))
    assert "first" in text
    assert "second" in text


def test_refusals() -> None:
    model, examples, _ = seeded("what both flows take")
    with pytest.raises(QuantcError, match="not calibrated"):
        convert(prepare(model, examples))
    with pytest.raises(QuantcError, match="not prepared"):
        convert(model)
    with pytest.raises(CaptureError, match="training mode"):
        prepare(Capturable().train(), examples)
    with pytest.raises(InputError, match="no examples"):
        prepare(model, [])
    quantized = convert(calibrated(model, examples))
    with pytest.raises(InputError, match="gradients"):
        quantized(images().requires_grad_())


def test_the_model_is_not_changed() -> None:
    model, examples, _ = seeded("what both flows take")
    before, kinds = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    convert(calibrated(model, examples))
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_backend_without_kernels_is_refused_before_anything_is_traced() -> None:
    with pytest.raises(UnknownNameError, match="there are no kernels for 'executorch'"):
        prepare(nn.Linear(4, 4).eval(), torch.randn(2, 4), backend="executorch")
