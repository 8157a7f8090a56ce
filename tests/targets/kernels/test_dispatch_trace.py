"""Dispatch traces: the ops that a function of tensors dispatches in one call, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quantc.targets.kernels.dispatch_trace import (
    Held,
    Made,
    NoTapeError,
    Several,
    Tape,
    TraceConstant,
    TracedInput,
    identity,
    record_tape,
)
from tests.support.stored_weights import needs_fbgemm

ATEN: Any = torch.ops.aten
WEIGHT = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
X = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_a_tape_holds_weights_and_no_results() -> None:
    tape, made = record_tape(lambda x: [F.linear(x, WEIGHT).relu() + WEIGHT], [X])
    assert [held is WEIGHT for held in tape.held] == [True]
    assert torch.equal(made[0], F.linear(X, WEIGHT).relu() + WEIGHT)


def test_steps_name_inputs_constants_and_earlier_results() -> None:
    tape, _ = record_tape(lambda x, y: [(x * 2).sub(y, alpha=3)], [X, X + 1])
    assert tape.inputs == 2
    assert [step.op for step in tape.steps] == [ATEN.mul.Tensor, ATEN.sub.Tensor]
    assert tape.steps[0].operands == (TracedInput(0), TraceConstant(int, "2", 2))
    assert tape.steps[1].operands == (Made(0, 0), TracedInput(1), TraceConstant(int, "3", 3))
    assert tape.results == (Made(1, 0),)


def test_arguments_that_are_not_given_have_their_defaults_on_the_tape() -> None:
    tape, _ = record_tape(lambda x: [x.add(x)], [X])
    assert tape.steps[0].operands == (TracedInput(0), TracedInput(0), TraceConstant(int, "1", 1))


def test_lists_are_told_by_their_items() -> None:
    def line(x: Tensor) -> list[Tensor]:
        first, second = torch.split(x, [2, 4])
        return [torch.cat([second, first])]

    tape, _ = record_tape(line, [X])
    split, cat = tape.steps
    assert split.lengths == (2,)
    assert cat.operands[0] == Several((Made(0, 0, 1), Made(0, 0, 0)))
    assert cat.lengths == (None,)


def test_an_input_that_is_given_back_is_a_result() -> None:
    tape, made = record_tape(lambda x: [x, WEIGHT], [X])
    assert tape.results == (TracedInput(0), Held(0))
    assert made[0] is X


def test_numbers_of_different_types_are_told_apart() -> None:
    lines: list[Callable[[Tensor], Sequence[Tensor]]] = [lambda x: [x + 1], lambda x: [x + 1.0], lambda x: [x + True]]
    tapes = [record_tape(line, [X])[0] for line in lines]
    assert [[one.is_like(other) for other in tapes] for one in tapes] == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
    ]


def test_tapes_are_alike_only_on_the_very_same_weights() -> None:
    def tape(weight: Tensor) -> Tape:
        return record_tape(lambda x: [x @ weight], [X])[0]

    assert tape(WEIGHT).is_like(tape(WEIGHT))
    assert not tape(WEIGHT).is_like(tape(WEIGHT.clone()))


@needs_fbgemm
def test_a_packed_weight_is_itself_however_often_it_is_asked_for() -> None:
    weight = torch.quantize_per_tensor(WEIGHT, 0.1, 0, torch.qint8)
    torch.backends.quantized.engine = "fbgemm"
    one, other = (torch.ops.quantized.linear_prepack(weight, None) for _ in range(2))
    assert identity([one][0]) == identity(one)
    assert identity(one) != identity(other)


def test_a_tensor_on_the_memory_of_another_is_put_there_by_name() -> None:
    def line(x: Tensor) -> list[Tensor]:
        made = x.abs()
        return [torch.empty(0).set_(made.untyped_storage(), 6, (5, 6), (6, 1)) * 2]

    tape, made = record_tape(line, [X])
    assert torch.equal(made[0], X.abs()[1:] * 2)
    assert [step.op for step in tape.steps].count(ATEN.set_.source_Tensor_storage_offset) == 1
    assert all(step.op is not ATEN.set_.source_Storage_storage_offset for step in tape.steps)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "an item": (lambda x: [x * x.max().item()], "looks at numbers"),
    "a size": (lambda x: [torch.nonzero(x)], "depends on numbers"),
    "a mask": (lambda x: [x[x > 0]], "depends on numbers"),
    "chance": (lambda x: [torch.rand_like(x)], "at random"),
    "memory of an input": (lambda x: [torch.empty(0).set_(x.untyped_storage(), 0, (3,), (1,))], "memory of an input"),
    "no tensor": (lambda x: [3], "other things than tensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_more_than_its_ops_has_no_tape(name: str) -> None:
    line, why = REFUSED[name]
    with pytest.raises(NoTapeError, match=why):
        record_tape(line, [X])


def test_positions_are_no_numbers_that_sizes_depend_on() -> None:
    places = torch.tensor([3, 0])
    tape, made = record_tape(lambda x: [x[places]], [X])
    assert torch.equal(made[0], torch.stack([X[3], X[0]]))
    assert len(tape.steps) == 1


def test_a_refused_try_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(NoTapeError):
        record_tape(lambda x: [torch.rand_like(x)], [X])
    assert torch.equal(torch.rand(2), wanted)
