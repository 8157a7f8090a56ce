"""QConfigs: pairs of constructors; the named ones are torch's."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import quantc.nn.observers as own_observers
import quantc.nn.qconfig as own_qconfigs
from quantc.errors import ConfigError, QuantcError
from tests.support.observer_cases import alike, ao, named


def qconfigs() -> dict[str, tuple[Any, Any]]:
    found = {name: (getattr(own_qconfigs, name), getattr(ao.qconfig, name)) for name in named(own_qconfigs, tuple)}
    for backend in own_qconfigs.ENGINES:
        found[f"{backend}"] = own_qconfigs.get_default_qconfig(backend), ao.get_default_qconfig(backend)
        for version in (0, 1):
            found[f"{backend}-qat-{version}"] = (
                own_qconfigs.get_default_qat_qconfig(backend, version),
                ao.get_default_qat_qconfig(backend, version),
            )
    return found


QCONFIGS = qconfigs()


def test_every_named_qconfig_of_torch_is_here() -> None:
    theirs = {name for name, value in vars(ao.qconfig).items() if isinstance(value, ao.QConfig) and name[0] != "_"}
    assert theirs == set(named(own_qconfigs, tuple))


@pytest.mark.parametrize("name", QCONFIGS)
def test_qconfigs_are_torch_s(name: str) -> None:
    mine, theirs = QCONFIGS[name]
    for role in ("activation", "weight"):
        made, upstream = getattr(mine, role)(), getattr(theirs, role)()
        if isinstance(upstream, nn.Identity):
            assert isinstance(made, nn.Identity)
        else:
            alike(made, upstream)


def test_a_qconfig_of_observers_is_refused() -> None:
    with pytest.raises(ValueError, match="all layers would share it") as caught:
        own_qconfigs.QConfig(own_observers.MinMaxObserver(), own_observers.MinMaxObserver)
    assert isinstance(caught.value, QuantcError)
    with pytest.raises(QuantcError, match="did you mean fbgemm"):
        own_qconfigs.get_default_qconfig("fbgem")


@pytest.mark.parametrize("make", [own_qconfigs.get_default_qconfig, own_qconfigs.get_default_qat_qconfig])
def test_libraries_and_versions_that_are_not_known_are_refused(make: Any) -> None:
    for given, word in ((("fbgem",), "fbgem"), (("x86", 7), "7")):
        with pytest.raises(AssertionError, match=word) as caught:  # as torch.ao raises
            make(*given)
        assert isinstance(caught.value, ConfigError)
        assert caught.value.advice


def test_configs_of_the_same_arguments_are_equal() -> None:
    one, other = own_qconfigs.get_default_qconfig("x86"), own_qconfigs.get_default_qconfig("fbgemm")
    assert own_qconfigs.qconfig_equals(one, other)
    assert not own_qconfigs.qconfig_equals(one, own_qconfigs.get_default_qconfig("onednn"))
    assert own_qconfigs.qconfig_equals(None, None)
    assert not own_qconfigs.qconfig_equals(one, None)
    assert {one: 1}[other] == 1


def test_the_older_name_observes_nothing_unless_told() -> None:
    config = own_qconfigs.QConfigDynamic(weight=own_observers.default_weight_observer)
    assert config.activation is nn.Identity
    assert isinstance(config, own_qconfigs.QConfig)
    with pytest.raises(ValueError, match="weight of QConfigDynamic"):
        own_qconfigs.QConfigDynamic(weight=own_observers.MinMaxObserver())
