"""quantc's own targets: entry points, endings and extras agree."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib.metadata import entry_points

import pytest

from quantc.errors import MissingDependencyError
from quantc.targets import target_table
from quantc.targets.target import Target
from tests.support.paths import ROOT

OWN = {target.name: target for target in vars(target_table).values() if isinstance(target, Target)}


def test_every_target_has_an_entry_point_of_its_name() -> None:
    found = {entry.name: entry.load() for entry in entry_points(group="quantc.targets") if "quantc.t" in entry.value}
    assert found == OWN


def test_endings_are_theirs_alone() -> None:
    endings = [target.suffix for target in OWN.values() if target.suffix]
    assert len({*endings}) == len(endings)


def test_what_they_require_is_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {target.requires[1] for target in OWN.values() if target.requires} <= {f"quantc[{name}]" for name in extras}


@pytest.mark.parametrize("name", [name for name, target in OWN.items() if target.requires is None])
def test_those_that_require_nothing_are_ready(name: str) -> None:
    OWN[name].check_ready()


@pytest.mark.parametrize("name", [name for name, target in OWN.items() if target.requires is not None])
def test_a_missing_package_is_named_with_what_installs_it(name: str) -> None:
    absent = replace(OWN[name], requires=("a_package_that_is_not_there", "some[extra]"))
    with pytest.raises(MissingDependencyError, match="a_package_that_is_not_there") as caught:
        absent.check_ready()
    assert "pip install 'some[extra]'" in str(caught.value)
