"""auto: the laws of an observation, the choice on batches that a range was not fitted to, and outliers that stay."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.backends.x86 import X86
from quantc.errors import LoadError, QuantcError
from quantc.observe.auto import TRIED, Auto
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.granularity import Share
from quantc.spec.observation import State
from quantc.spec.spec import INT8, UINT8, QuantSpec

SPEC = UINT8.but(observe="auto")


def seen(batches: list[Tensor], share: Share = PerTensor(), first: int = 0) -> Auto:  # noqa: B008 - a frozen value
    found = Auto.empty(share, {})
    for number, batch in enumerate(batches, start=first):
        found.batch = number
        found.update(batch)
    return found


def same(one: Auto, other: Auto) -> bool:
    states = [each.to_state() for each in (one, other)]
    tensors = [state.tensors for state in states]
    return (
        states[0].values == states[1].values
        and tensors[0].keys() == tensors[1].keys()
        and all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])
    )


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 7), min_size=0, max_size=3), seed=st.integers(0, 2**16))
def test_any_split_gives_the_same_bits(cuts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(40, generator=generator) * (number + 1) for number in range(7)]
    ends = [0, *sorted(cuts), 7]
    parts = [seen(batches[a:b], first=a) for a, b in pairwise(ends)]
    merged = Auto.empty(PerTensor(), {})
    for part in reversed(parts):
        merged = part.merge(merged)
    whole = seen(batches)
    assert same(merged, whole)
    assert merged.qparams(SPEC).equals(whole.qparams(SPEC))
    assert same(Auto.from_state(PerTensor(), whole.to_state()), whole)


def held_out_error(spec: QuantSpec, found: Auto, x: Tensor) -> float:
    from quantc.spec.numerics import fake_quantize

    return float((fake_quantize(x, found.qparams(spec), spec) - x).square().mean())


def outlier_channels(generator: torch.Generator) -> Tensor:
    """Tokens with two channels that carry large numbers, as those of transformers."""
    x = torch.randn(64, 64, generator=generator)
    x[:, [5, 40]] *= torch.tensor([40.0, 25.0])
    return x


@pytest.mark.parametrize("make", [torch.randn, None, "tails", "relu"], ids=["normal", "outliers", "tails", "relu"])
def test_no_method_is_much_better_on_new_data(make: object) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        if make is None:
            return outlier_channels(generator)
        x = torch.randn(4096, generator=generator)
        if make == "tails":
            return x * torch.exp(1.5 * torch.randn(4096, generator=generator))
        return x.relu() if make == "relu" else x

    for spec in (SPEC, INT8.but(observe="auto", dtype="int4")):
        found = seen([draw() for _ in range(6)])
        new = torch.cat([draw() for _ in range(16)])
        errors = {name: held_out_error(spec.but(observe=name), found_as(found, name), new) for name in TRIED}
        assert held_out_error(spec, found, new) <= 1.25 * min(errors.values()), (errors, found.chosen(spec))


def found_as(found: Auto, name: str) -> Auto:
    """Statistics that any method can be asked of."""
    return found.whole()  # type: ignore[return-value]


def test_outlier_channels_of_transformers_are_not_clipped() -> None:
    """Pitfall R13: percentiles clip the channels that carry most."""
    generator = torch.Generator().manual_seed(0)
    found = seen([outlier_channels(generator) for _ in range(6)])
    chosen = found.chosen(SPEC)
    assert chosen.method in ("minmax", "mse")
    assert chosen.errors["percentile"] > chosen.errors[chosen.method]
    assert chosen.errors["entropy"] > 10 * chosen.errors[chosen.method]
    x = outlier_channels(generator)
    assert held_out_error(SPEC, found, x) < 0.7 * held_out_error(
        SPEC.but(observe="percentile{percentile=99}"), found_as(found, ""), x
    )
    assert "percentile" in str(chosen)


def test_one_half_alone_is_not_clipped() -> None:
    found = seen([torch.randn(1000)])
    assert found.chosen(SPEC).method == "minmax"
    assert "nothing to judge on" in str(found.chosen(SPEC))
    assert float(found.whole().extremes.high or 0) == float(found.extremes.high or 1)


def test_channels_share_a_method_and_not_a_range() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(3, 500) * torch.tensor([[1.0], [10.0], [100.0]]) for _ in range(4)]
    spec = INT8.but(observe="auto", granularity=PerChannel(axis=0))
    scales = seen(batches, PerChannel(axis=0)).qparams(spec).scale
    assert scales.shape == (3,)
    assert bool((scales[1:] > 5 * scales[:-1]).all())


def test_faults_are_named() -> None:
    state = seen([torch.randn(9), torch.randn(9)]).to_state()
    with pytest.raises(LoadError, match="'odd'"):
        Auto.from_state(PerTensor(), State(state.tensors, {key: x for key, x in state.values.items() if key != "odd"}))
    with pytest.raises(LoadError, match="contradicts"):
        Auto.from_state(PerTensor(), State(state.tensors, {**state.values, "seen": 3}))
    with pytest.raises(QuantcError, match="percentile"):
        UINT8.but(observe="auto{percentile=99}")


def backend() -> Backend:
    return X86.but(act=SPEC)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def test_files_shards_and_reports_have_the_choice(tmp_path: Path) -> None:
    model, batches = net(), [torch.randn(32, 16, generator=torch.Generator().manual_seed(n)) for n in range(6)]

    def prepared() -> qc.Program:
        return qc.prepare(qc.capture(model, (batches[0],)), backend())

    whole = prepared()
    report = qc.calibrate(whole, batches)
    assert all(row.chosen.partition(":")[0] in TRIED for row in report.groups)
    assert "on other batches" in str(report)
    for part in range(2):
        shard = prepared()
        qc.calibrate(shard, batches, shard=(part, 2)).statistics.save(tmp_path / f"{part}.safetensors")
    merged = prepared()
    qc.merge_statistics(merged, [tmp_path / "1.safetensors", tmp_path / "0.safetensors"])
    assert torch.equal(qc.convert(merged)(batches[0]), qc.convert(whole)(batches[0]))
    later = qc.prepare(qc.capture(model, (batches[0],)), "x86")  # mse, of the same statistics
    qc.use_statistics(later, tmp_path / "0.safetensors")
    whole.save(tmp_path / "whole.qc")
    loaded = qc.load(tmp_path / "whole.qc")
    assert isinstance(loaded, qc.Program)
    assert torch.equal(qc.convert(loaded)(batches[0]), qc.convert(whole)(batches[0]))
    config = qc.QuantConfig().set_all(SPEC, role="act")
    config.save(tmp_path / "auto.toml")
    again = qc.prepare(qc.capture(model, (batches[0],)), "x86", config=qc.QuantConfig.load(tmp_path / "auto.toml"))
    qc.calibrate(again, batches)
    assert torch.equal(qc.convert(again)(batches[0]), qc.convert(whole)(batches[0]))
