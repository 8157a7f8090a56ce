"""The ExecuTorch program: called like the model, checked, saved, copied."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import InputError, SaveError
from quantc.targets.executorch.artifact import Pte, read_back
from quantc.targets.executorch.metadata import InputData, Metadata
from quantc.targets.executorch.pte_container import seal_pte
from tests.support.executorch_models import conv, image, static
from tests.support.stems import converted, stem

pytest.importorskip("executorch")


def test_results_of_a_pte_are_not_overwritten() -> None:
    """The runtime copies them: quantc does not do so again."""
    program, x = converted(stem(3, 1), "executorch")
    lowered = qc.lower(program, "executorch")
    first = lowered(x)
    before = first.clone()
    second = lowered(-x)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, before)
    assert not torch.equal(first, second)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = conv()

    def forward(self, x: Tensor, scale: int, *, other: Tensor) -> Any:
        return {"sum": self.a(x) + other, "same": scale}


@pytest.mark.slow
def test_it_is_called_like_the_model() -> None:
    x = image()
    program = qc.capture(Named().eval(), (x, 3), example_kwargs={"other": x})
    prepared = qc.prepare(program, "executorch")
    qc.calibrate(prepared, [{"x": x, "scale": 3, "other": x}], progress="silent")
    quantized = qc.convert(prepared)
    lowered = qc.lower(quantized, "executorch")
    got, want = lowered(x, 3, other=x), quantized(x, 3, other=x)
    assert got["same"] == want["same"] == 3
    assert torch.allclose(got["sum"], want["sum"], atol=0.1)
    with pytest.raises(InputError, match="captured for 3"):
        lowered(x, 4, other=x)


def test_nan_and_gradients_are_refused_also_after_inputs_that_fitted(tmp_path: Path) -> None:
    """The delegate makes a number of NaN, where the float model yields NaN; and it has no gradients."""
    quantized, x = static(conv(), image()), image()
    lowered = qc.lower(quantized, "executorch")
    lowered.save(tmp_path / "model.pte")
    broken = x.clone()
    broken[1, 2, 3, 3] = float("nan")
    for made in (lowered, qc.load(tmp_path / "model.pte")):
        assert torch.equal(made(x), lowered.run(x)[0])
        for call in (made, made.run):
            with pytest.raises(InputError, match="holds NaN"):
                call(broken)
            with pytest.raises(InputError, match="requires a gradient"):
                call(x.clone().requires_grad_())
        with torch.no_grad():
            assert torch.equal(made(x.clone().requires_grad_()), made(x))
        infinite = x.clone()
        infinite[0, 0, 0, :2] = torch.tensor([float("inf"), -float("inf")])
        for form in (made, quantized):
            with pytest.raises(InputError, match="holds infinity"):
                form(infinite)


CONTENT = b"\x10\0\0\0ET12" + bytes(3000)


class Stub:
    """A runtime that yields the sum of its inputs, and keeps them."""

    def __init__(self) -> None:
        self.given: list[list[Tensor]] = []

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        self.given.append(list(inputs))
        return [torch.stack([x.float().sum() for x in inputs])]


def made(*inputs: InputData, ranges: dict[str, tuple[int, int]] | None = None, **options: Any) -> tuple[Pte, Stub]:
    metadata = Metadata(
        quantc="1", torch="2", executorch="3", program="Net", backend="executorch", config="c", source="s",
        inputs=list(inputs), ranges=ranges or {}, **options,
    )  # fmt: skip
    found, stub = Pte(CONTENT, metadata, where="model.pte"), Stub()
    found._running = stub  # type: ignore[assignment]
    return found, stub


def images(**options: Any) -> InputData:
    return InputData(name="x", dtype="float32", shape=["batch", 3], **options)


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ((torch.zeros(2, 4),), r"float32\[2, 4\], and the program takes float32\[batch in 1..8, 3\]"),
        ((torch.zeros(9, 3),), r"batch in 1\.\.8"),
        ((torch.zeros(2, 3, dtype=torch.float64),), "'x' is float64"),
        ((torch.zeros(3),), r"float32\[3\]"),
        (([1.0],), "a list, not a tensor"),
        ((), "0 tensors for 1 inputs: x"),
        ((torch.zeros(2, 3, device="meta"),), "input 0 is on meta"),
        ((torch.zeros(2, 3).to_sparse(),), "layout"),
        ((torch.zeros(2, 3, requires_grad=True),), "requires a gradient"),
    ],
    ids=["size", "batch", "dtype", "rank", "kind", "count", "device", "layout", "gradient"],
)
def test_tensors_that_do_not_fit_do_not_reach_the_runtime(inputs: tuple[Any, ...], told: str) -> None:
    pte, stub = made(images(), ranges={"batch": (1, 8)})
    with pytest.raises(InputError, match=told) as caught:
        pte.run(*inputs)
    assert caught.value.where == "model.pte"
    assert stub.given == []


def test_sizes_of_one_name_agree_and_expressions_are_left_to_the_runtime() -> None:
    other = InputData(name="y", dtype="int64", shape=["batch", "2*batch"])
    pte, stub = made(images(), other, ranges={"batch": (1, 8)})
    pte.run(torch.ones(2, 3), torch.ones(2, 5, dtype=torch.int64))
    with pytest.raises(InputError, match="'y'"):
        pte.run(torch.ones(2, 3), torch.ones(3, 6, dtype=torch.int64))
    assert len(stub.given) == 1


def test_nan_is_looked_for_where_the_file_says_that_it_is_rounded() -> None:
    broken = torch.tensor([[1.0, float("nan"), 2.0]])
    rounded, _ = made(images(is_rounded=True), ranges={"batch": (1, 8)})
    with pytest.raises(InputError, match="NaN"):
        rounded.run(broken)
    plain, stub = made(images(), ranges={"batch": (1, 8)})
    plain.run(broken)
    assert len(stub.given) == 1


def test_without_a_signature_tensors_come_and_go_flat() -> None:
    pte, _ = made(images(), ranges={"batch": (1, 8)})
    assert pte(torch.ones(2, 3)).tolist() == [6.0]
    with pytest.raises(InputError, match="not x=, a int") as caught:
        pte(3, x=torch.ones(2, 3))
    assert "metadata.inputs" in str(caught.value.advice)
    nameless = Pte(CONTENT, None, where="other.pte")
    assert nameless.name == "other.pte"
    assert nameless.to_data() == {"target": "executorch", "bytes": len(CONTENT), "metadata": None, "delegation": None}


def test_a_trial_leaves_no_state_behind() -> None:
    for has_state in (False, True):
        pte, stub = made(images(), has_state=has_state)
        pte.try_out([torch.ones(2, 3)])
        assert len(stub.given) == 1
        assert (pte._running is None) is has_state


def test_a_file_is_written_with_its_seal_and_under_its_own_name(tmp_path: Path) -> None:
    pte, _ = made(images())
    pte.save(tmp_path / "model.pte")
    assert (tmp_path / "model.pte").read_bytes() == seal_pte(CONTENT)
    with pytest.raises(SaveError, match="this writes an ExecuTorch program"):
        pte.save(tmp_path / "model.onnx")


def test_it_tells_of_itself_without_a_delegation_report() -> None:
    pte, _ = made(images())
    assert pte.name == "Net"
    assert pte.headline.startswith("Net for ExecuTorch, ")
    assert str(pte) == pte.headline
    assert json.loads(pte.to_json())["metadata"]["inputs"][0]["name"] == "x"
    with pytest.raises(qc.QuantcError, match="which op is which"):
        pte.delegation()


def test_copies_hold_the_same_file_and_no_runtime() -> None:
    pte, _ = made(images())
    for twin in (copy.deepcopy(pte), pickle.loads(pickle.dumps(pte)), read_back(CONTENT, pte.metadata, "model.pte")):  # noqa: S301 - our own
        assert (twin.content, twin.metadata, twin.name) == (pte.content, pte.metadata, pte.name)
        assert twin._running is None
