"""Training flags of a captured graph: those that equalled the mode follow it, and others stay as captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.capture.mode_flags import record_modes
from quantc.ir.program import Program
from quantc.ir.sites import ModeValue, Origin
from tests.support.programs import Builder, aten


def recorded(target: Any, *args: Any, training: bool, model: nn.Module | None = None) -> Program:
    """A program of one call on its input, with its modes recorded."""
    build = Builder()
    x = build.input("x", 2, 3, 4)
    program = build.program(build.call(target, x, *args))
    program.training = training
    record_modes(program, model)
    return program


def modes(program: Program) -> list[ModeValue]:
    return list(program.modes.rows.values())


@pytest.mark.parametrize("training", [True, False])
def test_a_flag_that_equalled_the_mode_follows_it_and_another_does_not(training: bool) -> None:
    follows = ModeValue(2, train=True, eval=False)
    assert modes(recorded(aten.dropout.default, 0.5, training, training=training)) == [follows]
    assert modes(recorded(aten.dropout.default, 0.5, not training, training=training)) == []


def test_every_kind_of_dropout_is_known_by_the_place_of_its_flag() -> None:
    for target in (aten.feature_dropout.default, aten.alpha_dropout.default, aten.dropout_.default):
        assert modes(recorded(target, 0.5, True, training=True)) == [ModeValue(2, train=True, eval=False)]
    assert modes(recorded(aten.rrelu.default, 0.1, 0.3, True, training=True)) == [ModeValue(3, train=True, eval=False)]


def test_a_flag_that_was_left_out_is_not_recorded() -> None:
    assert modes(recorded(aten.rrelu.default, 0.1, 0.3, training=False)) == []


def normed(training: bool, *, path: str = "norm.", tracked: bool = True, model: nn.Module | None = None) -> Program:
    build = Builder()
    x = build.input("x", 2, 3, 4)
    mean = var = None
    if tracked:
        mean, var = (build.graph.create_node("get_attr", f"{path}{name}") for name in ("running_mean", "running_var"))
        holder = build.root
        if path:
            holder = nn.Module()
            build.root.add_module("norm", holder)
        for node, value in ((mean, torch.zeros(3)), (var, torch.ones(3))):
            holder.register_buffer(str(node.target).rpartition(".")[2], value)
            node.meta["val"] = torch.empty(3, device="meta")
        holder.register_buffer("num_batches_tracked", torch.tensor(0))
    norm = build.call(aten.batch_norm.default, x, None, None, mean, var, training, 0.1, 1e-5, False)
    program = build.program(norm)
    program.training = training
    record_modes(program, model)
    return program


@pytest.mark.parametrize("path", ["norm.", ""])
def test_a_norm_that_follows_the_mode_knows_its_counter(path: str) -> None:
    program = normed(True, path=path)
    assert modes(program) == [ModeValue(5, train=True, eval=False)]
    assert list(program.counters.rows.values()) == [f"{path}num_batches_tracked"]


def test_a_norm_without_statistics_uses_the_batch_s_in_either_mode() -> None:
    program = normed(True, tracked=False)
    assert modes(program) == []
    assert len(program.counters) == 0


def test_a_norm_that_averages_for_ever_is_for_inference_alone() -> None:
    model = nn.Module()
    model.norm = nn.BatchNorm1d(3, momentum=None)
    assert any("'norm'" in note for note in normed(False, model=model).inference_only)
    model.norm = nn.BatchNorm1d(3)
    assert normed(False, model=model).inference_only == ()


@pytest.mark.parametrize("kind", ["torch.nn.modules.activation.MultiheadAttention", "model.Net"])
def test_dropout_of_attention_follows_the_mode_in_torch_s_own_modules_alone(kind: str) -> None:
    build = Builder()
    x = build.input("x", 1, 2, 3, 4)
    call = build.call(aten.scaled_dot_product_attention.default, x, x, x, None, 0.25)
    program = build.program(call)
    program.training = True
    program.origins[call] = Origin("attention", kind)
    record_modes(program, None)
    assert modes(program) == ([ModeValue(4, train=0.25, eval=0.0)] if kind.startswith("torch.nn") else [])


def test_dropout_that_an_eval_capture_has_lost_is_noted() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2, dropout=0.3))
    assert any("0.3" in note for note in recorded(aten.relu.default, training=False, model=model).inference_only)
    for quiet in (nn.Sequential(nn.MultiheadAttention(4, 2)), None):
        assert recorded(aten.relu.default, training=False, model=quiet).inference_only == ()
    assert recorded(aten.relu.default, training=True, model=model).inference_only == ()
