"""Lowered modules among the rest of torch: compiled, exported, copied, in threads and processes; what they refuse."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import InputError, ModeError
from quantc.ir.program import Program
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.lowered import Lowered
from tests.support.lowered_nets import dynamic_program, image, same, static_program


@pytest.fixture(params=[static_program, dynamic_program], ids=["static", "dynamic"])
def program(request: pytest.FixtureRequest) -> Program:
    found: Program = request.param()
    return found


@pytest.fixture
def lowered(program: Program) -> Lowered:
    return qc.lower(program, "x86")


# -- copies and state ----------------------------------------------------------------------------------------------------


def test_copies_pickles_and_states_give_the_same(lowered: Lowered) -> None:
    x = image(4)
    expected = lowered(x)
    for twin in (copy.deepcopy(lowered), pickle.loads(pickle.dumps(lowered))):  # noqa: S301 - our own bytes
        assert twin.choices == lowered.choices
        assert same(twin(x), expected)
        twin.load_state_dict(lowered.state_dict())
        assert same(twin(x), expected)
    assert lowered.to("cpu") is lowered
    assert lowered.cpu().float().eval() is lowered
    assert same(lowered(x), expected)


def test_states_of_others_are_refused(lowered: Lowered) -> None:
    state = lowered.state_dict()
    name = next(name for name in state if name.endswith("weight"))
    with pytest.raises(RuntimeError, match="Missing key"):
        lowered.load_state_dict({key: value for key, value in state.items() if key != name})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        lowered.load_state_dict(state | {"other": torch.zeros(1)})
    assert isinstance(
        nn.Sequential(lowered).load_state_dict({f"0.{key}": value for key, value in state.items()}), tuple
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to("meta"),
        lambda m: m.train(),
        lambda m: m.requires_grad_(),
    ],
    ids=["half", "double", "meta", "train", "requires_grad_"],
)
def test_it_stays_what_it_is(lowered: Lowered, change: Callable[[Lowered], object]) -> None:
    x = image(4)
    expected = lowered(x)
    with pytest.raises(ModeError):
        change(lowered)
    assert same(lowered(x), expected)


# -- modes, threads, processes -------------------------------------------------------------------------------------------


def test_packing_in_inference_mode_poisons_nothing(lowered: Lowered) -> None:
    x = image(4)
    with torch.inference_mode():
        expected = lowered(x)
    assert same(lowered(x), expected)
    with torch.no_grad():
        assert same(lowered(x), expected)
    assert not any(value.is_inference() for value in lowered.state_dict().values())
    assert not any(value.is_inference() for value in lowered.program.root.state_dict().values())
    lowered.load_state_dict(lowered.state_dict())  # writes into tensors
    assert same(lowered(x), expected)


def test_threads_pack_once(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    made, count, batches = qc.lower(program, "x86"), 8, 3
    packed: list[Kernel] = []

    def watch(kernel: Kernel) -> None:
        pack = kernel.pack

        def noted() -> Any:
            packed.append(kernel)
            return pack()

        monkeypatch.setattr(kernel, "pack", noted)

    for kernel in made.modules():
        if isinstance(kernel, Kernel):
            watch(kernel)
    barrier = threading.Barrier(count)
    found: dict[int, Any] = {}

    def run(index: int) -> None:
        barrier.wait()
        for _ in range(batches):
            found[index] = made(image(1 + index % 3, seed=index))
            assert made.program.root is not None  # while others pack

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(packed) == len(set(packed))
    for index in range(count):
        assert same(found[index], made(image(1 + index % 3, seed=index)))


def test_runs_in_a_forked_process(lowered: Lowered) -> None:
    x = image(4)
    expected = lowered(x)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"same" if same(lowered(x), expected) else b"else")
        os._exit(0)
    os.close(write)
    assert os.read(read, 4) == b"same"
    assert os.waitpid(child, 0)[1] == 0


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "what"),
    [
        (image(4).double(), "is f64.*captured for f32"),
        (image(4).half(), "is f16.*captured for f32"),
        (image(4)[:, :2], "size 2 in dimension 1"),
        (image(4)[0], "captured for f32"),
        (image(33), "outside the captured range"),
        (image(4).to("meta"), "is on meta, and the kernels run on the CPU"),
        (image(4).requires_grad_(), "requires a gradient, and kernels have none"),
        (None, "is a NoneType, not a tensor"),
    ],
    ids=["double", "half", "channels", "rank", "batch", "device", "gradient", "none"],
)
def test_inputs_that_do_not_fit_are_refused(lowered: Lowered, x: Any, what: str) -> None:
    for _ in range(2):
        with pytest.raises(InputError, match=what):
            lowered(x)
        lowered(image(4))


def test_gradients_are_not_asked_for_where_none_are_recorded(lowered: Lowered) -> None:
    x = image(4).requires_grad_()
    with torch.no_grad():
        expected = lowered(x)
    assert same(expected, lowered(x.detach()))
    assert not any(tensor.requires_grad for tensor in lowered(image(4)))


def test_another_batch_than_captured_says_how_to_capture_it() -> None:
    x = torch.randn(1, 8)
    fixed = qc.quantize(nn.Linear(8, 4).eval(), (x,), mode="dynamic", dynamic_shapes=None).program
    made = qc.lower(fixed, "x86")
    with pytest.raises(InputError, match=r"has size 5 in dimension 0") as error:
        made(torch.randn(5, 8))
    assert "dynamic_shapes=" in str(error.value)


def test_nan_is_refused() -> None:
    x = image(4)
    x[1, 0, 2, 2] = torch.nan
    for program in (static_program(), dynamic_program()):
        with pytest.raises(InputError, match="input 'x' holds NaN"):
            qc.lower(program, "x86")(x)
    x[1, 0, 2, 2], x[1, 0, 3, 3] = torch.inf, -torch.inf
    for program in (static_program(), dynamic_program()):
        with pytest.raises(InputError, match="input 'x' holds infinity"):
            qc.lower(program, "x86")(x)


def test_empty_batches_give_empty_results(lowered: Lowered) -> None:
    assert [tuple(tensor.shape) for tensor in lowered(image(0))] == [(0, 16), (0, 8, 6, 6)]
    assert lowered(image(2))[0].shape == (2, 16)


def test_how_inputs_lie_in_memory_does_not_matter(lowered: Lowered) -> None:
    x = image(4)
    expected = lowered(x)
    assert same(lowered(x.contiguous(memory_format=torch.channels_last)), expected)
    assert same(lowered(x.transpose(2, 3).contiguous().transpose(2, 3)), expected)
    assert same(lowered(image(8)[::2]), lowered(image(8)[::2].contiguous()))


# -- memory --------------------------------------------------------------------------------------------------------------


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).eval()


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_weights_take_less_than_a_third_of_float(mode: Any) -> None:
    model, x = layers(), torch.randn(4, 256)
    result = qc.quantize(model, (x,), None if mode == "dynamic" else [(x,)], mode=mode)
    lowered = qc.lower(result.program, "x86")
    in_float = sum(parameter.nbytes for parameter in model.parameters())
    before = lowered.memory()
    assert before.packed == 0
    assert before.in_float == in_float
    lowered(x)
    after = lowered.memory()
    assert after.packed >= 2 * 256 * 512
    assert after.held <= 0.3 * in_float
    assert lowered.to_data()["memory"] == {"plain": after.plain, "packed": after.packed, "in_float": in_float}
    assert str(after) in str(lowered)
