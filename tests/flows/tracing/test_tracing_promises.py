"""What the tracing flow lost or let pass before its ops ran at once: each case, call after call, held to the float model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantc.errors import CaptureError, InputError
from quantc.flows.tracing import UnseenOpError, convert, coverage, prepare
from tests.support.traced_runs import Counted, sqnr

Forward = Callable[[Any, Tensor], Any]


class Two(nn.Module):
    """Two layers, and a test's own `forward`."""

    def __init__(self, body: Forward) -> None:
        super().__init__()
        self.a, self.b, self.body = nn.Linear(8, 8), nn.Linear(8, 8), body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def rows(count: int = 16) -> Tensor:
    return torch.randn(count, 8)


def out_of_zeros(model: Any, x: Tensor) -> Any:
    out = torch.zeros(len(x), 8)
    torch.add(model.a(x), x, out=out)
    return out


def out_of_memory_that_is_new(model: Any, x: Tensor) -> Any:
    out = torch.empty(0)
    torch.add(model.a(x), x, out=out)
    return model.b(out)


def out_of_a_part(model: Any, x: Tensor) -> Any:
    y = model.a(x)
    torch.neg(y[:, 4:], out=y[:, :4])
    return model.b(y)


def in_place_of_a_relu(model: Any, x: Tensor) -> Any:
    y = F.relu(model.a(x))
    y += 1
    return model.b(y)


def flattened(model: Any, x: Tensor) -> Any:
    y = F.relu(model.a(x))
    z = y.flatten()
    z += y.flatten()
    return model.b(y)


def through_squeeze(model: Any, x: Tensor) -> Any:
    y = model.a(x)
    y.unsqueeze(1).squeeze(1).add_(1)
    return model.b(y)


def through_view_as(model: Any, x: Tensor) -> Any:
    y = model.a(x)
    y.view_as(x).mul_(2)
    return model.b(y)


def through_split(model: Any, x: Tensor) -> Any:
    y = model.a(x)
    first, _ = y.split(4, 1)
    first += 1
    return model.b(y)


def through_unsafe_chunk(model: Any, x: Tensor) -> Any:
    """Views that torch counts no writes for."""
    y = model.a(x)
    torch.unsafe_chunk(y, 2, 1)[0].add_(1)
    return model.b(y)


def through_a_view_that_is_an_array(model: Any, x: Tensor) -> Any:
    y = model.a(x)
    view = y.view(-1)
    y.sum().item()
    view.numpy()[::2] = 0.5
    return model.b(y)


LOST: dict[str, Forward] = {
    row.__name__: row
    for row in (
        out_of_zeros, out_of_memory_that_is_new, out_of_a_part, in_place_of_a_relu, flattened, through_squeeze, through_view_as,
        through_split, through_unsafe_chunk, through_a_view_that_is_an_array,
    )
}  # fmt: skip


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
@pytest.mark.parametrize("how", LOST)
def test_writes_are_not_lost(how: str, backend: str) -> None:
    torch.manual_seed(0)
    model = Two(LOST[how]).eval()
    prepared = prepare(model, rows(), backend)
    with torch.no_grad():
        for _ in range(4):
            prepared(rows(64))
        quantized = convert(prepared)
        for _ in range(12):
            x = rows()
            assert sqnr(model(x.clone()), quantized(x.clone())) > 16


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
@torch.no_grad()
def test_a_write_that_torch_does_not_count_is_not_lost(backend: str) -> None:
    def written(model: Any, x: Tensor) -> Any:
        y = model.a(x)
        torch.kron(torch.full_like(y, 2.5), torch.full((1,), 3.0), out=y)
        return model.b(y)

    model, x = Two(written).eval(), torch.randn(4, 8)
    y = model.a(x)
    before = y._version
    torch.kron(torch.full_like(y, 2.5), torch.full((1,), 3.0), out=y)
    assert y._version == before  # what makes it hard
    prepared = prepare(model, x, backend)
    prepared(x)
    quantized = convert(prepared)
    for _ in range(10):
        assert (quantized(x) - model(x)).norm() < 0.05 * model(x).norm()


def test_a_call_that_sometimes_writes_to_out_is_the_one_it_is_this_time() -> None:
    def body(model: Any, x: Tensor) -> Any:
        y = model.a(x)
        given: dict[str, Any] = {"out": torch.zeros(len(x), 8)} if model.is_on else {}
        made = torch.add(y, x, **given)
        return given.get("out", made)

    torch.manual_seed(0)
    model: Any = Two(body).eval()
    model.is_on = False
    prepared: Any = prepare(model, rows())
    with torch.no_grad():
        prepared(rows(64))
        quantized: Any = convert(prepared)
        for turn in range(12):
            model.is_on = quantized.is_on = turn % 3 == 1
            x = rows()
            assert sqnr(model(x), quantized(x)) > 20


def test_operands_that_change_places_are_those_they_are() -> None:
    def body(model: Any, x: Tensor) -> Any:
        y = model.a(x)
        left, right = (x, y) if model.is_on else (y, x)
        return model.b(left - 2 * right)

    torch.manual_seed(0)
    model: Any = Two(body).eval()
    model.is_on = False
    prepared: Any = prepare(model, rows(), "qnnpack")
    with torch.no_grad():
        for _ in range(3):
            prepared(rows(64))
        quantized: Any = convert(prepared)
        for turn in range(6):
            model.is_on = quantized.is_on = turn % 2 == 1
            x = rows()
            assert sqnr(model(x), quantized(x)) > 12


