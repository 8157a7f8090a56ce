"""Integer regions: none of ours holds a stray float, and every seeded one is found."""

from __future__ import annotations

import pytest

from quantc.errors import VerifyError
from quantc.integer.library import op_of
from quantc.integer.region_check import check_integer_form, integer_regions, stray_floats
from quantc.ir.program import Program
from quantc.text.parser import parse
from tests.support.integer_models import BACKENDS, NAMES, STYLES, Multiplier, Style, converted, prepared


@pytest.mark.parametrize(("backend", "multiplier"), [*((name, "float64") for name in BACKENDS), ("qnnpack", "fixed")])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", NAMES)
def test_our_programs_have_none(name: str, style: Style, backend: str, multiplier: Multiplier) -> None:
    program, _ = converted(name, backend, style, multiplier=multiplier)
    assert stray_floats(program) == []
    check_integer_form(program)


@pytest.mark.parametrize("name", NAMES)
def test_every_integer_op_is_in_one_region(name: str) -> None:
    program, _ = converted(name, "qnnpack", "fused")
    inside = [node for region in integer_regions(program) for node in region.nodes]
    assert len(inside) == len(set(inside))
    ops = [node for node in program.nodes() if op_of(node.target) is not None]
    assert set(ops) <= set(inside)
    assert not any(node.op == "get_attr" for node in inside)


def test_regions_are_parted_by_floats() -> None:
    program, _ = converted("branches", "qnnpack", "fused")
    assert [region.path for region in integer_regions(program)] == ["", "true_graph_0", "false_graph_0"]
    whole, _ = converted("residual", "qnnpack", "fused")
    assert len(integer_regions(whole)) == 1


def test_the_float_program_has_no_region() -> None:
    program, _ = prepared("residual", "qnnpack")
    assert integer_regions(program) == ()
    assert stray_floats(program) == []


HEAD = 'program "Seeded" stage=lowered method=export mode=eval\n'
BEGIN = """  input %x : f32[2,4]
  const %w = "w" : i8[3,4] buffer
  const %m = "m" : f64[] buffer
  %scaled : f32[2,4] = mul(%x, 10.0)
  %nearest : f32[2,4] = aten.round.default(%scaled)
  %moved : f32[2,4] = add(%nearest, 3)
  %limited : f32[2,4] = clamp(%moved, 0, 255)
  %q : u8[2,4] = cast(%limited, u8)
"""
LINEAR = "  %y : u8[2,3] = quantc.linear.default(%q, 3, %w, None, None, 0, %m, None, 0, 0, 255, u8)\n"
END = """  %real : f32[2,3] = cast(%y, f32)
  %real_scaled : f32[2,3] = mul(%real, 0.5)
  output (%real_scaled,)
"""
SUM = """  %wide : i16[2,4] = cast(%q, i16)
  %factor : i16[3,4] = cast(%w, i16)
  %columns : i16[4,3] = transpose(%factor, dim0=0, dim1=1)
  %acc : i32[2,3] = higher_order.out_dtype(&aten.mm.default, i32, %wide, %columns)
"""


def program(*lines: str) -> Program:
    return parse(HEAD + "".join(lines))


def strays(*lines: str) -> dict[str, str]:
    return {stray.node: stray.why for stray in stray_floats(program(*lines))}


def test_the_frames_of_the_seeded_graphs_are_sound() -> None:
    assert strays(BEGIN, LINEAR, END) == {}
    rescaled = """  %long : f64[2,3] = cast(%acc, f64)
  %steps : f64[2,3] = mul(%long, %m)
  %whole : f64[2,3] = aten.round.default(%steps)
  %level : f64[2,3] = clamp(%whole, 0, 255)
  %y : u8[2,3] = cast(%level, u8)
"""
    assert strays(BEGIN, SUM, rescaled, END) == {}


def test_a_float_op_on_integers_that_were_only_cast() -> None:
    lines = """  %bare : f32[2,4] = cast(%q, f32)
  %relu : f32[2,4] = relu(%bare)
  %back : u8[2,4] = cast(%relu, u8)
"""
    found = strays(BEGIN, lines, LINEAR.replace("%q", "%back"), END)
    assert "relu reads it before it has its scale" in found["bare"]
    assert "made integers without rounding" in found["relu"]


