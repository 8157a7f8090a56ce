"""Tensors of a converted model: whoever looks, whenever, sees what was computed at the call."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.bench.networks import resnet18
from quantc.flows.tracing import convert, prepare
from tests.support.traced_models import Capturable
from tests.support.traced_runs import sqnr

Body = Callable[["Chain", Tensor], Any]


class Chain(nn.Module):
    """Convolutions with a residual, and a place where a test puts its code: between the first and the second."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 4)
        self.between: Body = lambda model, x: x
        self.kept: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.stem(x))
        y = self.between(self, self.first(x))
        y = F.relu(self.second(y) + x)
        return self.head(y.mean((2, 3)))


def images() -> Tensor:
    return torch.randn(2, 3, 12, 12)


@pytest.fixture(scope="module")
def made() -> tuple[nn.Module, nn.Module]:
    """The float model, and the quantized one, which has run before."""
    torch.manual_seed(0)
    model = Chain().eval()
    prepared = prepare(model, images())
    with torch.no_grad():
        for _ in range(4):
            prepared(images())
        quantized = convert(prepared)
        for _ in range(8):
            quantized(images())
    return model, quantized


def with_code(model: nn.Module, between: Body) -> Any:
    twin: Any = copy.deepcopy(model)
    twin.between = between
    return twin


def looked(quantized: nn.Module, between: Body, x: Tensor, times: int = 6) -> list[Any]:
    """What a model gives with code in between, time after time."""
    twin = with_code(quantized, between)
    with torch.no_grad():
        return [twin(x) for _ in range(times)]


def test_the_bits_are_those_of_a_copy(made: Any) -> None:
    _, quantized = made
    x = images()
    with torch.no_grad():
        direct = copy.deepcopy(quantized)(x)
        assert torch.equal(quantized(x), direct)


def test_resnet_gives_the_bits_of_the_lowered_one() -> None:
    torch.manual_seed(0)
    model, x = resnet18(), torch.randn(1, 3, 64, 64)
    prepared, program = prepare(model, x), qc.prepare(qc.capture(model, (x,)), "x86")
    with torch.no_grad():
        prepared(x)
        qc.calibrate(program, [x], progress="silent")
        quantized, lowered = convert(prepared), qc.lower(qc.convert(program), "x86")
        for _ in range(5):
            other = torch.randn_like(x)
            assert torch.equal(quantized(other), lowered(other))


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda y: y.sum().item(),
    "float": lambda y: float(y.max()),
    "print": repr,
    "format": lambda y: f"{y[0, 0, 0, 0]}",
    "numpy": lambda y: y.numpy(),
    "list": lambda y: y.tolist(),
    "another op": torch.sin,
    "deepcopy": copy.deepcopy,
    "save": lambda y: torch.save(y, io.BytesIO()),
    "memory": lambda y: y.stride(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_looking_changes_nothing_and_shows_the_numbers(look: str, made: Any) -> None:
    x = images()
    with torch.no_grad():
        expected = made[1](x)
    seen: list[Any] = []

    def between(model: Chain, y: Tensor) -> Tensor:
        seen.append(LOOKS[look](y))
        seen.append(LOOKS[look](torch.as_tensor(y.clone().numpy())))
        return y

    assert all(torch.equal(row, expected) for row in looked(made[1], between, x))
    assert all(str(a) == str(b) for a, b in zip(seen[::2], seen[1::2], strict=True))


def test_a_traced_tensor_knows_its_looks(made: Any) -> None:
    kinds: list[Any] = []

    def between(model: Chain, y: Tensor) -> Tensor:
        kinds.append((y.shape, y.dtype, y.device, y.dim(), y.requires_grad, y is y, isinstance(y, Tensor)))
        return y

    looked(made[1], between, images())
    assert set(kinds) == {(torch.Size([2, 8, 12, 12]), torch.float32, torch.device("cpu"), 4, False, True, True)}


def test_tensors_that_are_kept_hold_what_was_computed(made: Any) -> None:
    def between(model: Chain, y: Tensor) -> Tensor:
        model.kept.append(y)
        return y

    twin = with_code(made[1], between)
    inputs = [images() for _ in range(6)]
    with torch.no_grad():
        for x in inputs:
            twin(x)
        for x, kept in zip(inputs, twin.kept, strict=True):
            expected = with_code(made[0], between)
            expected(x)
            assert sqnr(expected.kept[0], kept + 0) > 25


def test_writes_in_place_to_what_is_bytes(made: Any) -> None:
    def between(model: Any, y: Tensor) -> Tensor:
        name = y
        y *= 0.9
        y[:, 0] = 0
        return name

    x = images()
    with torch.no_grad():
        expected = with_code(made[0], between)(x)
    rows = looked(made[1], between, x)
    assert all(torch.equal(row, rows[0]) for row in rows)
    assert sqnr(expected, rows[0]) > 20


@pytest.mark.parametrize("how", ["in place", "numpy"])
def test_inputs_may_be_written_to_after_they_were_read(how: str) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.other = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> Any:
            y = F.relu(self.conv(x))
            if how == "in place":
                x.zero_()
            else:
                x.numpy()[:] = 0
            return self.other(y)

    torch.manual_seed(0)
    model = Writes().eval()
    prepared = prepare(model, images())
    with torch.no_grad():
        prepared(images())
        quantized, x = convert(prepared), images()
        for _ in range(6):
            assert sqnr(model(x.clone()), quantized(x.clone())) > 20


def test_weights_that_are_loaded_in_between_count_for_later_calls(made: Any) -> None:
    torch.manual_seed(5)
    other = Chain().eval()
    prepared = prepare(other, images())
    with torch.no_grad():
        prepared(images())
        rest = convert(prepared)
        x = images()
        twin: Any = copy.deepcopy(made[1])
        before = [twin(x) for _ in range(5)][-1]
        twin.load_state_dict(rest.state_dict())
        after = [twin(x) for _ in range(5)]
        assert not torch.equal(before, after[0])
        assert all(torch.equal(row, rest(x)) for row in after)


def test_an_error_of_the_users_leaves_the_model_usable(made: Any) -> None:
    class StopError(Exception):
        pass

    def between(model: Any, y: Tensor) -> Tensor:
        model.kept.append(y)
        if len(model.kept) == 4:
            raise StopError
        return y

    twin = with_code(made[1], between)
    x = images()
    with torch.no_grad():
        expected = made[1](x)
        for turn in range(6):
            if turn == 3:
                with pytest.raises(StopError):
                    twin(x)
            else:
                assert torch.equal(twin(x), expected)
        assert torch.equal(twin.kept[3] + 0, twin.kept[0] + 0)  # it can still be looked at


def test_wrong_shapes_are_refused_at_the_call(made: Any) -> None:
    def between(model: Any, y: Tensor) -> Tensor:
        return y[:, :4] if model.kept else y

    twin = with_code(made[1], between)
    with torch.no_grad():
        for _ in range(4):
            twin(images())
        twin.kept.append(1)
        with pytest.raises(RuntimeError) as caught:
            twin(images())
        assert any(entry.name == "forward" and "test_traced_tensor" in str(entry.path) for entry in caught.traceback)
        twin.kept.clear()
        x = images()
        assert torch.equal(twin(x), made[1](x))


def test_other_threads_may_look(made: Any) -> None:
    seen: list[Tensor] = []

    def between(model: Any, y: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: seen.append(y.detach().clone()))
        thread.start()
        thread.join()
        return y

    x = images()
    with torch.no_grad():
        expected = made[1](x)
    assert all(torch.equal(row, expected) for row in looked(made[1], between, x))
    assert all(torch.equal(row, seen[0]) for row in seen)


def test_threads_that_share_a_model(made: Any) -> None:
    inputs = [images() for _ in range(24)]
    with torch.no_grad():
        expected = [made[1](x) for x in inputs]
    twin = copy.deepcopy(made[1])

    def run(x: Tensor) -> Any:
        with torch.no_grad():
            return twin(x)

    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(run, inputs), expected))


