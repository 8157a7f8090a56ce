"""From why a node is float to the changes that would quantize it: each is applied here, and a rule then takes the node."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quantc as qc
from quantc.errors import QuantcError
from quantc.inspect.changes import (
    ByHand,
    Cast,
    MakeConstant,
    QuantizeInput,
    QuantizeReader,
    RemoveConfigRule,
    RemoveRule,
    SetArgument,
    SingleUser,
)
from quantc.ir.program import Stage
from quantc.passes.annotate import Annotate
from quantc.patterns import Match, at_least, at_most, aten, differs, one_of
from quantc.patterns.checks import Check, equals
from quantc.patterns.dsl import op, optional
from quantc.patterns.operand_patterns import const, value
from quantc.patterns.refusals import Cause, Fault, WrongArguments
from quantc.patterns.table import Rule
from tests.support.explained import (
    LINEAR,
    POOL,
    PRODUCT,
    SIMPLE,
    Erf,
    backend,
    captured,
    conv,
    explained,
    smallest,
)


def test_remove_a_config_rule_about_another_node_of_the_match() -> None:
    table = backend(Rule("conv-relu", conv() >> aten.relu, PRODUCT))
    program = captured(nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU()), torch.randn(1, 2, 4, 4))
    config = qc.QuantConfig().set_op("conv2d", qc.FLOAT)
    change = smallest(explained(program, "relu", table, config), RemoveConfigRule)
    explained(program, "relu", table, change.apply(config), verdict="quantized")


@pytest.mark.parametrize(
    ("check", "given", "wanted"),
    [
        (equals(0), 1, (0, 0)),
        (at_most(1), 2, (1, 1)),
        (at_least(3), 2, (3, 3)),
        (one_of((0, 0), (4, 4)), 2, (0, 0)),
    ],
    ids=["equals", "at-most", "at-least", "one-of"],
)
def test_set_an_argument(check: Check, given: int, wanted: tuple[int, int]) -> None:
    """The check accepts the change. The program does not: its result would have another shape."""
    table = backend(Rule("conv", conv(padding=check), PRODUCT))
    program = captured(nn.Conv2d(2, 2, 3, padding=given), torch.randn(1, 2, 8, 8))
    change = smallest(explained(program, "conv2d", table), SetArgument)
    assert change.arguments == (("padding", wanted),)
    assert check.accepts(wanted)
    with pytest.raises(QuantcError, match="it would yield") as caught:
        change.apply(program)
    assert "capture it again" in str(caught.value.advice)


def test_set_arguments_and_the_rule_matches() -> None:
    """Dilation of a 1x1 kernel can be anything; both arguments that do not fit are set at once."""
    table = backend(Rule("conv", conv(dilation=1, padding=0), PRODUCT))
    program = captured(nn.Conv2d(2, 2, 1, dilation=2), torch.randn(1, 2, 4, 4))
    before = program.dump()
    change = smallest(explained(program, "conv2d", table), SetArgument)
    assert dict(change.arguments) == {"dilation": (1, 1)}
    changed = change.apply(program)
    assert program.dump() == before, "the program itself is not touched"
    changed.verify()
    explained(changed, "conv2d", table, verdict="quantized")
    x = torch.randn(1, 2, 4, 4)
    torch.testing.assert_close(changed(x), program(x))
    prepared = qc.prepare(program, table, allow_empty=True)
    again = change.apply(prepared)
    assert again.stage < Stage.ANNOTATED, "a prepared program is to be prepared again"
    explained(again, "conv2d", table, verdict="quantized")


def test_an_argument_that_the_weights_do_not_allow_is_refused() -> None:
    table = backend(Rule("conv", conv(groups=1), PRODUCT))
    program = captured(nn.Conv2d(4, 4, 1, groups=2), torch.randn(1, 4, 4, 4))
    change = smallest(explained(program, "conv2d", table), SetArgument)
    assert change.to_data() == {"kind": "set-argument", "on": "program", "node": "conv2d", "arguments": {"groups": 1}}
    with pytest.raises(QuantcError, match=r"conv2d cannot be called with groups=1"):
        change.apply(program)


def test_a_check_with_many_answers_offers_none() -> None:
    table = backend(Rule("conv", conv(groups=differs(1)), PRODUCT))
    program = captured(nn.Conv2d(4, 4, 1), torch.randn(1, 4, 4, 4))
    assert not [change for change in explained(program, "conv2d", table).changes if isinstance(change, SetArgument)]


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.conv(x)
        return torch.relu(y), torch.erf(y), y


def test_single_user() -> None:
    table = backend(Rule("conv-relu", conv() >> aten.relu, PRODUCT))
    program = captured(Fork(), torch.randn(1, 2, 4, 4))
    change = smallest(explained(program, "conv2d", table), SingleUser)
    assert change.fields() == {"node": "conv2d", "other": "erf", "keep": ["relu"]}
    changed = change.apply(program)
    changed.verify()
    explained(changed, "conv2d", table, verdict="quantized")
    explained(changed, "relu", table, verdict="quantized")
    x = torch.randn(1, 2, 4, 4)
    for left, right in zip(changed(x), program(x), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
    with pytest.raises(QuantcError, match="no users other than relu"):
        change.apply(changed)


def test_cast() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Softplus()).double()
    table = backend(Rule("linear", LINEAR.pattern >> optional(aten.relu), PRODUCT))
    program = captured(model, torch.randn(2, 4, dtype=torch.float64))
    change = smallest(explained(program, "relu", table), Cast)
    assert change.fields() == {"nodes": ["linear", "relu"], "dtype": "f32"}
    changed = change.apply(program)
    changed.verify()
    explained(changed, "relu", table, verdict="quantized")
    explained(changed, "linear", table, verdict="quantized")
    x = torch.randn(2, 4, dtype=torch.float64)
    assert changed(x).dtype == torch.float64
    torch.testing.assert_close(changed(x), model(x), rtol=1e-5, atol=1e-6)


def test_cast_where_the_pattern_names_the_dtype() -> None:
    table = backend(Rule("linear", aten.linear(value("x", dtype="f32"), const("w"), const("b?")), PRODUCT))
    program = captured(nn.Linear(4, 3).half(), torch.randn(2, 4, dtype=torch.float16))
    change = smallest(explained(program, "linear", table), Cast)
    explained(change.apply(program), "linear", table, verdict="quantized")


class Given(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)


def test_make_constant() -> None:
    x, w = torch.randn(2, 4), torch.randn(3, 4)
    program = captured(Given(), x, w)
    change = smallest(explained(program, "linear", SIMPLE), MakeConstant)
    assert change.fields() == {"node": "linear", "operand": "w"}
    with pytest.raises(QuantcError, match="w depends on w, which is no constant") as caught:
        change.apply(program)
    assert "value=" in str(caught.value.advice)
    changed = change.apply(program, w)
    changed.verify()
    explained(changed, "linear", SIMPLE, verdict="quantized")
    torch.testing.assert_close(changed(x, torch.zeros(3, 4)), F.linear(x, w))


def test_make_constant_of_what_is_computed_from_constants() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.w / self.w.norm())

    program = captured(Normed(), torch.randn(2, 4))
    unfolded = qc.Pipeline((Annotate(backend=qc.TableQuantizer(SIMPLE), allow_empty=True),)).run_on_copy(program)
    change = smallest(unfolded.explain("linear"), MakeConstant)
    changed = change.apply(unfolded)
    explained(changed, "linear", SIMPLE, verdict="quantized")
    x = torch.randn(2, 4)
    torch.testing.assert_close(changed(x), program(x))


def test_remove_a_rule_that_is_in_the_way() -> None:
    wide = Rule("conv-relu", conv() >> aten.relu, PRODUCT)
    tail = Rule("relu-erf", aten.relu >> op("erf", args="_"), {"out": "act"})
    table = backend(wide, tail)
    program = captured(nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), Erf()), torch.randn(1, 2, 4, 4))
    found = explained(program, "erf", table)
    assert found.nearest is not None
    assert found.nearest.rule == "relu-erf"
    change = smallest(found, RemoveRule)
    assert change.rule == "conv-relu"
    explained(program, "erf", change.apply(table), verdict="quantized")


def test_quantize_the_input_of_a_rule_that_hands_on() -> None:
    """A pool behind a convolution that the config leaves float: the change is the convolution's."""
    table = backend(Rule("conv", conv(), {**PRODUCT, "out": "act"}), LINEAR, POOL)
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.MaxPool2d(2), nn.MaxPool2d(2), nn.Conv2d(2, 2, 1))
    program = captured(model, torch.randn(1, 2, 8, 8))
    config = qc.QuantConfig().set("0", qc.FLOAT)
    change = smallest(explained(program, "max_pool2d_1", table, config), QuantizeInput)
    assert change.node == "conv2d"
    assert change.to_data()["change"]["kind"] == "remove-config-rule"
    explained(program, "max_pool2d_1", table, change.apply(config), verdict="propagated")