def test_a_float_op_that_takes_integers_as_they_are() -> None:
    lines = "  %half : f32[2,3] = aten.div.Tensor(%y, %y)\n  output (%half,)\n"
    assert "makes floats of integers" in strays(BEGIN, LINEAR, lines)["half"]
    lines = "  %curve : f32[2,3] = sigmoid(%y)\n  output (%curve,)\n"
    assert "makes floats of integers" in strays(BEGIN, LINEAR, lines)["curve"]


def test_a_multiplier_that_is_not_float64() -> None:
    found = strays(BEGIN.replace('"m" : f64[]', '"m" : f32[]'), LINEAR, END)
    assert "where multipliers are float64" in found["m"]


def test_an_integer_op_that_reads_a_float_activation() -> None:
    found = strays(BEGIN, LINEAR.replace("%q", "%limited"), END)
    assert "which is no constant" in found["limited"]


@pytest.mark.parametrize("offset", ["", "  %less : f32[2,3] = sub(%single, 3)\n"])
def test_a_sum_that_is_rescaled_in_float32(offset: str) -> None:
    lines = f"""  %single : f32[2,3] = cast(%acc, f32)
{offset}  %steps : f32[2,3] = mul({"%less" if offset else "%single"}, 0.01)
  %whole : f32[2,3] = aten.round.default(%steps)
  %plus : f32[2,3] = add(%whole, 7)
  %level : f32[2,3] = clamp(%plus, 0, 255)
  %y : u8[2,3] = cast(%level, u8)
"""
    assert "rescaled in it" in strays(BEGIN, SUM, lines, END)["steps"]


def test_a_multiplier_that_truncates() -> None:
    lines = """  %long : f64[2,3] = cast(%acc, f64)
  %steps : f64[2,3] = mul(%long, %m)
  %y : u8[2,3] = cast(%steps, u8)
"""
    assert "without rounding" in strays(BEGIN, SUM, lines, END)["steps"]


def test_more_than_a_multiplier_in_float64() -> None:
    lines = """  %long : f64[2,3] = cast(%acc, f64)
  %power : f64[2,3] = exp(%long)
  %whole : f64[2,3] = aten.round.default(%power)
  %y : u8[2,3] = cast(%whole, u8)
"""
    assert "exp is not what a multiplier goes through" in strays(BEGIN, SUM, lines, END)["power"]


def test_a_stray_in_a_branch_is_named_with_its_path() -> None:
    text = f"""{HEAD}  input %p : b1[]
{BEGIN.replace("  input %x", "  input %x", 1)}  %cond : (u8[2,4]) = higher_order.cond(%p, @yes, @no, (%q,))
  %item : u8[2,4] = operator:getitem(%cond, 0)
{LINEAR.replace("%q", "%item")}{END}graph @yes
  input %v : u8[2,4]
  %bare : f32[2,4] = cast(%v, f32)
  %neg : f32[2,4] = neg(%bare)
  %back : u8[2,4] = cast(%neg, u8)
  output (%back,)
graph @no
  input %v : u8[2,4]
  %same : u8[2,4] = clone(%v)
  output (%same,)
"""
    assert {stray.node for stray in stray_floats(parse(text))} == {"yes/bare", "yes/neg"}


def test_what_is_left_in_float_between_dequantize_and_quantize_is_no_stray() -> None:
    lines = """  %real_q : f32[2,4] = cast(%q, f32)
  %centred : f32[2,4] = sub(%real_q, 3)
  %number : f32[2,4] = mul(%centred, 0.1)
  %tan : f32[2,4] = tanh(%number)
  %again : f32[2,4] = mul(%tan, 100.0)
  %again_whole : f32[2,4] = aten.round.default(%again)
  %again_q : u8[2,4] = cast(%again_whole, u8)
"""
    assert strays(BEGIN, lines, LINEAR.replace("%q", "%again_q"), END) == {}


def test_the_form_is_refused_with_all_its_faults() -> None:
    left = "  %dq : f32[2,3] = quantized_decomposed.dequantize_per_tensor.default(%y, 0.5, 0, 0, 255, u8)\n  output (%dq,)\n"
    lines = LINEAR.replace("%q", "%limited")
    with pytest.raises(VerifyError, match="2 faults") as caught:
        check_integer_form(program(BEGIN, lines, left))
    assert "which the integer form spells out" in str(caught.value)
    assert "which is no constant" in str(caught.value)
