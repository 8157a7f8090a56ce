"""Dump text that is malformed or means harm: it is a ParseError with its line, and it runs nothing."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantc.errors import ParseError
from quantc.ir.program import Stage
from quantc.text.parser import parse
from quantc.text.printer import dump
from tests.support.programs import Choice, exported, small_net

# -- malformed text ----------------------------------------------------------------------------------------------------

HEAD = 'program "N" stage=captured method=given mode=eval\n'
GOOD = HEAD + "  input %x : f32[2]\n  %y : f32[2] = relu(%x)\n  output (%y,)\n"

MALFORMED: dict[str, tuple[str, str, int | None]] = {
    **{
        f"digest {digest}": (
            GOOD.replace("  %y", f'  const %w = "w" : f32[2] param {digest}\n  %y'),
            "is not a digest",
            3,
        )
        for digest in ("#9f2c01a", "#9f2c01abc", "#9F2C01AB", "#9f2c01ag", "#x # 0 : Linear", '#9f2c01a tied="v"')
    },
    "digest of a state": (
        GOOD.replace("  output", '  state "n" : i64[] buffer #0\n  output'),
        "'#0' is not a digest",
        4,
    ),
    "digest of a module": (
        GOOD.replace("= relu(%x)", '= call_module @m(%x) {type="m", state="0123"}'),
        "state='0123' is not a digest",
        3,
    ),
    "empty": ("", "no program", None),
    "no header": ("input %x", "begins with a program line", 1),
    "header without name": ("program N", "a string in double quotes", 1),
    "unknown stage": (HEAD.replace("captured", "captive"), "unknown stage 'captive'", 1),
    "unknown option": (HEAD.replace("mode=eval", "mood=good"), "mood=good", 1),
    "two programs": (GOOD + GOOD, "one program", 5),
    "no output": (HEAD + "  input %x", "no output", 1),
    "after the output": (GOOD + "  %z = relu(%y)", "nothing may follow the output", 5),
    "unknown op": (GOOD.replace("relu", "rellu"), "unknown op 'rellu'", 3),
    "unknown overload": (GOOD.replace("relu", "aten.relu.nope"), "unknown op 'aten.relu.nope'", 3),
    "unknown higher-order op": (GOOD.replace("relu", "higher_order.nope"), "unknown higher-order op", 3),
    "foreign function": (GOOD.replace("relu", "os:system"), "not one that text may name", 3),
    "use before definition": (GOOD.replace("relu(%x)", "relu(%z)"), "%z is used before it is defined", 3),
    "defined twice": (GOOD.replace("%y : f32[2]", "%x : f32[2]"), "%x is defined twice", 3),
    "unclosed bracket": (GOOD.replace("relu(%x)", "relu(%x"), r"expected '\)'", 3),
    "unclosed string": (GOOD.replace("relu(%x)", 'relu("x)'), "does not belong here", 3),
    "bad escape": (GOOD.replace("relu(%x)", r'relu("\q")'), "not a string", 3),
    "too many arguments": (GOOD.replace("(%x)", "(%x, 1)"), "takes 1 arguments, not 2", 3),
    "missing argument": (GOOD.replace("relu(%x)", "add(%x)"), "needs the argument 'y'", 3),
    "unknown argument": (GOOD.replace("relu(%x)", "add(%x, %x, alhpa=2)"), "did you mean alpha", 3),
    "argument given twice": (GOOD.replace("relu(%x)", "add(%x, %x, y=2)"), "'y' is given twice", 3),
    "position after name": (GOOD.replace("relu(%x)", "add(x=%x, %x)"), "come before", 3),
    "bad type": (GOOD.replace("f32[2] =", "f33[2] ="), "'f33.2.' is not a type", 3),
    "empty dimension": (GOOD.replace("f32[2] =", "f32[,2] ="), "empty dimension", 3),
    "bare word as value": (GOOD.replace("(%x)", "(hello)"), "'hello' is not a value", 3),
    "tuple of one without comma": (GOOD.replace("(%y,)", "(%y)"), "a tuple of one", 4),
    "long number": (GOOD.replace("(%x)", f"({'9' * 5000})"), "too many digits", 3),
    "deep nesting": (GOOD.replace("(%x)", f"({'[' * 5000}"), "nest too deeply", 3),
    "deep type": (GOOD.replace("f32[2] =", f"{'(' * 5000} ="), "nests too deeply", 3),
    "deep in_spec": (GOOD + "  in_spec " + "[" * 100_000, "nests too deeply", 5),
    "wrong in_spec": (GOOD + "  in_spec [1, 2]", r"expected \*, a bracket", 5),
    "unknown class in out_spec": (GOOD + "  out_spec nowhere:Class(*)", "the class nowhere:Class is not known", 5),
    "key twice": (GOOD + '  out_spec {"a": *, "a": *}', "given twice", 5),
    "bad size": (GOOD + "  size s0 in few..many", "a dynamic size is written", 5),
    "unknown graph": (GOOD.replace("relu(%x)", "higher_order.cond(%x, @a, @b, ())"), "unknown graph 'a'", 3),
    "orphan graph": (GOOD + "graph @a/b\n  output ()", "which does not exist", 5),
    "nested graph that torch cannot compile": (
        GOOD + "graph @a\n  input %x\n  %y = operator:add(%x)\n  output (%y,)",
        "torch cannot compile this graph",
        5,
    ),
    "graph without a name": (GOOD + "graph @.b\n  output ()", "cannot be the name", 5),
    "graph twice": (GOOD + "graph @a\n  output ()\ngraph @a\n  output ()", "defined twice", 7),
    "constant without kind": (GOOD.replace("  %y", '  const %w = "w" : f32[2]\n  %y'), "param, buffer or tensor", 3),
    "tied to nothing": (
        GOOD.replace("  %y", '  const %w = "w" : f32[2] param tied="v"\n  %y'),
        "not a constant of its own",
        3,
    ),
    "constant inside a constant": (
        GOOD.replace("  %y", '  const %w = "w" : f32[2] param\n  const %v = "w.v" : f32[2] param\n  %y'),
        "not a module",
        4,
    ),
    "constant under a module's own name": (
        GOOD.replace("  %y", '  const %w = "forward" : f32[2] param\n  %y'),
        "a name that every module has",
        3,
    ),
    "constant of dynamic size": (
        GOOD.replace("  %y", '  const %w = "w" : f32[s0] param\n  %y'),
        "not a number",
        3,
    ),
    "constant too large": (
        GOOD.replace("  %y", f'  const %w = "w" : f32[{2**62},{2**62}] buffer\n  %y'),
        "no tensor is",
        3,
    ),
    "unknown attribute": (GOOD.replace("relu(%x)", "relu(%x) {speed=3}"), "'speed' is not known here", 3),
    "mode of no argument": (
        GOOD.replace("relu(%x)", "relu(%x) {mode_arg=4, train=True, eval=False}"),
        "mode_arg=4",
        3,
    ),
    "keyword as name": (GOOD.replace("%y", "%class"), "not an identifier", 3),
    "getattr of something private": (
        GOOD.replace("relu(%x)", 'builtins:getattr(%x, "__class__")'),
        "getattr may only read",
        3,
    ),
    "method of no tensor": (GOOD.replace("relu(%x)", "call_method .tofile(%x)"), "not a method of a tensor", 3),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_text(case: str) -> None:
    text, message, line = MALFORMED[case]
    with pytest.raises(ParseError, match=message) as caught:
        parse(text)
    if line is not None:
        assert caught.value.line == line
        assert caught.value.column >= 1
        assert "^" in str(caught.value)


def test_in_spec_of_another_size() -> None:
    with pytest.raises(ParseError, match="arranges 2 inputs, but there are 1"):
        parse(GOOD.replace("  input", "  in_spec ((*, *), {})\n  input"))


def test_the_caret_points_at_the_fault() -> None:
    with pytest.raises(ParseError) as caught:
        parse(GOOD.replace("relu(%x)", "relu(%nope)"))
    *_, shown, caret, _ = str(caught.value).splitlines()
    assert shown[caret.index("^") :].startswith("%nope")


def test_only_strings_are_parsed() -> None:
    with pytest.raises(ParseError, match="not a bytes"):
        parse(b"program")  # type: ignore[arg-type]


def test_comments_blank_lines_and_missing_facts_are_fine() -> None:
    program = parse('# a model\nprogram "N"\n\n  input %x\n  # nothing else\n  output (%x,)\n')
    assert program.stage is Stage.CAPTURED
    assert torch.equal(program(torch.ones(2)), torch.ones(2))


# -- text that means harm ----------------------------------------------------------------------------------------------

BOOM = "__import__('pathlib').Path('boom').touch()"
HOSTILE = {
    "node name": GOOD.replace("%y", f'%"{BOOM}"'),
    "input target": GOOD.replace("f32[2]\n", f'f32[2] {{target="x={BOOM}"}}\n', 1),
    "input name": GOOD.replace("f32[2]\n", f'f32[2] {{name="x={BOOM}"}}\n', 1),
    "output name": GOOD.replace("(%y,)", f'(%y,) {{name="{BOOM}"}}'),
    "constant": GOOD.replace("  %y", f'  const %w = "a\\"); {BOOM}; (\\"" : f32[2] param\n  %y'),
    "module": GOOD.replace("relu(", f'call_module @"a\\"); {BOOM}; (\\""('),
    "graph": GOOD.replace("relu(%x)", f'higher_order.cond(%x, @"{BOOM}", @b, ())'),
    "keyword": GOOD.replace("relu(%x)", f"torch:relu(%x, {BOOM}=1)"),
    "eval": GOOD.replace("relu(%x)", f'builtins:eval("{BOOM}")'),
    "torch.load": GOOD.replace("relu(%x)", 'torch:load("boom")'),
    "file": GOOD.replace("relu(%x)", 'torch:from_file("boom", True, 4)'),
    "operator.call": GOOD.replace("relu(%x)", "operator:call(%x)"),
    "torch.ops attribute": GOOD.replace("relu(%x)", "load_library.__class__.__init__(%x)"),
}


HOSTILE_SPECS = {
    "module": "boom_module:X(*)",
    "factory": "collections:defaultdict[[&boom_module:x, []]](*)",
    "opaque": 'collections:OrderedDict[opaque("boom_module")](*)',
    "attribute": "pathlib:Path.home(*)",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_text_runs_nothing(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParseError):
        parse(HOSTILE[case])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["in_spec", "out_spec"])
@pytest.mark.parametrize("case", HOSTILE_SPECS)
def test_hostile_specs_import_nothing(case: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "boom_module.py").write_text("from pathlib import Path\nPath('boom').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ParseError):
        parse(GOOD.replace("  input", f"  {where} {HOSTILE_SPECS[case]}\n  input"))
    assert "boom_module" not in sys.modules
    assert not (tmp_path / "boom").exists()


def test_keyword_names_in_a_spec_are_checked() -> None:
    spec = f"((), {{\"a': {BOOM}, 'b\": *}})"
    with pytest.raises(ParseError, match="not an identifier"):
        parse(GOOD.replace("  input", f"  in_spec {spec}\n  input"))


# -- fuzz --------------------------------------------------------------------------------------------------------------


@cache
def seeds() -> list[str]:
    return [
        dump(small_net()),
        dump(exported(Choice(), [torch.ones(2, 4)])),
        GOOD,
        GOOD.replace("relu(%x)", 'torch:relu(%x, [1.5, {"a": (None, slice(1, 2, None))}], k=complex(0.0, 1.0))'),
    ]


PIECES = [
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ",",
    "=",
    ":",
    '"',
    "%",
    "@",
    "#",
    "\\",
    "\n",
    " ",
    "0",
    "-",
    ".",
    "\u2028",
    "x",
    "&",
]


@settings(max_examples=400)
@given(st.data())
def test_mutated_text_parses_or_says_why(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(seeds()))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 12))
        piece = data.draw(st.sampled_from(PIECES) | st.text(max_size=3) | st.just(text[start : start + 20]))
        text = text[:start] + piece + text[start + length :]
    try:
        program = parse(text)
    except ParseError:
        return
    again = dump(program)
    assert dump(parse(again)) == again
