"""The running form without Python: a recording computes what the function does, or there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import quantc as qc
from quantc.targets.kernels.codegen import straight_line
from quantc.targets.kernels.dispatch_trace import NoTapeError
from quantc.targets.kernels.lowered import Lowered
from quantc.targets.kernels.replay import MAX_RECORDINGS, Replayed, replay
from tests.support.lowered_families import Counter, Residual, of_family

WEIGHT = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
PLACES = torch.tensor([3, 0, 1])
TABLE = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- functions ---------------------------------------------------------------------------------------------------------


def shared_memory(x: Tensor) -> Sequence[Tensor]:
    """A tensor of another dtype on the memory of a result that lies channels last."""
    made = x.contiguous(memory_format=torch.channels_last).to(torch.uint8)
    bytes_of = torch.empty(0, dtype=torch.int8).set_(made.untyped_storage(), 0, made.shape, made.stride())
    return [bytes_of + 1]


def written_in_place(x: Tensor) -> Sequence[Tensor]:
    made = x * 2
    view = made[1:]
    made.add_(1).relu_()
    return [view.clone(), made]


FUNCTIONS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "lists": lambda x: list(torch.cat([part * 2 for part in torch.split(x, [2, 4], 1)], 1).unbind(0)),
    "no numbers": lambda x: [x.clamp(min=0), x.sum(dim=[-1], keepdim=True), x.to(torch.float64)],
    "places": lambda x: [x.index_select(1, PLACES)],
    "optional tensors": lambda x: [torch.ops.aten.index.Tensor(x, [None, PLACES])],
    "settings": lambda x: [x.contiguous(memory_format=torch.channels_last), torch.full_like(x, 0.5), x.mean(1)],
    "weights": lambda x: [F.linear(x, WEIGHT), F.layer_norm(x, (6,), WEIGHT[0], None)],
    "attention": lambda x: [F.scaled_dot_product_attention(x, x, x, scale=0.5)],
    "in place": written_in_place,
    "the input itself": lambda x: [x, x + 1],
    "shared memory": shared_memory,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_recording_computes_the_same(name: str) -> None:
    line = FUNCTIONS[name]
    made = replay(line, [numbers(2, 6, 6, 6)])
    for seed in range(3):
        x = numbers(2, 6, 6, 6, seed=seed) * 10
        given = x.clone()
        for one, other in zip(made(x), line(x), strict=True):
            assert torch.equal(one, other)
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(x, given)


def from_numpy(x: Tensor) -> Sequence[Tensor]:
    return [x + torch.from_numpy(x.numpy() * 2)]


def on_memory_of_an_input(x: Tensor) -> Sequence[Tensor]:
    return [torch.empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride()) + 1]


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "an item": (lambda x: [x * x.max().item()], "looks at numbers"),
    "a branch": (lambda x: [x if x.sum() > 0 else -x], "looks at numbers"),
    "equality": (lambda x: [x if torch.equal(x, x) else -x], "looks at numbers"),
    "numpy": (from_numpy, "not the same ops on the same weights"),
    "a list": (lambda x: [x * x.flatten().tolist()[0]], "not the same ops on the same weights"),
    "chance": (lambda x: [F.dropout(x, 0.5, training=True)], "draws numbers at random"),
    "a count": (lambda x: [x * torch.nonzero(x > 0).shape[0]], "depends on numbers"),
    "a mask": (lambda x: [x * x[x > 0].shape[0]], "depends on numbers"),
    "memory of an input": (on_memory_of_an_input, "on the memory of an input"),
    "no tensor": (lambda x: [x, 3], "other things than tensors"),
    "an error": (lambda x: [x @ x], "RuntimeError: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_more_than_its_ops_is_not_recorded(name: str) -> None:
    line, why = REFUSED[name]
    with pytest.raises(NoTapeError, match=why):
        replay(line, [numbers(3, 4)])


def test_numbers_that_are_all_the_same_hide_nothing() -> None:
    with pytest.raises(NoTapeError, match="same weights"):
        replay(from_numpy, [torch.zeros(3, 4)])


def test_one_tensor_given_twice_is_two_inputs() -> None:
    made = replay(lambda x, y: [x + 2 * y], [PLACES, PLACES])
    assert made(PLACES, PLACES + 1)[0].tolist() == (PLACES + 2 * (PLACES + 1)).tolist()
    x, y = numbers(2, 3), numbers(2, 3, seed=1)
    made = replay(lambda x, y: [x + 2 * y], [x, x])
    assert torch.equal(made(x, y)[0], x + 2 * y)


def test_a_try_draws_no_numbers() -> None:
    run = Replayed(lambda x: [x + torch.rand_like(x)])
    x = numbers(2, 3)
    drawn = []
    for _ in range(4):
        torch.manual_seed(5)
        drawn.append(run(x)[0])
    assert all(torch.equal(one, drawn[0]) for one in drawn)


# -- which calls are recorded --------------------------------------------------------------------------------------------


def test_what_is_met_twice_is_recorded() -> None:
    run = Replayed(lambda x: [x * 2])
    x = numbers(2, 3)
    run(x)
    assert run.count == 0
    for _ in range(3):
        assert torch.equal(run(x)[0], x * 2)
    assert run.count == 1
    assert str(run) == "runs: recorded for one shape of inputs"


def test_shapes_strides_and_dtypes_are_told_apart() -> None:
    run = Replayed(lambda x: [x.reshape(-1), x.contiguous() + 1])
    looks = [numbers(2, 3), numbers(3, 2), numbers(3, 2).t(), numbers(2, 3).double()]
    for x in looks * 3:
        assert all(torch.equal(a, b) for a, b in zip(run(x), (x.reshape(-1), x + 1), strict=True))
    assert run.count == len(looks)


def test_not_more_than_so_many_shapes_are_recorded() -> None:
    run = Replayed(lambda x: [x + 1])
    for size in [*range(1, MAX_RECORDINGS + 5)] * 3:
        x = numbers(size)
        assert torch.equal(run(x)[0], x + 1)
    assert run.count == MAX_RECORDINGS


def test_shapes_that_come_once_take_no_room() -> None:
    run = Replayed(lambda x: [x + 1])
    for size in range(1, 3 * MAX_RECORDINGS):
        run(numbers(size))
    for _ in range(2):
        run(numbers(100))
    assert run.count == 1


def test_a_refusal_is_told_and_the_function_goes_on() -> None:
    run = Replayed(lambda x: [x * x.max().item()])
    x = numbers(3)
    for _ in range(4):
        assert torch.equal(run(x)[0], x * x.max())
    assert run.count == 0
    assert str(run).startswith("runs: called from Python, since aten._local_scalar_dense.default looks at numbers")


def test_errors_are_those_of_the_function() -> None:
    run = Replayed(lambda x: [F.embedding(x, TABLE)])
    x = torch.tensor([1, 2])
    for _ in range(3):
        run(x)
    assert run.count == 1
    with pytest.raises(IndexError, match="out of range"):
        run(torch.tensor([1, 99]))
    assert torch._C._get_graph_executor_optimize()
    assert torch.equal(run(x)[0], TABLE[x])


def test_autocast_and_subclasses_are_run_by_the_function() -> None:
    class Other(Tensor):
        pass

    run = Replayed(lambda x: [x @ x])
    x = numbers(4, 4)
    for _ in range(3):
        run(x)
    assert run.count == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(x)[0].dtype is torch.bfloat16
    assert isinstance(run(x.as_subclass(Other))[0], Other)
    assert run.why_not == "inputs are more than plain tensors"


def test_elements_that_share_memory_are_not_turned_about() -> None:
    run = Replayed(lambda x: [x + 1])
    x = numbers(1, 3).expand(4, 3)
    for _ in range(3):
        assert torch.equal(run(x)[0], x + 1)
    assert "share their memory" in run.why_not


def test_inputs_that_are_one_tensor_are_not_taken_for_each_other() -> None:
    run = Replayed(lambda x, y: [x - 2 * y])
    x, y = numbers(2, 3), numbers(2, 3, seed=1)
    for _ in range(3):
        assert torch.equal(run(x, x)[0], -x)
    assert run.count == 1
    assert torch.equal(run(x, y)[0], x - 2 * y)


def test_an_input_in_the_memory_of_a_weight_is_not_taken_for_it() -> None:
    weight = numbers(2, 3)
    run = Replayed(lambda x: [x - weight])
    for _ in range(3):
        assert torch.equal(run(weight.view(2, 3))[0], weight - weight)
    assert run.count == 1
    assert torch.equal(run(weight + 1)[0], torch.ones(2, 3))


def test_nan_is_found_on_the_way() -> None:
    alarms: list[int] = []
    run = Replayed(lambda x: [x + 1, x - 1], [0], lambda leaves: alarms.append(int(leaves[0].isnan().sum())))
    x = numbers(2, 3)
    for _ in range(4):
        assert [made.tolist() for made in run(x)] == [(x + 1).tolist(), (x - 1).tolist()]
    assert run.count == 1
    assert alarms == [0, 0]  # when the function itself was called
    x[0, 0] = float("nan")
    run(x)
    assert alarms == [0, 0, 1]


# -- lowered modules -----------------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.Linear(48, 8)), (5, 32)),
    "residual": (Residual, (40, 32)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Hardswish(), nn.Conv2d(8, 8, 1),
            nn.MaxPool2d(2), nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4),
        ),
        (2, 4, 8, 8),
    ),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 1)), (2, 4, 6, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True), (2, 7, 32)),
}  # fmt: skip


def recorded(lowered: Lowered) -> Replayed:
    line = lowered._line
    assert isinstance(line, Replayed)
    return line


@pytest.mark.parametrize("family", ["fbgemm", "onednn"])
@pytest.mark.parametrize("name", MODELS)
def test_lowered_modules(name: str, family: str) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    lowered, x = of_family(build(), family, *shape)
    first = lowered(x)
    for _ in range(4):
        again = lowered(x)
        assert torch.equal(again, first)
        assert again.stride() == first.stride()
    run = recorded(lowered)
    assert (run.count, run.why_not) == (1, "")
    plain = straight_line(lowered.module)
    for seed in range(3):
        other = numbers(*shape, seed=seed) * 3
        assert torch.equal(lowered(other), plain(other)[0])


def test_other_weights_are_recorded_anew() -> None:
    (one, x), (other, _) = (of_family(nn.Sequential(nn.Linear(32, 32)), "fbgemm", 4, 32) for _ in range(2))
    for _ in range(3):
        one(x)
        other(x)
    state = {name: value.clone() for name, value in one.state_dict().items()}
    levels = next(name for name, value in state.items() if value.dtype is torch.int8)
    state[levels] = -state[levels]
    other.load_state_dict(state)
    wanted = other(x)
    assert not torch.equal(wanted, one(x))
    for _ in range(3):
        assert torch.equal(other(x), wanted)


class Parts(nn.Module):
    """Takes a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"sum": self.layer(pair[0]) + pair[1], "first": self.layer(pair[1])}


