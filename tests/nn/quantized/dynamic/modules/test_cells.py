"""Recurrent cells that find scales as they run, beside torch.ao's and the float ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.dynamic as ao_dynamic
from torch import nn

from quantc.errors import MixedTensorsError, SpecError
from quantc.nn import quantize_per_tensor
from quantc.nn.qconfig import default_dynamic_qconfig, float16_dynamic_qconfig
from quantc.nn.quantized import dynamic
from tests.support.dynamic_cases import furthest
from tests.support.nn_cases import engine

CELLS: dict[str, Any] = {
    "LSTMCell": lambda: nn.LSTMCell(5, 6),
    "GRUCell": lambda: nn.GRUCell(5, 6),
    "RNNCell": lambda: nn.RNNCell(5, 6, nonlinearity="relu"),
}


def pair(name: str, qconfig: Any = default_dynamic_qconfig) -> tuple[Any, Any]:
    torch.manual_seed(0)
    source = CELLS[name]()
    source.qconfig = qconfig
    return getattr(dynamic, name).from_float(source), source


def state(cell: Any, *batch: int) -> Any:
    parts = [torch.randn(*batch, 6) for _ in range(cell.states)]
    return cell.given(parts)


@pytest.mark.parametrize("qconfig", [default_dynamic_qconfig, float16_dynamic_qconfig], ids=["int8", "half"])
@pytest.mark.parametrize("name", CELLS)
def test_a_step_from_a_state_is_torchs(name: str, qconfig: Any) -> None:
    with engine("x86"):
        ours, source = pair(name, qconfig)
        theirs = getattr(ao_dynamic, name).from_float(source)
        x, hx = torch.randn(3, 5), state(ours, 3)
        assert furthest(ours(x, hx), theirs(x, hx)) < 1e-5
        assert furthest(ours(x, hx), source(x, hx)) < 0.1


@pytest.mark.parametrize("name", CELLS)
def test_one_sample_alone_is_a_batch_of_one(name: str) -> None:
    ours, _ = pair(name)
    x, hx = torch.randn(5), state(ours, 1)
    alone = ours.given([part[0] for part in ours.listed(hx)])
    wanted = ours.given([part[0] for part in ours.listed(ours(x[None], hx))])
    assert furthest(ours(x, alone), wanted) == 0
    assert [tuple(part.shape) for part in ours.listed(ours(x, alone))] == [(6,)] * ours.states
    assert furthest(ours(x), ours.given([part[0] for part in ours.listed(ours(x[None]))])) == 0


def test_a_cell_is_made_of_its_own_kind() -> None:
    with pytest.raises(SpecError, match="GRUCell is made of GRUCell, not of LSTMCell"):
        dynamic.GRUCell.from_float(nn.LSTMCell(5, 6))


def test_quantized_tensors_are_refused() -> None:
    ours, _ = pair("GRUCell")
    with pytest.raises(MixedTensorsError, match="GRUCell"):
        ours(quantize_per_tensor(torch.randn(3, 5), 0.1, 3))


def test_cells_show_their_sizes_and_what_is_not_usual() -> None:
    assert repr(dynamic.GRUCell(5, 6)) == "DynamicQuantizedGRUCell(5, 6, dtype=torch.int8)"
    shown = repr(dynamic.RNNCell(5, 6, bias=False, nonlinearity="relu", dtype=torch.float16))
    assert shown == "DynamicQuantizedRNNCell(5, 6, bias=False, nonlinearity=relu, dtype=torch.float16)"
