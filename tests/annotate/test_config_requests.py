"""What a config asks of a backend's rules: granted, fitted to the op, or refused with a reason."""

from __future__ import annotations

import pytest
from torch import fx

import quantc as qc
from quantc.annotate.config_requests import (
    MAX_PLACES,
    ConfigRequest,
    RefusedRequest,
    is_dynamic,
    refuse,
    timing_of,
    why_not_dynamic,
    why_not_static,
)
from quantc.config.resolve import Setting
from quantc.errors import AnnotationError
from quantc.ir.decisions import Fixed, Quantize
from quantc.ir.program import Program
from quantc.patterns.dsl import op
from quantc.patterns.table import Rule
from quantc.spec.formats import Offer, PerChannel, PerGroup, Role, Timing
from quantc.spec.spec import (
    INT8,
    INT8_DYNAMIC,
    INT8_TOKEN,
    INT8_WEIGHT,
    INT8_WEIGHT_ONLY,
    INT16,
    UINT8,
    UINT8_DYNAMIC,
    QuantSpec,
)
from tests.support.pattern_graphs import Build
from tests.support.small_backend import SMALL


def rule(*, static: Offer = Offer.YES, dynamic: Offer = Offer.NO) -> Rule:
    return Rule("any", op("linear", args="x w"), {"x": "act", "w": "act"}, static=static, dynamic=dynamic)


class Net:
    """A linear layer, a convolution and a matmul."""

    def __init__(self) -> None:
        build = Build()
        self.x, self.image = build.input("x", 4, 8), build.input("image", 1, 2, 4, 4)
        self.weight, self.kernel = build.const("weight", 6, 8), build.const("kernel", 3, 2, 1, 1)
        self.linear = build("linear", self.x, self.weight, None)
        self.conv = build("conv2d", self.image, self.kernel, None)
        self.turned = build("transpose", self.linear, 0, 1)
        self.matmul = build("matmul", self.linear, self.turned)
        self.program: Program = build.done(self.matmul, self.conv)

    def asked(self, config: qc.QuantConfig, node: fx.Node, role: Role = Role.ACT) -> Setting:
        found = config.resolve(self.program).setting(node, role)
        assert found is not None
        return found


ALL = qc.QuantConfig()


def test_the_technique_is_that_of_the_rule() -> None:
    net = Net()
    assert timing_of(None) is Timing.STATIC
    assert timing_of(net.asked(ALL.set_all(qc.FLOAT), net.linear)) is Timing.STATIC
    assert timing_of(net.asked(ALL.set_all(INT8_DYNAMIC), net.linear)) is Timing.DYNAMIC
    # a rule for weights alone leaves activations float: the technique is still that of the rule
    weight_only = net.asked(ALL.set_all(INT8_WEIGHT_ONLY), net.linear)
    assert timing_of(weight_only) is Timing.WEIGHT_ONLY
    assert not is_dynamic(weight_only)
    assert is_dynamic(net.asked(ALL.set_all(INT8_TOKEN), net.linear))
    assert not is_dynamic(None)


@pytest.mark.parametrize(
    ("offer", "config", "says"),
    [
        (Offer.NO, ALL.set_op("linear", INT8_DYNAMIC), "no dynamic form"),
        (Offer.NAMED, ALL.set_all(INT8_DYNAMIC), "only where the config names"),
        (Offer.NAMED, ALL.set_op("linear", INT8_DYNAMIC), None),
        (Offer.NAMED, ALL.set_node("linear", INT8_DYNAMIC), None),
        (Offer.YES, ALL.set_all(INT8_DYNAMIC), None),
        (Offer.NO, ALL.set_all(INT8), None),
        (Offer.NO, ALL.set_all(qc.FLOAT), None),
    ],
)
def test_a_rule_is_dynamic_where_it_offers_it(offer: Offer, config: qc.QuantConfig, says: str | None) -> None:
    net = Net()
    found = why_not_dynamic(rule(dynamic=offer), net.asked(config, net.linear), net.linear, net.x)
    assert found is None if says is None else says in str(found)
    assert why_not_dynamic(rule(dynamic=offer), None, net.linear, net.x) is None


def test_rows_that_are_added_up_cannot_have_scales_of_their_own() -> None:
    net, offers = Net(), rule(dynamic=Offer.YES)
    for node, value, fits in (
        (net.linear, net.x, True),
        (net.conv, net.image, False),
        (net.matmul, net.linear, True),
        (net.matmul, net.turned, False),
    ):
        by_token, whole = (net.asked(ALL.set_all(spec), node) for spec in (INT8_TOKEN, INT8_DYNAMIC))
        found = why_not_dynamic(offers, by_token, node, value)
        assert found is None if fits else f"adds up rows of {value.name}" in str(found)
        assert why_not_dynamic(offers, whole, node, value) is None


def test_a_rule_is_static_where_it_offers_it() -> None:
    net = Net()
    named, swept = (net.asked(config, net.matmul) for config in (ALL.set_op("matmul", UINT8), ALL.set_all(UINT8)))
    by_name = rule(static=Offer.NAMED)
    assert why_not_static(rule(), [(net.matmul, None)]) is None
    assert "only where the config names" in str(why_not_static(by_name, [(net.matmul, None), (net.matmul, swept)]))
    assert why_not_static(by_name, [(net.matmul, swept), (net.matmul, named)]) is None  # one that names it suffices
    never, dynamic = rule(static=Offer.NO), rule(static=Offer.NO, dynamic=Offer.YES)
    assert why_not_static(never, [(net.matmul, named)]) == "it has no static form"
    assert "INT8_DYNAMIC" in str(why_not_static(dynamic, [(net.matmul, named)]))


