"""Training: a program trains as its model does, whichever mode it was captured in, or says that it cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.errors import ModeError, QuantcError
from quantc.ir.program import Program
from tests.support.agree import assert_same, assert_same_training, fingerprint, run
from tests.zoo import BY_NAME, Case, tagged

Method = Literal["export", "fx"]
METHODS: tuple[Method, ...] = ("export", "fx")


def trainable(turn: int) -> pytest.MarkDecorator:
    """Every second model that trains at once, beginning with the first or the second; the others are slow."""
    params = [
        pytest.param(case, method, id=f"{case.name}-{method}", marks=() if index % 2 == turn else pytest.mark.slow)
        for index, case in enumerate(tagged("train"))
        for method in METHODS
    ]
    return pytest.mark.parametrize(("case", "method"), params)


methods = pytest.mark.parametrize("method", METHODS)


class ConvNet(nn.Module):
    """Batch norm and dropout with options nobody has by default."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.bn1 = nn.BatchNorm2d(6, eps=2e-2, momentum=0.37)
        self.drop2d = nn.Dropout2d(0.15)
        self.drop = nn.Dropout(0.35)
        self.fc = nn.Linear(6, 8)
        self.bn2 = nn.BatchNorm1d(8, affine=False, momentum=0.01)
        self.alpha = nn.AlphaDropout(0.25)

    def forward(self, x: Tensor) -> Any:
        y = self.drop2d(F.relu(self.bn1(self.conv(x))))
        y = F.dropout(self.drop(y.mean((2, 3))), 0.45, self.training)
        return self.alpha(self.bn2(self.fc(y)))


class OneNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = norm

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.conv(x))


class AlwaysOn(nn.Module):
    """Monte Carlo dropout: the noise stays in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 32)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Any:
        return F.dropout(self.drop(self.fc(x)), 0.5, training=True)


class NeverOn(nn.Module):
    """Batch norm and dropout that user code pins to inference."""

    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("var", torch.rand(6) + 0.5)

    def forward(self, x: Tensor) -> Any:
        y = F.batch_norm(self.fc(x), self.mean, self.var, training=False)
        return F.dropout(y, 0.5, training=False)


class ModeBranch(nn.Module):
    """User code that does something else in training: no flag of any op says so."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        return y * 2 if self.training else y.relu()


class StopGradient(nn.Module):
    """Detached and no_grad parts: removing either would change the gradients and nothing else."""

    def __init__(self, way: Literal["detach", "data", "no_grad"]) -> None:
        super().__init__()
        self.way = way
        self.trunk = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.trunk(x))
        if self.way == "no_grad":
            with torch.no_grad():
                y = torch.relu(self.trunk(x))
        elif self.way == "detach":
            y = y.detach()
        else:
            y = y.data
        return self.head(y) + self.trunk(x).detach().clone()


def images(count: int = 3) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(4, 3, 7, 7, generator=generator),) for _ in range(count)]


def rows(count: int = 3) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(8)
    return [(torch.randn(4, 6, generator=generator),) for _ in range(count)]


def built(kind: type[nn.Module], *args: Any) -> nn.Module:
    torch.manual_seed(3)
    return kind(*args)


def normed(norm: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return OneNorm(norm)


def batches_of(case: Case) -> list[tuple[Any, ...]]:
    return [case.example(seed)[0] for seed in range(3)]


def attempt(action: Callable[[], Program]) -> Program | QuantcError:
    """What an action gives, or how it was refused."""
    try:
        return action()
    except QuantcError as refusal:
        return refusal


def trains_alike(program: Program, model: nn.Module, batches: list[Any]) -> None:
    """The program in training mode against a copy of the model in training mode, then both in inference."""
    twin = copy.deepcopy(model).train()
    assert_same_training(program.train().module, twin, batches)
    twin.eval()
    program.eval()
    for args in batches:
        assert_same(run(program, args).output, run(twin, args).output)


@trainable(0)
def test_captured_in_training_mode_it_trains_as_the_model(case: Case, method: Method) -> None:
    model = case.model().train()
    before = fingerprint(model)
    program = qc.capture(model, case.example()[0], method=method)
    assert fingerprint(model) == before
    assert program.training
    trains_alike(program, model, batches_of(case))
    assert fingerprint(model) == before


@trainable(1)
def test_captured_in_inference_mode_it_trains_as_the_model(case: Case, method: Method) -> None:
    model = case.model()
    before = fingerprint(model)
    program = qc.capture(model, case.example()[0], method=method)
    assert not program.training
    trains_alike(program, model, batches_of(case))
    assert fingerprint(model) == before


@methods
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_unusual_options_are_kept(method: Method, mode: bool) -> None:
    model = built(ConvNet).train(mode)
    program = qc.capture(model, images()[0], method=method)
    trains_alike(program, model, images())


@methods
def test_training_and_back_changes_nothing(method: Method) -> None:
    model = built(ConvNet).eval()
    program = qc.capture(model, images()[0], method=method)
    text, expected = program.dump(), run(program, images()[0]).output
    for _ in range(3):
        assert program.train().training
        assert not program.eval().training
    assert program.dump() == text
    program.verify()
    assert_same(run(program, images()[0]).output, expected)


@methods
def test_a_clone_trains_alone(method: Method) -> None:
    program = qc.capture(built(ConvNet).eval(), images()[0], method=method)
    expected = run(program, images()[0]).output
    twin = program.clone()
    twin.train()
    for args in images():
        run(twin, args)
    assert not program.training
    assert_same(run(program, images()[0]).output, expected)


@methods
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_batch_norm_without_running_statistics(method: Method, affine: bool, mode: bool) -> None:
    model = normed(nn.BatchNorm2d(4, affine=affine, track_running_stats=False)).train(mode)
    program = qc.capture(model, images()[0], method=method)
    trains_alike(program, model, images())


@methods
def test_cumulative_average_cannot_be_switched_on(method: Method) -> None:
    """momentum=None averages over the batches seen so far: the factor is computed from the counter in Python."""
    program = qc.capture(normed(nn.BatchNorm2d(4, momentum=None)).eval(), images()[0], method=method)
    with pytest.raises(ModeError, match="momentum") as caught:
        program.train()
    assert caught.value.advice


@methods
def test_cumulative_average_captured_in_training_is_right_or_refused(method: Method) -> None:
    model = normed(nn.BatchNorm2d(4, momentum=None)).train()
    program = attempt(lambda: qc.capture(model, images()[0], method=method))
    if isinstance(program, QuantcError):
        assert program.advice
        return
    assert_same_training(program.module, copy.deepcopy(model), images())


@methods
def test_attention_dropout_captured_in_inference_cannot_be_switched_on(method: Method) -> None:
    """In inference nn.MultiheadAttention leaves no trace of its dropout."""
    case = BY_NAME["multihead_attention"]
    program = qc.capture(case.model(), case.example()[0], method=method)
    with pytest.raises(ModeError):
        program.train()
    assert not program.training


@methods
def test_attention_captured_in_training_trains(method: Method) -> None:
    case = BY_NAME["multihead_attention"]
    model = case.model().train()
    program = qc.capture(model, case.example()[0], method=method)
    assert_same_training(program.module, copy.deepcopy(model), batches_of(case))


@methods
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["bidirectional_lstm", "lstm_tagger", "gru_tagger", "instance_norm_tracking", "vit"])
def test_other_modal_ops_train_as_the_model(name: str, mode: bool, method: Method) -> None:
    case = BY_NAME[name]
    model = case.model().train(mode)
    program = qc.capture(model, case.example()[0], method=method)
    trains_alike(program, model, batches_of(case))


