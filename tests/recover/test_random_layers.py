"""Laws of fitting on random layers: linears, tables and convolutions, transposed, depthwise and in groups, with dead
channels, outliers, data of low rank and few rows, on any grid. Judged in float64 by torch's own ops, on the batches that nothing was fitted to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import quantc as qc
from quantc.backends.x86 import X86
from quantc.ir.program import Program
from tests.support.recovery import ALL_ROWS, Case, linear_case, losses, random_case

PASSES = (
    "rescale",
    "round",
    "round{method=coordinate}",
    "round{bias=kept}",
    "correct-bias",
    "rescale,round,correct-bias",
)
ROUNDING = 1e-5
"""Float32 of the program, against float64 of the judgment."""


def check_case(case: Case) -> None:
    """No pass ends above rounding to nearest; each says what it did; run again, it does nothing."""
    prepared, odd = case.prepared(), case.batches[1::2]
    plain = qc.convert(prepared)
    before = losses(prepared, plain, odd)
    power = losses(prepared, zeroed(prepared), odd)
    for passes in PASSES:
        better = qc.recover(prepared, passes, progress="silent")
        after = losses(prepared, qc.convert(better), odd)
        for old, new, size in zip(before, after, power, strict=True):
            allowed = float(old.sum()) * (1 + ROUNDING) + 1e-10 * float(size.sum())
            assert float(new.sum()) <= allowed, f"{case.name}: {passes}: {old} -> {new}"
        judgments = [judgment for entry in better.log for judgment in entry.judgments]
        assert len(judgments) == len(passes.split(",")), case.name
        assert bool(better.plan.fitted) == any(judgment.fate == "kept" for judgment in judgments)
        for judgment in judgments:
            assert judgment.fate != "refused" or judgment.reason
            assert judgment.fate != "kept" or (judgment.gain or 0) > 0


def zeroed(program: Program) -> Program:
    """The same layers without weights and biases."""
    found = program.clone()
    with torch.no_grad():
        for tensor in (*found.root.parameters(), *found.root.buffers()):
            tensor.zero_()
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_pass_ends_above_rounding_to_nearest(seed: int) -> None:
    check_case(random_case(seed))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(20, 520, 50))
def test_no_pass_ends_above_rounding_to_nearest_on_500_layers(start: int) -> None:
    for seed in range(start, start + 50):
        check_case(random_case(seed))


def fitted_bits(program: Program) -> dict[str, bytes]:
    """The values that were fitted, and the scales, in bits."""
    better = qc.recover(program, progress="silent")
    found = {str(site): tensor.numpy().tobytes() for site, tensor in better.plan.fitted.items()}
    state = qc.convert(better).root.state_dict()
    return {**found, **{name: tensor.contiguous().numpy().tobytes() for name, tensor in state.items()}}


@pytest.mark.parametrize(
    "case",
    [linear_case(backend=X86, inputs=320, outputs=96), random_case(5), random_case(22)],
    ids=lambda case: case.layer,
)
def test_one_and_four_threads_give_the_same_bits(case: Case) -> None:
    found = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        found.append(fitted_bits(case.prepared()))
    assert found[0] == found[1]


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("seed", [3, 9, 15])
def test_parts_and_a_restart_give_the_same_bits(seed: int, tmp_path: Path) -> None:
    case = random_case(seed)
    batches = case.batches * 2
    model = torch.nn.Sequential(case.layer).eval()

    def empty() -> Program:
        captured = qc.capture(model, (batches[0],), method="fx", dynamic_shapes=None)
        return qc.prepare(captured, case.backend)

    def stopping(after: int) -> list[Tensor] | object:
        def run() -> object:
            yield from batches[:after]
            raise StoppedError

        return run()

    whole = empty()
    qc.calibrate(whole, batches, collect=ALL_ROWS, progress="silent")
    merged = empty()
    paths = [tmp_path / f"{part}" for part in range(3)]
    for part, path in enumerate(paths):
        qc.calibrate(empty(), batches, collect=ALL_ROWS, shard=(part, 3), progress="silent").statistics.save(path)
    qc.merge_statistics(merged, paths[::-1])
    resumed = empty()
    checkpoint = tmp_path / "checkpoint"
    with pytest.raises(StoppedError):
        qc.calibrate(empty(), stopping(2), collect=ALL_ROWS, checkpoint=checkpoint, progress="silent")  # type: ignore[arg-type]
    qc.calibrate(resumed, batches, collect=ALL_ROWS, checkpoint=checkpoint, progress="silent")
    expected = fitted_bits(whole)
    assert fitted_bits(merged) == expected
    assert fitted_bits(resumed) == expected
