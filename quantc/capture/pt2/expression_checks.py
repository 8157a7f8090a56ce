"""Validation of text that reaches `eval`: size expressions, and guards on inputs.

torch passes a file's size expressions to `sympy.sympify`, which evaluates them as Python, and compiles its guards into
a function. So both are parsed here first, and only arithmetic with bounded growth is accepted.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

MAX_CHARACTERS = 20_000
MAX_DEPTH = 150
MAX_EXTREMA = 64
MAX_POWER = 64
MAX_TERMS = 4096
MAX_VALUE = 1 << 4096

# Up to six digits: torch counts up to the largest unbacked symbol in a loop.
SYMBOL = re.compile(r"(?:s|u|zf|zuf)[0-9]{1,6}")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
# Text that can stand between quotes in Python source and still be only text.
QUIET = re.compile(r"[^\"'\\]*")


def words(text: str) -> frozenset[str]:
    """Set of the whitespace-separated names in a text."""
    return frozenset(text.split())


CONSTANTS = frozenset({"oo", "int_oo", "true", "false"})
ASSUMPTIONS = words(
    "commutative complex even extended_real finite hermitian imaginary infinite integer negative nonnegative nonpositive"
    " nonzero odd positive rational real zero"
)
MATHS = words("acos asin atan ceil cos cosh exp floor log log2 sin sinh sqrt tan tanh trunc")
PLAIN_FUNCTIONS = words(
    "Abs And CeilDiv CeilToInt CleanDiv Eq Equality ExprCondPair FloatTrueDiv FloorDiv FloorToInt Ge GreaterThan Gt ITE"
    " Identity IntTrueDiv Integer IsNonOverlappingAndDenseIndicator Le LessThan Lt Mod ModularIndexing Ne Not Or Piecewise"
    " PythonMod Rational RoundDecimal RoundToInt StrictGreaterThan StrictLessThan ToFloat TruncToFloat TruncToInt Tuple"
    " Unequality Where ceiling floor BitwiseFn_bitwise_and BitwiseFn_bitwise_or BitwiseFn_bitwise_xor"
)
GUARD_CALLS = words(
    "max min abs round math.isnan torch.sym_float torch.sym_int torch.sym_max torch.sym_min torch.sym_not torch.sym_ite"
    " torch._sym_sqrt IsNonOverlappingAndDenseIndicator cast_symbool_to_symint_guardless"
) | {f"math.{name}" for name in MATHS}
# What a guard may ask of an input tensor; all of these take nothing and change nothing.
QUESTIONS = frozenset({"size", "stride", "storage_offset"})


class Bound(NamedTuple):
    """Growth bound of a sub-expression: its value, counting a symbol as 1, and its number of terms once expanded."""

    value: int = 1
    terms: int = 1


class ExpressionRefused(Exception):  # noqa: N818  (it says what happened to the text; callers only see the reason)
    """Carries the reason out of the walk."""


@lru_cache(maxsize=4096)
def why_not_size(text: str) -> str | None:
    """Reason why torch may not evaluate this size expression (`2*s0 + 1` or sympy's own `Add(...)` spelling); None if it may."""
    return _why_not(text, _size_leaf)


def why_not_guard(text: str) -> str | None:
    """Reason why torch may not compile this guard on the inputs (`L['x'].size()[0] % 2 == 0`); None if it may."""
    return _why_not(text, _guard_leaf)


def is_quiet(text: str) -> bool:
    """True for printable text without quotes and backslashes, which no quoting in generated code can turn into code."""
    return text.isprintable() and QUIET.fullmatch(text) is not None


Leaf = Callable[[ast.expr], Bound | None]


def _why_not(text: str, leaf: Leaf) -> str | None:
    if len(text) > MAX_CHARACTERS:
        return f"is {len(text)} characters long; at most {MAX_CHARACTERS} are read"
    if not text.isascii() or not text.isprintable() or any(mark in text for mark in '#"\\'):
        return "holds characters that no arithmetic needs"
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        _check_depth(tree)
        _bound(tree, leaf)
    except ExpressionRefused as refusal:
        return str(refusal)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "does not parse as arithmetic"
    return None


def _check_depth(tree: ast.expr) -> None:
    layer: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        layer = [child for node in layer for child in ast.iter_child_nodes(node)]
        if not layer:
            return
    raise ExpressionRefused(f"is nested more than {MAX_DEPTH} deep")


def _bound(tree: ast.expr, leaf: Leaf) -> Bound:
    """The bound of a sub-expression. Raises Refused on anything that is not arithmetic, or could grow too large."""
    found = leaf(tree)
    if found is None:
        found = _combine(tree, leaf)
    if found.value > MAX_VALUE or found.terms > MAX_TERMS:
        raise ExpressionRefused("could grow to a number or a sum too large to compute")
    return found


def _combine(tree: ast.expr, leaf: Leaf) -> Bound:
    match tree:
        case ast.Constant(value=bool()):
            return Bound()
        case ast.Constant(value=int(number)):
            return Bound(abs(number))
        case ast.Constant(value=float(number)) if math.isfinite(number):
            return Bound(math.ceil(abs(number)))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not(), operand=inner):
            return _bound(inner, leaf)
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _bound(left, leaf), _bound(right, leaf))
        case ast.Compare(left=left, ops=ops, comparators=others) if not any(map(_is_membership, ops)):
            return _widest([_bound(part, leaf) for part in (left, *others)])
        case ast.BoolOp(values=values):
            return _widest([_bound(part, leaf) for part in values])
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _widest([_bound(part, leaf) for part in (test, body, orelse)])
        case _:
            raise ExpressionRefused(f"holds `{_short(tree)}`, which is not arithmetic")


