"""The small training loop: one step a batch, a report of it, and common mistakes refused by step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import quantc as qc
from quantc.errors import TrainingError
from quantc.qat.training_loop import TrainingReport
from tests.support.training import SMALL_BATCH, refused, sgd, small_model, small_prepared


def test_no_batches() -> None:
    trained = small_prepared()
    with refused(TrainingError, "there were no batches"):
        qc.qat.train(trained, [], functional.cross_entropy, sgd(trained))


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "nan": (lambda y, t: functional.cross_entropy(y, t) * torch.nan, "the loss is nan"),
    "infinite": (lambda y, t: functional.cross_entropy(y, t) / 0.0, "the loss is inf"),
    "detached": (lambda y, t: functional.cross_entropy(y.detach(), t), "depends on no parameter"),
    "of something else": (
        lambda y, t: nn.Parameter(torch.ones(())) * y.detach().mean(),
        "no parameter was given a gradient",
    ),
    "nan gradients": (lambda y, t: torch.sqrt(y - y).sum(), "gradients are NaN"),
}


@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_that_teach_nothing(name: str) -> None:
    trained = small_prepared()
    loss, words = LOSSES[name]
    with refused(TrainingError, words, "step 3"):
        qc.qat.train(trained, [SMALL_BATCH], loss, sgd(trained), first_step=3)


def test_an_optimizer_of_the_model_trains_nothing() -> None:
    own = small_model()
    trained = qc.prepare(qc.capture(own, (SMALL_BATCH[0],)), "x86", qat=True)
    with refused(TrainingError, "prepared.parameters()"):
        qc.qat.train(trained, [SMALL_BATCH], functional.cross_entropy, torch.optim.SGD(own.parameters(), lr=0.1))


def test_it_is_the_loop_that_anybody_would_write() -> None:
    ours, theirs = small_prepared(), small_prepared()
    x, target = SMALL_BATCH
    batches = [(x, target), (x * 0.5, target), (x + 0.1, target)]
    report = qc.qat.train(ours, batches, functional.cross_entropy, sgd(ours, 0.1))
    optimizer, losses = sgd(theirs, 0.1), []
    for inputs, wanted in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(theirs(inputs), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert report == TrainingReport(tuple(losses))
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


def test_several_inputs_come_in_a_tuple_and_what_has_no_gradient_is_reported() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.used(x + y), self.other(x)

    torch.manual_seed(0)
    x = torch.randn(4, 3)
    program = qc.prepare(qc.capture(Two().eval(), (x, x)), "x86", qat=True)
    report = qc.qat.train(program, [((x, x), None)] * 2, lambda out, _: out[0].square().mean(), sgd(program))
    assert report.without_gradient == ("other.bias", "other.weight")
    assert str(report).startswith("2 steps, loss ")
    assert "other.bias" in str(report)
    by_turns = qc.qat.train(program, [((x, x), 0), ((x, x), 1)], lambda out, turn: out[turn].mean(), sgd(program))
    assert by_turns.without_gradient == ()  # each had one in some step


def test_a_report_lists_a_few_names_and_counts_the_rest() -> None:
    report = TrainingReport((2.0, 1.0), tuple("abcdef"))
    assert str(report) == "2 steps, loss 2 -> 1; no gradient for a, b, c, d and 2 more"


def test_the_last_whole_step_stays_when_a_later_one_is_refused() -> None:
    program, twin = small_prepared(), small_prepared()

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(y, target) * (torch.nan if float(target.sum()) == 0 else 1.0)

    x, target = SMALL_BATCH
    with pytest.raises(TrainingError, match="nan") as caught:
        qc.qat.train(program, [(x, target), (x, target * 0)], loss, sgd(program))
    assert "step 2" in str(caught.value.where)
    qc.qat.train(twin, [(x, target)], loss, sgd(twin))
    parameters = dict(twin.named_parameters())
    assert all(torch.equal(parameter, parameters[name]) for name, parameter in program.named_parameters())
