"""Recurrent layers on fbgemm's and QNNPACK's kernels: against the integer form, and against torch's own modules."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.errors import DataError, InputError
from quantc.targets.kernels.dynamic_recurrent import Recurrent
from quantc.targets.kernels.saturation import adds_in_16_bits
from tests.support.recurrent_models import KINDS, Whole, every_model, model_and_input, noise

TARGETS = ("x86", "qnnpack")
CLOSE = 2e-6
"""Without biases kernels and integer form differ in the last bits of float32 alone."""
TWO_LEVELS = 2 / 127
"""With biases, which kernels add in float32 and the integer form in steps, the state may round to the next level; so it
does where a number lies halfway between two."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch warns that its quantized modules are deprecated."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


def lowered(model: nn.Module, x: Tensor, target: str, **rest: Any) -> qc.Lowered:
    made: qc.Lowered = qc.lower(qc.quantize(model, (x,), mode="dynamic", backend=target, **rest).program, target)
    return made


def kernels(module: qc.Lowered) -> list[Recurrent]:
    return [found for found in module.module.modules() if isinstance(found, Recurrent)]


def farthest(left: Any, right: Any) -> float:
    pairs = zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True)
    return max(float((one - other).abs().max()) if one.numel() else 0.0 for one, other in pairs)


LAYERS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A layer of random sizes and settings, and what it is given."""
    kind = draw(st.sampled_from(KINDS))
    width, hidden = draw(st.integers(1, 48)), draw(st.integers(1, 40))
    steps, batch = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    options: dict[str, Any] = {"num_layers": draw(st.integers(1, 2))}
    options |= {name: draw(st.booleans()) for name in ("bidirectional", "batch_first", "bias")}
    if kind.startswith("rnn"):
        options["nonlinearity"] = kind.removeprefix("rnn_")
    with torch.random.fork_rng():
        torch.manual_seed(draw(st.integers(0, 2**31)))
        return Whole(LAYERS[kind](width, hidden, **options)).eval(), torch.randn(steps, batch, width)


@settings(max_examples=12)
@given(layers(), st.sampled_from(TARGETS))
def test_kernels_compute_what_the_integer_form_does(drawn: tuple[nn.Module, Tensor], target: str) -> None:
    model, x = drawn
    with torch.no_grad():
        module = lowered(model, x, target)
        assert all(row.kernel for row in module.placed)
        is_exact = target == "x86" and not model.get_submodule("layer").bias
        assert farthest(module.program(x), module(x)) < (CLOSE if is_exact else TWO_LEVELS)


@every_model
@pytest.mark.parametrize("target", TARGETS)
def test_every_layer_and_cell_is_on_a_kernel(name: str, target: str) -> None:
    model, x = model_and_input(name)
    module = lowered(model, x, target)
    assert kernels(module)
    assert all(row.kernel for row in module.placed), str(module)
    assert farthest(module.program(x), module(x)) < TWO_LEVELS
    assert noise(module.program(x), module(x)) > 45
    assert noise(model(x), module(x)) > 28


@every_model
def test_rows_with_scales_of_their_own_are_on_kernels_on_x86(name: str) -> None:
    model, x = model_and_input(name)
    config = qc.QuantConfig().set_all(qc.UINT8_TOKEN.but(qmax=127, eps=2.0**-20))
    module = lowered(model, x, "x86", config=config)
    assert [row.kernel for row in module.placed] == ["linear layers, step by step"] * len(module.placed)
    assert farthest(module.program(x), module(x)) < TWO_LEVELS
    assert noise(module.program(x), module(x)) > 45


def test_the_weights_of_a_cell_in_a_loop_are_packed_once() -> None:
    model, x = model_and_input("lstm cell")
    module = lowered(model, x, "x86")
    assert len(module.placed) == len(x)
    assert len(kernels(module)) == 1


# -- torch's own modules -------------------------------------------------------------------------------------------


def torchs(model: nn.Module) -> nn.Module:
    """What torch itself makes of a model."""
    kinds = {nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell}
    made: nn.Module = torch.ao.quantization.quantize_dynamic(model, kinds)  # type: ignore[no-untyped-call]
    return made


def unpacked(packed: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Levels, scale and bias of a packed weight."""
    weight, bias = torch.ops.quantized.linear_unpack(packed)
    return weight.int_repr(), torch.tensor(weight.q_scale()), bias


