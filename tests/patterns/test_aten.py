"""The shared vocabulary: each word fits its ops, under the names that rules give roles to."""

from __future__ import annotations

from typing import Any

import pytest

from quantc.ir.dialect import BY_NAME, arguments
from quantc.patterns import Match, OpPattern
from quantc.patterns import aten as v
from tests.support.pattern_graphs import Build, attempt, found, refused

WORDS: dict[str, OpPattern] = {name: word for name, word in vars(v).items() if isinstance(word, OpPattern)}


NORMS = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm")
RENAMED = {**{norm: {"w": "gamma", "b": "beta"} for norm in NORMS}, "prelu": {"w": "slope"}}
"""The words whose operands have other names than in the dialect."""


@pytest.mark.parametrize(("word", "pattern"), WORDS.items(), ids=WORDS)
def test_operands_are_bound_under_the_names_of_the_dialect(word: str, pattern: OpPattern) -> None:
    renamed = RENAMED.get(word, {})
    for op in (BY_NAME[name] for name in pattern.ops if name in BY_NAME):
        b = Build()
        names = [row.name for row in arguments(op.target)][: len(pattern.operands)]
        given: list[Any] = [
            [b.input(name)] if str(operand).endswith("*") else b.input(name)
            for name, operand in zip(names, pattern.operands, strict=True)
        ]
        node = b(op.name, *given)
        bindings = found(pattern, b.done(node), node).bindings
        expected = {
            renamed.get(name, name): tuple(value) if isinstance(value, list) else value
            for name, value in zip(names, given, strict=True)
            if name not in ("normalized_shape", "num_groups")
        }
        assert dict(bindings) == expected


@pytest.mark.parametrize("name", ["add", "sub", "rsub"])
def test_sums_that_scale_an_operand_are_others(name: str) -> None:
    b = Build()
    x, y = b.input("x"), b.input("y")
    plain, scaled = b(name, x, y), b(name, x, y, alpha=2)
    program = b.done(plain, scaled)
    assert isinstance(attempt(WORDS[name], program, plain), Match)
    assert "alpha = 2" in refused(WORDS[name], program, scaled)


def test_a_norm_after_a_convolution_binds_both_their_weights() -> None:
    b = Build()
    stats = [b.const(name, 4) for name in ("scale", "shift", "mean", "var")]
    conv = b("conv2d", b.input("x"), b.const("weight", 4, 4, 1, 1), b.const("bias", 4))
    norm = b("batch_norm", conv, *stats, False, 0.1, 1e-5, False)
    match = found(v.conv >> v.batch_norm, b.done(norm), norm)
    names = ("w", "b", "gamma", "beta", "mean", "var")
    assert [match.node(name).name for name in names] == ["weight", "bias", "scale", "shift", "mean", "var"]


def test_relu_is_a_clamp_and_a_clamp_is_no_relu() -> None:
    b = Build()
    x = b.input("x")
    relu, clamp = b("relu", x), b("clamp", x, 0, 6)
    program = b.done(relu, clamp)
    assert found(v.clamp, program, relu).root is relu
    assert found(v.clamp, program, clamp).root is clamp
    assert refused(v.relu, program, clamp) == "expected relu, found clamp"


def test_an_unknown_word_is_refused_with_the_near_ones() -> None:
    with pytest.raises(AttributeError, match=r"did you mean .*max_pool") as caught:
        v.maxpool  # type: ignore[attr-defined]  # noqa: B018
    assert caught.value.name == "maxpool"
    with pytest.raises(AttributeError) as caught:
        v.__wrapped__  # type: ignore[attr-defined]  # noqa: B018
    assert "patterns" not in str(caught.value).partition("'__wrapped__'")[2]
