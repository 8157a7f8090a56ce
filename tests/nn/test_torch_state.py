"""State dicts go to torch.ao's modules of the same names, and come from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as ao_quantized
from torch import nn

from quantc.errors import SaveError
from quantc.nn import quantized, torch_state_dict
from quantc.nn.qconfig import float_qparams_weight_only_qconfig_4bit
from tests.support.nn_cases import CASES, Case, both, engine

UNSAVED = ("ELU", "Sigmoid", "Softmax")
"""Modules of which torch.ao saves nothing."""


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in UNSAVED], ids=str)
def test_state_dicts_go_both_ways(case: Case) -> None:
    """What torch.ao saved loads here, and what is written for torch.ao loads there: with the same results."""
    with engine(case.engine):
        x = torch.randn(case.shape)
        ours, theirs = case.pair(x)
        other, their_other = case.pair(3 * x)
        ours_x, theirs_x = both(x)
        wanted, their_wanted = ours(ours_x), theirs(theirs_x)
        other.load_state_dict(theirs.state_dict())
        their_other.load_state_dict(torch_state_dict(ours))
        assert other(ours_x).equals(wanted)
        assert torch.equal(their_other(theirs_x).int_repr(), their_wanted.int_repr())


@pytest.mark.parametrize("case", [case for case in CASES if case.name in UNSAVED], ids=str)
def test_a_grid_that_torch_did_not_save_is_missed(case: Case) -> None:
    ours, theirs = case.pair(torch.randn(case.shape))
    with pytest.raises(RuntimeError, match=r"Missing key.*scale"):
        ours.load_state_dict(theirs.state_dict())


ao: Any = ao_quantized
"""The oracle; its modules have no types."""


def test_modules_within_a_model_are_written_under_their_paths() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"inner": quantized.Linear(2, 3)}))
    state = torch_state_dict(model)
    assert torch.equal(state["0.weight"], model[0].weight)  # type: ignore[arg-type]
    theirs = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"inner": ao.Linear(2, 3)}))
    assert state.keys() == theirs.state_dict().keys()
    found, wanted = (given._metadata for given in (state, theirs.state_dict()))  # type: ignore[attr-defined]
    assert {path: found[path] for path in wanted} == wanted


def test_results_of_other_dtypes_have_no_place_there() -> None:
    layer = quantized.Linear(2, 3)
    layer.out_dtype = torch.int8
    with pytest.raises(SaveError, match="Linear"):
        torch_state_dict(layer)


def test_tables_of_four_bits_are_packed_for_torch() -> None:
    torch.manual_seed(0)
    table: Any = nn.Embedding(5, 4)
    table.qconfig = float_qparams_weight_only_qconfig_4bit
    ours, theirs = quantized.Embedding.from_float(table), ao.EmbeddingBag(5, 4, dtype=torch.quint4x2)
    theirs.load_state_dict(torch_state_dict(ours))
    torch.testing.assert_close(theirs.weight().dequantize(), ours.weight().dequantize())
