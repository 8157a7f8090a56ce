"""Modules for training learn what torch.ao's do, step by step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as ao_intrinsic
import torch.ao.nn.intrinsic.qat as ao_intrinsic_qat
import torch.ao.nn.intrinsic.quantized as ao_intrinsic_quantized
import torch.ao.nn.qat as ao_qat
import torch.ao.nn.quantized as ao_quantized
from torch import Tensor, nn

from quantc.errors import SpecError
from quantc.nn import STATIC_MODULES, intrinsic, qat
from quantc.nn import qconfig as qconfigs
from quantc.nn.intrinsic import qat as intrinsic_qat
from tests.support.nn_cases import both, engine, steps_apart

STEPS = 20
CONVS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def _float(name: str, library: Any) -> nn.Module:
    """The float module that a trained one is made of."""
    torch.manual_seed(0)
    if name.startswith("Linear"):
        made: list[nn.Module] = [nn.Linear(12, 6)]
        made += [nn.BatchNorm1d(6)] if "Bn" in name else []
    else:
        axes = int(name[-2])
        made = [CONVS[axes](4, 6, 3, padding=1, groups=2)]
        made += [NORMS[axes](6)] if "Bn" in name else []
    made += [nn.ReLU()] if "ReLU" in name else []
    return made[0] if len(made) == 1 else getattr(library, name)(*made)


def _input(name: str) -> Tensor:
    return torch.randn(8, 12) if name.startswith("Linear") else torch.randn(4, 4, *[5] * int(name[-2]))


FUSED = [f"Conv{middle}{axes}d" for middle in ("ReLU", "Bn", "BnReLU") for axes in (1, 2, 3)] + [
    "LinearReLU",
    "LinearBn1d",
]
NAMES = ["Conv1d", "Conv2d", "Conv3d", "Linear", *FUSED]


def _pair(name: str) -> tuple[Any, Any]:
    pairs: dict[bool, tuple[Any, Any]] = {True: (intrinsic_qat, ao_intrinsic_qat), False: (qat, ao_qat)}
    ours, theirs = pairs[name in FUSED]
    made = []
    for package, containers in ((ours, intrinsic), (theirs, ao_intrinsic)):
        module = _float(name, containers)
        for part in (module, *module.children()):
            part.qconfig = qconfigs.get_default_qat_qconfig("x86")  # type: ignore[assignment]
        made.append(getattr(package, name).from_float(module.train()))
    return made[0], made[1]


def _trained(module: Any, name: str, observer: Any) -> list[float]:
    """Losses, with what is made fake-quantized too."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        if step == STEPS // 2 and hasattr(module, "freeze_bn_stats"):
            module.freeze_bn_stats()
        made = observer(module(_input(name)))
        loss = (made - torch.linspace(-1, 1, made.numel()).reshape(made.shape)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_torchs(name: str) -> None:
    ours, theirs = _pair(name)
    observer = qconfigs.get_default_qat_qconfig("x86").activation()
    found = _trained(ours, name, copy.deepcopy(observer))
    wanted = _trained(theirs, name, observer)
    assert found == pytest.approx(wanted, abs=1e-5)
    assert found[0] != found[-1]
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    assert all(torch.allclose(mine[key].double(), other[key].double(), atol=1e-5) for key in mine)
    theirs.load_state_dict(mine)
    ours.load_state_dict(other)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_trained_is_converted(name: str) -> None:
    ours, theirs = _pair(name)
    for module in (ours, theirs):
        module.activation_post_process = qconfigs.get_default_qat_qconfig("x86").activation()
        _trained(module, name, module.activation_post_process)
        module.eval()
    converted: Any = STATIC_MODULES[type(ours)]
    library = ao_intrinsic_quantized if "ReLU" in name else ao_quantized
    with engine("fbgemm"):
        mine, other = converted.from_float(ours), getattr(library, converted.__name__).from_float(theirs)
        ours_x, theirs_x = both(_input(name))
        assert torch.equal(mine.weight().int_repr(), other.weight().int_repr())
        assert steps_apart(mine(ours_x), other(theirs_x)) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_back_to_float(name: str) -> None:
    """With its fake quantizer off, a trained module computes what the float one that comes of it does."""
    ours, _ = _pair(name)
    _trained(ours, name, nn.Identity())
    ours.eval()
    ours.weight_fake_quant.disable_fake_quant()
    x = _input(name)
    assert torch.allclose(ours.to_float().eval()(x), ours(x), atol=1e-5)


def test_a_frozen_norm_stays_frozen_in_training() -> None:
    module = intrinsic_qat.ConvBn2d(2, 3, 1, qconfig=qconfigs.get_default_qat_qconfig("x86"))
    module.apply(intrinsic_qat.freeze_bn_stats)
    module.train()
    before = module.bn.running_mean.clone()
    module(torch.randn(4, 2, 5, 5) + 3)
    assert torch.equal(module.bn.running_mean, before)
    module.apply(intrinsic_qat.update_bn_stats)
    module(torch.randn(4, 2, 5, 5) + 3)
    assert not torch.equal(module.bn.running_mean, before)


def test_without_a_qconfig_it_says_so() -> None:
    with pytest.raises(SpecError, match="no qconfig"):
        qat.Linear(2, 3)
    with pytest.raises(SpecError, match="made of ConvBn2d, not of Conv2d"):
        intrinsic_qat.ConvBn2d.from_float(nn.Conv2d(1, 1, 1))
