"""The recipe on the embedded examples: what calibration loses with 4-bit weights, training brings back."""

from __future__ import annotations

import pytest

import quantc as qc
from examples.qat_digits import W4A8, W8A8, accuracy, calibrated, captured, trained
from quantc.cli.example import digits_split

ONE_IMAGE = 100 / 719 + 1e-9


@pytest.mark.slow
def test_four_bit_weights_reach_float_accuracy_only_if_trained(capsys: pytest.CaptureFixture[str]) -> None:
    training, held_out = digits_split()
    program = captured()
    whole, static = accuracy(program, held_out), accuracy(calibrated(program, W4A8, training), held_out)
    converted, course = trained(program, W4A8, training, held_out)
    final = accuracy(converted, held_out)
    with capsys.disabled():
        print(f"\nW4A8: float {whole:.2f}%, calibrated {static:.2f}%, trained {final:.2f}%")  # noqa: T201 - the numbers of the recipe
    assert static <= whole - 1.5
    assert final >= whole - 3 * ONE_IMAGE  # seeds differ by as much
    assert final >= static + 1.0
    assert final == course.accuracies[-1]  # the converted program is the one that was trained


@pytest.mark.slow
@pytest.mark.parametrize("name", ["separable", "residual"])
def test_eight_bits_lose_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    training, held_out = digits_split()
    program = captured(name)
    whole = accuracy(program, held_out)
    converted, _ = trained(program, W8A8, training, held_out, epochs=4)
    final = accuracy(converted, held_out)
    with capsys.disabled():
        print(f"\nW8A8, {name}: float {whole:.2f}%, trained {final:.2f}%")  # noqa: T201 - the numbers of the recipe
    assert final >= whole - 0.1


def test_a_few_steps_bring_four_bit_weights_closer() -> None:
    """The same in seconds: one epoch."""
    training, held_out = digits_split()
    program = captured()
    static = accuracy(calibrated(program, W4A8, training), held_out)
    converted, course = trained(program, W4A8, training, held_out, epochs=1)
    assert accuracy(converted, held_out) > static
    assert converted.stage is qc.Stage.FOLDED
    assert len(course.losses) == 34
