"""Linear layers that add a float summand as they write, in place where nobody reads it later."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quantc.targets.kernels.int8_linear import FEW_ROWS
from quantc.targets.kernels.kernel import KernelForm
from quantc.targets.kernels.lowered import Lowered
from quantc.targets.kernels.residual_linear import LinearSum
from tests.support.lowered_families import Residual, check_line, of_family
from tests.support.residual_layers import plain_layer


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


# -- the kernel itself, against NumPy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 3 * FEW_ROWS])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("bound", [False, True])
def test_the_sum_is_that_of_the_product_and_the_summand(rows: int, keep: bool, bound: bool) -> None:
    plain, exact = plain_layer()
    kernel = LinearSum.of(plain)
    kernel.keep = keep
    x = torch.randint(0, 256, (rows, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    other = torch.randn(rows, 5, generator=torch.Generator().manual_seed(2))
    given = other.clone()
    run = kernel.bound(kernel.pack_for(x, given), KernelForm.PLAIN, KernelForm.PLAIN) if bound else kernel
    found = run(x, given)
    np.testing.assert_allclose(found.numpy(), exact(x) + other.double().numpy(), rtol=1e-5, atol=1e-5)
    assert not keep or torch.equal(given, other)


def test_a_summand_that_lies_in_another_order_is_not_written_over() -> None:
    plain, exact = plain_layer()
    kernel = LinearSum.of(plain)
    kernel.keep = False
    rows = 2 * FEW_ROWS
    x = torch.randint(0, 256, (rows, 8), dtype=torch.uint8)
    other = torch.randn(5, rows).t()
    expected = exact(x) + other.double().numpy()
    np.testing.assert_allclose(kernel(x, other).numpy(), expected, rtol=1e-5, atol=1e-5)