def _is_membership(op: ast.cmpop) -> bool:
    return isinstance(op, ast.In | ast.NotIn | ast.Is | ast.IsNot)


def _binary(op: ast.operator, left: Bound, right: Bound) -> Bound:
    match op:
        case ast.Add() | ast.Sub():
            return _sum([left, right])
        case ast.Mult() | ast.Div():
            return _product([left, right])
        case ast.FloorDiv() | ast.Mod():
            return _widest([left, right])
        case ast.Pow():
            return _power(left, right)
        case _:
            raise ExpressionRefused(f"uses the operator {type(op).__name__}, which sizes do not need")


def _sum(parts: list[Bound]) -> Bound:
    return Bound(sum(part.value for part in parts), sum(part.terms for part in parts))


def _product(parts: list[Bound]) -> Bound:
    value = terms = 1
    for part in parts:
        value = min(value * max(1, part.value), MAX_VALUE + 1)
        terms = min(terms * part.terms, MAX_TERMS + 1)
    return Bound(value, terms)


def _power(base: Bound, exponent: Bound) -> Bound:
    if exponent.value > MAX_POWER:
        raise ExpressionRefused(f"raises to a power above {MAX_POWER}")
    return _product([base] * exponent.value)


def _shift(base: Bound, distance: Bound) -> Bound:
    return _product([base, _power(Bound(2), distance)])


def _widest(parts: list[Bound]) -> Bound:
    return Bound(max((part.value for part in parts), default=1))


def _extreme(parts: list[Bound]) -> Bound:
    if len(parts) > MAX_EXTREMA:
        raise ExpressionRefused(f"compares more than {MAX_EXTREMA} values at once")
    return _widest(parts)


def _pair(combine: Callable[[Bound, Bound], Bound]) -> Callable[[list[Bound]], Bound]:
    def apply(parts: list[Bound]) -> Bound:
        if len(parts) != 2:
            raise ExpressionRefused("gives a function the wrong number of arguments")
        return combine(*parts)

    return apply


