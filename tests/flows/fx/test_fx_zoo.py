"""Every model of the zoo that symbolic tracing takes goes through the FX flow, and computes what it did."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from quantc.flows.fx import convert_fx, get_default_qconfig_mapping, prepare_fx
from tests.zoo import CASES, Case

LOOSE = {
    "spell_reductions": "the mean of all is near zero, and has the scale of what it is the mean of",
    "max_unpool": "of numbers that are rounded to one, another is the largest",
    "counter": "it counts its calls",
    "moving_average": "it follows its calls",
}
"""Models whose results differ by more than rounding, and why."""
TAKEN = [case for case in CASES if not case.fx_refuses and not case.keywords(1)]


@pytest.mark.slow
@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_a_model_of_the_zoo(case: Case) -> None:
    model = case.model()
    args, _ = case.example()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), args)
        for seed in range(4):
            prepared(*case.example(seed)[0])
        made = floats(convert_fx(prepared)(*case.example()[0]))
        exact = floats(model(*case.example()[0]))
    assert len(made) == len(exact) > 0
    errors = [float((y - z).abs().max() / z.abs().max().clamp(min=1e-6)) for y, z in zip(made, exact, strict=True)]
    assert all(torch.isfinite(y).all() for y in made)
    assert max(errors) < 0.2 or case.name in LOOSE


def floats(tree: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
