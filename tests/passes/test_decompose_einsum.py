"""decompose-einsum: matrix products are written as such, and have torch's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.hooks import Guard, Truth, Verify
from quantc.ir.program import Program
from quantc.ir.types import type_of
from quantc.passes.decompose_einsum import DecomposeEinsum
from quantc.pipeline.pipeline import Pipeline

PIPELINE = Pipeline((DecomposeEinsum(),))


class Einsum(nn.Module):
    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation

    def forward(self, *operands: Tensor) -> Tensor:
        return torch.einsum(self.equation, *operands)


class Two(nn.Module):
    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum(self.equation, x, y)


def rewritten(model: nn.Module, inputs: tuple[Tensor, ...], **how: Any) -> Program:
    program = PIPELINE.run(qc.capture(model.eval(), inputs, **how), [Truth(), Verify(), Guard()])
    assert all(type_of(node) is not None for node in program.graph.nodes if node.op == "call_function")
    return program


def ops(program: Program) -> list[str]:
    return [str(node.target).split(".")[1] for node in program.graph.nodes if node.op == "call_function"]


@st.composite
def contractions(draw: st.DrawFn) -> tuple[str, tuple[Tensor, ...]]:
    """Equations of two operands in which each index is in the batch, on one side, or summed; any order."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    letters = draw(st.permutations("abcdefXYZ"))
    counts = [draw(st.integers(0, 2)) for _ in range(3)] + [draw(st.integers(1, 2))]
    groups: list[list[str]] = []
    for count in counts:
        groups.append(list(letters[:count]))
        letters = letters[count:]
    batch, left, right, summed = groups
    sizes = {letter: draw(st.integers(1, 4)) for group in groups for letter in group}
    x = draw(st.permutations([*batch, *left, *summed]))
    y = draw(st.permutations([*batch, *right, *summed]))
    out = draw(st.permutations([*batch, *left, *right]))
    equation = f"{''.join(x)}, {''.join(y)} -> {''.join(out)}"
    return equation, tuple(torch.randn(*(sizes[letter] for letter in term)) for term in (x, y))


@settings(max_examples=20)
@given(contractions())
def test_every_contraction_of_two_tensors_is_a_matmul(case: tuple[str, tuple[Tensor, ...]]) -> None:
    equation, operands = case
    program = rewritten(Two(equation), operands, method="fx")
    assert "einsum" not in ops(program)
    assert {"matmul", "linear"} & set(ops(program))
    torch.testing.assert_close(program(*operands), torch.einsum(equation, *operands), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("...ij,...jk", ((2, 3, 4, 5), (2, 3, 5, 6))),
        ("...ij,jk->...ik", ((2, 3, 4, 5), (5, 6))),
        ("b...d,bd->b...", ((2, 3, 4, 5), (2, 5))),
        ("ij,jk", ((3, 4), (4, 5))),
        ("ba,ac", ((3, 4), (4, 5))),
        ("Bb,bA", ((3, 4), (4, 5))),
        ("i...,i...->...", ((4, 2, 3), (4, 2, 3))),
        ("...i,...i", ((4, 3), (4, 3))),
        ("...ij,...kj->...ik", ((5, 2, 3, 4), (2, 6, 4))),
        ("bhid,bhjd->bhij", ((2, 3, 4, 5), (2, 3, 6, 5))),
        ("bhij,bhjd->bihd", ((2, 3, 4, 5), (2, 3, 5, 6))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_dots_and_implicit_results(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    torch.manual_seed(0)
    operands = tuple(torch.randn(shape) for shape in shapes)
    program = rewritten(Two(equation), operands)
    assert "einsum" not in ops(program)
    torch.testing.assert_close(program(*operands), torch.einsum(equation, *operands))


def test_nothing_is_moved_where_the_axes_lie_right() -> None:
    x, y = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    assert ops(rewritten(Two("bij,bjk->bik"), (x, y))) == ["matmul"]


class Projection(nn.Module):
    def __init__(self, equation: str, *shape: int) -> None:
        super().__init__()
        self.equation = equation
        self.w = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, x, self.w)


def test_a_weight_by_rows_makes_a_linear() -> None:
    x = torch.randn(2, 3, 4)
    assert ops(rewritten(Projection("bid,od->bio", 5, 4), (x,))) == ["linear"]


def test_dynamic_shapes_are_kept() -> None:
    batch, rows = torch.export.Dim("batch", min=1, max=32), torch.export.Dim("rows", min=2, max=64)
    model = Two("bihd,bjhd->bhij")
    inputs = (torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, 4))
    shapes = {"x": {0: batch, 1: rows}, "y": {0: batch, 1: rows}}
    program = rewritten(model, inputs, dynamic_shapes=shapes)
    assert "matmul" in ops(program)
    others = (torch.randn(3, 7, 3, 4), torch.randn(3, 7, 3, 4))
    torch.testing.assert_close(program(*others), model(*others))


def test_dynamic_axes_are_put_back() -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    model = Projection("bid,dhk->bihk", 4, 2, 3)
    program = rewritten(model, (torch.randn(2, 5, 4),), dynamic_shapes={"x": {1: rows}})
    other = torch.randn(2, 9, 4)
    torch.testing.assert_close(program(other), model(other))
    both = Two("bhijd,bhkd->bhijk")
    inputs = (torch.randn(1, 2, 5, 3, 4), torch.randn(1, 2, 6, 4))
    program = rewritten(both, inputs, dynamic_shapes={"x": {2: rows}, "y": None})
    others = (torch.randn(1, 2, 8, 3, 4), torch.randn(1, 2, 6, 4))
    torch.testing.assert_close(program(*others), both(*others))


@pytest.mark.parametrize(
    ("equation", "shapes", "reason"),
    [
        ("ij->ji", ((3, 4),), "it has 1 operands"),
        ("ij,jk,kl->il", ((3, 4), (4, 5), (5, 6)), "it has 3 operands"),
        ("ii,ij->j", ((3, 3), (3, 4)), "the diagonal of i"),
        ("ij,jk->k", ((3, 4), (4, 5)), "over i of one operand alone"),
        ("ij,ij->ij", ((3, 4), (3, 4)), "it sums over nothing"),
        ("i,j->ij", ((3,), (4,)), "it sums over nothing"),
        ("ij,jk->ik", ((3, 1), (4, 5)), "j is 1 in one operand and 4 in the other"),
    ],
    ids=lambda value: value if isinstance(value, str) and "," in value else "",
)
def test_what_is_no_matrix_product_stays(equation: str, shapes: tuple[tuple[int, ...], ...], reason: str) -> None:
    operands = tuple(torch.randn(shape) for shape in shapes)
    program = rewritten(Einsum(equation), operands)
    assert ops(program) == ["einsum"]
    assert reason in program.log[-1].notes[0]
    assert not program.log[-1].changed
