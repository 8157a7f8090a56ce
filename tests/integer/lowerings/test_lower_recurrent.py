"""Recurrent layers from a model to integers: which mode takes which layer, the numbers, and what stays float."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.integer.library import op_of
from quantc.integer.lowerings.lower_recurrent import NOTE
from quantc.integer.reference_check import check_kernels
from quantc.integer.region_check import check_integer_form
from quantc.ir.dialect import op_name
from tests.support.recurrent_models import KINDS, Whole, every_model, model_and_input, noise

BACKENDS = ("x86", "qnnpack")


@every_model
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["static", "dynamic", "weight-only"])
def test_every_mode_takes_every_layer(name: str, backend: str, mode: Any) -> None:
    model, x = model_and_input(name)
    result = qc.quantize(model, (x,), [x], backend=backend, mode=mode)
    recurrent = [node for node in result.program.nodes() if op_name(node).startswith(KINDS)]
    assert recurrent
    assert all(node in result.program.plan.claims for node in recurrent)
    with torch.no_grad():
        assert noise(model(x), result(x)) > 25


@every_model
@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_layers_have_an_integer_form(name: str, backend: str) -> None:
    model, x = model_and_input(name)
    result = qc.quantize(model, (x,), mode="dynamic", backend=backend, to="integer")
    program = result.program
    program.verify()
    check_integer_form(program)
    assert not check_kernels(program, (x,))
    found = [node for node in program.nodes() if op_of(node.target) is not None]
    assert {op_of(node.target).name.partition("_dynamic")[1] for node in found} == {"_dynamic"}  # type: ignore[union-attr]
    assert NOTE in [note for entry in program.log for note in entry.notes]
    with torch.no_grad():
        assert noise(model(x), program(x)) > 28
    decomposed = qc.convert(result.prepared, to="integer", style="decomposed")
    check_integer_form(decomposed)
    assert all(torch.equal(*pair) for pair in zip(*map(pytree.tree_leaves, (program(x), decomposed(x))), strict=True))


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_the_forms_differ_by_the_rounding_of_the_state(name: str) -> None:
    """In Q/DQ form the state is float. Measured: 45 to 60 dB apart, below the noise of what both round."""
    model, x = model_and_input(name)
    prepared = qc.quantize(model, (x,), mode="dynamic").prepared
    qdq, integer = qc.convert(prepared), qc.convert(prepared, to="integer")
    with torch.no_grad():
        apart, off = noise(qdq(x), integer(x)), noise(model(x), qdq(x))
    assert 30 < apart < 80
    assert apart > off - 3


def test_tokens_have_scales_of_their_own() -> None:
    model, x = model_and_input("lstm")
    x = x * torch.logspace(-2, 1, 4).reshape(1, 4, 1)
    config = qc.QuantConfig().set_all(qc.UINT8_TOKEN)
    whole = qc.quantize(model, (x,), mode="dynamic", to="integer")
    tokens = qc.quantize(model, (x,), mode="dynamic", config=config, to="integer")
    check_integer_form(tokens.program)
    with torch.no_grad():
        assert noise(model(x), tokens(x)) > noise(model(x), whole(x))


def test_projections_stay_float_and_say_why() -> None:
    model = Whole(nn.LSTM(12, 10, proj_size=4)).eval()
    program = qc.quantize(model, (torch.randn(5, 4, 12),), mode="dynamic", to="integer").program
    assert "proj_size" in program.plan.left_float[program.node("lstm")]
    assert "proj_size" in str(program.coverage())


def test_static_layers_stay_float_and_say_why() -> None:
    model, x = model_and_input("gru")
    program = qc.quantize(model, (x,), [x], to="integer").program
    assert program.plan.left_float[program.node("gru")] == "it has no integer form"


def test_batches_of_another_size() -> None:
    model, x = model_and_input("gru")
    sizes = {"x": {0: torch.export.Dim("batch")}}
    prepared = qc.quantize(model, (x,), mode="dynamic", dynamic_shapes=sizes).prepared
    other = torch.randn(3, 4, 12)
    fused, decomposed = (qc.convert(prepared, to="integer", style=style) for style in ("fused", "decomposed"))
    with torch.no_grad():
        assert noise(model(other), fused(other)) > 28
    assert torch.equal(fused(other)[0], decomposed(other)[0])


def test_unbatched_input_and_a_saved_program(tmp_path: Any) -> None:
    model, x = model_and_input("lstm")
    program = qc.quantize(model, (x[:, 0],), mode="dynamic", to="integer").program
    program.save(tmp_path / "lstm.qc")
    loaded = qc.load(tmp_path / "lstm.qc")
    pairs = zip(*map(pytree.tree_leaves, (program(x[:, 0]), loaded(x[:, 0]))), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert str(loaded) == str(program)
