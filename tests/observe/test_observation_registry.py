"""The registry of observations: what is offered follows the protocol, and anybody can add one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

import pytest
import torch
from torch import Tensor
from torch.ao.quantization.observer import MinMaxObserver

from quantc.errors import PluginError, SpecError
from quantc.flows.foreign_observers import ObservedBy
from quantc.observe import (
    OBSERVATIONS,
    Histogram,
    MinMax,
    Observation,
    Order,
    State,
    Statistics,
    register_observation,
    start,
)
from quantc.observe.observation_registry import absent_allowed, why_not_choice
from quantc.observe.trained import Trained
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.granularity import Share
from quantc.spec.numerics import QParams
from quantc.spec.spec import INT8, UINT8, QuantSpec
from tests.support.observations import observed


@dataclass(eq=False)
class Largest:
    """A user's own: symmetric around the largest magnitude, times a margin."""

    statistics: ClassVar[str] = "largest"
    order: ClassVar[Order] = Order.FREE

    margin: float
    share: Share = field(default_factory=PerTensor)
    largest: float = 0.0
    seen: int = 0
    non_finite: int = 0

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, bool | int | float | str]) -> Self:
        return cls(float(options.get("margin", 1.0)), share)

    def update(self, x: Tensor, *, where: str = "") -> None:
        self.seen += x.numel()
        self.largest = max(self.largest, float(x.abs().max()))

    def merge(self, other: Self) -> Self:
        return type(self)(self.margin, self.share, max(self.largest, other.largest), self.seen + other.seen)

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        return QParams(torch.tensor(self.largest * self.margin / spec.qmax), torch.tensor(0))

    def to_state(self) -> State:
        return State({}, {"largest": self.largest, "seen": self.seen, "margin": self.margin})

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        return cls(state.number("margin"), share, state.number("largest"), state.count("seen"))


def test_anybody_can_write_one(tmp_path: Path) -> None:
    register_observation(Largest)
    try:
        spec = INT8.but(observe="largest{margin=2.0}")
        observation = observed(spec, [torch.tensor([1.0, -127.0])])
        assert observation.qparams(spec).one == (2.0, 0)
        Statistics({"x:out0": observation}).save(tmp_path / "s.safetensors")
        assert Statistics.load(tmp_path / "s.safetensors").sites["x:out0"].qparams(spec).one == (2.0, 0)
    finally:
        OBSERVATIONS.forget("largest")
    with pytest.raises(SpecError, match="unknown observation 'largest'"):
        QuantSpec.parse('int8{observe="largest{margin=3.0}"}')


def test_what_is_no_observation_cannot_be_registered() -> None:
    with pytest.raises(PluginError, match="it lacks empty, update, merge"):
        register_observation(int)  # type: ignore[arg-type]


def observed_by_a_module() -> Observation:
    found = ObservedBy.of(MinMaxObserver())  # anybody's serves
    found.update(torch.tensor([-1.0, 2.0]))
    return found


MADE_ELSEWHERE: dict[type[Observation], Callable[[], Observation]] = {
    Trained: lambda: Trained(PerTensor(), QParams(torch.tensor(0.5), torch.tensor(3))),
    ObservedBy: observed_by_a_module,
}
"""What no spec can ask for: training and the flows make it, and a file brings it back."""


@pytest.mark.parametrize("name", OBSERVATIONS.names())
def test_all_that_are_offered_follow_the_protocol(name: str) -> None:
    kind = OBSERVATIONS[name]
    options: dict[str, bool | int | float | str] = {"scale": 0.5} if name == "fixed" else {}
    if kind in MADE_ELSEWHERE:
        found = MADE_ELSEWHERE[kind]()
        again = kind.from_state(found.share, found.to_state())
        assert again.qparams(UINT8).equals(found.qparams(UINT8))
        with pytest.raises(SpecError, match=r"training|observer module"):
            kind.empty(PerTensor(), options)
    else:
        found = kind.empty(PerTensor(), options)
    assert isinstance(found, Observation)
    assert MinMax.statistics in OBSERVATIONS
    assert kind.statistics in OBSERVATIONS


def test_an_observation_starts_with_the_granularity_and_options_of_its_spec() -> None:
    channels = start(INT8.but(observe="mse", granularity=PerChannel(axis=2)))
    assert isinstance(channels, Histogram)
    assert channels.share == PerChannel(axis=2)
    assert start(INT8.but(observe="moving-average{rate=0.5}")).to_state().values["rate"] == 0.5


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("minmax", {"rate": 1}, "'rate'"),
        ("percentile", {"percentile": 40.0}, "percentile"),
        ("mse", {"bins": 3}, "bins"),
        ("fixed", {}, "scale"),
        ("nearly", {}, "'nearly'"),
    ],
)
def test_choices_that_a_spec_cannot_make_are_explained(name: str, options: dict[str, float], told: str) -> None:
    assert told in (why_not_choice(name, options) or "")


def test_choices_that_exist_are_taken() -> None:
    assert why_not_choice("percentile", {"percentile": 99.0}) is None
    assert why_not_choice("fixed", {"scale": 0.5, "zero_point": 3}) is None


def test_absent_observations_are_allowed_inside_their_context_alone() -> None:
    with absent_allowed() as absent:
        spec = INT8.but(observe="gone{speed=3}")
        assert why_not_choice("minmax", {"rate": 1}), "what exists is checked all the same"
    assert spec.observe.name == "gone"
    assert any("'gone'" in told for told in absent)
    with pytest.raises(SpecError, match="'gone'"):
        INT8.but(observe="gone")