@methods
def test_a_frozen_batch_norm_stays_frozen(method: Method) -> None:
    """Fine-tuning habit: the model trains, its norms do not."""
    model = built(ConvNet).train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    program = qc.capture(model, images()[0], method=method)
    twin = copy.deepcopy(model)
    assert_same_training(program.module, twin, images())
    twin.eval()
    program.eval()
    assert_same(run(program, images()[0]).output, run(twin, images()[0]).output)


@methods
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_always_on_dropout_stays_on(method: Method, mode: bool) -> None:
    model = built(AlwaysOn).train(mode)
    program = qc.capture(model, rows()[0], method=method)
    for training in (mode, True, False):
        twin = copy.deepcopy(model).train(training)
        program.train(training)
        for seed, args in enumerate(rows()):
            torch.manual_seed(seed)
            actual = run(program, args).output
            torch.manual_seed(seed)
            assert_same(actual, run(twin, args).output)
            assert (actual == 0).float().mean() > 0.2


@methods
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_pinned_inference_ops_stay_pinned(method: Method, mode: bool) -> None:
    model = built(NeverOn).train(mode)
    program = qc.capture(model, rows()[0], method=method)
    trains_alike(program, model, rows())


@methods
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_a_branch_on_the_mode_is_right_or_refused(method: Method, mode: bool) -> None:
    """`if self.training` leaves no trace in the graph; switching must not give the other branch's numbers wrong."""
    model = built(ModeBranch).train(mode)
    program = qc.capture(model, rows()[0], method=method)
    twin = copy.deepcopy(model)
    assert_same(run(program, rows()[0]).output, run(twin, rows()[0]).output)
    switched = attempt(lambda: program.train(not mode))
    if isinstance(switched, QuantcError):
        assert isinstance(switched, ModeError)
        assert switched.advice
        return
    assert_same(run(program, rows()[0]).output, run(twin.train(not mode), rows()[0]).output)


@methods
@pytest.mark.parametrize("way", ["detach", "data", "no_grad"])
def test_stopped_gradients_stay_stopped_or_are_refused(method: Method, way: str) -> None:
    model = built(StopGradient, way).train()
    program = attempt(lambda: qc.capture(model, rows()[0], method=method))
    if isinstance(program, QuantcError):
        assert method == "fx" or way == "data", "torch.export sees no_grad and detach"
        assert program.advice
        return
    assert_same_training(program.module, copy.deepcopy(model), rows())


@methods
def test_gradients_reach_the_inputs(method: Method) -> None:
    model = built(ConvNet).eval()
    program = qc.capture(model, images()[0], method=method)
    grads = []
    for function in (program, copy.deepcopy(model)):
        x = images()[0][0].clone().requires_grad_()
        function(x).square().sum().backward()
        grads.append(x.grad)
    assert_same(grads[0], grads[1])


@methods
def test_attention_captured_in_training_drops_nothing_in_eval(method: Method) -> None:
    case = BY_NAME["multihead_attention"]
    model, args = case.model().train(), case.example()[0]
    program = qc.capture(model, args, method=method)
    program.eval()
    assert_same(program(*args), program(*args))
    assert_same(program(*args), model.eval()(*args), 1e-5)
