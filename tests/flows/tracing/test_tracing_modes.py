"""Modes, numbers and refusals of models that are calibrated or trained: they compute what the model says now, or refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quantc.errors import CaptureError, InputError
from quantc.flows.tracing import UnseenOpError, compare, convert, coverage, prepare, to_program
from tests.support.traced_runs import decibels

ROWS = [torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
IMAGES = [torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3, padding=1)
    return nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))


def dropping() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))


def trained(model: nn.Module, batches: list[Tensor]) -> Any:
    made = prepare(model, batches[0], qat=True)
    for x in batches:
        made(x)
    return made


def of_a_copy(model: Any) -> Any:
    return copy.deepcopy(model)


def of_a_state(model: Any) -> Any:
    other = prepare(network(), IMAGES[0], qat=True)
    other.load_state_dict(model.state_dict())
    return other.eval()


@pytest.mark.parametrize("again", [of_a_copy, of_a_state])
def test_a_trained_model_is_evaluated_in_eval_mode(again: Callable[[Any], Any]) -> None:
    model = trained(network(), IMAGES).eval()
    other = again(model)
    for x in IMAGES:
        assert torch.equal(other(x), model(x))
    assert int(other[1].num_batches_tracked) == len(IMAGES)
    assert torch.equal(other[1].running_mean, model[1].running_mean)
    assert compare(model, convert(model), IMAGES).sqnr > 40


def test_a_norm_that_averages_all_batches_does_so() -> None:
    model = network()
    model[1].momentum = None  # type: ignore[assignment]
    theirs = copy.deepcopy(model).train()
    ours = trained(model, IMAGES)
    for x in IMAGES:
        theirs(x)
    torch.testing.assert_close(ours[1].running_mean, theirs[1].running_mean, rtol=0.1, atol=0.02)
    torch.testing.assert_close(ours[1].running_var, theirs[1].running_var, rtol=0.1, atol=0.02)


def test_momentum_may_change() -> None:
    model = trained(network(), IMAGES)
    model[1].momentum = 0.0
    before = model[1].running_mean.clone()
    model(IMAGES[0])
    assert torch.equal(before, model[1].running_mean)


def test_a_norm_that_is_in_eval_mode_is_frozen() -> None:
    model = trained(network(), IMAGES)
    model[1].eval()
    before, count = model[1].running_mean.clone(), int(model[1].num_batches_tracked)
    model(IMAGES[0])
    assert torch.equal(before, model[1].running_mean)
    assert int(model[1].num_batches_tracked) == count
    model[1].train()
    model(IMAGES[0])
    assert not torch.equal(before, model[1].running_mean)


def test_dropout_that_is_in_eval_mode_drops_nothing() -> None:
    model = trained(dropping(), ROWS)
    assert not torch.allclose(model(ROWS[0]), model(ROWS[0]), atol=0.1)
    model[2].eval()
    torch.testing.assert_close(model(ROWS[0]), model(ROWS[0]), rtol=0.01, atol=0.01)


class Functional(nn.Module):
    def __init__(self, mode: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.a, self.b, self.mode = nn.Linear(8, 8), nn.Linear(8, 8), mode

    def forward(self, x: Tensor) -> Any:
        return self.b(F.dropout(self.a(x), 0.5, self.mode(self)))


def test_dropout_by_a_function_goes_by_what_it_is_told() -> None:
    model = trained(Functional(lambda module: module.training), ROWS)
    assert not torch.allclose(model(ROWS[0]), model(ROWS[0]), atol=0.1)
    model.eval()
    assert torch.equal(model(ROWS[0]), model(ROWS[0]))
    with pytest.raises(UnseenOpError, match="training=False while the model trains"):
        trained(Functional(lambda module: False), ROWS)


class Turned(nn.Module):
    def __init__(self, turn: str) -> None:
        super().__init__()
        self.a, self.b, self.turn = nn.Linear(8, 8), nn.Linear(16, 4), turn

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        y.t_() if self.turn == "t_" else y.transpose_(0, 1) if self.turn == "transpose_" else y.swapaxes_(0, 1)
        return self.b(y)


@pytest.mark.parametrize("turn", ["t_", "transpose_", "swapaxes_"])
def test_turning_in_place_is_trained(turn: str) -> None:
    torch.manual_seed(0)
    model = Turned(turn)
    ours = trained(model, ROWS)
    ours(ROWS[0]).sum().backward()
    assert ours.a.weight.grad.norm() > 0
    with torch.no_grad():
        ours.eval()
        assert decibels(model(ROWS[0]), ours(ROWS[0])) > 20
        assert decibels(ours(ROWS[0]), convert(ours)(ROWS[0])) > 40


class Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last, self.limit = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), 0.1
        self.other = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        y = F.conv2d(x, self.conv.weight, self.conv.bias, padding=self.conv.padding)
        return self.last(F.hardtanh(y, -self.limit, self.limit))


def limits(model: Any) -> None:
    model.limit = 1.0


def padding(model: Any) -> None:
    model.conv.padding = (2, 2)


def no_bias(model: Any) -> None:
    model.conv.bias = None


def other_bias(model: Any) -> None:
    model.conv.bias = model.other


@pytest.mark.parametrize("qat", [False, True], ids=["calibrated", "trained"])
@pytest.mark.parametrize("change", [limits, padding, no_bias, other_bias])
def test_other_numbers_and_weights_are_refused_before_convert_too(change: Callable[[Any], None], qat: bool) -> None:
    torch.manual_seed(0)
    made: Any = prepare(Numbers().train(qat), IMAGES[0], qat=qat)
    made(IMAGES[0])
    change(made)
    if qat and change is other_bias:  # another parameter may be trained in the place of one
        made.eval()
        expected = made.last(F.hardtanh(F.conv2d(IMAGES[0], made.conv.weight, None, padding=1), -0.1, 0.1))
        assert decibels(expected, made(IMAGES[0])) > 20
        return
    with pytest.raises((UnseenOpError, InputError)):
        made(IMAGES[0])


def test_what_is_calibrated_stays_in_eval_mode() -> None:
    made: Any = prepare(network().eval(), IMAGES[0])
    made(IMAGES[0])
    made[1].train()
    with pytest.raises(UnseenOpError, match="batch_norm with True for False"):
        made(IMAGES[0])


class Catching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        try:
            if x.max() > 5:
                raise ValueError
            y = self.a(x) if x.sum() > 0 else self.b(x)
        except Exception:  # noqa: BLE001 - as models do
            y = x * 0.1
        return self.c(y)


@torch.no_grad()
def test_a_refusal_that_the_model_catches_is_one() -> None:
    model, ones = Catching().eval(), torch.ones(4, 8)
    prepared = prepare(model, [ones, ones * 9])
    with pytest.raises(UnseenOpError):
        prepared(-ones)
    prepared(ones)
    prepared(ones * 9)
    quantized = convert(prepared)
    assert decibels(model(ones), quantized(ones)) > 20
    with pytest.raises(UnseenOpError):
        quantized(-ones)
    assert decibels(model(ones * 9), quantized(ones * 9)) > 20


class Gaining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.gain = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.gain.mul_(0.9)
        return torch.erf(self.a(x)) * self.gain.exp()


def test_what_examples_do_to_a_parameter_is_taken_back() -> None:
    prepared: Any = prepare(Gaining().eval(), [ROWS[0]] * 3)
    assert torch.equal(prepared.gain, torch.ones(8))


def test_a_trained_model_is_evaluated_in_inference_mode() -> None:
    model = trained(dropping(), ROWS).eval()
    expected = model(ROWS[0])
    with torch.inference_mode():
        assert torch.equal(model(ROWS[0]), expected)
        assert torch.equal(model(ROWS[0].clone()), expected)


class Checkpointed(nn.Module):
    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.is_reentrant = nn.Linear(8, 8), nn.Linear(8, 4), is_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.b, F.relu(self.a(x)), use_reentrant=self.is_reentrant)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_what_is_computed_again_on_the_way_back_is_refused(is_reentrant: bool) -> None:
    model = prepare(Checkpointed(is_reentrant), ROWS[0], qat=True)
    with pytest.raises(InputError, match="computed again on the way back"):
        model(ROWS[0]).sum().backward()


class Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.then: Any = None

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.a(x))
        return y if self.then is None else self.then(y)


@torch.no_grad()
def test_a_traced_tensor_is_handed_to_another_converted_model() -> None:
    first, second = prepare(Handing().eval(), ROWS[0]), prepare(dropping().eval(), ROWS[0])
    expected = second(first(ROWS[0]))
    one, other = convert(first), convert(second)
    one.then = other
    assert decibels(expected, one(ROWS[0])) > 25


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_model_with_a_leaf_is_no_program() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Same(), nn.Linear(8, 4)).eval()
    with pytest.raises(CaptureError, match="1 is kept whole"):
        to_program(prepare(model, ROWS[0], leaf="1"))


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        self.kept = F.relu(self.a(x))
        return self.kept + torch.randn(8)


def test_both_models_that_are_compared_draw_the_same_numbers() -> None:
    prepared = prepare(Drawing().eval(), ROWS[0])
    prepared(ROWS[0])  # with gradients: what the model keeps has a history
    assert compare(prepared, convert(prepared), ROWS).sqnr > 25


@torch.no_grad()
def test_models_of_other_weights_are_not_compared() -> None:
    made = [prepare(nn.Sequential(nn.Linear(8, 8)).eval(), ROWS[0]) for _ in range(2)]
    for prepared in made:
        prepared(ROWS[0])
    with pytest.raises(InputError, match="other weights"):
        compare(made[0], convert(made[1]), ROWS)
    with pytest.raises(InputError, match="batches is a tensor"):
        compare(made[0], convert(made[0]), ROWS[0])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(20, 16), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


@torch.no_grad()
def test_coverage_has_calls_that_no_graph_holds() -> None:
    given = (torch.randint(0, 20, (4, 7)), torch.tensor([7, 3, 5, 2]))
    prepared = prepare(Packed().eval(), given)
    prepared(*given)
    for made in (prepared, convert(prepared)):
        found = coverage(made)
        (row,) = (row for row in found.rows if row.op == "lstm")
        assert (row.verdict, row.module, row.macs) == ("float", "lstm", None)
        assert found.uncounted == (row.node,)
        assert "not counted: 1 ops" in found.headline


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        y: Any = self.a(x)
        y.value, y.buffer, y.root = 3, None, "mine"
        return self.b(F.relu_(y)) * y.value


@torch.no_grad()
def test_tensors_may_have_attributes_of_any_name() -> None:
    model = Named().eval()
    prepared = prepare(model, ROWS[0])
    prepared(ROWS[0])
    assert decibels(model(ROWS[0]), convert(prepared)(ROWS[0])) > 25


class Filling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        x.mul_(2.0)
        return self.a(x)


def test_examples_are_left_as_they_are() -> None:
    x = ROWS[0].clone()
    prepare(Filling().eval(), [x, x])
    assert torch.equal(x, ROWS[0])
