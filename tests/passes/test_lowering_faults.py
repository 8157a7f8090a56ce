"""Faults planted in each pass of lowering: `Verify` or `Guard` finds them, and names the pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from quantc.errors import PassError
from quantc.integer.match_lowering import Task
from quantc.passes import (
    assign_memory_format,
    copy_returned_constants,
    eliminate_dead,
    fuse_attention,
    fuse_residual,
    lower_weights,
    overwrite_summands,
    place_kernels,
)
from quantc.targets.kernels.dynamic_linear import LinearDynamic
from quantc.targets.kernels.kernel import Kernel
from tests.support.golden_texts import FOLDER, Golden

NUMBERS = "changed the numbers"


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    put = place_kernels._put

    def wrongly(program: Any, call: Any, placement: Any) -> fx.Node:
        made = put(program, call, placement)
        multiplier = placement.kernel._buffers.get("multiplier")
        if multiplier is not None:
            placement.kernel._buffers["multiplier"] = multiplier * 1.2
        return made

    monkeypatch.setattr(place_kernels, "_put", wrongly)


def swapped_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of a kernel reads its summand in place of its input."""
    put = place_kernels._put

    def wrongly(program: Any, call: Any, placement: Any) -> fx.Node:
        return put(program, call, replace(placement, inputs=placement.inputs[::-1]))

    monkeypatch.setattr(place_kernels, "_put", wrongly)


def dropped_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearDynamic, "absorb", lambda self, op: op == "relu")


def siblings_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = LinearDynamic.joined.__func__  # type: ignore[attr-defined]

    def wrongly(cls: Any, kernels: list[Kernel]) -> Any:
        return joined(cls, [kernels[1], kernels[0], *kernels[2:]])

    monkeypatch.setattr(LinearDynamic, "joined", classmethod(wrongly))


def scale_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fuse_attention.attention_at

    def wrongly(root: fx.Node) -> Any:
        match = found(root)
        return None if match is None else replace(match, scale=1.0)

    monkeypatch.setattr(fuse_attention, "attention_at", wrongly)


def dropped_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_residual, "_is_plain_sum", lambda node, own: True)


def in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign_memory_format, "is_read_in_order", lambda program, node: False)


def written_over_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overwrite_summands, "_is_free_byte", lambda node, order, kernels: True)


def shared_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_returned_constants, "_of_constants", lambda graph: set())


def copied_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros in place of the constant."""
    monkeypatch.setattr(copy_returned_constants, "CLONE", torch.ops.aten.zeros_like.default)


def doubled_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the scales of a weight."""
    constant = lower_weights._constant

    def wrongly(program: Any, w: fx.Node, name: str, value: Any, before: fx.Node) -> Any:
        found = constant(program, w, name, value, before)
        tensor = None if found is None else program.tensor(found)
        if name != "scale" or tensor is None:
            return found
        return program.constant("doubled", tensor * 2, before=before)

    monkeypatch.setattr(lower_weights, "_constant", wrongly)


def nothing_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eliminate_dead.Effects, "_op", lambda self, node, target: False)


def wrong_multiplier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulators are rescaled by too much."""
    fixed = Task.fixed
    monkeypatch.setattr(Task, "fixed", lambda self, multiplier: fixed(self, multiplier * 1.1))


FAULTS: dict[Any, tuple[str, str]] = {
    doubled_scales: ("lower-weights/net", NUMBERS),
    wrong_multiplier: ("lower-integer/net", NUMBERS),
    nothing_writes: ("eliminate-dead/effects", NUMBERS),
    wrong_scale: ("place-kernels/x86", NUMBERS),
    swapped_inputs: ("overwrite-summands/block", NUMBERS),
    dropped_relu: ("fuse-epilogues/relu", NUMBERS),
    siblings_in_another_order: ("merge-siblings/projections", NUMBERS),
    scale_of_attention: ("fuse-attention/scaled", NUMBERS),
    dropped_factor: ("fuse-residual/scaled", NUMBERS),
    in_any_order: ("assign-memory-format/strides", NUMBERS),
    written_over_what_is_read: ("overwrite-summands/read-later", NUMBERS),
    shared_constant: ("copy-returned-constants/view", "said to be memory of its own"),
    copied_from_elsewhere: ("copy-returned-constants/constant", NUMBERS),
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_in_a_pass_of_lowering_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case, what = FAULTS[plant]
    guilty = "place-kernels" if plant is swapped_inputs else case.partition("/")[0]
    golden = Golden.read(FOLDER / f"{case}.txt")
    golden.run()
    plant(monkeypatch)
    with pytest.raises(PassError, match=what) as caught:
        golden.run()
    assert f"pass {guilty}" in str(caught.value)
