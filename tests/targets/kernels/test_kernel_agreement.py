"""Difference between each kernel and the op it stands for, on the same inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.targets.kernels.int8_linear import Linear
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_agreement import KernelGap, kernel_agreement


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"made": self.third(self.second(torch.relu(self.first(x))))}


X = torch.linspace(-1, 1, 24).reshape(4, 6)


@pytest.fixture
def lowered() -> qc.Lowered:
    torch.manual_seed(0)
    prepared = qc.prepare(qc.capture(Model().eval(), (X,)), "x86")
    qc.calibrate(prepared, [X], progress="silent")
    return qc.lower(qc.convert(prepared, reduce_range="weights"), "x86")


def layers(module: qc.Lowered) -> list[Linear]:
    return [kernel for kernel in module.modules() if isinstance(kernel, Linear)]


def changed(kernel: Kernel, change: Any) -> None:
    """Let a kernel do something to its result."""
    run = kernel.run
    kernel.run = lambda packed, *inputs: change(run(packed, *inputs), *inputs)  # type: ignore[method-assign]


def test_every_kernel_has_its_row_by_the_name_of_the_op(lowered: qc.Lowered) -> None:
    found = kernel_agreement(lowered, X)
    assert [gap.kernel for gap in found] == [kernel.name for kernel in lowered.modules() if isinstance(kernel, Kernel)]
    assert {gap.node for gap in found} <= {node.name for node in lowered.program.nodes()}
    assert all(gap.steps <= 1 and gap.relative < 1e-6 for gap in found)


def test_a_kernel_that_is_some_steps_off_is_found_and_it_alone(lowered: qc.Lowered) -> None:
    exact = kernel_agreement(lowered, X)
    second = layers(lowered)[1]
    changed(second, lambda made, *inputs: torch.where(made < 128, made + 5, made - 5))
    found = kernel_agreement(lowered, x=X)
    wrong = [index for index, gap in enumerate(found) if gap.steps > 1]
    assert [found[index].kernel for index in wrong] == [second.name]
    assert 4 <= found[wrong[0]].steps <= 6
    assert found[wrong[0]].differing > 0.9
    assert [gap for index, gap in enumerate(found) if index not in wrong] == [
        gap for index, gap in enumerate(exact) if index not in wrong
    ]


def test_floats_differ_relative_to_the_largest(lowered: qc.Lowered) -> None:
    changed(layers(lowered)[2], lambda made, *inputs: made * 1.25)
    (gap,) = [gap for gap in kernel_agreement(lowered, X) if gap.relative > 0.01]
    assert gap.relative == pytest.approx(0.25, rel=1e-3)
    assert gap.steps == 0


def test_a_kernel_that_writes_over_its_input_spoils_no_other_row(lowered: qc.Lowered) -> None:
    before = kernel_agreement(lowered, X)
    given = X.clone()

    def overwrite(made: Tensor, *inputs: Tensor) -> Tensor:
        result = made.clone()
        inputs[0].zero_()
        return result

    for layer in layers(lowered):
        changed(layer, overwrite)
    assert kernel_agreement(lowered, given) == before
    assert torch.equal(given, X)


def test_layers_that_are_one_kernel_are_one_row() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Any:
            return self.a(x), self.b(x)

    torch.manual_seed(0)
    module = qc.lower(qc.quantize(Pair().eval(), (X,), mode="dynamic").program, "x86")
    (gap,) = kernel_agreement(module, X)
    assert gap.node == "linear, linear_1"
    assert 0 < gap.relative < 0.02  # half a step of the bias, and levels halfway between two


def test_a_row_is_told_in_a_line() -> None:
    gap = KernelGap("conv2d", "onednn qconv", 1, 0.0125, 2.5e-7)
    assert str(gap) == "conv2d (onednn qconv): 1 steps, 1.25% differ; 2.5e-07"
