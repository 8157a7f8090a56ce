"""Dynamic sizes: what the user marks stays symbolic, is right at other sizes, and is checked at every call."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.errors import CaptureError, InputError
from quantc.ir.program import Program
from quantc.text.printer import numbered
from tests.support.agree import assert_same, run
from tests.support.edge_models import Make, linear, module

Method = Literal["export", "fx"]
METHODS: tuple[Method, ...] = ("export", "fx")
methods = pytest.mark.parametrize("method", METHODS)
n, m, b, t, h, w = (Dim(name) for name in "nmbthw")
N = ({0: n},)


def of(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(sum(map(sum, shapes)))
    return tuple(torch.randn(shape) for shape in shapes)


@dataclass(frozen=True)
class Sized:
    """A model, example inputs, marks, and inputs of other sizes.

    `differ` says why the two captures are not the same program; `refuses` names the method that refuses, and a word
    of its reason."""

    name: str
    build: Make
    example: tuple[Tensor, ...]
    marks: Any
    others: tuple[tuple[Tensor, ...], ...]
    differ: str = ""
    refuses: dict[Method, str] | None = None


ROWS: list[Sized] = []


def sized(name: str, forward: Callable[..., Any], example: Any, marks: Any, *others: Any, **facts: Any) -> None:
    parts = {key: value for key, value in facts.items() if key not in ("differ", "refuses")}
    rest = {key: value for key, value in facts.items() if key in ("differ", "refuses")}
    ROWS.append(Sized(name, module(forward, **parts), example, marks, others, **rest))


ROW, WIDE = of((3, 4)), of((5, 4))
FIXES = "fixed by the model"
sized("layers", lambda s, x: s.fc(x).relu(), ROW, N, WIDE, of((1, 4)), fc=linear)
sized(
    "view", lambda s, x: s.fc(x).view(x.size(0), 2, 2).transpose(1, 2).reshape(x.shape[0], -1), ROW, N, WIDE, fc=linear
)
sized("arithmetic", lambda s, x: x.reshape(x.shape[0] * 2, 2).repeat(1, 3)[: x.shape[0]] / x.shape[0], ROW, N, WIDE)
sized("size and more", lambda s, x: x.view(x.size()[:-1] + (2, 2)).sum(-1), ROW, N, WIDE)  # noqa: RUF005 - as people write it
sized("spread", lambda s, x: x.reshape(*x.shape[:-1], 2, 2), ROW, N, WIDE)
sized("slices", lambda s, x: (x[: x.shape[0] - 1], x[1 : x.shape[0]]), WIDE, ({0: Dim("k", min=4)},), of((7, 4)))
sized(
    "makes tensors",
    lambda s, x: torch.zeros(x.shape) + x.new_ones(x.shape[0], 4) + torch.ones(x.shape[0], 1),
    ROW,
    N,
    WIDE,
)
sized("number of elements", lambda s, x: x.sum() / x.numel() + x.nelement(), ROW, N, WIDE)
sized("columns", lambda s, x: sum(x[:, i] for i in range(x.shape[1])), ROW, N, WIDE)
sized("outer", lambda s, x: x.unsqueeze(0) * x.unsqueeze(1) + torch.eye(x.shape[0])[:, :, None], ROW, N, WIDE)
sized("sizes as outputs", lambda s, x: (x * 2, x.shape[0], x.shape[0] * 2), ROW, N, WIDE)
sized("pads to a multiple", lambda s, x: F.pad(x, (0, 0, 0, (-x.shape[0]) % 4)), ROW, N, WIDE)
sized("batch of one", lambda s, x: s.fc(x) + x, of((1, 4)), N, WIDE, of((1, 4)), fc=linear)
sized("one size in two", lambda s, x, y: x + y, of((3, 4), (3, 4)), ({0: n}, {0: n}), of((5, 4), (5, 4)))
sized("two sizes", lambda s, x, y: torch.cat([x, y]), of((3, 4), (2, 4)), ({0: n}, {0: m}), of((5, 4), (7, 4)))
sized("twice the size", lambda s, x, y: x + y[::2], of((3, 4), (6, 4)), ({0: n}, {0: 2 * n}), of((5, 4), (10, 4)))
sized("one more", lambda s, x, y: x + y[1:], of((3, 4), (4, 4)), ({0: n}, {0: n + 1}), of((5, 4), (6, 4)))
sized(
    "branch decided by the range",
    lambda s, x: x * 2 if x.shape[0] > 4 else -x,
    of((6, 4)),
    ({0: Dim("q", min=5)},),
    WIDE,
)
sized("branch on a fixed size", lambda s, x: x * 2 if x.shape[1] == 4 else -x, ROW, N, WIDE)
sized(
    "causal mask",
    lambda s, x: x.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -9.0),
    of((2, 5, 5)),
    ({0: b, 1: t, 2: t},),
    of((3, 7, 7)),
)
sized(
    "attention",
    lambda s, x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    of((2, 5, 4)),
    ({0: b, 1: t},),
    of((3, 7, 4)),
)
sized(
    "upsampled",
    lambda s, x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    of((2, 3, 8, 8)),
    ({0: b, 2: h, 3: w},),
    of((3, 3, 10, 12)),
)
sized(
    "recurrent", lambda s, x: s.rnn(x)[0], of((3, 5, 4)), N, of((6, 5, 4)), rnn=lambda: nn.LSTM(4, 4, batch_first=True)
)
sized("batch norm", lambda s, x: s.bn(x), ROW, N, WIDE, bn=lambda: nn.BatchNorm1d(4))
sized("square root", lambda s, x: x / math.sqrt(x.shape[0]), ROW, N, WIDE, refuses={"export": FIXES})
sized("power", lambda s, x: x * x.shape[0] ** -0.5, ROW, N, WIDE, differ="export converts the size to a float first")
sized(
    "half of an unknown",
    lambda s, x: x[:, : x.shape[1] // 2],
    of((3, 6)),
    ({1: n},),
    of((3, 7)),
    refuses={"export": "generated guard"},
)
sized("a hint", lambda s, x: s.fc(x).sum(1), ROW, ({0: Dim.AUTO},), WIDE, fc=linear, differ="export assumes at least 2")
sized(
    "must be dynamic",
    lambda s, x: s.fc(x).sum(1),
    ROW,
    ({0: Dim.DYNAMIC},),
    WIDE,
    fc=linear,
    differ="export assumes at least 2",
)
sized(
    "hints that get fixed",
    lambda s, x: s.fc(x),
    ROW,
    ({0: Dim.AUTO, 1: Dim.AUTO},),
    WIDE,
    fc=linear,
    differ="export assumes at least 2",
)
sized("a hint that gets narrowed", lambda s, x: x[:3].sum() / x[:3].shape[0], of((5, 4)), ({0: Dim.AUTO},), of((6, 4)))
TAKEN = [
    pytest.param(row, method, id=f"{row.name}-{method}")
    for row in ROWS
    for method in METHODS
    if method not in (row.refuses or {})
]


def captured(row: Sized, method: Method) -> tuple[Program, nn.Module]:
    torch.manual_seed(0)
    model = row.build().eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The default behavior for interpolate")
        return qc.capture(model, row.example, method=method, dynamic_shapes=row.marks), model


@pytest.mark.parametrize(("row", "method"), TAKEN)
def test_programs_are_right_at_other_sizes(row: Sized, method: Method) -> None:
    program, model = captured(row, method)
    program.verify()
    for args in (row.example, *row.others):
        assert_same(run(program, args).output, run(model, args).output)
    assert any(not kind.type.is_static for kind in program.signature.inputs if kind.type is not None)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS if not row.refuses])
def test_both_captures_give_the_same_program(row: Sized) -> None:
    export, fx = (numbered(captured(row, method)[0]) for method in METHODS)
    assert (export == fx) is not bool(row.differ), row.differ or "they should be the same"


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS if row.refuses])
def test_what_export_refuses_it_refuses_clearly(row: Sized) -> None:
    with pytest.raises(CaptureError) as caught:
        captured(row, "export")
    assert (row.refuses or {})["export"] in caught.value.what
    assert "dynamic_shapes" in (caught.value.advice or "")


@methods
@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda s, x: x + torch.ones(3, 4), "fixed"),
        (lambda s, x: x[:3].sum() / x[:3].shape[0], ""),
        (lambda s, x: x * 2 if x.shape[0] > 4 else -x, ""),
        (lambda s, x: sum(x[i] for i in range(x.shape[0])), ""),
        (lambda s, x: sum(row for row in x), ""),
        (lambda s, x: x / math.log(x.shape[0]), ""),
    ],
    ids=["added to a fixed size", "cut", "branch", "range", "rows", "log"],
)
def test_a_model_that_fixes_a_size_is_refused(method: Method, forward: Callable[..., Any], words: str) -> None:
    with pytest.raises(CaptureError) as caught:
        qc.capture(module(forward)(), of((5, 4)) if not words else ROW, method=method, dynamic_shapes=N)
    assert words in caught.value.what
    assert caught.value.where
    assert caught.value.advice


def test_a_limit_that_only_a_kernel_asks_about_does_not_narrow() -> None:
    """Convolutions choose their method by batch size; that must not show."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    program = qc.capture(model, of((2, 3, 8, 8)), method="fx", dynamic_shapes=({0: b},))
    for batch in (1, 2, 15, 40):
        x = torch.randn(batch, 3, 8, 8)
        assert_same(run(program, (x,)).output, run(model, (x,)).output, 1e-6)


