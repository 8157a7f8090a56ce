"""Rewriting a program for training: norms put back, fake quantizers where the plan says, and modes that follow."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.ir.dialect import is_op
from quantc.ir.program import TRAINED, Program
from quantc.qat.fake import FakeQuantizer, HandedOn
from quantc.qat.fake_quantize_insertion import MODES, NORMS, is_dropout, put_module
from quantc.qat.modes import ModeFlag
from quantc.qat.removal import module_calls
from tests.support.training import assert_converts_exactly, prepared, small_prepared, small_program


def test_tensors_that_are_moved_about_are_rounded_once() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4))
    x = torch.randn(2, 3, 8, 8)
    program = qc.prepare(qc.capture(model.eval(), (x,)), "x86", qat=True)
    calls = [module for _, module in module_calls(program)]
    assert sum(isinstance(module, FakeQuantizer) for module in calls) == 4  # two inputs, two weights
    handing_on = [module for module in calls if isinstance(module, HandedOn)]
    assert len(handing_on) == 2
    assert all(module(x) is x for module in handing_on)
    program(x)
    assert_converts_exactly(program, x)


def calls(program: Program, holder: str) -> list[str]:
    return [node.name for node, _ in module_calls(program) if str(node.target).startswith(f"{holder}.")]


def test_modules_of_one_name_are_kept_apart() -> None:
    program = small_program()
    first, second = nn.Identity(), nn.ReLU()
    names = [put_module(program, program.graph, "_held", "a", module) for module in (first, second, first)]
    assert names[0] == names[2] == "_held.a"
    assert program.root.get_submodule(names[0]) is first
    assert program.root.get_submodule(names[1]) is second


def test_no_module_takes_the_place_of_one_whose_name_is_like_a_numbered_one() -> None:
    program = small_program()
    modules = [nn.Identity(), nn.ReLU(), nn.Tanh()]
    names = [
        put_module(program, program.graph, "_held", name, module)
        for name, module in zip(("a", "a_2", "a"), modules, strict=True)
    ]
    assert [program.root.get_submodule(name) for name in names] == modules


def test_a_norm_stands_around_its_product_again() -> None:
    program = small_prepared()
    assert calls(program, NORMS) == ["fold_batch_norm", "unfold_batch_norm", "batch_norm_1"]
    conv = next(node for node in program.nodes() if is_op(node, "conv2d"))
    assert [user.name for user in conv.users] == ["batch_norm_1"]
    order = [node.name for node in program.nodes()]
    rounded = next(name for name in order if name.startswith("fake_quantize_batch_norm_weight"))
    places = [order.index(name) for name in ("fold_batch_norm", rounded, "unfold_batch_norm", "conv2d", "batch_norm_1")]
    assert places == sorted(places)  # the weight is rounded while the norm is folded into it


def test_every_group_of_the_plan_is_rounded_by_one_module() -> None:
    program = small_prepared()
    fakes = [module for _, module in module_calls(program) if isinstance(module, FakeQuantizer)]
    assert sorted(fake.group for fake in fakes) == sorted(group.name for group in program.plan.groups)
    assert len(set(map(id, fakes))) == len(fakes)
    assert calls(program, TRAINED)


def test_a_tensor_that_two_ops_read_is_rounded_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.a(x) + self.b(x)
            return out

    torch.manual_seed(0)
    program = qc.prepare(qc.capture(Twice().eval(), (torch.randn(2, 3),)), "x86", qat=True)
    readers = [node.args[0] for node in program.nodes() if is_op(node, "linear")]
    assert readers[0] is readers[1]


def test_arguments_that_depend_on_the_mode_are_calls() -> None:
    program = prepared()
    flags = [module for _, module in module_calls(program) if isinstance(module, ModeFlag)]
    assert sorted(flag.op for flag in flags) == ["batch_norm", "batch_norm", "dropout"]  # a counter among them
    assert len(calls(program, MODES)) == 3
    assert [flag() for flag in flags if flag.op == "dropout"] == [True]
    program.eval()
    assert [flag() for flag in flags] == [0, False, False]


def test_dropout_counts_as_such_only_where_it_follows_the_mode() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.nn.functional.dropout(x, 0.5, self.training)
            return torch.nn.functional.dropout(y, 0.25, True)

    program = qc.capture(Both().train(), (torch.randn(2, 3),))
    dropouts = [node for node in program.nodes() if is_op(node, "dropout")]
    assert [node.args[1] for node in dropouts if is_dropout(program, node)] == [0.5]
