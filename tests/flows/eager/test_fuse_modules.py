"""Fusing modules by name: what is refused before anything is done, and what becomes of hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import quantc.nn.intrinsic as nni
from quantc.errors import QuantcError, UnknownNameError
from quantc.flows import eager
from quantc.flows.eager.fuse_modules import set_module
from tests.support.eager_small import FUSE, Small, X, check


def test_fusing_in_training_mode_names_the_modules_and_the_other_function() -> None:
    with pytest.raises(eager.EagerModeError) as caught:
        eager.fuse_modules(Small(), FUSE)
    check(caught.value, "conv, bn, relu", "model.eval()", "fuse_modules_qat")


def test_fusing_for_training_in_eval_mode_is_warned_of() -> None:
    with pytest.warns(eager.EagerWarning, match=r"model.train\(\)|eval mode"):
        eager.fuse_modules_qat(Small().eval(), FUSE)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["conv", "bm"], UnknownNameError),
        (["conv", "fc"], eager.FusionError),
        (["conv"], eager.FusionError),
        ([["conv", "bn"], "fc"], eager.FusionError),
    ],
)
def test_what_cannot_be_fused_is_refused_and_the_model_is_as_before(given: Any, expected: type[QuantcError]) -> None:
    model = Small().eval()
    with pytest.raises(expected):
        eager.fuse_modules(model, given, inplace=True)
    assert type(model.conv) is nn.Conv2d
    assert type(model.bn) is nn.BatchNorm2d


def test_hooks_between_fused_modules_are_warned_of_and_others_are_kept() -> None:
    model, calls = Small().eval(), []
    model.conv.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.relu.register_forward_hook(lambda *_: calls.append("after"))
    model.bn.register_forward_hook(lambda *_: calls.append("between"))
    with pytest.warns(eager.LostHookWarning, match="BatchNorm2d"):
        fused = eager.fuse_modules(model, FUSE)
    fused(X)
    assert calls == ["before", "after"]


def test_the_first_place_does_the_work_and_the_rest_are_identities() -> None:
    model = Small().eval()
    fused: Any = eager.fuse_modules(model, FUSE)
    assert [type(fused.get_submodule(name)) for name in FUSE[0]] == [nni.ConvReLU2d, nn.Identity, nn.Identity]
    torch.testing.assert_close(fused(X), model(X))
    assert isinstance(model.get_submodule("bn"), nn.BatchNorm2d)
    assert eager.fuse_modules(model, FUSE[0], inplace=True) is model
    assert isinstance(model.get_submodule("bn"), nn.Identity)


def test_nothing_to_fuse_is_a_copy() -> None:
    model = Small().eval()
    same = eager.fuse_modules(model, [])
    assert same is not model
    assert torch.equal(same(X), model(X))


def test_a_module_at_two_places_is_not_fused() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).eval()
    model.add_module("again", model[1])
    with pytest.raises(eager.FusionError, match="again"):
        eager.fuse_modules(model, ["0", "1"])


def test_all_lists_are_checked_before_the_first_is_fused() -> None:
    model = Small().eval()
    with pytest.raises(UnknownNameError, match="nowhere"):
        eager.fuse_modules(model, [["conv", "bn"], ["nowhere", "relu"]], inplace=True)
    assert type(model.bn) is nn.BatchNorm2d


def test_one_module_is_fused_by_a_method_of_the_users_own() -> None:
    def doubled(is_qat: bool, linear: nn.Module) -> nn.Module:
        return nn.Sequential(linear, nn.ReLU())

    config = {"additional_fuser_method_mapping": {nn.Linear: doubled}}
    fused = eager.fuse_modules(Small().eval(), ["fc"], fuse_custom_config_dict=config)
    assert type(fused.get_submodule("fc")) is nn.Sequential


def test_fused_modules_are_in_the_mode_of_the_first() -> None:
    assert not eager.fuse_modules(Small().eval(), FUSE).get_submodule("conv").training
    assert eager.fuse_modules_qat(Small().train(), FUSE).get_submodule("bn").training


def test_hooks_that_take_keywords_go_on_taking_them() -> None:
    model, seen = Small().eval(), []
    model.conv.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    eager.fuse_modules(model, FUSE)(X)
    assert seen == [{}]
    assert len(model.conv._forward_pre_hooks) == 1


def test_a_module_is_put_at_a_path() -> None:
    model, relu = nn.Sequential(nn.Sequential(nn.Linear(2, 2))), nn.ReLU()
    set_module(model, "0.0", relu)
    assert model.get_submodule("0.0") is relu
