"""Isolation of batches: what a program writes is put back, and random numbers follow the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.calibration.interpreter import Runner
from quantc.calibration.state_isolation import Isolation
from tests.support.calibration import batch, captured


class Counting(nn.Module):
    """Gives another answer each time, unless its buffer is put back."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


def test_what_a_program_writes_is_put_back_after_each_batch() -> None:
    x = torch.randn(3, 4)
    program = qc.capture(Counting().eval(), (x,))
    runner, isolation = Runner(program, {}), Isolation(program)
    for number in range(3):
        with isolation.batch(number, [x]) as inputs:
            assert torch.equal(runner.run(inputs)[0], x)
    assert all(float(buffer) == 0 for buffer in program.root.buffers())


class WritesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1) * 2


def test_inputs_a_program_writes_to_are_copied() -> None:
    x = torch.randn(3, 4)
    before = x.clone()
    program = qc.capture(WritesInput().eval(), (x.clone(),))
    with Isolation(program).batch(0, [x]) as inputs:
        assert torch.equal(Runner(program, {}).run(inputs)[0], (before + 1) * 2)
    assert torch.equal(x, before)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_random_numbers_follow_the_batch_and_leave_the_generator_alone() -> None:
    x = torch.zeros(3, 4)
    program = qc.capture(Noisy().eval(), (x,))
    runner, isolation = Runner(program, {}), Isolation(program)
    state = torch.get_rng_state()

    def run(number: int) -> Tensor:
        with isolation.batch(number, [x]) as inputs:
            found: Tensor = runner.run(inputs)[0]
            return found

    first, second = run(0), run(1)
    assert not torch.equal(first, second)
    assert torch.equal(run(0), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_state_is_put_back_when_a_batch_fails() -> None:
    x = torch.ones(3, 4)
    program = qc.capture(Counting().eval(), (x,))
    runner, isolation = Runner(program, {}), Isolation(program)
    with pytest.raises(RuntimeError, match="size"), isolation.batch(0, [x]) as inputs:
        runner.run(inputs)[0].reshape(7)
    assert all(float(buffer) == 0 for buffer in program.root.buffers())


def test_programs_that_write_nothing_copy_no_input_and_touch_no_tensor() -> None:
    program, x = captured(), batch(0)
    versions = [tensor._version for tensor in program.parameters()]
    before = torch.get_rng_state()
    with Isolation(program).batch(3, [x, 7]) as inputs:
        assert inputs[0] is x
        assert inputs[1] == 7
        assert torch.equal(torch.get_rng_state(), before)  # nothing is random, so nothing is seeded
    assert [tensor._version for tensor in program.parameters()] == versions


def test_the_tensors_of_modules_kept_whole_are_put_back() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Counting()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    x = torch.ones(3, 4)
    program = qc.capture(Outer().eval(), (x,), method="fx", leaf=(Counting,))
    runner, isolation = Runner(program, {}), Isolation(program)
    found = []
    for number in range(2):
        with isolation.batch(number, [x]) as inputs:
            found.append(runner.run(inputs)[0])
    assert torch.equal(found[0], found[1])
