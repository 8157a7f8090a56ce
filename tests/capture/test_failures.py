"""Models and requests that capture refuses: each says what, where (the user's own line) and what to do."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import quantc as qc
from quantc.errors import CaptureError, InputError
from tests.support.agree import fingerprint

Method = Literal["export", "fx"]
HERE = Path(__file__)
X = torch.arange(8.0).reshape(2, 4) / 7 - 0.4
methods = pytest.mark.parametrize("method", ["export", "fx"])


def line(marker: str) -> str:
    """`file:number` of the line that ends with a marker."""
    found = [number for number, text in enumerate(HERE.read_text().splitlines(), 1) if text.endswith(f"# {marker}")]
    assert len(found) == 1, marker
    return f"{HERE}:{found[0]}"


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Any:
        if x.sum() > 0:  # if
            return x
        return -x


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        while x.norm() > 1:  # while
            x = x / 2
        return x


class Number(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x[: int(x.sum())]  # int


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.ReLU(), Branch())

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.fc(x))


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Any:
        raise ValueError("not ready")  # raise


class Seeds(nn.Module):
    def forward(self, x: Tensor) -> Any:
        torch.manual_seed(0)  # seed
        return x + torch.rand(2, 4)


class OwnGenerator(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + torch.rand(2, 4, generator=torch.Generator().manual_seed(1))


class PythonRandom(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * 2 if random.random() < 0.5 else x


class Vmapped(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.vmap(lambda row: row * row.sum())(x)


class Gradient(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.func.grad(lambda t: (t**2).sum())(x)


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.from_numpy(x.numpy() * 2)  # numpy


class CountsInResult(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return x * self.count


class Remembers(nn.Module):
    """The first input decides what later calls give."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if self.first is None:
            self.first = x.abs() + 1
        return x / self.first


class CumulativeNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x: Tensor) -> Any:
        return self.bn(x)


class Two(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> Any:
        return x + other


class Wraps(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) + 1


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(4, 4))


@dataclass(frozen=True)
class Refused:
    """A model, what capture is given, and words that the three parts of the error hold."""

    name: str
    model: Callable[[], Any]
    what: str
    where: str
    advice: str
    args: Any = (X,)
    only: Method | None = None
    train: bool = False


LENGTHS = torch.tensor([3, 2])
ROWS = [
    Refused("branch", Branch, "depends on", "if", "leaf="),
    Refused("while", Loop, "depends on", "while", "torch.cond"),
    Refused("int", Number, "depends on the data", "int", "leaf="),
    Refused("branch in a submodule", Nested, "depends on", "if", "leaf="),
    Refused("raises", Raises, "does not run on the example inputs: not ready", "raise", "example_inputs"),
    Refused("seeds", Seeds, "seed", "seed", "leaf="),
    Refused("generator", OwnGenerator, "Generator", "", "leaf="),
    Refused("python random", PythonRandom, "repeat one draw", "", "leaf="),
    Refused("vmap, export", Vmapped, "torch.func", "", "leaf=", only="export"),
    Refused("vmap, fx", Vmapped, "takes real tensors only", "", "method='export'", only="fx"),
    Refused("grad, export", Gradient, "torch.func", "", "leaf=", only="export"),
    Refused("packed", Packs, "packed sequences", "", "leaf=", (torch.ones(2, 3, 4), LENGTHS), only="fx"),
    Refused("packed, export", Packs, "", "", "leaf=", (torch.ones(2, 3, 4), LENGTHS), only="export"),
    Refused("numpy", Numpy, "numpy", "numpy", "leaf="),
    Refused("counts", CountsInResult, "depend on what earlier calls left in self.count", "", "register_buffer"),
    Refused("remembers", Remembers, "depend on what earlier calls left in self.first", "", "register_buffer"),
    Refused("cumulative norm", CumulativeNorm, "depends on the data", "", "leaf=", train=True),
    Refused("missing argument", Two, "missing a required argument: 'other'", "", "forward takes"),
    Refused("too many", Branch, "too many positional arguments", "", "forward takes", (X, X)),
    Refused("wrong shape", lambda: Wraps(nn.Linear(3, 3)), "does not run on the example inputs", "", "example_inputs"),
    Refused("wrong dtype", lambda: Wraps(nn.Linear(4, 4)), "does not run", "", "example_inputs", (X.double(),)),
    Refused("not a tuple", Branch, "example_inputs is a Tensor", "", "(x,)", X),
    Refused("a list", Branch, "example_inputs is a list", "", "(x,)", [X]),
    Refused("a function", lambda: torch.relu, "takes a torch.nn.Module", "", "wrap a function"),
    Refused("scripted", scripted, "TorchScript", "", "scripted from"),
    Refused("scripted part", lambda: Wraps(scripted()), "'inner' is a TorchScript", "", "method='fx'", only="export"),
    Refused(
        "lazy", lambda: nn.Sequential(nn.LazyLinear(3)), "'0.weight' of Sequential is lazy", "", "run the model once"
    ),
    Refused(
        "packed input", Branch, "PackedSequence", "", "padded", (pack_padded_sequence(torch.ones(3, 2, 4), LENGTHS),)
    ),
]
CASES = [
    pytest.param(row, method, id=f"{row.name}-{method}")
    for row in ROWS
    for method in ("export", "fx")
    if row.only in (None, method)
]


