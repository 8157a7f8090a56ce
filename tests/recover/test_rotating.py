"""Streams are found by dataflow, and rotated without a change of what the program computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantc.ir.judgment import Judgment
from quantc.ir.program import Program
from quantc.recover import rotating
from quantc.recover.rotating import rotate_streams
from tests.support.streams import HIDDEN, TOKENS, DecomposedRms, Language, captured, language, shaken


def kept(judgments: list[Judgment]) -> list[str]:
    return [each.reason for each in judgments if each.fate == "kept"]


def refused(judgments: list[Judgment]) -> str:
    return "\n".join(each.reason for each in judgments if each.fate == "refused")


def rotated(program: Program, *inputs: Tensor) -> list[Judgment]:
    """Rotate, and hold the program to float64 rounding."""
    before = program(*inputs).detach()
    found = rotate_streams(program, 0, "keep")
    program.verify()
    assert float((program(*inputs).detach() - before).abs().max()) < 1e-11 * float(before.abs().max())
    return found


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, DecomposedRms])
def test_the_residual_stream_and_the_values_of_each_attention(norm: type[nn.Module]) -> None:
    """R1: a gain of 1 + w is folded as a whole."""
    program = language(norm)
    weight = program.tensor(program.graph.find_nodes(op="get_attr", target="table.weight")[0])
    found = kept(rotated(program, TOKENS))
    assert sum(text.startswith("vectors of 16") and "5 gains folded" in text for text in found) == 1
    assert sum(text.startswith("vectors of 4") for text in found) == 2  # queries and keys have phases
    now = program.tensor(program.graph.find_nodes(op="get_attr", target="table.weight")[0])
    assert weight is not None
    assert now is not None
    torch.testing.assert_close(now.norm(dim=1), weight.norm(dim=1))
    assert not torch.allclose(now, weight)


def test_queries_and_keys_turn_together_where_nothing_is_between() -> None:
    program = language(rotary=False)
    assert sum(text.startswith("vectors of 4") for text in kept(rotated(program, TOKENS))) == 4


def test_a_channel_that_is_much_larger_is_spread() -> None:
    model = shaken(Language(nn.LayerNorm))
    with torch.no_grad():
        model.get_parameter("table.weight")[:, 3] *= 100
    program = captured(model, TOKENS)
    rotated(program, TOKENS)
    table = program.tensor(program.graph.find_nodes(op="get_attr", target="table.weight")[0])
    assert table is not None
    sizes = table.detach().abs().amax(0)
    assert float(sizes.max() / sizes.median()) < 5


def test_a_norm_after_the_sum_is_refused() -> None:
    """Its gain is in the stream."""
    found = rotated(language(post=True, last=False), TOKENS)
    assert "has a gain, and add" in refused(found)
    assert not any(text.startswith("vectors of 16") for text in kept(found))


def test_r7_a_tied_table_stays_tied_or_is_refused_unless_it_may_be_untied() -> None:
    plain = language(tied=True, last=False)
    assert len(kept(rotated(plain, TOKENS))) == 3
    assert len(plain.graph.find_nodes(op="get_attr", target="table.weight")) == 1
    with_gain = language(tied=True)
    found = rotated(with_gain, TOKENS)
    assert "table.weight is tied: embedding, linear" in refused(found)
    assert len(kept(found)) == 2
    again = language(tied=True)
    before = again(TOKENS).detach()
    assert len(kept(rotate_streams(again, 0, "untie"))) == 3
    torch.testing.assert_close(again(TOKENS).detach(), before)


class Tower(nn.Module):
    """Vectors go through one function on the way from a linear to another, and around it."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, HIDDEN), nn.Linear(HIDDEN, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.first(x)))
        return out


LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda x: 2.0 * x / 3.0 - x,
    "an offset": lambda x: x + 1.5,
    "a mask": lambda x: x.masked_fill(torch.tensor([[True], [False], [True], [False]]), -3.0),
    "a choice of rows": lambda x: torch.where(torch.tensor([[True], [False], [True], [False]]), x, -x),
    "parts of the rows": lambda x: torch.cat([x[:, 2:], x[:, :2]], 1),
    "sums of rows": lambda x: x.mean(1, keepdim=True) + x.sum(1, keepdim=True),
    "a pad": lambda x: F.pad(x, (0, 0, 1, 1)),
    "its length": lambda x: x / torch.linalg.vector_norm(x, 2, -1, keepdim=True),
    "its spread": lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    "a product with itself": lambda x: (x @ x.transpose(-1, -2)) @ x,
    "its square": lambda x: x * (x * x).sum(-1, keepdim=True),
    "two side by side": lambda x: F.layer_norm(torch.cat([x, 2 * x], -1), (2 * HIDDEN,))[..., HIDDEN:],
    "stacked": lambda x: torch.stack([x, x + x], 1).sum(1),
    "pooled": lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2),
    "dropped": lambda x: F.dropout(x, 0.5, training=False),
}
COMPONENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "a product": lambda x: x * x.flip(1),
    "a cube": lambda x: x * x.pow(3).mean(-1, keepdim=True),
    "a quotient": lambda x: 1.0 / (x.abs() + 1.0),
    "a softmax": lambda x: x.softmax(-1),
    "largest": lambda x: x * x.amax(-1, keepdim=True),
    "squares that are read": lambda x: x.pow(2).cumsum(-1),
    "a norm of parts": lambda x: F.layer_norm(x.reshape(2, 4, 8, 2), (8, 2)).flatten(-2),
    "a length of one": lambda x: x / torch.linalg.vector_norm(x, 1, -1, keepdim=True),
}


@pytest.mark.parametrize("what", list(LINEAR))
def test_what_commutes_with_rotations(what: str) -> None:
    program = captured(Tower(LINEAR[what]).double().eval(), torch.randn(2, 4, 3, dtype=torch.float64))
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    found = rotated(program, x)
    assert any(text.startswith("vectors of 16") for text in kept(found)), refused(found)


@pytest.mark.parametrize("what", list(COMPONENTWISE))
def test_what_does_not(what: str) -> None:
    program = captured(Tower(COMPONENTWISE[what]).double().eval(), torch.randn(2, 4, 3, dtype=torch.float64))
    found = rotated(program, torch.randn(2, 4, 3, dtype=torch.float64))
    assert kept(found) == []
    assert refused(found)


def test_components_that_the_data_puts_in_order_are_not_rotated() -> None:
    """One vector in the example: any order of it looks like a move."""
    tower = Tower(lambda x: x[:, :, (x.sum((0, 1)) * 0).argsort(stable=True)])
    x = torch.randn(1, 1, 3, dtype=torch.float64)
    program = captured(tower.double().eval(), x)
    found = rotate_streams(program, 0, "keep")
    assert kept(found) == []
    assert "chooses components by the data" in refused(found)


def test_a_result_of_the_program_is_not_rotated() -> None:
    class Both(Tower):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            hidden = self.first(x)
            return hidden, self.last(hidden)

    program = captured(Both(torch.relu).double().eval(), torch.randn(2, 3, dtype=torch.float64))
    found = rotate_streams(program, 0, "keep")
    assert kept(found) == []
    assert "is a result of the program" in refused(found)


def test_r8_a_tensor_that_is_read_before_and_after() -> None:
    """One op reads a stream twice, and another reads it beside what the first makes."""
    twice: Callable[[Tensor], Tensor] = lambda x: (x + x) + torch.tanh(x.norm(2, -1, keepdim=True)) * x  # noqa: E731
    program = captured(Tower(twice).double().eval(), torch.randn(2, 4, 3, dtype=torch.float64))
    rotated(program, torch.randn(2, 4, 3, dtype=torch.float64))


def test_convolutions_take_up_rotations_of_their_channels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 2, stride=2), nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    assert kept(rotated(captured(model.double().eval(), x), x)) == ["vectors of 16: 1 tensors, 3 constants"]
    apart = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 3, 1))
    assert kept(rotated(captured(apart.double().eval(), x), x)) == []


def test_what_changes_the_numbers_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation that moves the mean would break layer norms."""
    flip = lambda size, seed: -torch.eye(size, dtype=torch.float64).roll(1, 0) * (1.1 if size == HIDDEN else 1.0)  # noqa: E731
    monkeypatch.setattr(rotating, "rotation", flip)
    program = language()
    before, nodes = program(TOKENS).detach(), len(program.graph.nodes)
    found = rotate_streams(program, 0, "keep")
    assert [each.fate for each in found if each.fate != "refused"] == ["undone"] * 3
    assert torch.equal(program(TOKENS).detach(), before)
    assert len(program.graph.nodes) == nodes
    program.verify()
