"""Which layers can be fused, found by running the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantc.flows import eager
from tests.support.eager_models import CASES, QUANTC
from tests.support.eager_small import X, hooks


class Skip(nn.Module):
    """Two convolutions with norms, between which the sum reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.conv2, self.bn2, self.relu2 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.fc, self.relu3 = nn.Linear(6, 6), nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        x = self.relu1(self.bn1(self.conv1(x)))
        y = self.conv2(x)
        z = self.relu2(self.bn2(y)) + y
        last = self.fc(z)
        return last, self.relu3(last)


def test_what_can_be_fused_is_found_by_running_the_model() -> None:
    model = Skip().eval()
    assert eager.fusable(model, X) == [["conv1", "bn1", "relu1"], ["bn2", "relu2"]]
    assert hooks(model) == 0
    assert torch.allclose(eager.fuse_modules(model, eager.fusable(model, X))(X)[1], model(X)[1], atol=1e-5)
    for case in CASES.values():
        found = eager.fusable(case.made(QUANTC).eval(), case.data()[0])
        assert all(names in found or len(names) == 2 for names in case.fuse)


def test_a_layer_that_runs_twice_is_not_fused() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.relu = nn.Linear(4, 4), nn.ReLU()
            self.second, self.last = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x: Tensor) -> Any:
            return self.last(self.second(self.relu(self.first(self.relu(self.first(x))))))

    assert eager.fusable(Again().eval(), torch.randn(2, 4)) == [["second", "last"]]


def test_a_function_between_layers_keeps_them_apart() -> None:
    class Between(nn.Module):
        def __init__(self, meddles: bool) -> None:
            super().__init__()
            self.fc, self.relu, self.meddles = nn.Linear(4, 4), nn.ReLU(), meddles

        def forward(self, x: Tensor) -> Any:
            y = self.fc(x)
            return self.relu(y * 2 if self.meddles else y).reshape(y.shape)

    assert eager.fusable(Between(True).eval(), torch.randn(2, 4)) == []
    assert eager.fusable(Between(False).eval(), torch.randn(2, 4)) == [["fc", "relu"]]


def test_arguments_by_name_reach_the_model() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.relu = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x: Tensor, *, rectify: bool) -> Any:
            return self.relu(self.fc(x)) if rectify else self.fc(x)

    assert eager.fusable(Named(), torch.randn(2, 4), rectify=True) == [["fc", "relu"]]
    assert eager.fusable(Named(), torch.randn(2, 4), rectify=False) == []
