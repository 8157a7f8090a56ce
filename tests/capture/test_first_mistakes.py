"""What people get wrong at first is answered with what to do, and models they bring are taken as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import AnnotationError, InputError


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda given: qc.prepare(given, "x86"), "qc.capture"),
        (lambda given: qc.calibrate(given, [X]), "qc.prepare"),
        (qc.convert, "qc.prepare"),
    ],
    ids=["prepare", "calibrate", "convert"],
)
def test_a_model_where_a_program_belongs(call: Callable[[Any], Any], advice: str) -> None:
    with pytest.raises(InputError, match="given a Sequential, and takes a Program") as caught:
        call(model())
    assert advice in str(caught.value.advice)


def test_compare_with_its_arguments_swapped() -> None:
    quantized = qc.quantize(model(), (X,), [X]).program
    swapped: Any = model()
    with pytest.raises(InputError, match="for the quantized program"):
        qc.compare(quantized, swapped, [X])


def test_labels_in_the_batches() -> None:
    with pytest.raises(InputError, match="2 positional arguments, and the model takes 1") as caught:
        qc.quantize(model(), (X,), [(X, torch.zeros(4))])
    assert "labels" in str(caught.value.advice)
    assert "TreeSpec" not in str(caught.value)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        made: Tensor = self.layer(x) * scale
        return made


def test_arguments_by_name_that_were_captured_by_position() -> None:
    program = qc.capture(Scaled().eval(), (torch.randn(2, 4), 2.0))
    with pytest.raises(InputError) as caught:
        program(x=torch.randn(2, 4), scale=2.0)
    assert "give x, scale by position" in str(caught.value.advice)


def test_a_tensor_for_a_number_that_was_fixed() -> None:
    program = qc.capture(Scaled().eval(), (torch.randn(2, 4), 2.0))
    with pytest.raises(InputError, match="was captured for 2"):
        program(torch.randn(2, 4), torch.ones(4))


class OfDict(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"] @ batch["y"].T


def test_a_dict_in_another_arrangement() -> None:
    program = qc.capture(OfDict(), ({"x": X, "y": X},))
    with pytest.raises(InputError, match=r"is arranged as \{x: \*, z: \*\}.*captured with \{x: \*, y: \*\}"):
        program({"x": X, "z": X})


def test_other_floats_are_told_of_float32() -> None:
    with pytest.raises(AnnotationError, match="nothing was quantized") as caught:
        qc.quantize(model().double(), (X.double(),), [X.double()])
    assert "model.float()" in str(caught.value.advice)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if bool(x.sum() > 0) else x


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.kept = Branching()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.kept(self.before(x))
        return y


def test_a_module_kept_whole_is_named_as_the_reason() -> None:
    program = qc.capture(Around().eval(), (X,), method="fx", leaf=("kept",))
    with pytest.raises(AnnotationError, match="nothing was quantized") as caught:
        qc.prepare(program, "x86")
    assert "kept is kept whole, and nothing is known of it" in str(caught.value.where)


def test_ranges_below_the_smallest_scale_are_in_the_report() -> None:
    tiny = X * 1e-4
    result = qc.quantize(nn.Linear(8, 8, bias=False).eval(), (tiny,), [tiny], backend="qnnpack")
    assert "have the smallest scale allowed, 0.000244" in str(result.report)
    assert "smallest scale" not in str(qc.quantize(model(), (X,), [X], backend="qnnpack").report)


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * scale
        return y


def test_keyword_inputs_in_one_call() -> None:
    scale = torch.full((8,), 2.0)
    result = qc.quantize(Keyword().eval(), (X,), [{"x": X, "scale": scale}], example_kwargs={"scale": scale})
    assert result(X, scale=scale).shape == (4, 8)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.into(x)
        y: Tensor = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return y


@pytest.mark.parametrize("backend", ["x86", "qnnpack", "executorch"])
def test_torchs_attention_with_a_padding_mask(backend: str) -> None:
    torch.manual_seed(0)
    padded, x, padding = Padded().eval(), torch.randn(4, 7, 16), torch.zeros(4, 7, dtype=torch.bool)
    padding[0, 4:] = True
    result = qc.quantize(padded, (x, padding), [(x, padding)], backend=backend)
    with torch.no_grad():
        expected, found = padded(x, padding), result(x, padding)
    assert float(20 * torch.log10(expected.norm() / (expected - found).norm())) > 25
