"""Products of stacks for the delegate: one batch axis, numbers as tensors, and no shape changed between two products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.ir.program import Program
from quantc.passes.legalize_bmm import delay_reshapes
from tests.support.spelled import spelled, targets

pytest.importorskip("executorch")


class Attention(nn.Module):
    """With q, k and v cut from one tensor, in one of the ways that models have."""

    def __init__(self, cut: str, heads: int = 2, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.cut, self.heads = cut, heads

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        made: Tensor = self.qkv(self.norm(x))
        if self.cut in ("unbind", "select"):
            made = made.reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = made.unbind(0) if self.cut == "unbind" else (made[0], made[1], made[-1])
        else:
            parts: dict[str, Callable[[], Sequence[Tensor]]] = {
                "chunk": lambda: made.chunk(3, -1),
                "split": lambda: torch.split(made, width, -1),
                "sizes": lambda: torch.split(made, [width, width, width], 2),
                "narrow": lambda: [made.narrow(-1, width * place, width) for place in range(3)],
            }
            q, k, v = (part.reshape(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts[self.cut]())
        scores = (q @ k.transpose(-2, -1) * 0.25).softmax(-1)
        mixed: Tensor = self.out((scores @ v).transpose(1, 2).reshape(batch, tokens, width))
        return x + mixed


def quantized(model: nn.Module, *shape: int, dynamic_shapes: object = None) -> tuple[Program, Tensor]:
    torch.manual_seed(0)
    batches = [torch.randn(shape) for _ in range(4)]
    program = qc.capture(model.eval(), (batches[0],), dynamic_shapes=dynamic_shapes)
    prepared = qc.prepare(program, "executorch")
    qc.calibrate(prepared, batches[:3], progress="silent")
    return qc.convert(prepared), batches[3]


CUTS = ("unbind", "select", "chunk", "split", "sizes", "narrow")


@pytest.mark.parametrize("cut", [CUTS[0], *(pytest.param(cut, marks=pytest.mark.slow) for cut in CUTS[1:])])
def test_attention_is_one_piece_whatever_cuts_its_tensors_apart(cut: str) -> None:
    torch.manual_seed(0)
    program, x = quantized(Attention(cut), 2, 6, 16)
    lowered = qc.lower(program, "executorch")
    delegation = lowered.delegation()
    assert delegation.delegates == 1, str(delegation)
    assert set(delegation.others) == {"aten.native_layer_norm.default"}, "nothing but the norm is outside"
    assert delegation.fraction == 1.0
    assert (lowered(x) - program(x)).abs().max() < 0.02


@pytest.mark.parametrize("cut", CUTS)
def test_spelled_programs_compute_the_same_bits(cut: str) -> None:
    torch.manual_seed(0)
    program, x = quantized(Attention(cut), 2, 6, 16)
    own = spelled(program)
    assert torch.equal(own(x), program(x))
    assert "matmul" not in targets(own)
    assert not {"select.int", "unbind.int", "chunk", "split.Tensor", "split_with_sizes", "narrow"} & set(targets(own))


def test_between_the_products_of_attention_no_shape_is_changed() -> None:
    torch.manual_seed(0)
    program, _ = quantized(Attention("unbind"), 2, 6, 16)
    found = targets(spelled(program))
    first, second = (place for place, target in enumerate(found) if target == "bmm")
    between = [target for target in found[first:second] if "number" not in target]
    assert "reshape" not in between[: between.index("softmax.int") + 1]
    assert [target for target in between if target in ("mul.Tensor", "softmax.int")] == ["mul.Tensor", "softmax.int"]


@pytest.mark.parametrize("cut", ["chunk", pytest.param("unbind", marks=pytest.mark.slow)])
def test_any_number_of_sequences(cut: str) -> None:
    torch.manual_seed(0)
    sizes = ({0: torch.export.Dim("batch", max=8)},)
    program, _ = quantized(Attention(cut), 2, 6, 16, dynamic_shapes=sizes)
    lowered = qc.lower(program, "executorch")
    x = torch.randn(5, 6, 16)
    assert torch.equal(spelled(program)(x), program(x))
    assert (lowered(x) - program(x)).abs().max() < 0.02


class Body(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(8, 8), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.first(x))


BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "a number on the left": lambda x: 1.5 - x,
    "divided": lambda x: torch.sin(x / 3),
    "with alpha": lambda x: torch.add(x, 0.5, alpha=2.0),
    "whole numbers": lambda x: x * 2 + 1,
    "infinite": lambda x: torch.maximum(x, torch.sin(x)) + float("inf"),
    "softmax over the heads": lambda x: (torch.unflatten(x, -1, (2, 4)) @ torch.unflatten(x, -1, (4, 2))).softmax(1),
    "softmax over rows": lambda x: (torch.unflatten(x, -1, (2, 4)) @ torch.unflatten(x, -1, (4, 2))).softmax(-2),
    "softmax over columns": lambda x: (torch.unflatten(x, -1, (2, 4)) @ torch.unflatten(x, -1, (4, 2))).softmax(3),
    "used twice": lambda x: (y := torch.unflatten(x, -1, (2, 4)) @ torch.unflatten(x, -1, (4, 2))).softmax(-1) + y,
    "a matrix for all": lambda x: x @ x.reshape(-1, 8).t(),
    "broadcast": lambda x: torch.unflatten(x, -1, (2, 4)) @ torch.unflatten(x[:, :1], -1, (4, 2)),
    "a stack": lambda x: x @ x.transpose(1, 2),
    "an axis of one place": lambda x: x[:, None].select(1, 0) * 2,
    "uneven": lambda x: torch.cat(torch.split(x, 3, 2)[::-1], 2),
    "uneven chunks": lambda x: torch.cat(x.chunk(3, 1)[::-1], 1),
    "parts that nobody reads": lambda x: torch.split(x, 2, -1)[1],
    "a part of a part": lambda x: x.chunk(2, -1)[1].select(1, -1).narrow(0, -1, 1),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_is_spelled_otherwise_yields_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    program, x = quantized(Body(BODIES[name]), 3, 4, 8)
    assert torch.equal(spelled(program)(x), program(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_what_is_spelled_otherwise_runs_so(name: str) -> None:
    torch.manual_seed(0)
    program, x = quantized(Body(BODIES[name]), 3, 4, 8)
    wanted = program(x)
    lowered = qc.lower(program, "executorch")
    assert torch.equal(lowered(x).isfinite(), wanted.isfinite())
    assert (lowered(x) - wanted).nan_to_num().abs().max() < 0.1


def test_reshapes_are_left_where_they_are_read_by_others() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.reshape(2, 3, 4)
            return y.softmax(-1), y

    x = torch.randn(6, 4)
    program = qc.capture(Twice(), (x,))
    before = str(program)
    delay_reshapes(program)
    assert str(program) == before
