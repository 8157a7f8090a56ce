"""strip-dropout: dropout that is off goes, dropout that is on stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.errors import ModeError
from quantc.hooks import Guard, Truth, Verify
from quantc.ir.program import Program
from quantc.passes.strip_dropout import StripDropout
from quantc.pipeline.pipeline import Pipeline
from tests.support.agree import fingerprint

PIPELINE = Pipeline((StripDropout(),))
KINDS = (nn.Dropout(0.3), nn.Dropout2d(0.3), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3), nn.Dropout(0.3, True))


class Net(nn.Module):
    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.dropout(self.conv(x)))


def stripped(model: nn.Module, x: Tensor) -> Program:
    before = fingerprint(model)
    program = PIPELINE.run(qc.capture(model, (x,)), [Truth(), Verify(), Guard()])
    assert fingerprint(model) == before
    return program


def names(program: Program) -> list[str]:
    return [str(node.target).split(".")[1] for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_dropout_goes_in_inference(kind: nn.Module) -> None:
    model, x = Net(kind).eval(), torch.randn(2, 3, 4, 4)
    program = stripped(model, x)
    assert names(program) == ["conv2d", "relu"]
    assert torch.equal(program(x), model(x))
    assert program.log[-1].notes == ("removed 1 dropout",)
    assert not program.modes.rows


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_dropout_stays_in_training(kind: nn.Module) -> None:
    model, x = Net(kind).train(), torch.randn(2, 3, 4, 4)
    program = stripped(model, x)
    assert not program.log[-1].changed
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    assert torch.equal(program(x), expected)
    program.eval()
    assert torch.equal(program(x), model.eval()(x))


def test_the_way_back_to_training_is_closed() -> None:
    program = stripped(Net(nn.Dropout()).eval(), torch.randn(2, 3, 4, 4))
    with pytest.raises(ModeError, match=r"dropout .*was removed"):
        program.train()


class AlwaysOn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=True)


def test_dropout_that_is_always_on_stays() -> None:
    model, x = AlwaysOn().eval(), torch.ones(64)
    program = stripped(model, x)
    assert not program.log[-1].changed
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    assert torch.equal(program(x), expected)
    assert (expected == 0).any()
