"""Quantized modules compute what torch.ao's do, within one step; they are saved, copied and printed."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.ao.nn.quantized as ao_quantized
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quantc.nn import observers, quantized, torch_state_dict
from quantc.nn import qconfig as qconfigs
from tests.support.nn_cases import CASES, Case, _case, both, engine, steps_apart


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


WINDOWS = st.fixed_dictionaries(
    {
        "kernel_size": st.integers(1, 3),
        "stride": st.integers(1, 3),
        "padding": st.integers(0, 2),
        "dilation": st.integers(1, 2),
        "groups": st.sampled_from([1, 2]),
        "bias": st.booleans(),
    }
)


@pytest.mark.parametrize("name", ["Conv1d", "Conv2d", "ConvReLU1d", "ConvReLU2d"])
@pytest.mark.parametrize("engine_name", ["fbgemm", "x86", "qnnpack"])
@settings(max_examples=8)
@given(
    window=WINDOWS,
    channels=st.sampled_from([(2, 4), (6, 2), (16, 32)]),
    size=st.integers(6, 12),
    zero=st.integers(0, 255),
)
def test_any_window(
    name: str, engine_name: str, window: dict[str, Any], channels: tuple[int, int], size: int, zero: int
) -> None:
    axes = int(name[-2])
    kind = {1: nn.Conv1d, 2: nn.Conv2d}[axes]
    made = _case(
        name,
        lambda: kind(*channels, **window),
        (2, channels[0], *[size] * axes),
        engine=engine_name,
        fused="ReLU" in name,
    )
    with engine(engine_name):
        torch.manual_seed(size)
        x = torch.randn(made.shape)
        ours, theirs = made.pair(x)
        ours_x, theirs_x = both(x, (0.031, zero))
        assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1


@pytest.mark.parametrize("engine_name", ["fbgemm", "x86", "onednn", "qnnpack"])
@settings(max_examples=10)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 40),
    bias=st.booleans(),
    zero=st.integers(0, 255),
)
def test_any_linear(engine_name: str, rows: int, inputs: int, outputs: int, bias: bool, zero: int) -> None:
    made = _case("Linear", lambda: nn.Linear(inputs, outputs, bias), (rows, inputs), engine=engine_name)
    with engine(engine_name):
        torch.manual_seed(rows)
        x = torch.randn(made.shape)
        ours, theirs = made.pair(x)
        ours_x, theirs_x = both(x, (0.031, zero))
        assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1


SPREAD = st.fixed_dictionaries(
    {
        "kernel_size": st.integers(1, 3),
        "stride": st.integers(1, 3),
        "padding": st.integers(0, 1),
        "dilation": st.integers(1, 2),
        "groups": st.sampled_from([1, 2]),
        "bias": st.booleans(),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine_name"),
    [
        ("Conv3d", "fbgemm"),
        ("ConvReLU3d", "x86"),
        ("ConvTranspose1d", "fbgemm"),
        ("ConvTranspose2d", "fbgemm"),
        ("ConvTranspose1d", "qnnpack"),
        ("ConvTranspose2d", "qnnpack"),
    ],
)
@settings(max_examples=20)
@given(
    window=SPREAD, channels=st.sampled_from([(2, 4), (6, 2), (8, 16)]), size=st.integers(5, 8), zero=st.integers(0, 255)
)
def test_any_other_window(
    name: str, engine_name: str, window: dict[str, Any], channels: tuple[int, int], size: int, zero: int
) -> None:
    axes = int(name[-2])
    kind: Any = getattr(nn, name.replace("ReLU", ""))
    made = _case(
        name,
        lambda: kind(*channels, **window),
        (2, channels[0], *[size] * axes),
        engine=engine_name,
        fused="ReLU" in name,
        per_channel="Transpose" not in name,
    )
    with engine(engine_name):
        torch.manual_seed(size)
        x = torch.randn(made.shape)
        ours, theirs = made.pair(x)
        ours_x, theirs_x = both(x, (0.031, zero))
        assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1


@pytest.mark.parametrize("name", ["Conv2d", "Linear"])
@pytest.mark.parametrize("scheme", [torch.per_tensor_affine, torch.per_channel_affine])
def test_weights_with_zero_points(name: str, scheme: torch.qscheme) -> None:
    """Where the engine has no kernel for them the integer form is run as it is written."""
    kind = observers.MinMaxObserver if scheme is torch.per_tensor_affine else observers.PerChannelMinMaxObserver
    weight = kind.with_args(dtype=torch.qint8, qscheme=scheme)
    module: Any = nn.Conv2d(4, 6, 3) if name == "Conv2d" else nn.Linear(8, 6)
    module.weight.data += 0.1
    module.qconfig = qconfigs.QConfig(activation=observers.MinMaxObserver, weight=weight)
    x = torch.randn(2, 4, 8, 8)
    observer = observers.MinMaxObserver()
    observer(module(x))
    module.activation_post_process = observer
    with engine("fbgemm"):
        ours, theirs = getattr(quantized, name).from_float(module), getattr(ao_quantized, name).from_float(module)
        assert bool((ours.tensor("weight_zero_point") != 0).any())
        ours_x, theirs_x = both(x)
        assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1


def test_threads_may_call_one_module() -> None:
    case = next(case for case in CASES if case.name == "ConvReLU2d")
    x = torch.randn(case.shape)
    ours, _ = case.pair(x)
    read, _ = both(x)
    wanted = copy.deepcopy(ours)(read)
    with ThreadPoolExecutor(4) as pool:
        assert all(made.equals(wanted) for made in pool.map(lambda _: ours(read), range(32)))


def test_a_layer_that_reads_several_grids() -> None:
    """Each is packed for once; of many the oldest are forgotten, and made again."""
    case = next(case for case in CASES if case.name == "Linear")
    x = torch.randn(case.shape)
    ours, theirs = case.pair(x)
    for scale in (0.03, 0.04, 0.05, 0.06, 0.07, 0.03):
        ours_x, theirs_x = both(x, (scale, 120))
        assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1