@methods
def test_sizes_outside_the_range_are_refused_by_name(method: Method) -> None:
    program = qc.capture(nn.Linear(4, 4), ROW, method=method, dynamic_shapes=({0: Dim("batch", min=2, max=8)},))
    program(*of((8, 4)))
    for size in (1, 9):
        with pytest.raises(InputError, match=rf"size batch is {size}, outside the captured range 2\.\.8") as caught:
            program(*of((size, 4)))
        assert caught.value.advice


@methods
def test_sizes_that_belong_together_must_agree(method: Method) -> None:
    add = module(lambda s, x, y: x + y)()
    program = qc.capture(add, of((3, 4), (3, 4)), method=method, dynamic_shapes=({0: n}, {0: n}))
    with pytest.raises(InputError, match=r"'y' has size 4 in dimension 0.*n = 5"):
        program(*of((5, 4), (4, 4)))
    every = module(lambda s, x, y: x + y[::2])()
    program = qc.capture(every, of((3, 4), (6, 4)), method=method, dynamic_shapes=({0: n}, {0: 2 * n}))
    with pytest.raises(InputError, match=r"2\*n = 10"):
        program(*of((5, 4), (9, 4)))


TWO = module(lambda s, x, y: x + y)
MALFORMED = {
    "too few": (({0: n},), "1 entries for 2 inputs"),
    "too many": (({0: n}, {0: n}, None), "3 entries for 2 inputs"),
    "unknown name": ({"x": {0: n}, "why": None, "y": {0: n}}, "names 'why'"),
    "no structure": (3, "dynamic_shapes is a int"),
    "no marks": (({0: n}, "n"), "marks a tensor with 'n'"),
    "unknown mark": (({0: n}, {0: "n"}), "unknown mark 'n'"),
    "dimension out of range": (({0: n}, {7: n}), "dimension 7"),
    "negative dimension": (({0: n}, {-1: n}), "dimension -1"),
    "list of another length": (([n, None, None], {0: n}), "3 marks for a tensor of 2"),
    "example out of range": (({0: Dim("q", min=9)}, None), "outside the range 9.."),
    "relation not met": (({0: n}, {0: 2 * n}), "should be 6"),
}


