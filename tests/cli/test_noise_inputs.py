"""Default inputs: seeded noise like the example inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.cli.noise_inputs import example_leaves, noise_like
from quantc.errors import LoadError
from quantc.ir.program import Program
from tests.support.programs import small_net


@pytest.fixture
def program() -> Program:
    made = small_net()
    generator = torch.Generator().manual_seed(0)
    made.example_inputs = (torch.randn(2000, generator=generator) * 3 + 7, torch.arange(4), 5)
    return made


def test_noise_has_the_shape_the_mean_and_the_spread_of_floats(program: Program) -> None:
    (noise, _, _), *_ = noise_like(program, "here", 1, 1)
    assert noise.shape == (2000,)
    assert float(noise.mean()) == pytest.approx(7, abs=0.3)
    assert float(noise.std()) == pytest.approx(3, abs=0.2)


def test_what_is_no_float_stays_as_it_is(program: Program) -> None:
    given: Any = program.example_inputs
    for leaves in noise_like(program, "here", 1, 2):
        assert leaves[1] is given[1]
        assert leaves[2] == 5


def test_a_seed_gives_the_same_noise_again_and_each_batch_another(program: Program) -> None:
    first, again, other = (noise_like(program, "here", seed, 2) for seed in (1, 1, 2))
    assert all(torch.equal(mine[0], same[0]) for mine, same in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], other[0][0])


def test_constant_inputs_have_some_spread_and_formats_stay(program: Program) -> None:
    program.example_inputs = (torch.full((3,), 2.0, dtype=torch.float64),)
    ((noise,),) = noise_like(program, "here", 1, 1)
    assert noise.dtype is torch.float64
    assert len(set(noise.tolist())) == 3


def test_the_random_numbers_of_others_are_left_alone(program: Program) -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    noise_like(program, "here", 1, 3)
    assert torch.equal(torch.rand(2), wanted)


def test_a_program_without_examples_is_refused_by_its_source() -> None:
    program = small_net()
    assert isinstance(program.root, nn.Module)
    with pytest.raises(LoadError, match=program.name) as caught:
        example_leaves(program, "models.py:net")
    assert caught.value.where == "models.py:net"
    assert "--data" in str(caught.value.advice)