def test_modes_that_change_within_a_call(made: Any) -> None:
    kinds: list[bool] = []

    def between(model: Any, y: Tensor) -> Tensor:
        with torch.inference_mode():
            kinds.append((y + 0).is_inference())
        z: Tensor = y.clone() + 0
        kinds.append(z.is_inference())
        z.add_(0)  # not allowed to what was made in inference mode
        return y

    x = images()
    with torch.no_grad():
        expected = made[1](x)
    assert all(torch.equal(row, expected) for row in looked(made[1], between, x))
    assert kinds[:2] == [True, False]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert sqnr(expected, made[1](x).float()) > 20
    with torch.no_grad():
        assert torch.equal(made[1](x), expected)


def test_sums_leave_their_summand_as_it_is() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
            self.kept: list[Any] = []
            self.keeps = False

        def forward(self, x: Tensor) -> Any:
            x = F.relu(self.a(x))
            y = F.relu(self.b(x) + x)
            if self.keeps:
                self.kept.append(x)
            return self.c(y)

    torch.manual_seed(0)
    model = Sums().eval()
    x = torch.randn(2, 8, 12, 12)
    prepared = prepare(model, x)
    with torch.no_grad():
        prepared(x)
        quantized: Any = convert(prepared)
        rows = [quantized(x) for _ in range(6)]
        quantized.keeps = True
        rows += [quantized(x) for _ in range(6)]
        assert all(torch.equal(row, rows[0]) for row in rows)
        assert all(torch.equal(kept + 0, quantized.kept[0] + 0) for kept in quantized.kept)
        assert sqnr(F.relu(model.a(x)), quantized.kept[-1] + 0) > 25


def test_hooks_of_the_user_are_given_numbers(made: Any) -> None:
    twin = copy.deepcopy(made[1])
    seen: list[float] = []
    x = images()
    with torch.no_grad():
        expected = [twin(x) for _ in range(5)][-1]
        layer: Any = twin.get_submodule("second.0")
        handle = layer.register_forward_hook(lambda module, args, output: seen.append(float(args[0].sum())))
        assert torch.equal(twin(x), expected)
        handle.remove()
        assert torch.equal(twin(x), expected)
    assert len(seen) == 1
    assert seen[0] > 0


def test_shapes_that_change_from_call_to_call() -> None:
    torch.manual_seed(0)
    model = Capturable().eval()
    prepared = prepare(model, torch.randn(2, 3, 16, 16))
    with torch.no_grad():
        prepared(torch.randn(2, 3, 16, 16))
        quantized = convert(prepared)
        for turn in range(12):
            x = torch.randn(1 + turn % 3, 3, 16, 16)
            assert torch.equal(quantized(x), copy.deepcopy(quantized)(x))


def test_sums_read_floats_that_were_looked_at() -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = torch.relu(layer(x) + x)
                if x.mean().item() > 1e9:
                    break
            return x

    torch.manual_seed(0)
    model, x = Turns().eval(), torch.randn(2, 8, 12, 12)
    prepared = prepare(model, x)
    with torch.no_grad():
        prepared(x)
        quantized = convert(prepared)
        rows = [quantized(x) for _ in range(6)]
        assert all(torch.equal(row, rows[0]) for row in rows)
        assert sqnr(model(x), rows[0]) > 25