@methods
@pytest.mark.parametrize(("marks", "words"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_marks(method: Method, marks: Any, words: str) -> None:
    with pytest.raises(CaptureError) as caught:
        qc.capture(TWO(), of((3, 4), (3, 4)), method=method, dynamic_shapes=marks)
    assert words in caught.value.what
    assert caught.value.where
    assert caught.value.advice


@methods
def test_one_name_for_two_sizes(method: Method) -> None:
    with pytest.raises(CaptureError, match="n is 3 in one example input and 4 in another"):
        qc.capture(
            module(lambda s, x, y: torch.cat([x, y]))(),
            of((3, 4), (4, 4)),
            method=method,
            dynamic_shapes=({0: n}, {0: n}),
        )


@methods
def test_marks_by_name_nested_and_for_keywords(method: Method) -> None:
    net = module(lambda s, batch, *, shift: batch["x"] * 2 + batch["pair"][1] + shift)()
    x, y, z = of((3, 4), (3, 4), (4,))
    marks = {"batch": {"x": {0: n}, "pair": [None, {0: n}]}, "shift": None}
    inputs: tuple[Any, ...] = ({"x": x, "pair": [z, y]},)
    program = qc.capture(net, inputs, method=method, example_kwargs={"shift": z}, dynamic_shapes=marks)
    x, y, z = of((6, 4), (6, 4), (4,))
    assert torch.equal(program({"x": x, "pair": [z, y]}, shift=z), x * 2 + y + z)


class Star(nn.Module):
    def forward(self, *xs: Tensor) -> Any:
        return xs[0] + xs[1]


class StarNamed(nn.Module):
    def forward(self, *xs: Tensor, **named: Tensor) -> Any:
        return xs[0] + xs[1] * named["k"]


@methods
@pytest.mark.parametrize("marks", [{"xs": ({0: n}, {0: n})}, (({0: n}, {0: n}),)], ids=["by name", "in order"])
def test_marks_for_star_arguments(method: Method, marks: Any) -> None:
    program = qc.capture(Star(), of((3, 4), (3, 4)), method=method, dynamic_shapes=marks)
    x, y = of((6, 4), (6, 4))
    assert torch.equal(program(x, y), x + y)


def test_marks_for_keywords_taken_together() -> None:
    """By fx alone: torch.export does not take marks for them."""
    marks = {"xs": ({0: n}, {0: n}), "named": {"k": {0: n}}}
    x, y, z = of((3, 4), (3, 4), (3, 4))
    program = qc.capture(StarNamed(), (x, y), method="fx", example_kwargs={"k": z}, dynamic_shapes=marks)
    x, y, z = of((6, 4), (6, 4), (6, 4))
    assert torch.equal(program(x, y, k=z), x + y * z)


def test_a_size_is_a_number_to_the_model() -> None:
    ask = module(lambda s, x: x * 2 if isinstance(x.shape[0], int) else x * 3)()
    program = qc.capture(ask, ROW, method="fx", dynamic_shapes=N)
    assert torch.equal(program(*WIDE), WIDE[0] * 2)


@methods
def test_a_check_on_a_size_is_not_in_the_way(method: Method) -> None:
    checked = module(lambda s, x: (torch._check(x.shape[0] > 1), x * 2)[1])()  # type: ignore[no-untyped-call]
    program = qc.capture(checked, ROW, method=method, dynamic_shapes=({0: Dim("n", min=2)},))
    assert torch.equal(program(*WIDE), WIDE[0] * 2)


def test_a_check_that_asks_for_more_than_was_granted_is_refused() -> None:
    checked = module(lambda s, x: (torch._check(x.shape[0] > 3), x * 2)[1])()  # type: ignore[no-untyped-call]
    with pytest.raises(CaptureError, match="at least 4"):
        qc.capture(checked, WIDE, method="fx", dynamic_shapes=N)
