"""Copies of the modules that hold a program's tensors."""

from __future__ import annotations

import torch
from torch import nn

from quantc.ir.module_copy import copy_module


def holder() -> nn.Module:
    root = nn.Module()
    root.child = nn.Module()
    root.child.w = nn.Parameter(torch.ones(2))
    root.child.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    root.child.register_buffer("kept", torch.zeros(3))
    root.child.register_buffer("passing", torch.zeros(3), persistent=False)
    return root


def test_a_copy_has_the_same_tensors_and_shares_none() -> None:
    root = holder()
    twin = copy_module(root)
    both = [dict([*module.named_parameters(), *module.named_buffers()]) for module in (root, twin)]
    assert list(both[0]) == list(both[1])
    for name, tensor in both[0].items():
        assert torch.equal(both[1][name], tensor)
        assert both[1][name].data_ptr() != tensor.data_ptr()
        assert both[1][name].requires_grad == tensor.requires_grad
    assert list(twin.state_dict()) == list(root.state_dict()), "buffers that are not saved stay so"


def test_tensors_and_modules_with_two_names_keep_both() -> None:
    root = holder()
    root.other = nn.Module()
    root.other.w = root.get_parameter("child.w")
    root.again = root.get_submodule("child")
    twin = copy_module(root)
    assert twin.get_parameter("other.w") is twin.get_parameter("child.w")
    assert twin.get_submodule("again") is twin.get_submodule("child")


def test_modes_are_kept_module_by_module() -> None:
    root = holder()
    root.get_submodule("child").eval()
    twin = copy_module(root)
    assert (twin.training, twin.get_submodule("child").training) == (True, False)


def test_modules_that_are_more_than_containers_are_copied_with_all_they_have() -> None:
    root, ran = holder(), list[str]()
    root.act = nn.Dropout(0.25)
    root.get_submodule("child").register_forward_pre_hook(lambda module, _: ran.append(type(module).__name__))
    vars(root)["note"] = ["kept"]
    twin = copy_module(root)
    act = twin.get_submodule("act")
    assert isinstance(act, nn.Dropout)
    assert act.p == 0.25
    assert act is not root.get_submodule("act")
    assert len(twin.get_submodule("child")._forward_pre_hooks) == 1
    assert vars(twin)["note"] == ["kept"]
    assert vars(twin)["note"] is not vars(root)["note"]


def test_a_removed_child_stays_removed() -> None:
    root = holder()
    root.register_module("gone", None)
    twin = copy_module(root)
    assert "gone" in twin._modules
    assert twin._modules["gone"] is None