@pytest.mark.parametrize(("row", "method"), CASES)
def test_refusals_say_what_where_and_what_to_do(row: Refused, method: Method) -> None:
    model = row.model()
    if isinstance(model, nn.Module):
        model.train(row.train)
    with pytest.raises(CaptureError) as caught:
        qc.capture(model, row.args, method=method)
    error = caught.value
    assert row.what in error.what
    assert error.where, "no place is named"
    if row.where:
        assert error.where.startswith(line(row.where)), error.where
    assert row.advice in (error.advice or "")


@methods
@pytest.mark.parametrize("build", [Branch, Nested, Raises, Seeds, CountsInResult, Remembers, PythonRandom])
def test_a_refused_model_is_left_as_it_was(build: Callable[[], nn.Module], method: Method) -> None:
    model = build()
    before, plain = fingerprint(model), {name: repr(value) for name, value in vars(model).items()}
    states = random.getstate(), torch.get_rng_state()
    example = X.clone()
    with pytest.raises(CaptureError):
        qc.capture(model, (example,), method=method)
    assert fingerprint(model) == before
    assert {name: repr(value) for name, value in vars(model).items()} == plain
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert torch.equal(example, X)


@pytest.mark.parametrize("build", [CountsInResult, Remembers])
def test_strict_export_refuses_state_as_well(build: Callable[[], nn.Module]) -> None:
    assert "earlier calls" in refused(build(), (X,), method="export-strict").what


def test_auto_says_why_each_method_failed_and_names_the_line() -> None:
    with pytest.raises(CaptureError) as caught:
        qc.capture(Branch(), (X,))
    assert "by export" in caught.value.what
    assert "by fx" in caught.value.what
    assert (caught.value.where or "").startswith(line("if"))


def test_a_failing_export_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(Branch(), (X,))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def refused(*args: Any, **options: Any) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        qc.capture(*args, **options)
    assert caught.value.where
    assert caught.value.advice
    return caught.value


def test_requests_that_make_no_sense() -> None:
    model = Wraps(nn.Linear(4, 4))
    assert "unknown capture method 'exprot'" in refused(model, (X,), method="exprot").what
    assert "needs example inputs" in refused(model, method="export").what
    assert "cannot keep modules whole" in refused(model, (X,), method="export", leaf=("inner",)).what
    assert "did you mean inner?" in (refused(model, (X,), leaf=("iner",)).advice or "")
    assert "no module of that class" in refused(model, (X,), leaf=(nn.Conv2d,)).what
    assert "leaf holds a Linear" in refused(model, (X,), leaf=(model.inner,)).what
    assert "leaf holds a int" in refused(model, (X,), leaf=(3,)).what
    assert "without example inputs" in refused(model, dynamic_shapes={"x": {0: Dim("n")}}).what
    assert "example_kwargs is a list" in refused(model, (X,), example_kwargs=[X]).what


def test_a_misspelt_keyword_is_named() -> None:
    error = refused(Two(), (X,), example_kwargs={"othr": X})
    assert "takes no keyword 'othr'" in error.what
    assert "did you mean other?" in (error.advice or "")


def test_keywords_alone_are_example_inputs() -> None:
    program = qc.capture(Two(), example_kwargs={"other": X, "x": X + 1})
    assert torch.equal(program(other=X, x=X), X + X)


@methods
def test_calls_that_do_not_fit_are_refused(method: Method) -> None:
    program = qc.capture(Two(), (X, X), method=method)
    for args, words in (
        ((X,), "the model takes 2"),
        ((X, X, X), "the model takes 2"),
        ((X, X[:1]), "has size 1 in dimension 0"),
        ((X, X.double()), "f64"),
        ((X, X[0]), "f32[4]"),
        ((X, 3.0), "not a tensor"),
    ):
        with pytest.raises(InputError) as caught:
            program(*args)
        assert words in caught.value.what
        assert caught.value.advice


@methods
def test_numbers_and_strings_are_fixed_at_capture(method: Method) -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor, factor: int, mode: str) -> Any:
            return x * factor if mode == "mul" else x + factor

    program = qc.capture(Scales(), (X, 3, "mul"), method=method)
    assert torch.equal(program(X, 3, "mul"), X * 3)
    with pytest.raises(InputError, match="captured for 3"):
        program(X, 4, "mul")


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda self, x: x.sum() if x.dim() == 2 else x, "a branch depends"),
        (lambda self, x: sum(row for row in x), "looped over"),
        (lambda self, x: x / len(x), "length of x"),
        (lambda self, x: x["a"] + 1, "indexed with 'a'"),
        (lambda self, x: x[..., 0, 1], "needs the rank"),
        (lambda self, *xs: xs[0], "number of inputs"),
    ],
    ids=["rank", "rows", "len", "dict", "ellipsis", "star"],
)
def test_what_needs_sizes_asks_for_example_inputs(forward: Any, words: str) -> None:
    model = type("Sized", (nn.Module,), {"forward": forward})()
    error = refused(model)
    assert words in error.what
    assert "example_inputs" in (error.advice or "")
