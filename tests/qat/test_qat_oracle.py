"""Training beside torch.ao's eager modules for quantization-aware training: the same losses and the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn.intrinsic import qat as intrinsic
from torch.ao.nn.intrinsic.modules import fused
from torch.ao.quantization import (
    FakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    QConfig,
)

import quantc as qc
from tests.support.training_peers import RATE, STEPS, backend, trained


def qconfig() -> Any:
    """The same for torch.ao. Its observer of weights forgets all but the weights at hand."""
    fake: Any = FakeQuantize
    config: Any = QConfig
    act = fake.with_args(
        observer=MovingAverageMinMaxObserver,
        quant_min=0,
        quant_max=255,
        dtype=torch.quint8,
        averaging_constant=RATE,
        eps=2.0**-23,
    )
    weight = fake.with_args(
        observer=MovingAveragePerChannelMinMaxObserver,
        quant_min=-127,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        averaging_constant=1.0,
        eps=2.0**-23,
    )
    return config(activation=act, weight=weight)


class Theirs(nn.Module):
    """An input that is fake-quantized, and a module of torch.ao's."""

    def __init__(self, config: Any, body: nn.Module) -> None:
        super().__init__()
        self.input = config.activation()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self.input(x))


CASES: dict[str, tuple[Callable[[], nn.Sequential], Any, Any, tuple[int, ...]]] = {
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5)),
        fused.ConvBn1d,
        intrinsic.ConvBn1d,
        (3, 9),
    ),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5, eps=1e-3, momentum=0.2)),
        fused.ConvBn2d,
        intrinsic.ConvBn2d,
        (3, 6, 6),
    ),
    "conv2d with bias, grouped": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.BatchNorm2d(6)),
        fused.ConvBn2d,
        intrinsic.ConvBn2d,
        (4, 7, 7),
    ),
    "conv2d, relu": (
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU()),
        fused.ConvBnReLU2d,
        intrinsic.ConvBnReLU2d,
        (3, 6, 6),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, 2, bias=False), nn.BatchNorm3d(4)),
        fused.ConvBn3d,
        intrinsic.ConvBn3d,
        (2, 4, 4, 4),
    ),
    "linear": (
        lambda: nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)),
        fused.LinearBn1d,
        intrinsic.LinearBn1d,
        (7,),
    ),
}


def started(name: str) -> tuple[nn.Sequential, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    build, _, _, shape = CASES[name]
    model = build().train()
    for _ in range(3):
        model(torch.randn(8, *shape))  # statistics that are not those of a new norm
    with torch.no_grad():
        model[1].weight.uniform_(0.5, 2)  # type: ignore[operator]
        model[1].bias.uniform_(-1, 1)  # type: ignore[operator]
    like = model(torch.randn(8, *shape))
    batches = [(torch.randn(8, *shape), torch.randn(like.shape)) for _ in range(STEPS)]
    return model, batches


@pytest.mark.parametrize("frozen_after", [None, 8])
@pytest.mark.parametrize("name", list(CASES))
def test_losses_and_weights_are_those_of_torch(name: str, frozen_after: int | None) -> None:
    model, batches = started(name)
    _, fuse, module, _ = CASES[name]
    config = qconfig()
    float_module = fuse(*copy.deepcopy(model))
    float_module.qconfig = config
    theirs: Any = Theirs(config, module.from_float(float_module)).train()
    ours = qc.prepare(qc.capture(copy.deepcopy(model).eval(), (batches[0][0],)), backend(), qat=True)
    cut = STEPS if frozen_after is None else frozen_after
    expected = trained(theirs, theirs.parameters(), batches[:cut])
    found = trained(ours, ours.parameters(), batches[:cut])
    if frozen_after is not None:
        theirs.body.freeze_bn_stats()
        qc.qat.freeze_norms(ours)
        expected += trained(theirs, theirs.parameters(), batches[cut:])
        found += trained(ours, ours.parameters(), batches[cut:])
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert expected[-1] < expected[0]
    state = ours.state_dict()
    wanted = {"0.weight": theirs.body.weight, "1.weight": theirs.body.bn.weight, "1.bias": theirs.body.bn.bias}
    wanted |= {"1.running_mean": theirs.body.bn.running_mean, "1.running_var": theirs.body.bn.running_var}
    for key, tensor in wanted.items():
        assert torch.allclose(state[key], tensor, rtol=1e-5, atol=1e-5), key
    assert int(state["1.num_batches_tracked"]) == int(theirs.body.bn.num_batches_tracked)
    fake = theirs.input.activation_post_process
    low, high = (next(value for key, value in state.items() if key.endswith(f"in0.{end}")) for end in ("low", "high"))
    assert torch.allclose(low, fake.min_val)
    assert torch.allclose(high, fake.max_val)
