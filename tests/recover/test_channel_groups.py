"""Channel groups: which channels may have factors, and that programs keep their bits whatever the factors are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quantc as qc
from quantc.ir.program import Program
from quantc.recover.channel_groups import ChannelGroups
from tests.support.channel_nets import NETS, with_factors


def captured(model: nn.Module, x: Tensor, method: str = "fx") -> Program:
    program = qc.capture(model.eval(), (x,), method, dynamic_shapes=None)  # type: ignore[arg-type]
    return qc.pipelines.inference().run_on_copy(program)


@pytest.mark.parametrize("name", sorted(NETS))
def test_powers_of_two_change_no_bit(name: str) -> None:
    """Of any net, with every class scaled at once: what quantc calls movable is."""
    torch.manual_seed(0)
    model, x, movable = NETS[name]()
    program = captured(model, x)
    other, groups = with_factors(program, seed=len(name))
    assert sum(group.is_movable for group in groups.groups) == movable, [str(each) for each in groups.groups]
    torch.testing.assert_close(other(x), program(x), rtol=0, atol=0)


class Clamped(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(4, 4), act, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.two(self.act(self.one(x)))
        return result


def the_only_group(model: nn.Module, x: Tensor) -> tuple[bool, str]:
    """Whether the last layer's input is movable, and why not."""
    found = ChannelGroups.of(captured(model, x)).groups
    (group,) = (each for each in found if each.readers and "is an input" not in each.reason)
    return group.is_movable, group.reason


def test_r9_a_clamp_with_an_upper_bound_is_refused_by_name() -> None:
    """relu6 and hardtanh bound what they read; relu, leaky relu and prelu do not."""
    x = torch.randn(2, 4)
    for act in list[nn.Module](
        [nn.ReLU6(), nn.Hardtanh(), nn.Hardswish(), nn.Sigmoid(), nn.GELU(), nn.Softmax(-1), nn.ELU()]
    ):
        movable, reason = the_only_group(Clamped(act), x)
        assert not movable
        assert "not proportional" in reason, act
    assert "(clamp 0.0, 6.0)" in the_only_group(Clamped(nn.ReLU6()), x)[1]
    for act in list[nn.Module]([nn.ReLU(), nn.LeakyReLU(0.3), nn.PReLU(), nn.Identity(), nn.Dropout(0.5)]):
        assert the_only_group(Clamped(act), x) == (True, ""), act


def test_r8_a_tensor_that_one_op_reads_twice() -> None:
    """x + x and cat(x, x) scale with x; x * x does not."""

    class Twice(nn.Module):
        def __init__(self, join: str) -> None:
            super().__init__()
            self.one, self.two, self.join = nn.Linear(4, 4), nn.Linear(8 if join == "cat" else 4, 2), join

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            x = {"add": lambda: x + x, "mul": lambda: x * x, "cat": lambda: torch.cat([x, x], -1)}[self.join]()
            result: Tensor = self.two(x)
            return result

    x = torch.randn(3, 4)
    assert the_only_group(Twice("add"), x)[0]
    assert the_only_group(Twice("cat"), x)[0]
    movable, reason = the_only_group(Twice("mul"), x)
    assert not movable
    assert "mul" in reason


def test_what_stays_says_why() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.tied, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.out(x)
            z = self.tied(self.tied(y))
            return y, self.last(F.relu(z) + 1.0)

    groups = ChannelGroups.of(captured(Kept(), torch.randn(2, 4)))
    reasons = [group.reason for group in groups.groups]
    assert not any(group.is_movable for group in groups.groups)
    told = " ".join(reasons)
    assert "the program returns it" in told
    assert "with the number 1.0" in told
    assert "read more than once" in told


def test_some_channels_of_a_group_stay_alone() -> None:
    """Joined with an input: its channels stay, the others move."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.two(torch.cat([self.one(x), x], -1))
            return result

    groups = ChannelGroups.of(captured(Joined(), torch.randn(2, 4)))
    assert [group.classes.size for group in groups.groups if group.is_movable] == [4]
