"""The running form: kernels are placed on a copy, one of several candidates each, and the whole has the last word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quantc as qc
from quantc.targets.kernels import kernel_table, running_form
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError
from quantc.targets.kernels.running_form import Choosing, run_on_kernels
from tests.support.toy_kernels import AsWritten, InFloat, chosen, offer_toys, program


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    return offer_toys(monkeypatch, tmp_path)


def test_the_whole_has_the_last_word(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are the fastest each by itself need not be so together."""
    seen: list[dict[str, Any]] = []

    def raced(forms: dict[str, Any], inputs: Any) -> dict[str, float]:
        seen.append({name: [float(part.sum()) for part in run(*inputs)] for name, run in forms.items()})
        return {name: 1.0 if name == "table" else 2.0 for name in forms}

    monkeypatch.setattr(running_form, "race", raced)
    lowered = qc.lower(program(), target, tune=True)
    assert list(seen[0]) == ["measured", "table"]
    assert seen[0]["measured"] == pytest.approx(seen[0]["table"])
    assert chosen(lowered) == [("slow", "whole"), ("slow", "whole")]
    assert set(lowered.choices.values()) == {"slow"}
    assert chosen(qc.lower(program(), target, tune=True)) == [("slow", "whole"), ("slow", "whole")]
    assert len(seen) == 1  # remembered


def test_float_is_taken_only_where_it_is_allowed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsWritten, "seconds", 0.001)
    monkeypatch.setattr(InFloat, "seconds", 0.0, raising=False)
    assert chosen(qc.lower(program(), target, tune=True))[0][0] == "quick"
    assert chosen(qc.lower(program(), target, tune=True, allow_float=True))[0][0] == "in float"


def refusing(call: Call) -> Kernel:
    raise NoKernelError("not today")


def integer() -> qc.Program:
    return qc.pipelines.integer().run_on_copy(program())


def test_the_program_is_left_as_it_is_and_its_weights_are_shared(target: str) -> None:
    own = integer()
    text = own.dump()
    made = run_on_kernels(own, target, Choosing())
    assert own.dump() == text
    assert [row.kernel for row in made.placed if row.op == "linear"] == ["slow", "slow"]
    weights = {tensor.data_ptr() for tensor in own.root.buffers() if tensor.dtype is torch.int8}
    held = [kernel for kernel in made.module.modules() if isinstance(kernel, AsWritten)]
    assert {tensor.data_ptr() for kernel in held for tensor in kernel.rest if isinstance(tensor, Tensor)} >= weights


def test_ops_without_a_kernel_run_as_they_are_written(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.setitem(kernel_table.KERNELS, "toy", {"linear": [refusing]})
    own = integer()
    made = run_on_kernels(own, target, Choosing())
    assert {row.reason for row in made.placed if row.op == "linear"} == {"not today"}
    assert made.choices == {}
    x = torch.randn(5, 8)
    assert torch.equal(made.module(x)[0], own(x))


def test_saved_choices_are_taken_without_a_question(target: str) -> None:
    own = integer()
    names = list(run_on_kernels(own, target, Choosing()).choices)
    made = run_on_kernels(own, target, Choosing(saved=dict.fromkeys(names, "quick")))
    assert set(made.choices.values()) == {"quick"}
    assert {row.chosen for row in made.placed if row.op == "linear"} == {"saved"}


def test_a_saved_kernel_that_is_gone_is_told_and_another_is_taken(target: str) -> None:
    own = integer()
    first, second = run_on_kernels(own, target, Choosing()).choices
    with pytest.warns(UserWarning, match=f"{first} was saved with the kernel 'gone'.*'slow' is taken instead"):
        made = run_on_kernels(own, target, Choosing(saved={first: "gone"}))
    assert made.choices == {first: "slow", second: "slow"}
