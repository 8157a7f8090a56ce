"""Rows that layers read, against torch's unfold and the layer itself."""

from __future__ import annotations

import torch
from torch import nn

import quantc as qc
from quantc.calibration.layer_inputs import layer_inputs, lookups
from tests.support.layer_inputs import prepared_layer


def test_patches_times_the_weight_are_the_layer() -> None:
    layers = [
        (nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, bias=False), (3, 4, 12)),
        (nn.Conv2d(6, 4, (3, 2), groups=2, padding=(1, 0), bias=False), (2, 6, 5, 7)),
        (nn.Conv3d(3, 3, 2, groups=3, bias=False), (2, 3, 4, 3, 3)),
    ]
    for layer, shape in layers:
        (rows,) = layer_inputs(prepared_layer(layer, shape))
        x = torch.randn(shape)
        found = rows.rows(x, 0)
        weight = layer.weight.detach().reshape(rows.groups, -1, rows.width)
        out = (found @ weight.mT).permute(1, 0, 2).flatten(1)  # [rows, outputs]
        expected = layer(x).movedim(1, -1).flatten(0, -2)
        assert torch.allclose(out, expected, atol=1e-5)


def test_an_input_without_a_batch_is_one_sample() -> None:
    (rows,) = layer_inputs(prepared_layer(nn.Conv2d(3, 4, 3), (1, 3, 6, 6)))
    assert torch.equal(rows.rows(torch.ones(3, 6, 6), 0), rows.rows(torch.ones(1, 3, 6, 6), 0))


def test_a_share_is_the_same_rows_each_time_and_others_in_other_batches() -> None:
    (rows,) = layer_inputs(prepared_layer(nn.Linear(2, 3), (1, 2)))
    x = torch.arange(2000.0).reshape(1000, 2)
    first, again, other = rows.rows(x, 4, 0.1), rows.rows(x, 4, 0.1), rows.rows(x, 5, 0.1)
    assert first.shape == (1, 100, 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert bool((first[0, :, 0].diff() > 0).all())  # none twice


def test_rows_are_no_view_of_the_tensor() -> None:
    (rows,) = layer_inputs(prepared_layer(nn.Linear(2, 3), (4, 2)))
    x = torch.ones(4, 2)
    found = rows.rows(x, 0)
    x.zero_()
    assert bool((found == 1).all())


def test_a_table_is_a_small_problem_for_each_of_its_rows() -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4)).eval()
    program = qc.prepare(qc.capture(model, (torch.zeros(2, 3, dtype=torch.int64),)), "x86")
    (found,) = lookups(program)
    assert (found.groups, found.outputs, found.width, found.statistics) == (20, 8, 1, "tokens")
    weight = model[0].get_parameter("weight")
    assert found.by_output(weight).shape == (20, 8, 1)
    assert torch.equal(found.as_weight(found.by_output(weight), weight.shape), weight)
    assert [each.readers[0].name for each in layer_inputs(program)] == ["linear"]
