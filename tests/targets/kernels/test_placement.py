"""Placement: ops are replaced by kernels, one of several candidates each, and the whole has the last word."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import quantc as qc
from quantc.targets.kernels import kernel_table, placement
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, Maker, NoKernelError, Placement
from quantc.targets.kernels.placement import Choosing, Placed, candidates, on_kernels
from tests.support.kernel_calls import call_of, number
from tests.support.programs import Builder
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

    monkeypatch.setattr(placement, "race", raced)
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


# -- candidates --------------------------------------------------------------------------------------------------------


class Exact(Kernel):
    name: ClassVar[str] = "exact"

    def pack(self) -> Any:
        return ()

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return inputs[0]


class Rough(Exact):
    name: ClassVar[str] = "rough"
    computes_in_float: ClassVar[bool] = True


def exact(call: Call) -> Kernel:
    return Exact()


def rough(call: Call) -> Kernel:
    return Rough()


def refusing(reason: str) -> Maker:
    def maker(call: Call) -> Kernel:
        raise NoKernelError(reason)

    return maker


def a_call() -> Call:
    x = torch.zeros(2, 3, dtype=torch.uint8)
    return call_of("requantize", x, 0, number(1.0), None, 0, 0, 255, torch.uint8)[0]


def test_all_that_take_a_call_are_candidates_and_the_others_say_why_not_once() -> None:
    makers = [refusing("too small"), exact, refusing("too small"), refusing("too wide"), rough]
    found, reason = candidates(makers, a_call(), allow_float=True)
    assert [item.kernel.name for item in found] == ["exact", "rough"]
    assert reason == "too small; too wide"


def test_kernels_in_float_are_candidates_only_where_that_is_allowed() -> None:
    found, reason = candidates([rough, exact], a_call(), allow_float=False)
    assert [item.kernel.name for item in found] == ["exact"]
    assert reason == ""
    assert candidates([rough], a_call(), allow_float=False) == ([], "there is no kernel for it")


def test_a_maker_says_itself_what_its_kernel_reads() -> None:
    call = a_call()
    other = Placement(Exact(), (call.node,))
    found, _ = candidates([lambda call: other, exact], call, allow_float=False)
    assert [item.inputs for item in found] == [(call.node,), call.inputs]


def test_without_makers_there_is_no_kernel() -> None:
    assert candidates([], a_call(), allow_float=True) == ([], "there is no kernel for it")


def test_products_of_constants_have_no_kernel() -> None:
    build = Builder()
    levels = build.constant("c", torch.zeros(2, 3, dtype=torch.uint8))
    factor = build.constant("m", number(1.0))
    node = build.call(torch.ops.quantc.requantize.default, levels, 0, factor, None, 0, 0, 255, torch.uint8)
    call = Call(build.program(node), node)
    assert candidates([exact], call, allow_float=True) == ([], "its activation is a constant")


# -- programs ----------------------------------------------------------------------------------------------------------


def integer() -> qc.Program:
    return qc.pipelines.integer().run_on_copy(program())


def test_the_program_is_left_as_it_is_and_its_weights_are_shared(target: str) -> None:
    own = integer()
    text = own.dump()
    made = on_kernels(own, target, Choosing())
    assert own.dump() == text
    assert [row.kernel for row in made.placed if row.op == "linear"] == ["slow", "slow"]
    weights = {tensor.data_ptr() for tensor in own.root.buffers() if tensor.dtype is torch.int8}
    held = [kernel for kernel in made.module.modules() if isinstance(kernel, AsWritten)]
    assert {tensor.data_ptr() for kernel in held for tensor in kernel.rest if isinstance(tensor, Tensor)} >= weights


def test_ops_without_a_kernel_run_as_they_are_written(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.setitem(kernel_table.KERNELS, "toy", {"linear": [refusing("not today")]})
    own = integer()
    made = on_kernels(own, target, Choosing())
    assert {row.reason for row in made.placed if row.op == "linear"} == {"not today"}
    assert made.choices == {}
    x = torch.randn(5, 8)
    assert torch.equal(made.module(x)[0], own(x))


def test_saved_choices_are_taken_without_a_question(target: str) -> None:
    own = integer()
    names = list(on_kernels(own, target, Choosing()).choices)
    made = on_kernels(own, target, Choosing(saved=dict.fromkeys(names, "quick")))
    assert set(made.choices.values()) == {"quick"}
    assert {row.chosen for row in made.placed if row.op == "linear"} == {"saved"}


def test_a_saved_kernel_that_is_gone_is_told_and_another_is_taken(target: str) -> None:
    own = integer()
    first, second = on_kernels(own, target, Choosing()).choices
    with pytest.warns(UserWarning, match=f"{first} was saved with the kernel 'gone'.*'slow' is taken instead"):
        made = on_kernels(own, target, Choosing(saved={first: "gone"}))
    assert made.choices == {first: "slow", second: "slow"}


def test_a_row_is_told_in_a_line() -> None:
    row = Placed(
        "conv2d", "conv", "onednn qconv", "too wide", "table", "", {"onednn qconv": 10.4, "fbgemm qconv": 12.0}
    )
    assert str(row) == "conv2d (conv): onednn qconv: too wide; table: onednn qconv 10 µs, fbgemm qconv 12 µs"
    assert str(Placed("lstm", "lstm", "", "")) == "lstm (lstm): as written"
