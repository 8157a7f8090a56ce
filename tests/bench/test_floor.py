"""The kernel floor: every op of a lowered module, timed alone."""

from __future__ import annotations

import time

import pytest
import torch

import quantc as qc
from quantc.bench.floor import Floor, OpTime, best_seconds, kernel_floor
from quantc.targets.kernels.kernel import Kernel
from tests.support.bench_tasks import tiny_task


def test_the_floor_covers_every_op() -> None:
    task = tiny_task()
    prepared = qc.prepare(qc.capture(task.model, task.calibration[0]), "x86")
    qc.calibrate(prepared, task.calibration, progress="silent")
    lowered = qc.lower(qc.convert(prepared), "x86")
    expected = lowered(*task.unseen[0])
    floor = kernel_floor(lowered, *task.unseen[0], rounds=1)
    modules = {node.name: node for node in lowered.module.graph.find_nodes(op="call_module")}
    kernels = [
        name for name, node in modules.items() if isinstance(lowered.module.get_submodule(str(node.target)), Kernel)
    ]
    by_node = {row.node: row for row in floor.ops}
    assert len(kernels) >= 3
    assert all(by_node[name].kernel for name in kernels)
    computed = [node.name for node in lowered.module.graph.nodes if node.op.startswith("call_")]
    assert list(by_node) == computed, "float ops as well, each once"
    assert all(row.microseconds > 0 for row in floor.ops)
    assert floor.milliseconds == pytest.approx(sum(row.microseconds for row in floor.ops) / 1e3)
    assert floor.share == pytest.approx(floor.milliseconds / floor.whole_milliseconds)
    assert sum(int(row[3]) for row in floor.rows()) == len(floor.ops)
    assert torch.equal(lowered(*task.unseen[0]), expected), "timing changes nothing"
    assert "conv" in floor.table()


def test_equal_ops_are_one_row_and_the_dearest_comes_first() -> None:
    ops = (
        OpTime("a", "conv", "fast", "1×2", 100.0),
        OpTime("b", "add", "", "1×2", 300.0),
        OpTime("c", "conv", "fast", "1×2", 500.0),
        OpTime("d", "conv", "fast", "9×9", 100.0),
    )
    floor = Floor(ops, 2.0)
    assert floor.rows() == [
        ("conv", "fast", "1×2", "2", "600.0", "0.600"),
        ("add", "", "1×2", "1", "300.0", "0.300"),
        ("conv", "fast", "9×9", "1", "100.0", "0.100"),
    ]
    assert (floor.milliseconds, floor.share) == (1.0, 0.5)
    assert str(floor) == "floor 1.00 ms, the whole 2.00 ms: 0.50 of it"
    assert floor.to_data()["ops"][1] == {"node": "b", "op": "add", "kernel": "", "shape": "1×2", "microseconds": 300.0}


def test_the_best_turn_counts() -> None:
    turns = iter([0.003, 0.001, 0.002])

    def step() -> None:
        end = time.process_time() + next(turns)
        while time.process_time() < end:
            pass

    assert 0.001 <= best_seconds(step, (), 1) < 0.002
