"""State dicts go to torch.ao's modules of the same names, and come from them."""

from __future__ import annotations

import pytest
import torch

from quantc.nn import torch_state_dict
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
