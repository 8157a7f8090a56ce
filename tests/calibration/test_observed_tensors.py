"""Which tensors are observed: each element once, where it is computed, for every group that needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.calibration.observed_tensors import data_groups, observed_sites, observed_tensors
from quantc.observe import Recording
from quantc.spec.formats import PerChannel
from quantc.spec.spec import UINT8
from tests.support.calibration import observing, prepared
from tests.support.small_backend import SMALL


class Shared(nn.Module):
    """One tensor is read by two ops, and reshaped on the way to a third."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.three = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.one(x)
        return self.two(y), self.three(y.reshape(-1, 3))


def test_each_tensor_of_a_group_is_observed_once_a_run() -> None:
    x = torch.randn(4, 6)
    program = qc.prepare(qc.capture(Shared().eval(), (x,)), observing("recording"))
    qc.calibrate(program, [x])
    records = program.plan.statistics
    tensors = {name: seen.tensors for name, seen in records.items() if isinstance(seen, Recording)}
    assert len(tensors) == 4  # what goes into the first, and what each gives; the second and third read the same
    assert all(len(seen) == 1 for seen in tensors.values())


class Moved(nn.Module):
    """Tensors that are pooled, put side by side and reshaped: no number of these is new."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.conv(x))
        both = torch.cat([torch.nn.functional.max_pool2d(y, 2), torch.nn.functional.max_pool2d(y, 2, 2)], 1)
        return self.head(both.reshape(both.shape[0], 16))


def names(model: nn.Module, *shape: int, backend: Any = SMALL) -> list[str]:
    torch.manual_seed(0)
    program = qc.prepare(qc.capture(model.eval(), (torch.randn(shape),)), backend)
    return [node.name for node in observed_tensors(program)]


def test_groups_of_activations_take_part_and_those_of_weights_do_not() -> None:
    found = {group.name: spec for group, spec in data_groups(prepared("minmax"))}
    assert set(found.values()) == {UINT8.but(observe="minmax")}
    assert "conv2d:in0" in found
    assert "conv2d:in1" not in found


def test_ops_that_only_move_numbers_are_not_observed_again() -> None:
    assert names(Moved(), 1, 2, 4, 4) == ["x", "relu", "linear"]


def test_every_tensor_is_observed_where_ranges_go_by_channel() -> None:
    """What is moved has other channels."""
    by_channel = SMALL.but(act=UINT8.but(granularity=PerChannel(axis=1)))
    assert {"relu", "max_pool2d", "cat"} <= set(names(Moved(), 1, 2, 4, 4, backend=by_channel))


def test_padding_is_observed_for_it_may_bring_in_a_number() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Any:
            return self.conv(torch.nn.functional.pad(x, (1, 1), value=9.0))

    assert "pad" in names(Padded(), 1, 2, 3, 3, backend="qnnpack")


def test_a_tensor_that_two_groups_read_is_observed_for_both() -> None:
    torch.manual_seed(0)
    two = qc.QuantConfig().set("two", UINT8.but(observe="recording"))
    program = qc.prepare(qc.capture(Shared().eval(), (torch.randn(4, 6),)), "x86", config=two)
    found = {node.name: [group.name for group in groups] for node, groups in observed_tensors(program).items()}
    assert found["linear"] == ["linear_1:in0", "reshape:in0"]


def test_sites_are_listed_by_group() -> None:
    found = observed_sites(prepared("minmax"))
    assert found["conv2d_1:in0"] == ["relu:out0"]
    assert found["conv2d:in0"] == ["x:out0"]
    assert set(found) == {group.name for group, _ in data_groups(prepared("minmax"))}