def test_what_is_left_float_or_dynamic_does_not_need_a_static_form() -> None:
    net, never = Net(), rule(static=Offer.NO)
    left, come = (net.asked(ALL.set_all(use), net.matmul) for use in (qc.FLOAT, UINT8_DYNAMIC))
    assert why_not_static(never, [(net.matmul, left)]) is None
    assert why_not_static(never, [(net.matmul, come), (net.matmul, None)]) is None
    assert why_not_static(never, []) is None


# -- what is granted -----------------------------------------------------------------------------------------------


def request(
    own: Quantize | Fixed, spec: QuantSpec, backend: qc.Backend = SMALL
) -> tuple[Quantize | Fixed, list[RefusedRequest]]:
    """What comes of a spec for a layer where the backend has another."""
    net = Net()
    setting = net.asked(ALL.set_op("linear", spec), net.linear, spec.role)
    refused: list[RefusedRequest] = []
    value = net.weight if spec.role is Role.WEIGHT else net.x
    made = ConfigRequest(backend, net.linear, value, setting)
    return made.granted(own, Quantize(spec), net.program, refused), refused


def test_what_the_backend_can_run_is_granted() -> None:
    wanted = UINT8.but(qmax=127)
    assert request(Quantize(UINT8), wanted) == (Quantize(wanted), [])


def test_what_it_cannot_run_is_refused_and_its_own_spec_stays() -> None:
    granted, (refused,) = request(Quantize(UINT8), INT16)
    assert granted == Quantize(UINT8)
    assert "not int16" in refused.reason
    assert "linear" in refused.place


def test_a_spec_for_another_role_is_not_meant() -> None:
    assert request(Quantize(UINT8), INT8_WEIGHT.but(qmin=-127)) == (Quantize(UINT8), [])


def test_the_op_says_where_channels_lie() -> None:
    own = Quantize(INT8_WEIGHT.but(granularity=PerChannel(axis=1)))
    granted, refused = request(own, INT8_WEIGHT.but(qmin=-127))
    assert not refused
    assert granted == Quantize(INT8_WEIGHT.but(qmin=-127, granularity=PerChannel(axis=1)))


def test_channels_where_the_op_has_none_are_refused() -> None:
    _, (refused,) = request(Quantize(INT8_WEIGHT.but(granularity="per-tensor")), INT8_WEIGHT)
    assert "no axis of channels" in refused.reason


def test_fixed_qparams_stay_where_only_the_observation_differs() -> None:
    own = Fixed(1 / 256, 0, UINT8)
    assert request(own, UINT8.but(observe="mse")) == (own, [])
    assert request(own, UINT8.but(qmax=127))[0] == Quantize(UINT8.but(qmax=127))


GROUPS = INT8_WEIGHT.but(granularity=PerGroup(axis=0, size=4))
IN_GROUPS = qc.Backend("groups", SMALL.table, {**SMALL.roles, "in-groups": GROUPS})


@pytest.mark.parametrize(("channels", "axis"), [(0, 1), (1, 0)])
def test_groups_lie_along_the_axis_that_is_summed(channels: int, axis: int) -> None:
    own = Quantize(INT8_WEIGHT.but(granularity=PerChannel(axis=channels)))
    granted, refused = request(own, GROUPS.but(granularity=PerGroup(axis=axis, size=2)), IN_GROUPS)
    assert not refused  # 2 divides both axes of the weight, 6 by 8
    assert granted.spec.granularity == PerGroup(axis=axis, size=2)


def test_groups_that_do_not_divide_are_refused_with_the_length() -> None:
    own = Quantize(INT8_WEIGHT.but(granularity=PerChannel(axis=1)))
    granted, (refused,) = request(own, GROUPS, IN_GROUPS)
    assert granted == own
    assert refused.length == 6
    assert "groups of 4 do not divide the 6 elements of axis 0" in refused.reason


# -- the error -----------------------------------------------------------------------------------------------------


def refusals(*lengths: int | None) -> list[RefusedRequest]:
    net = Net()
    setting = net.asked(ALL.set_op("linear", GROUPS), net.linear, Role.WEIGHT)
    return [RefusedRequest(GROUPS, f"reason {n}", f"place {n}", setting, length) for n, length in enumerate(lengths)]


def test_nothing_refused_is_no_error() -> None:
    refuse(SMALL, [])


def test_every_place_is_named_up_to_a_limit() -> None:
    with pytest.raises(AnnotationError) as caught:
        refuse(SMALL, refusals(*[None] * (MAX_PLACES + 3)))
    assert "backend 'small' cannot run" in caught.value.what
    assert f"(and {MAX_PLACES + 2} more)" in caught.value.what
    where = str(caught.value.where)
    assert all(f"place {n}" in where for n in range(MAX_PLACES))
    assert f"place {MAX_PLACES}" not in where
    assert where.endswith("; and 3 more")


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ((12,), "groups of 4 or 2 divide it"),
        ((64, 96), "groups of 32 or 16 or 8 divide all of them"),
        ((7, 8), "no group size divides all of them"),
        ((None,), "choose another spec"),
    ],
)
def test_group_sizes_that_divide_every_axis_are_advised(lengths: tuple[int | None, ...], says: str) -> None:
    with pytest.raises(AnnotationError) as caught:
        refuse(SMALL, refusals(*lengths))
    assert str(caught.value.advice).startswith(says)
