"""Base class of kernels: weights are packed at the first call, and plain ones are held only as long as they are needed."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from quantc.errors import InputError
from quantc.targets.kernels.kernel import Kernel, KernelForm, Work, check_columns


class Scaled(Kernel):
    """A matrix product whose packed weight is the transposed one, doubled."""

    name: ClassVar[str] = "scaled"
    packs: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.arange(6.0).reshape(2, 3))
        self.register_buffer("bias", torch.ones(2))

    def pack(self) -> Any:
        self.packs.append(threading.get_ident())
        return self.get_buffer("weight").t() * 2

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        return {"weight": packed.t() / 2}

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return inputs[0] @ packed + self.get_buffer("bias")


X = torch.tensor([[1.0, 0.0, -1.0]])
EXPECTED = torch.tensor([[-3.0, -3.0]])
"""By hand: twice (0 - 2) and twice (3 - 5), plus 1."""


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    Scaled.packs.clear()


def test_weights_are_packed_at_the_first_call_and_never_again() -> None:
    kernel = Scaled()
    assert Scaled.packs == []
    assert torch.equal(kernel(X), EXPECTED)
    assert torch.equal(kernel(X), EXPECTED)
    assert len(Scaled.packs) == 1


def test_threads_that_come_at_once_pack_once() -> None:
    kernel, start = Scaled(), threading.Barrier(8)
    found: list[Tensor] = []

    def call() -> None:
        start.wait()
        found.append(kernel(X))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Scaled.packs) == 1
    assert all(torch.equal(made, EXPECTED) for made in found)


def test_what_is_packed_in_inference_mode_can_be_used_outside_it() -> None:
    kernel = Scaled()
    with torch.inference_mode():
        kernel(X)
    x = X.clone().requires_grad_()
    kernel(x).sum().backward()
    assert cast("Tensor", x.grad).tolist() == [[6.0, 10.0, 14.0]]


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))],  # noqa: S301 - our own bytes
    ids=["copied", "pickled"],
)
@pytest.mark.parametrize("dropped", [False, True])
def test_copies_have_plain_weights_and_pack_for_themselves(copied: Any, dropped: bool) -> None:
    kernel = Scaled()
    kernel(X)
    if dropped:
        kernel.drop(["weight"])
    twin = copied(kernel)
    assert twin.get_buffer("weight").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert torch.equal(twin(X), EXPECTED)
    assert len(Scaled.packs) == 2
    assert (kernel.optional_buffer("weight") is None) is dropped


def test_dropped_weights_are_still_in_the_state_and_can_be_taken_back() -> None:
    kernel = Scaled()
    before = {name: value.clone() for name, value in kernel.state_dict().items()}
    kernel(X)
    kernel.drop(["weight"])
    assert kernel.optional_buffer("weight") is None
    assert [name for name, _ in kernel.named_buffers()] == ["bias"]
    state, plain = kernel.state_dict(), kernel.plain_buffers()
    assert state.keys() == before.keys() == plain.keys()
    assert all(torch.equal(state[name], value) and torch.equal(plain[name], value) for name, value in before.items())
    assert torch.equal(kernel(X), EXPECTED)
    kernel.take_back()
    assert torch.equal(kernel.get_buffer("weight"), before["weight"])


@pytest.mark.parametrize("dropped", [False, True])
def test_weights_that_are_loaded_are_packed_again(dropped: bool) -> None:
    kernel = Scaled()
    kernel(X)
    if dropped:
        kernel.drop(["weight"])
    kernel.load_state_dict({"weight": torch.eye(2, 3), "bias": torch.zeros(2)})
    assert kernel(X).tolist() == [[2.0, 0.0]]


def test_weights_that_were_changed_by_hand_count_once_the_packed_ones_are_forgotten() -> None:
    kernel = Scaled()
    kernel(X)
    kernel.get_buffer("weight").zero_()
    assert torch.equal(kernel(X), EXPECTED)
    kernel.forget_packed()
    assert kernel(X).tolist() == [[1.0, 1.0]]


def test_a_bound_kernel_runs_on_the_packed_weights_it_was_given() -> None:
    run = Scaled().bound(torch.ones(3, 2), KernelForm.PLAIN, KernelForm.PLAIN)
    assert run(X).tolist() == [[1.0, 1.0]]


def test_a_kernel_that_says_it_joins_others_must_do_so() -> None:
    with pytest.raises(NotImplementedError, match="Scaled"):
        Scaled.joined([Scaled(), Scaled()])


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (Work("linear", 12, (8, 6)), "linear, 12 × 8→6"),
        (Work("conv2d 3x3 s1", 4, (8, 8), "padding [1, 1]"), "conv2d 3x3 s1, 4 × 8→8, padding [1, 1]"),
        (Work("softmax", 7, (5,)), "softmax, 7 × 5"),
    ],
)
def test_the_text_of_a_workload_is_the_key_of_its_times(work: Work, text: str) -> None:
    assert str(work) == text


def test_other_columns_than_those_of_the_weight_are_refused() -> None:
    check_columns(torch.zeros(4, 3), 3, "kernel")
    check_columns(torch.zeros(3), 3, "kernel")
    for x in (torch.zeros(3, 4), torch.zeros(3, 0), torch.zeros(())):
        with pytest.raises(InputError, match=r"kernel was given .* 3 columns"):
            check_columns(x, 3, "kernel")
