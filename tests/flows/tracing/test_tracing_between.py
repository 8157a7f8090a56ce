"""Code between the ops of a converted model: whatever it does, at whichever place, call after call the numbers are the same."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantc.flows.tracing import convert, prepare
from tests.support.traced_blocks import Blocks, fresh, images
from tests.support.traced_runs import sqnr

PLACES = 9
"""Where code of a test is run in `Blocks`."""


@pytest.fixture(scope="module")
def made() -> tuple[Any, Any]:
    """The float model, and the quantized one, which has run before."""
    torch.manual_seed(0)
    model = Blocks().eval()
    for norm in (row for row in model.modules() if isinstance(row, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_mean, -1, 1)  # type: ignore[arg-type]
    prepared = prepare(model, images())
    with torch.no_grad():
        for _ in range(4):
            prepared(images())
        quantized = convert(prepared)
        for _ in range(8):
            quantized(images())
    return model, quantized


@pytest.fixture
def twin(made: Any) -> Iterator[Any]:
    """The quantized model, which has run before, for tests that put code into it."""
    yield made[1]
    made[1].code = lambda model, place, x: x
    made[1].kept.clear()


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "numpy": lambda x: x.detach().numpy().copy(),
    "an op": torch.sin,
    "print": repr,
    "a copy": copy.deepcopy,
    "parts": lambda x: list(x.unbind(0)),
    "a thread": lambda x: _in_a_thread(lambda: x + 0),
    "memory": lambda x: x.data_ptr(),
}


def _in_a_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


SOME_PLACES = [pytest.param(place, marks=() if place in (1, 2, 7) else pytest.mark.slow) for place in range(PLACES)]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("place", SOME_PLACES)
def test_somebody_looks(look: str, place: int, twin: Any) -> None:
    x = images()
    seen: list[Tensor] = []

    def code(model: Any, here: int, y: Tensor) -> Tensor:
        if here == place:
            LOOKS[look](y)
            seen.append(y.clone())
        return y

    expected = fresh(twin, x, code)
    twin.code = code
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(twin(x), expected)
    assert all(torch.equal(row, seen[0]) for row in seen)


@pytest.mark.parametrize("place", range(PLACES))
def test_results_that_are_kept(place: int, twin: Any) -> None:
    def code(model: Any, here: int, y: Tensor) -> Tensor:
        if here == place:
            model.kept.append(y)
        return y

    inputs = [images() for _ in range(6)]
    expected: list[Tensor] = []

    def clones(model: Any, here: int, y: Tensor) -> Tensor:
        if here == place:
            expected.append(y.clone())
        return y

    for x in inputs:
        fresh(twin, x, clones)
    twin.code = code
    with torch.no_grad():
        for x in inputs:
            twin(x)
    # what lies inside of a fused op is what the float model computes there, of the same inputs
    assert all(sqnr(one, two + 0) > 30 for one, two in zip(expected, twin.kept, strict=True))


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda x: x.mul_(0.5),
    "a part": lambda x: x[:1].zero_(),
    "an item": lambda x: x.__setitem__(0, 0.25),
    "detached": lambda x: x.detach().add_(0.5),
    "numpy": lambda x: x.numpy().__imul__(0.5),
    "out": lambda x: torch.add(x, 1, out=x),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("place", SOME_PLACES)
def test_somebody_writes(write: str, place: int, twin: Any) -> None:
    def code(model: Any, here: int, y: Tensor) -> Tensor:
        if here == place:
            WRITES[write](y)
        return y

    x = images()
    expected = fresh(twin, x, code)
    assert not torch.equal(expected, fresh(twin, x))
    twin.code = code
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(twin(x), expected)


@pytest.mark.parametrize("place", range(PLACES))
def test_an_error_of_the_users(place: int, twin: Any) -> None:
    class StopError(Exception):
        pass

    def code(model: Any, here: int, y: Tensor) -> Tensor:
        if here == place:
            model.kept.append(y)
            raise StopError
        return y

    x = images()
    expected = fresh(twin, x)
    plain = twin.code
    with torch.no_grad():
        for _ in range(3):
            twin.code = code
            with pytest.raises(StopError):
                twin(x)
            twin.code = plain
            assert torch.equal(twin(x), expected)
        assert all(torch.equal(row + 0, twin.kept[0] + 0) for row in twin.kept)


def test_other_shapes_modes_and_hooks(twin: Any) -> None:
    x, larger = images(), images(3)
    expected, expected_larger = fresh(twin, x), fresh(twin, larger)
    seen: list[float] = []
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(twin(x), expected)
            assert torch.equal(twin(larger), expected_larger)
            with torch.inference_mode():
                assert torch.equal(twin(x), expected)
            with torch.autocast("cpu", torch.bfloat16):
                assert sqnr(expected, twin(x).float()) > 20
            handle = twin.blocks[1].conv2.register_forward_hook(lambda *given: seen.append(float(given[2].sum())))
            assert torch.equal(twin(x), expected)
            handle.remove()
            handle = twin.blocks[0].register_forward_pre_hook(lambda *given: seen.append(float(given[1][0].sum())))
            assert torch.equal(twin(x), expected)
            handle.remove()
    assert len(seen) == 8
    assert len(set(seen)) == 2


@pytest.mark.parametrize("place", range(PLACES - 1))
def test_modes_that_change_on_the_way(place: int, twin: Any) -> None:
    x = images()
    expected = fresh(twin, x)
    entered: list[Any] = []

    def code(model: Any, here: int, y: Tensor) -> Tensor:
        if here == place:
            entered.append(torch.inference_mode())
            entered[-1].__enter__()
        return y

    twin.code = code
    with torch.no_grad():
        for _ in range(4):
            try:
                assert torch.equal(twin(x), expected)
            finally:
                entered.pop().__exit__(None, None, None)


@pytest.mark.parametrize("rounds", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_at_random(rounds: int, twin: Any) -> None:
    """Whatever is done at whichever places, call after call, the model gives what a copy gives."""
    source = random.Random(rounds)

    def code(model: Any, here: int, y: Tensor) -> Tensor:
        for name in plan.get(here, ()):
            if name == "keep":
                model.kept.append(y)
            elif name == "write":
                y.mul_(0.75)
            elif name == "look":
                float(y.sum())
            elif name == "view":
                model.kept.append(y[:1])
            elif name == "clone":
                y = y.clone()
        return y

    twin.code = code
    with torch.no_grad():
        for _ in range(rounds):
            names = ["keep", "write", "look", "view", "clone"]
            plan: dict[int, list[str]] = {}
            for _ in range(source.choice([0, 0, 1, 1, 2, 4])):
                plan.setdefault(source.randrange(PLACES), []).append(source.choice(names))
            x = images(source.choice([1, 2]))
            own = copy.deepcopy(twin)
            own.kept, twin.kept = [], []
            expected, output = own(x), twin(x)
            assert torch.equal(output, expected), plan
            assert len(own.kept) == len(twin.kept)
            for one, two in zip(own.kept, twin.kept, strict=True):
                assert torch.equal(one + 0, two + 0), plan


def test_threads_that_go_different_ways(twin: Any) -> None:
    x = images()
    expected = fresh(twin, x)

    def code(model: Any, here: int, y: Tensor) -> Tensor:
        if here == getattr(local, "place", -1):
            float(y.sum())
        return y

    local = threading.local()
    twin.code = code

    def run(place: int) -> Any:
        local.place = place
        with torch.no_grad():
            return [twin(x) for _ in range(6)]

    with ThreadPoolExecutor(4) as pool:
        for rows in pool.map(run, [-1, 0, 3, 5, -1, 7, 8, 2]):
            assert all(torch.equal(row, expected) for row in rows)


def test_a_tensor_that_belongs_to_the_call_of_another_model(twin: Any) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 3, 1)
            self.held: list[Any] = [torch.sin]

        def forward(self, x: Tensor) -> Any:
            return self.held[0](F.relu(self.stem(x)))

    torch.manual_seed(0)
    own, model = copy.deepcopy(twin), Around().eval()
    prepared = prepare(model, images())
    with torch.no_grad():
        prepared(images())
        quantized: Any = convert(prepared)
        quantized.held, x = [own], images()
        first = quantized(x)
        for _ in range(6):
            assert torch.equal(quantized(x), first)
        assert sqnr(own(F.relu(model.stem(x))), first) > 20
