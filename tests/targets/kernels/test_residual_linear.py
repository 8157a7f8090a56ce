"""Linear layers that add a float summand as they write, in place where nobody reads it later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quantc.ir.program import Program
from quantc.targets.kernels.dynamic_linear import Weight
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_linear import FEW_ROWS, OnOnednn, Reading
from quantc.targets.kernels.kernel import KernelForm
from quantc.targets.kernels.kernel_fusion import kernels_of
from quantc.targets.kernels.lowered import Lowered
from quantc.targets.kernels.residual_linear import LinearSum, absorb_sums, settle_float_summands
from tests.support.by_hand import Builder, aten
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


# -- the kernel itself, against NumPy ------------------------------------------------------------------------------------


def layer(relu: bool = False) -> tuple[OnOnednn, Any]:
    """A linear layer with a float result, and what it computes in int64 and float64."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-64, 65, (5, 8)).astype(np.int8)
    bias = rng.normal(size=5).astype(np.float32)
    ending = Ending(torch.full((5,), 0.01), 0, 0, 0, torch.float32)
    kernel = OnOnednn(
        Weight(torch.from_numpy(weight), ending.multiplier, torch.from_numpy(bias)), Reading(7, 255), ending
    )
    if relu:
        kernel.absorb("relu")

    def exact(x: Tensor) -> Any:
        sums = (x.numpy().astype(np.int64) - 7) @ weight.astype(np.int64).T
        return sums * np.float64(np.float32(0.01)) + bias

    return kernel, exact


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 3 * FEW_ROWS])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("bound", [False, True])
def test_the_sum_is_that_of_the_product_and_the_summand(rows: int, keep: bool, bound: bool) -> None:
    plain, exact = layer()
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
    plain, exact = layer()
    kernel = LinearSum.of(plain)
    kernel.keep = False
    rows = 2 * FEW_ROWS
    x = torch.randint(0, 256, (rows, 8), dtype=torch.uint8)
    other = torch.randn(5, rows).t()
    expected = exact(x) + other.double().numpy()
    np.testing.assert_allclose(kernel(x, other).numpy(), expected, rtol=1e-5, atol=1e-5)


def with_layer(kernel: OnOnednn, add: Any) -> Program:
    """A program in which something is added to a layer's result."""
    build = Builder()
    x, other = build.input("x", torch.zeros(3, 8, dtype=torch.uint8)), build.input("other", torch.zeros(3, 5))
    build.root.add_module("kernel_linear", kernel)
    own = build.graph.create_node("call_module", "kernel_linear", (x,), name="kernel_linear")
    build.values[own] = torch.zeros(3, 5)
    own.meta["val"] = other.meta["val"]
    return build.program(*add(build, own, other))


ADDED: dict[str, tuple[Any, bool]] = {
    "to the right": (lambda build, own, other: [build.call(aten.add.Tensor, own, other)], True),
    "to the left": (lambda build, own, other: [build.call(aten.add.Tensor, other, own)], True),
    "times two": (lambda build, own, other: [build.call(aten.add.Tensor, own, other, alpha=2)], False),
    "a number": (lambda build, own, other: [build.call(aten.add.Tensor, own, 1.0)], False),
    "itself": (lambda build, own, other: [build.call(aten.add.Tensor, own, own)], False),
    "read again": (lambda build, own, other: [build.call(aten.add.Tensor, own, other), own], False),
    "a row": (
        lambda build, own, other: [build.call(aten.add.Tensor, own, build.call(aten.select.int, other, 0, 0))],
        False,
    ),
}


@pytest.mark.parametrize("name", ADDED)
def test_only_a_plain_sum_of_a_layer_that_nobody_else_reads_is_taken_in(name: str) -> None:
    add, is_absorbed = ADDED[name]
    plain, exact = layer()
    program = with_layer(plain, add)
    assert len(absorb_sums(program)) == is_absorbed
    kernels = [kernel for _, kernel in kernels_of(program, program.graph)]
    assert [type(kernel) for kernel in kernels] == [LinearSum if is_absorbed else OnOnednn]
    if is_absorbed:
        x, other = torch.arange(24, dtype=torch.uint8).reshape(3, 8), torch.ones(3, 5)
        np.testing.assert_allclose(program(x, other).numpy(), exact(x) + 1, rtol=1e-5, atol=1e-5)


def test_a_layer_that_ends_in_a_relu_adds_nothing() -> None:
    plain, _ = layer(relu=True)
    assert absorb_sums(with_layer(plain, ADDED["to the right"][0])) == []


def test_inputs_of_the_program_are_never_written_over() -> None:
    plain, _ = layer()
    program = with_layer(plain, ADDED["to the right"][0])
    absorb_sums(program)
    settle_float_summands(program)
    (kernel,) = [kernel for _, kernel in kernels_of(program, program.graph)]
    assert isinstance(kernel, LinearSum)
    assert kernel.keep
