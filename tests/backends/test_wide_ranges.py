"""Tensors between a square and a root are not put on 8 bits, and coverage says why; everything else is as before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.inspect.coverage import Verdict
from tests.support.costly_nets import NETS

Function = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.function(self.a(x), self.b(x)))  # type: ignore[no-any-return]


def verdicts(function: Function, backend: str) -> dict[str, tuple[Verdict, str]]:
    torch.manual_seed(0)
    program = qc.prepare(qc.capture(Net(function).eval(), (torch.randn(2, 4, 6, 6),)), backend)
    return {
        row.node: (row.verdict, row.reason)
        for row in program.coverage().rows
        if row.rule not in ("conv", "conv-static")
    }


WIDE: dict[str, Function] = {
    "magnitude": lambda a, b: torch.sqrt(a * a + b * b + 1e-9),
    "powers": lambda a, b: (a**2 + b.square()).sum(1, keepdim=True).sqrt() + a,
    "rms": lambda a, b: a * torch.rsqrt((a * a).mean(1, keepdim=True) + 1e-5),
    "variance": lambda a, b: a / ((a * a).mean((2, 3), keepdim=True) - a.mean((2, 3), keepdim=True) ** 2 + 1).sqrt(),
    "log": lambda a, b: torch.log((a + b).clamp(min=1e-5)),
    "joined": lambda a, b: torch.cat([a * a, b * b], 1).sum(1, keepdim=True).sqrt() * a,
    "exponentials": lambda a, b: a.exp() / (a.exp() + b.exp()),
}
"""Only their last op may be quantized."""


@pytest.mark.parametrize("backend", ["qnnpack", "executorch"])
def test_nothing_between_a_square_and_a_root_is_quantized(backend: str) -> None:
    for name, function in WIDE.items():
        found = verdicts(function, backend)
        last = list(found)[-1]
        quantized = [node for node, (verdict, _) in found.items() if verdict is not Verdict.FLOAT and node != last]
        kept = {"mean_1"} if name == "variance" else set()  # of the convolution's own result
        assert not set(quantized) - kept, (name, found)
    told = verdicts(WIDE["magnitude"], backend)
    assert all("decades" in told[node][1] or "small numbers" in told[node][1] for node in ("mul", "mul_1", "add"))


@pytest.mark.parametrize("backend", ["qnnpack", "executorch"])
def test_other_products_and_sums_are_quantized(backend: str) -> None:
    for function in (
        lambda a, b: a * b + a,
        lambda a, b: (a + b) * 0.5,
        lambda a, b: (a - b) * torch.sqrt(b.abs() + 1),  # the root is behind, and read as it is
    ):
        found = verdicts(function, backend)
        assert "mul" in found
        assert any(verdict is not Verdict.FLOAT for verdict, _ in found.values()), found


def test_a_spectrogram_is_close_to_that_of_x86() -> None:
    """In dB: 27.3 on x86; 17.7 on qnnpack and 22.0 on executorch, where squares were on 8 bits."""
    case = NETS["spectrogram, magnitude"]()
    found = {}
    for backend in ("x86", "qnnpack", "executorch"):
        result = qc.quantize(case.model, (case.batches[0],), case.batches, backend, held_out=case.held_out)
        assert result.report.comparison is not None
        found[backend] = result.report.comparison.sqnr
    assert min(found.values()) > max(20, found["x86"] - 3), found