def test_what_is_in_parts_is_taken_apart_each_time() -> None:
    pair = numbers(4, 8), numbers(4, 8, seed=1)
    lowered = qc.lower(qc.quantize(Parts().eval(), (pair,), [(pair,)]).program, "x86")
    first = lowered(pair)
    for _ in range(3):
        again = lowered(pair)
        assert all(torch.equal(first[name], again[name]) for name in ("sum", "first"))
    assert recorded(lowered).count == 1
    with pytest.raises(qc.QuantcError):
        lowered(*pair)


def test_nan_is_refused_from_a_recording_too() -> None:
    lowered, x = of_family(nn.Sequential(nn.Linear(32, 32)), "fbgemm", 4, 32)
    for _ in range(3):
        lowered(x)
    assert recorded(lowered).count == 1
    x[1, 1] = float("nan")
    with pytest.raises(qc.QuantcError, match="NaN"):
        lowered(x)


def test_modes_of_torch_change_nothing() -> None:
    lowered, x = of_family(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), "onednn", 4, 32)
    with torch.inference_mode():
        wanted = [lowered(x) for _ in range(4)][-1].clone()
    assert recorded(lowered).count == 1
    assert torch.equal(lowered(x), wanted)
    with torch.enable_grad():
        assert torch.equal(lowered(x), wanted)


