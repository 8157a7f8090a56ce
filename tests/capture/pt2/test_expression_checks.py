"""Size expressions and guards: what torch writes passes, what could run or never end does not."""

from __future__ import annotations

import ast

import pytest
import sympy  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from quantc.capture.pt2.expression_checks import why_not_guard, why_not_size

SIZES = (
    "s77 + 1",
    "2*s0//3 % 4",
    "oo",
    "-int_oo",
    "Symbol('s77', positive=True, integer=True)",
    "Add(FloorDiv(Max(Integer(8), Symbol('s17', positive=True, integer=True)), Integer(2)), Integer(70))",
    "TruncToInt(Mul(Float('0.5', precision=53), ToFloat(Symbol('s6', positive=True, integer=True))))",
    "Pow(Symbol('s6'), Integer(2))",
    "Mul(Integer(-1), FloorDiv(Integer(-8), Symbol('s17')))",
    "Piecewise(ExprCondPair(Symbol('s0'), true), (Integer(1), False))",
    "Pow(Add(" + ", ".join(f"s{n}" for n in range(60)) + "), Integer(2))",
)
GUARDS = (
    "L['d']['q'].size()[0] > 5",
    "((-1)*(((-1)*L['x'].size()[0]) // L['y'].size()[0])) != 1",
    "math.trunc(0.5*torch.sym_float(L['x'].size()[0])) == 4",
    "L['flat_args'][0].size()[0] > 3 and max(L['a'].size()[0], 3) < 5",
    "L['x'].feature.size()[1] == 2",
)
NOT_SIZES = (
    "__import__('os')",
    "().__class__",
    "Symbol('x')",
    "Symbol('s0', integer=print())",
    "Float('1e999')",
    "Integer('__import__(1)')",
    "Rational('1/3')",
    "s0[0]",
    "lambda: 1",
    "'text'",
    "f'{s0}'",
    "[s0 for s0 in s0]",
    "s0 in s0",
    "s0\\n+1",
    "s0 # comment",
    "Mul(*s0)",
    "",
)
NOT_GUARDS = (
    "__import__('os')",
    "L.__class__",
    "L['x'].__class__",
    "L['x'].set_(1)",
    "L['x'].tolist()",
    "L[print()]",
    "torch.load('x')",
    "torch.ops.load_library('x')",
    "math.__loader__",
    "L['x'].size()[0] == 1, print()",
    "(y := 1)",
    "open('x')",
    "max(key=print)",
)


@pytest.mark.parametrize("text", SIZES)
def test_sizes_torch_writes(text: str) -> None:
    assert why_not_size(text) is None


@pytest.mark.parametrize("text", GUARDS)
def test_guards_torch_writes(text: str) -> None:
    assert why_not_guard(text) is None


@pytest.mark.parametrize("text", NOT_SIZES)
def test_not_sizes(text: str) -> None:
    assert why_not_size(text) is not None


@pytest.mark.parametrize("text", NOT_GUARDS)
def test_not_guards(text: str) -> None:
    assert why_not_guard(text) is not None


@pytest.mark.parametrize(
    "text",
    [
        "Pow(Integer(10), Integer(100000000))",
        "10**10**10",
        "LShift(Integer(1), Integer(9999999999))",
        "Pow(Integer(7), Add(Integer(999999999), Mul(Integer(0), Symbol('s0'))))",
        "Mul(" + ", ".join(["Add(s0, s1)"] * 20) + ")",
        "Max(" + ", ".join(f"s{n}" for n in range(500)) + ")",
        "(" * 5000 + "s0" + ")" * 5000,
        "-" * 15000 + "1",
        "+".join(["s0"] * 9000),
    ],
)
def test_expressions_that_would_never_end(text: str) -> None:
    assert why_not_size(text) is not None


TOKENS = (
    "s0 u1 1 2 + - * // ** % == < and not ( ) , [0] Max( Add( Integer(3) Symbol('s0') Float('0.5') ToFloat( lambda: if else"
    " __import__('os') .mkdir( .__class__ eval( Symbol.__init__ L ['x'] .size() .stride() .tolist() max( math.floor("
    " torch.sym_float( torch.load( math. :="
)


@settings(max_examples=400)
@given(st.lists(st.sampled_from(TOKENS.split()), max_size=9).map(" ".join))
def test_accepted_sizes_are_expressions(text: str) -> None:
    """sympy, which evaluates what is let through, builds numbers, symbols and relations from it or fails, nothing else."""
    if why_not_size(text) is not None:
        return
    try:
        value = sympy.sympify(text)
    except (TypeError, ValueError, AttributeError, AssertionError, sympy.SympifyError):
        return
    assert isinstance(value, sympy.Basic | bool | tuple)


@settings(max_examples=400)
@given(st.lists(st.sampled_from(TOKENS.split()), max_size=9).map(" ".join))
def test_accepted_guards_only_ask_for_sizes(text: str) -> None:
    if why_not_guard(text) is not None:
        return
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert names <= {"L", "max", "math", "torch"}
    assert attributes <= {"size", "stride", "tolist", "floor", "sym_float", "mkdir"}
    assert not any(
        isinstance(node, ast.Call) and called(node) in ("tolist", "mkdir") for node in ast.walk(ast.parse(text))
    )


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""
