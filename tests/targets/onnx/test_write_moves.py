"""ONNX writers of ops that keep values: concat, split, reshape, pad, flip; sizes that vary stay open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

import quantc as qc
from quantc.targets.onnx.onnx_export import export
from quantc.targets.onnx.profiles import PROFILES
from tests.support.onnx_ops import Cases, Function, check, check_case, check_function

X, Y, Z = (4, 6), (4, 3, 8, 8), (4, 5, 6)
"""Shapes: a matrix, images, sequences. The first size varies."""
CASES: Cases = {
    "cat-stack": (lambda x: torch.stack([torch.cat([x, x + 1], 1), torch.cat([-x, x], 1)], -1), X),
    "stack-front": (lambda x: torch.stack([x, x * 2], 1), X),
    "split": (lambda x: [part * 2 for part in x.split([1, 3, 2], 1)] + list(x.chunk(3, -1)) + list(x.unbind(1)), X),
    "reshapes": (lambda x: x.flatten(1).unflatten(1, (5, 3, 2)).permute(0, 3, 1, 2).transpose(1, -1), Z),
    "flatten-front": (lambda x: x.flatten(0, 1), Z),
    "squeeze": (lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(1).squeeze(), X),
    "expand-repeat": (lambda x: x.unsqueeze(1).expand(-1, 3, -1).repeat(1, 2, 2), X),
    "flip-roll": (lambda x: x.flip(1).roll(2, 1) + x.roll((1, -1), (0, 1)), X),
    "pads": (
        lambda x: (
            F.pad(x, (1, 2), value=3.0).sum()
            + sum(F.pad(x, (1, 2, 0, 1), mode=mode).sum() for mode in ("reflect", "replicate", "circular"))
        ),
        Y,
    ),
    "pixels": (lambda x: F.pixel_unshuffle(F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), 2), Y),
    "channel-shuffle": (lambda x: F.channel_shuffle(x.repeat(1, 2, 1, 1), 2), Y),
}
FIXED: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "flip-nothing": (lambda x: x.flip(()), torch.randn(3, 4)),
    "squeeze-nothing": (lambda x: torch.ops.aten.squeeze.dims(x, []), torch.randn(1, 4)),
    "interleaved": (
        lambda x: torch.cat([x.repeat_interleave(2, 1).flatten(), x.repeat_interleave(3)]),
        torch.randn(3, 4),
    ),
    "roll-all": (lambda x: x.roll(5), torch.randn(3, 4)),
    "negative-pads": (lambda x: F.pad(x, (-1, 2, 1, -2), value=3.0), torch.randn(3, 4)),
    "empty-parts": (lambda x: torch.cat([torch.zeros(0), x[0]]), torch.randn(3, 4)),
    "no-elements": (lambda x: x[:0].reshape(0, 2, 2), torch.randn(3, 4)),
    "one-image": (lambda x: F.pixel_shuffle(x, 2), torch.randn(8, 3, 2)),
    "stacks-of-images": (lambda x: F.pixel_unshuffle(x, 2), torch.randn(2, 3, 2, 4, 6)),
    "turned": (lambda x: x.t() @ x, torch.randn(3, 4)),
    "transposed-number": (lambda x: x.transpose(0, 0) + 1, torch.tensor(2.0)),
}
"""For the size they were captured with."""
CAPTURED_SIZE = {"flatten-front", "pads", "flip-roll", "squeeze"}
"""Only for the size they were captured with: what they do to the first axis, torch.export wants fixed."""


@pytest.mark.parametrize("name", CASES)
def test_an_op_is_what_torch_has(name: str) -> None:
    check_case(CASES[name], is_open=name not in CAPTURED_SIZE)


@pytest.mark.parametrize("name", FIXED)
def test_a_corner_is_what_torch_has(name: str) -> None:
    function, x = FIXED[name]
    check_function(function, x)


SQUEEZED: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x.squeeze(),
    "first": lambda x: x.squeeze(0),
    "several": lambda x: x.squeeze((0, 1)),
    "of-a-sum": lambda x: torch.cat([x, x[:1]]).narrow(0, 0, x.shape[0]).squeeze(0),
}


@pytest.mark.parametrize("name", SQUEEZED)
def test_squeeze_of_a_size_that_varies_is_refused(name: str) -> None:
    program = qc.capture(Function(SQUEEZED[name]).eval(), (torch.randn(4, 5),))
    assert program.signature.ranges == {"batch": (1, None)}
    with pytest.raises(qc.QuantcError, match="no ONNX form") as caught:
        export(program, PROFILES["onnxruntime"])
    assert "takes axis 0 away depends on a size that varies (batch)" in str(caught.value)


@pytest.mark.parametrize("name", SQUEEZED)
def test_squeeze_of_a_size_from_two_on_takes_nothing_away(name: str) -> None:
    module = Function(SQUEEZED[name]).eval()
    program = qc.capture(module, (torch.randn(4, 5),), dynamic_shapes=({0: Dim("batch", min=2, max=32)},))
    for size in (2, 7):
        check(module, program, torch.randn(size, 5))