def test_several_threads_call_one_recording() -> None:
    lowered, _ = of_family(MODELS["convolutions"][0](), "onednn", 2, 4, 8, 8)
    inputs = [numbers(2, 4, 8, 8, seed=seed) for seed in range(4)]
    wanted = [lowered(each) for each in inputs]
    failed: list[int] = []

    def call(index: int) -> None:
        with torch.no_grad():
            failed.extend(index for _ in range(30) if not torch.equal(lowered(inputs[index]), wanted[index]))

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert recorded(lowered).count == 1


def test_what_writes_to_itself_is_not_recorded() -> None:
    x = torch.randn(4, 8)
    lowered = qc.lower(qc.quantize(Counter().eval(), (x,), mode="dynamic").program, "x86")
    results = [lowered(x) for _ in range(5)]
    assert not isinstance(lowered._line, Replayed)
    assert "runs: called from Python, since add_ writes to a tensor that stays" in str(lowered)
    assert lowered.to_data()["not_recorded"]
    assert all(not torch.equal(one, other) for one, other in pairwise(results))


class Gate(nn.Module):
    """Looks at numbers where torch does not see it, in a way that their order does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if max(x.flatten().tolist()) < 3 else -x


def test_code_that_was_kept_whole_is_called_each_time() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Gate(), nn.ReLU(), nn.Linear(8, 8)).eval(), numbers(4, 8)
    program = qc.capture(model, (x,), leaf=Gate)
    lowered = qc.lower(qc.quantize(program, None, [x, 100 * x]).program, "x86")
    for _ in range(4):
        lowered(x)
    gate = next(part for part in lowered.modules() if isinstance(part, Gate))
    before = gate.calls
    made = lowered(100 * x)
    assert gate.calls == before + 1
    assert (made - lowered.program(100 * x)).abs().max() < 1
    assert "1 is code of its own" in str(lowered)


@pytest.mark.parametrize("times", [0, 4])
def test_other_layouts_are_refused(times: int) -> None:
    lowered, x = of_family(nn.Sequential(nn.Linear(32, 32)), "fbgemm", 4, 32)
    for _ in range(times):
        lowered(x)
    with pytest.raises(qc.errors.InputError, match="layout torch"):
        lowered(x.to_sparse())


class Roads(nn.Module):
    """Two ways, by numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, self.left, self.right, (x,))


def test_branches_are_not_recorded_and_leave_torch_as_it_was() -> None:
    x = numbers(4, 8)
    lowered = qc.lower(qc.quantize(Roads().eval(), (x,), [(x,), (-x,)]).program, "x86")
    wanted = [lowered(x), lowered(-x)]
    for _ in range(3):
        assert [torch.equal(lowered(y), one) for y, one in zip((x, -x), wanted, strict=True)] == [True, True]
    assert not isinstance(lowered._line, Replayed)
    assert "looks at numbers" in str(lowered)
    make_fx(lambda y: torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)))(x)


def test_it_says_how_it_runs() -> None:
    lowered, x = of_family(nn.Sequential(nn.Linear(32, 32)), "fbgemm", 4, 32)
    lowered(x)
    assert "called from Python so far" in str(lowered)
    for _ in range(2):
        lowered(x)
    assert "recorded for one shape" in str(lowered)
    assert lowered.to_data()["recorded"] == 1