def test_another_function_at_the_same_place_is_another_call() -> None:
    def body(model: Any, x: Tensor) -> Any:
        y = model.a(x)
        return getattr(torch, model.name)(y) + 0.5

    torch.manual_seed(0)
    model: Any = Two(body).eval()
    model.name = "relu"
    prepared: Any = prepare(model, rows())
    with torch.no_grad():
        prepared(rows(64))
        quantized: Any = convert(prepared)
        model.name = quantized.name = "tanh"
        x = rows()
        try:
            found = quantized(x)
        except UnseenOpError:
            return
        assert sqnr(model(x), found) > 25


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
@pytest.mark.parametrize("build", [lambda: nn.Linear(8, 4), lambda: nn.Sequential(nn.Linear(8, 4))])
def test_a_model_that_is_one_bare_layer_is_quantized(build: Callable[[], nn.Module], backend: str) -> None:
    torch.manual_seed(0)
    model = build().eval()
    prepared = prepare(model, rows(), backend)
    with torch.no_grad():
        prepared(rows(64))
        quantized = convert(prepared)
        quantized(rows())
        x = rows()
        with Counted() as counted:
            found = quantized(x)
    assert type(quantized).__name__ == type(model).__name__
    assert "1 quantized" in str(coverage(quantized))
    assert (counted.int8, counted.float_products) == (1, 0)
    assert not torch.equal(found, model(x))
    assert sqnr(model(x), found) > 30


@pytest.mark.parametrize("phase", ["prepared", "converted"])
def test_a_model_inside_of_another_that_was_prepared_already_is_refused_by_name(phase: str) -> None:
    inner: nn.Module = prepare(nn.Sequential(nn.Linear(8, 8)).eval(), rows())
    with torch.no_grad():
        inner(rows())
        inner = inner if phase == "prepared" else convert(inner)
    outer = nn.Sequential()
    outer.add_module("head", nn.Linear(8, 8))
    outer.add_module("tail", inner)
    with pytest.raises(CaptureError, match=r"tail \(Sequential\) was prepared or converted"):
        prepare(outer.eval(), rows())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_refused_where_the_model_refuses_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Two(lambda model, x: model.b(F.relu(model.a(x)))).eval()
    prepared = prepare(model, rows())
    with torch.no_grad():
        prepared(rows())
        quantized = convert(prepared)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="dtype") as ours:
                quantized(rows().to(dtype))
            with pytest.raises(RuntimeError, match="dtype") as theirs:
                model(rows().to(dtype))
            assert str(ours.value) == str(theirs.value)
            quantized(rows())


MIXED: dict[str, Forward] = {
    "one layer": lambda model, x: model.a(x),
    "a fused op": lambda model, x: F.relu(model.a(x)),
    "a sum": lambda model, x: model.a(x) + x,
    "between layers": lambda model, x: model.b(F.relu(model.a(x))),
    "in place": lambda model, x: model.a(x).add_(x).relu_(),
    "with a float op": lambda model, x: model.b(model.a(x).softmax(-1)),
}


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
@pytest.mark.parametrize("how", MIXED)
def test_results_under_autocast_have_the_dtype_of_the_float_model(how: str, backend: str) -> None:
    torch.manual_seed(0)
    model = Two(MIXED[how]).eval()
    prepared = prepare(model, rows(), backend)
    with torch.no_grad():
        prepared(rows(64))
        quantized = convert(prepared)
        for _ in range(4):
            x = rows()
            with torch.autocast("cpu", torch.bfloat16):
                expected, found = model(x), quantized(x)
            assert found.dtype is expected.dtype
            assert sqnr(expected.float(), found.float()) > 20
            assert quantized(x).dtype is torch.float32


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, image: Tensor, mask: Tensor, *more: Tensor, scale: Tensor | None = None) -> Any:
        y = torch.softmax(self.layer(image) + mask, -1)
        return y if scale is None else y * scale


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
def test_nan_and_infinity_in_an_input_are_refused_by_name(backend: str) -> None:
    torch.manual_seed(0)
    model, x = Named().eval(), rows()
    mask = torch.zeros(16, 8)
    prepared = prepare(model, (x, mask), backend)
    with torch.no_grad():
        prepared(x, mask)
        quantized = convert(prepared)
        for number, word in ((torch.nan, "NaN"), (torch.inf, "infinity"), (-torch.inf, "infinity")):
            bad = x.clone()
            bad[3, 2] = number
            with pytest.raises(InputError, match=f"input 'image' holds {word}"):
                quantized(bad, mask)
        with pytest.raises(InputError, match="input 'mask' holds NaN"):
            quantized(x, mask + torch.nan)
        with pytest.raises(InputError, match="input 'scale' holds NaN"):
            quantized(x, mask, scale=torch.full((8,), torch.nan))
        hidden = mask.clone()
        hidden[:, 0] = -torch.inf  # as masks are: it is added in float
        if backend == "x86":
            assert sqnr(model(x, hidden), quantized(x, hidden)) > 25
        assert quantized(x, mask).isfinite().all()