def with_weights_of(module: qc.Lowered, theirs: list[Any]) -> qc.Lowered:
    """A lowered module with the weights of torch's: one scale for each, not one for each row."""
    (kernel,) = kernels(module)
    for index, packed in enumerate(theirs):
        for name, value in zip(("weight", "scale", "bias"), unpacked(packed), strict=True):
            kernel.register_buffer(f"{name}_{index}", value.detach())
    kernel.forget_packed()
    return module


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_layers_are_those_of_quantize_dynamic_bit_for_bit(name: str) -> None:
    model, x = model_and_input(name)
    theirs = torchs(model)
    layer: Any = theirs.get_submodule("layer")
    cells = [each.param.__getstate__() for each in layer._all_weight_values]
    module = with_weights_of(lowered(model, x, "x86"), [packed for cell in cells for packed in cell[0][4]])
    assert farthest(theirs(x), module(x)) == 0


@pytest.mark.parametrize("name", ["lstm cell", "rnn cell", "rnn cell with relu"])
def test_cells_are_those_of_quantize_dynamic_bit_for_bit(name: str) -> None:
    model, x = model_and_input(name)
    theirs = torchs(model)
    cell: Any = theirs.get_submodule("cell")
    module = with_weights_of(lowered(model, x, "x86"), [cell._packed_weight_ih, cell._packed_weight_hh])
    assert farthest(theirs(x), module(x)) == 0


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_they_are_as_close_to_float_as_quantize_dynamic(kind: str) -> None:
    """Rows of different size, as trained weights have them: each has a scale of its own here."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Whole(LAYERS[kind](64, 96)).eval(), torch.randn(32, 2, 64)
        for weight in (model.get_parameter("layer.weight_ih_l0"), model.get_parameter("layer.weight_hh_l0")):
            weight.mul_(torch.logspace(-1, 0.3, weight.shape[0]).reshape(-1, 1))
    theirs = torchs(model)
    ours, peer = noise(model(x), lowered(model, x, "x86")(x)), noise(model(x), theirs(x))
    assert ours > peer
    assert ours > 32


# -- what may go wrong ---------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen_as_in_integer_form(name: str, value: float) -> None:
    model, x = model_and_input(name)
    x[1, 2, 3] = value
    for target in TARGETS:
        module = lowered(model, torch.randn_like(x), target)
        expected, found = (pytree.tree_leaves(run(x)) for run in (module.program.module, module.module))
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one.isfinite(), other.isfinite())
            torch.testing.assert_close(one.nan_to_num(), other.nan_to_num(), atol=TWO_LEVELS, rtol=0)


def test_a_bias_that_is_not_finite_is_refused() -> None:
    model, x = model_and_input("gru")
    model.get_parameter("layer.bias_ih_l0")[3] = torch.nan
    with pytest.raises(DataError, match=r"1 of \d+ values of layer.bias_ih_l0 are NaN or infinite"):
        lowered(model, x, "x86")


def test_a_state_that_grows_beyond_bounds_is_seen() -> None:
    model, x = Whole(nn.RNN(4, 4, nonlinearity="relu")).eval(), torch.ones(80, 2, 4)
    for parameter in model.parameters():
        parameter.fill_(30.0)
    module = lowered(model, x, "x86")
    expected, found = module.program(x)[0], module(x)[0]
    assert not expected.isfinite().all()
    assert torch.equal(expected.isfinite(), found.isfinite())


def test_an_input_of_another_width_is_refused() -> None:
    model, x = model_and_input("lstm")
    with pytest.raises(InputError, match="columns"):
        kernels(lowered(model, x, "x86"))[0](torch.randn(5, 4, 13), *[torch.zeros(4, 4, 10)] * 2)
    with pytest.raises(InputError, match="columns"):
        kernels(lowered(model, x, "x86"))[0](x, *[torch.zeros(4, 4, 11)] * 2)


def test_an_empty_batch_and_another_batch() -> None:
    model, x = model_and_input("gru")
    sizes = {"x": {0: torch.export.Dim("batch", min=0)}}
    module = lowered(model, x, "x86", dynamic_shapes=sizes)
    for batch in (1, 9):
        other = torch.randn(batch, 4, 12)
        assert noise(model(other), module(other)) > 28
    kernel = kernels(module)[0]
    sequence, last = kernel(torch.zeros(0, 4, 12), torch.zeros(2, 0, 10))
    assert (sequence.shape, last.shape) == ((0, 4, 10), (2, 0, 10))


def test_qnnpack_says_which_scales_it_has() -> None:
    model, x = model_and_input("lstm")
    for spec, reason in ((qc.UINT8_DYNAMIC.but(qmax=127), "0..255"), (qc.UINT8_TOKEN, "one affine scale for all")):
        module = lowered(model, x, "qnnpack", config=qc.QuantConfig().set_all(spec))
        assert [row.kernel for row in module.placed] == [""]
        assert reason in module.placed[0].reason
        assert farthest(module.program(x), module(x)) == 0


def test_eight_bits_on_x86_are_warned_of() -> None:
    model, x = model_and_input("lstm")
    config = qc.QuantConfig().set_all(qc.UINT8_DYNAMIC)
    program = qc.quantize(model, (x,), mode="dynamic", config=config).program
    if adds_in_16_bits():
        with pytest.warns(UserWarning, match="saturate in lstm"):
            qc.lower(program, "x86")


def test_copies_pickles_and_files_pack_again(tmp_path: Any) -> None:
    model, x = model_and_input("lstm")
    module = lowered(model, x, "x86")
    expected = module(x)
    file = io.BytesIO()
    torch.save(kernels(module)[0], file)
    file.seek(0)
    module.save(tmp_path / "lstm.qc")
    for again in (copy.deepcopy(module), qc.lower(qc.load(tmp_path / "lstm.qc"), "x86")):
        assert farthest(again(x), expected) == 0
    states = [torch.zeros(4, 4, 10)] * 2
    assert farthest(torch.load(file, weights_only=False)(x, *states), expected) == 0
    assert not any("packed" in name for name in module.state_dict())


# -- weights alone -------------------------------------------------------------------------------------------------

HALF = "fbgemm float16 layers over sequences"


def weights_only(model: nn.Module, x: Tensor, spec: qc.QuantSpec) -> qc.Lowered:
    config = qc.QuantConfig().set_all(spec)
    return qc.lower(qc.quantize(model, (x,), mode="weight-only", config=config).program, "x86")


def reasons(module: qc.Lowered) -> dict[str, str]:
    return {row.op: row.kernel or row.reason for row in module.placed if row.op in LAYERS}


@pytest.mark.parametrize("spec", [qc.FP16_WEIGHT, qc.INT4_GROUP])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_large_layers_run_on_float16_weights(kind: str, spec: qc.QuantSpec) -> None:
    model, x = Whole(LAYERS[kind](32, 384, batch_first=True, bias=kind == "lstm")).eval(), torch.randn(2, 5, 32)
    module = weights_only(model, x, spec)
    assert reasons(module) == {kind: HALF}
    assert len(module.placed) == 1, "weights that nobody reads any more are not made"
    torch.testing.assert_close(module(x), module.program(x), rtol=1e-5, atol=1e-5)
    assert farthest(copy.deepcopy(module)(x), module(x)) == 0


def test_other_layers_run_in_float_and_say_why() -> None:
    x = torch.randn(5, 2, 32)
    small, large = Whole(nn.GRU(32, 64)).eval(), Whole(nn.LSTM(32, 384)).eval()
    projected = Whole(nn.LSTM(32, 384, proj_size=64)).eval()
    assert "float is faster" in reasons(weights_only(small, x, qc.FP16_WEIGHT))["gru"]
    assert "scale for each row" in reasons(weights_only(large, x, qc.INT8_WEIGHT_ONLY))["lstm"]
    assert "proj_size" in reasons(weights_only(projected, x, qc.FP16_WEIGHT))["lstm"]
    assert "not stored" in reasons(qc.lower(qc.quantize(small, (x,), [x]).program, "x86"))["gru"]