# Every function torch writes into a size expression, with how large its result can get.
FUNCTIONS: dict[str, Callable[[list[Bound]], Bound]] = {
    "Add": _sum,
    "Mul": _product,
    "Max": _extreme,
    "Min": _extreme,
    "Pow": _pair(_power),
    "PowByNatural": _pair(_power),
    "FloatPow": _pair(_power),
    "LShift": _pair(_shift),
    "RShift": _pair(_shift),
    **dict.fromkeys(PLAIN_FUNCTIONS, _widest),
    **dict.fromkeys((f"OpaqueUnaryFn_{name}" for name in MATHS), _widest),
}


def _size_leaf(tree: ast.expr) -> Bound | None:
    """Symbols, numbers and functions as they stand in size expressions."""
    match tree:
        case ast.Name(id=name) if name in CONSTANTS or SYMBOL.fullmatch(name):
            return Bound()
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(name))], keywords=keywords):
            return _symbol(name, keywords)
        case ast.Call(func=ast.Name(id="Float"), args=[ast.Constant(value=str(number))], keywords=keywords):
            return _float(number, keywords)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name]([_bound(argument, _size_leaf) for argument in args])
        case ast.Tuple(elts=[value, condition]):  # a branch of Piecewise
            return _widest([_bound(value, _size_leaf), _bound(condition, _size_leaf)])
        case _:
            return None


def _symbol(name: str, keywords: list[ast.keyword]) -> Bound:
    if not SYMBOL.fullmatch(name):
        raise ExpressionRefused(f"names a symbol `{name[:40]}`; torch's are named s0, u0, zf0 or zuf0")
    for keyword in keywords:
        if keyword.arg not in ASSUMPTIONS or not _is_flag(keyword.value):
            raise ExpressionRefused(f"gives the symbol {name} an unknown assumption")
    return Bound()


def _is_flag(tree: ast.expr) -> bool:
    return isinstance(tree, ast.Constant) and isinstance(tree.value, bool)


def _float(number: str, keywords: list[ast.keyword]) -> Bound:
    plain = all(word.arg == "precision" and ast.unparse(word.value) == "53" for word in keywords)
    if not plain or len(number) > 40 or "_" in number or not math.isfinite(value := float(number)):
        raise ExpressionRefused("holds a float that is not a plain finite number")
    return Bound(math.ceil(abs(value)))


def _guard_leaf(tree: ast.expr) -> Bound | None:
    """Questions about the inputs and functions as they stand in guards."""
    match tree:
        case ast.Attribute(value=ast.Name(id="math"), attr="inf" | "nan" | "pi") | ast.Name(id="inf"):
            return Bound()
        case ast.Call(func=function, args=args, keywords=[]) if _dotted_name(function) in GUARD_CALLS:
            return _extreme([_bound(argument, _guard_leaf) for argument in args])
        case ast.Subscript() | ast.Call() | ast.Attribute():
            _check_source(tree)
            return Bound()
        case _:
            return None


def _dotted_name(tree: ast.expr) -> str | None:
    match tree:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return f"{owner}.{name}"
        case _:
            return None


def _check_source(tree: ast.expr) -> None:
    """An input, or its size: `L['x']`, then keys, positions, fields, and at most one question."""
    if not all(map(_is_source_step, _steps(tree))):
        raise ExpressionRefused(f"holds `{_short(tree)}`, which is not a size of an input")


def _steps(tree: ast.expr) -> Iterator[ast.expr]:
    while True:
        yield tree
        match tree:
            case ast.Subscript(value=inner) | ast.Attribute(value=inner) | ast.Call(func=inner):
                tree = inner
            case _:
                return


def _is_source_step(tree: ast.expr) -> bool:
    match tree:
        case ast.Name(id="L"):
            return True
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return is_quiet(key)
        case ast.Subscript(slice=ast.Constant(value=int())):
            return True
        case ast.Call(func=ast.Attribute(attr=question), args=[], keywords=[]):
            return question in QUESTIONS
        case ast.Attribute(attr=name):
            return NAME.fullmatch(name) is not None
        case _:
            return False


def _short(tree: ast.expr) -> str:
    text = ast.unparse(tree)
    return text if len(text) <= 60 else f"{text[:57]}..."
