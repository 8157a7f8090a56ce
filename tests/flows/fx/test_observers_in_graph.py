"""Observers of QConfigs in a program's graph: put in, asked, and taken out again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import CalibrationError
from quantc.flows.fx import (
    QConfig,
    QConfigMapping,
    convert_fx,
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.fx.observers_in_graph import read, remove
from quantc.ir.decisions import Quantize
from quantc.nn.observers import MinMaxObserver, default_per_channel_weight_observer
from quantc.spec.formats import Role
from tests.support.fx_small import batches, layers, prepared_layers


def test_a_model_that_was_not_calibrated_is_not_converted() -> None:
    prepared = prepare_fx(layers(), get_default_qconfig_mapping(), (batches()[0],))
    with pytest.raises(CalibrationError, match="3 observers have seen no data") as caught:
        convert_fx(prepared)
    assert "activation_post_process_0" in (caught.value.where or "")


def test_an_observer_stands_behind_every_tensor_that_is_quantized() -> None:
    prepared = prepared_layers()
    order = [str(node.target) for node in prepared.graph.nodes if node.op.startswith("call")]
    assert [name.partition(".")[0] for name in order] == [
        "activation_post_process_0",
        "aten",
        "aten",
        "activation_post_process_1",
        "aten",
        "activation_post_process_2",
    ]


def test_taking_them_out_leaves_the_graph_of_the_model() -> None:
    program = prepared_layers().program.draft()
    remove(program)
    assert [node for node in program.graph.nodes if node.op == "call_module"] == []
    assert not any(name.startswith("activation_post_process") for name, _ in program.root.named_modules())
    x = batches()[0]
    assert torch.equal(program(x), layers()(x))


def test_what_observers_found_is_what_the_plan_has() -> None:
    prepared = prepared_layers()
    program = prepared.preparation.program.draft()
    read(program, prepared.preparation.makers(), prepared.preparation.observers)
    for group, names in prepared.preparation.observers.items():
        spec = next(each.outcome.spec for each in program.plan.groups if each.name == group)  # type: ignore[union-attr]
        found = program.plan.statistics[group].qparams(spec)
        observer: Any = prepared.get_submodule(names[0])
        scale, zero_point = observer.calculate_qparams()
        assert torch.equal(found.scale.reshape(-1), scale)
        assert torch.equal(found.zero_point.reshape(-1), zero_point.long())


def test_tensors_of_one_scale_share_an_observer() -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.cat([x.sigmoid(), x + x])

    prepared = prepare_fx(Joined().eval(), get_default_qconfig_mapping(), (batches()[0],))
    found = [
        module for name, module in prepared.named_modules(remove_duplicate=False) if name.startswith("activation_")
    ]
    assert len(found) > len({id(module) for module in found})


def test_observers_of_weights_lie_along_the_channels_of_the_op() -> None:
    by_channel = QConfig(MinMaxObserver, default_per_channel_weight_observer)
    mapping = QConfigMapping().set_global(by_channel)
    prepared = prepare_fx(nn.Sequential(nn.ConvTranspose2d(2, 3, 1)).eval(), mapping, (torch.randn(1, 2, 3, 3),))
    preparation = prepared.preparation
    weights: list[Any] = [
        preparation.makers().observer(group)
        for group in preparation.program.plan.groups
        if isinstance(group.outcome, Quantize) and group.outcome.spec.role is Role.WEIGHT
    ]
    assert by_channel.weight().ch_axis == 0
    assert [observer.ch_axis for observer in weights] == [1]
