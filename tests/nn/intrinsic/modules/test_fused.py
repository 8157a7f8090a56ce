"""Float layers that belong together: sequences of known members."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as ao_intrinsic
from torch import nn

from quantc.errors import SpecError
from quantc.nn import intrinsic

LAYERS: dict[str, Any] = {
    "Conv": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "Bn": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
}


def members(name: str) -> list[nn.Module]:
    """The members that a name tells."""
    axes = int(name[-2]) if name[-1] == "d" else 1
    made: list[nn.Module] = []
    if name.startswith("Linear"):
        made.append(nn.Linear(3, 4))
    if name.startswith("Conv"):
        made.append(LAYERS["Conv"][axes - 1](3, 4, 1))
    if "Bn" in name or name.startswith("BN"):
        made.append(LAYERS["Bn"][axes - 1](4 if not name.startswith("BN") else 3))
    if "ReLU" in name:
        made.append(nn.ReLU())
    return made


NAMES = [name for name in intrinsic.__all__ if isinstance(getattr(intrinsic, name), type) and not name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_computes_what_its_members_do_as_torchs_does(name: str) -> None:
    torch.manual_seed(0)
    parts = members(name)
    ours, theirs = getattr(intrinsic, name)(*parts).eval(), getattr(ao_intrinsic, name)(*parts).eval()
    axes = int(name[-2]) if name[-1] == "d" and not name.startswith("Linear") else 0
    x = torch.randn(2, 3, *[4] * axes)
    assert torch.equal(ours(x), theirs(x))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("name", NAMES)
def test_other_members_are_refused_by_kind_number_and_order(name: str) -> None:
    parts = members(name)
    kind = getattr(intrinsic, name)
    for wrong in (parts[:-1], [*parts, nn.ReLU()], parts[::-1], [*parts[:-1], nn.Sigmoid()]):
        with pytest.raises(SpecError, match=f"{name} is made of"):
            kind(*wrong)