def test_quantize_what_reads_a_rule_that_hands_on() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.MaxPool2d(2), Erf())
    program = captured(model, torch.randn(1, 2, 8, 8))
    change = smallest(explained(program, "max_pool2d", SIMPLE), QuantizeReader)
    assert change.node == "erf"
    explained(program, "max_pool2d", change.apply(SIMPLE), verdict="propagated")


def test_capture_with_examples() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    found = explained(qc.capture(model), "linear", SIMPLE)
    change = smallest(found, ByHand)
    assert change.to_data()["kind"] == "capture-with-examples"
    with pytest.raises(QuantcError, match="by hand"):
        change.apply(model)
    explained(qc.capture(model, (torch.randn(2, 4),)), "linear", SIMPLE, verdict="quantized")


def ungrouped(match: Match) -> Cause | None:
    groups = match.root.args[6]
    return None if groups == 1 else WrongArguments(match.root, (Fault("groups", groups, equals(1)),))


def narrow(match: Match) -> str | None:
    return "the kernel is for 8 channels at most"


def test_a_condition_may_say_what_to_change() -> None:
    program = captured(nn.Conv2d(4, 4, 1, groups=2), torch.randn(1, 4, 4, 4))
    told = explained(program, "conv2d", backend(Rule("conv", conv(), PRODUCT, when=ungrouped)))
    assert "has groups = 2, wanted groups == 1" in told.reason
    assert smallest(told, SetArgument).arguments == (("groups", 1),)


def test_a_condition_in_words_is_met_by_hand() -> None:
    program = captured(nn.Conv2d(4, 4, 1), torch.randn(1, 4, 4, 4))
    change = smallest(explained(program, "conv2d", backend(Rule("conv", conv(), PRODUCT, when=narrow))), ByHand)
    assert change.to_data()["kind"] == "meet-condition"
    assert "8 channels" in change.text


def test_integers_are_left_alone_whatever_one_does() -> None:
    class Index(nn.Module):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            return x @ x.t() + (index + 1)

    program = captured(Index(), torch.randn(3, 3), torch.arange(3))
    table = backend(Rule("add", aten.add, {"x": "act", "y": "act", "out": "act"}))
    found = explained(program, "add", table)
    assert found.changes == ()
    assert found.row.why == "integer"
    assert "no single change" in str(found)


def test_of_several_numbers_the_nearest_is_offered() -> None:
    table = backend(Rule("conv", conv(groups=one_of(8, 1, 16)), PRODUCT))
    program = captured(nn.Conv2d(8, 8, 1, groups=2), torch.randn(1, 8, 4, 4))
    change = smallest(explained(program, "conv2d", table), SetArgument)
    assert change.arguments == (("groups", 1),)
