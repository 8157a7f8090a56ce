"""Linear layers that add a float summand as they write, in place where nobody reads it later."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from quantc.targets.kernels.lowered import Lowered
from quantc.targets.kernels.residual_linear import LinearSum
from tests.support.lowered_families import Residual, check_line, of_family


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class ReadLater(nn.Module):
    """A branch whose summand is read again afterwards, by a view that is taken beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        before = self.first(x)
        view = before.transpose(0, 1)
        made: Tensor = before + self.second(torch.tanh(before)) + view.transpose(0, 1)
        return made


def sums(lowered: Lowered) -> list[LinearSum]:
    return [kernel for kernel in lowered.module.modules() if isinstance(kernel, LinearSum)]


@pytest.mark.parametrize("rows", [1, 40])
def test_a_sum_is_written_over_what_nobody_reads_later(rows: int) -> None:
    lowered, x = of_family(Residual(), "onednn", rows, 32)
    check_line(lowered, x)
    assert [kernel.keep for kernel in sums(lowered)] == [True, False]  # the first is over what `mul` has made
    assert sum("+ sum" in row.kernel for row in lowered.placed) == 2


def test_a_sum_is_not_written_over_what_is_read_later() -> None:
    lowered, x = of_family(ReadLater(), "onednn", 40, 32)
    check_line(lowered, x)
    assert all(kernel.keep for kernel in sums(lowered))
    exact = lowered.program(x)
    assert float((lowered(x) - exact).norm() / exact.norm()) < 0.02
