"""Quantized modules compute what torch.ao's do, within one step; they are saved, copied and printed."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.support.nn_cases import CASES, Case, both, engine, steps_apart


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_are_within_a_step_of_torchs(case: Case) -> None:
    with engine(case.engine):
        torch.manual_seed(1)
        x = torch.randn(case.shape)
        ours, theirs = case.pair(x)
        ours_x, theirs_x = both(x)
        found = ours(ours_x)
        assert steps_apart(found, theirs(theirs_x)) <= 1
        with torch.inference_mode():
            assert ours(both(x)[0]).equals(found)


@pytest.mark.parametrize("case", [case for case in CASES if case.engine == "x86"], ids=str)
def test_copies_and_files_give_the_same(case: Case, tmp_path: Path) -> None:
    with engine(case.engine):
        x = torch.randn(case.shape)
        ours, _ = case.pair(x)
        other, _ = case.pair(2 * x)
        read, _ = both(x)
        wanted = ours(read)
        assert copy.deepcopy(ours)(read).equals(wanted)
        assert pickle.loads(pickle.dumps(ours))(read).equals(wanted)  # noqa: S301 - our own bytes
        safetensors.torch.save_file(ours.state_dict(), tmp_path / "state.safetensors")
        other.load_state_dict(safetensors.torch.load_file(tmp_path / "state.safetensors"))
        assert other(read).equals(wanted)
        assert case.name in repr(ours)


def test_threads_may_call_one_module() -> None:
    case = next(case for case in CASES if case.name == "ConvReLU2d")
    x = torch.randn(case.shape)
    ours, _ = case.pair(x)
    read, _ = both(x)
    wanted = copy.deepcopy(ours)(read)
    with ThreadPoolExecutor(4) as pool:
        assert all(made.equals(wanted) for made in pool.map(lambda _: ours(read), range(32)))
