"""The pass `lower-weights`: ops that read their weight as it is stored, with the bits of the Q/DQ form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quantc as qc
from quantc import QuantConfig, QuantSpec, pipelines
from quantc.integer.library import op_of
from quantc.ir.program import Program
from quantc.passes.lower_weights import LowerWeights
from quantc.pipeline.pipeline import Pipeline
from quantc.qdq.ops import is_dequantize
from quantc.spec.formats import PerChannel, PerGroup, PerTensor

SPECS = {
    "int8": qc.INT8_WEIGHT_ONLY,
    "int8 whole": qc.INT8_WEIGHT_ONLY.but(granularity=PerTensor()),
    "int8 affine": qc.INT8_WEIGHT_ONLY.but(scheme="affine"),
    "int8 group": qc.INT8_WEIGHT_ONLY.but(granularity=PerGroup(axis=1, size=16)),
    "int4": qc.INT4_GROUP,
    "int4 symmetric": qc.INT4_GROUP_SYMMETRIC,
    "int2": qc.INT2_GROUP,
    "fp16": qc.FP16_WEIGHT,
    "fp8 e4m3": qc.FP8_E4M3_WEIGHT,
    "fp8 e5m2": qc.FP8_E5M2_WEIGHT,
}
spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


class Products(nn.Module):
    """A linear layer with a bias and one without, a matrix product, and one that adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 32, bias=False)
        self.third = nn.Parameter(torch.randn(32, 64))
        self.fourth = nn.Parameter(torch.randn(64, 32))
        self.shift = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.relu(self.first(x))) @ self.third
        return torch.addmm(self.shift, y, self.fourth)


class Lookups(nn.Module):
    def __init__(self, **bag: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 32)
        self.bag = nn.EmbeddingBag(20, 32, **bag)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.table(x) + self.bag(x).unsqueeze(1)
        return found


class Others(nn.Module):
    """Ops that are not written as one with their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 3)
        self.back = nn.ConvTranspose1d(32, 32, 3)
        self.state = nn.GRU(32, 32, batch_first=True)
        self.cell = nn.LSTMCell(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.state(self.back(self.conv(x)).transpose(1, 2))[0]
        last: Tensor = self.cell(y[:, -1])[0]
        return last


def stored(model: nn.Module, x: Tensor, spec: QuantSpec) -> tuple[Program, Program]:
    """The Q/DQ form of a model whose weights alone are quantized, and what the pass makes of it."""
    torch.manual_seed(0)
    before = qc.convert(qc.prepare(qc.capture(model.eval(), (x,)), "x86", config=QuantConfig().set_all(spec)))
    after = Pipeline((LowerWeights(),)).run_on_copy(before)
    after.verify()
    return before, after


def ops(program: Program) -> list[str]:
    found = [op_of(node.target) for node in program.nodes()]
    return [op.name for op in found if op is not None]


@spec
def test_products_are_one_op_with_their_weight(spec: QuantSpec) -> None:
    x = torch.randn(5, 32)
    before, after = stored(Products(), x, spec)
    assert ops(after) == ["linear_weight_only"] * 4
    assert not any(is_dequantize(node) for node in after.nodes())
    assert torch.equal(before(x), after(x))


@spec
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_tables_are_one_op_with_what_reads_them(spec: QuantSpec, mode: str) -> None:
    x = torch.randint(0, 20, (3, 7))
    before, after = stored(Lookups(mode=mode), x, spec)
    assert ops(after) == ["embedding_weight_only", "embedding_bag_weight_only"]
    assert not any(is_dequantize(node) for node in after.nodes())
    assert torch.equal(before(x), after(x))


@pytest.mark.parametrize("padding", [0, 5, -1])
def test_padding_is_left_out_of_bags(padding: int) -> None:
    x = torch.tensor([[5, 0, 19, 3], [19, 19, 19, 19], [0, 0, 5, 5]])
    before, after = stored(Lookups(mode="mean", padding_idx=padding), x, qc.INT4_GROUP)
    assert "embedding_bag_weight_only" in ops(after)
    assert torch.equal(before(x), after(x))


class Weighted(nn.Module):
    """Bags of one list of indices, each index with a weight; the last offset is the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 32))

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return F.embedding_bag(
            indices, self.table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )


@pytest.mark.parametrize("spec", [qc.INT8_WEIGHT_ONLY, qc.INT2_GROUP, qc.FP8_E5M2_WEIGHT], ids=str)
def test_bags_with_weights_and_empty_bags(spec: QuantSpec) -> None:
    x = (torch.tensor([1, 11, 3, 3, 0]), torch.tensor([0, 2, 2, 5]), torch.randn(5))
    result = qc.quantize(Weighted().eval(), x, mode="weight-only", config=QuantConfig().set_all(spec))
    after = Pipeline((LowerWeights(),)).run_on_copy(result.program)
    assert ops(after) == ["embedding_bag_weight_only"]
    assert torch.equal(result.program(*x), after(*x))


class AllItems(nn.Module):
    """Reads which bag each index went to, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 32))

    def forward(self, indices: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.ops.aten.embedding_bag.padding_idx(
            self.table, indices, offsets, False, 0, False, None, False, None
        )
        return found[0], found[1]


def test_bags_whose_other_results_are_read_keep_their_op() -> None:
    x = (torch.tensor([1, 11, 3, 3, 0]), torch.tensor([0, 2]))
    result = qc.quantize(AllItems().eval(), x, mode="weight-only")
    after = Pipeline((LowerWeights(),)).run_on_copy(result.program)
    assert ops(after) == ["stored_weight"]
    for one, other in zip(result.program(*x), after(*x), strict=True):
        assert torch.equal(one, other)


@spec
def test_other_ops_read_a_stored_weight(spec: QuantSpec) -> None:
    x = torch.randn(2, 32, 9)
    before, after = stored(Others(), x, spec)
    assert set(ops(after)) == {"stored_weight"}
    assert not any(is_dequantize(node) for node in after.nodes())
    # a convolution may go another way where a weight lies otherwise in memory
    assert torch.allclose(before(x), after(x), rtol=1e-5, atol=1e-6)


class Computed(nn.Module):
    """A bias that is computed, and a product that is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 32))
        self.other = nn.Parameter(torch.randn(64, 32))
        self.shift = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, x.sum() * torch.ones(64))
        return torch.addmm(self.shift, y, self.other, beta=0.5, alpha=2.0)


def test_products_that_have_no_such_op_read_a_stored_weight() -> None:
    x = torch.randn(4, 32)
    before, after = stored(Computed(), x, qc.INT8_WEIGHT_ONLY)
    assert ops(after) == ["stored_weight"] * 2
    assert torch.equal(before(x), after(x))


def test_a_weight_of_two_ops_is_stored_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 32)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.table(x), self.table.weight)

    x = torch.randint(0, 20, (3, 7))
    before, after = stored(Tied(), x, qc.INT8_WEIGHT_ONLY)
    assert sorted(ops(after)) == ["embedding_weight_only", "linear_weight_only"]
    assert sum(tensor.dtype == torch.int8 for _, tensor in after.root.named_buffers()) == 1
    assert torch.equal(before(x), after(x))


@pytest.mark.parametrize(
    "granularity",
    [PerChannel(axis=-2), PerChannel(axis=1), PerGroup(axis=0, size=8), PerGroup(axis=1, size=16)],
    ids=str,
)
def test_scales_may_lie_along_any_axis(granularity: Any) -> None:
    x = torch.randn(5, 32)
    before, after = stored(Products(), x, qc.INT8_WEIGHT_ONLY.but(granularity=granularity))
    assert ops(after) == ["linear_weight_only"] * 4
    assert torch.equal(before(x), after(x))


def test_what_is_static_or_dynamic_is_left_alone() -> None:
    model, x = Products().eval(), torch.randn(5, 32)
    for mode in ("static", "dynamic"):
        result = qc.quantize(model, (x,), [x], mode=mode)
        program = result.program.clone()
        assert not LowerWeights().run(program)
        assert program.dump() == result.program.dump()


def test_techniques_mix_in_one_model() -> None:
    model, x = Products().eval(), torch.randn(5, 32)
    config = QuantConfig().set("first", qc.INT4_GROUP).set("second", qc.FLOAT)
    lowered = qc.lower(qc.quantize(model, (x,), mode="dynamic", config=config).program, "x86")
    assert "linear_weight_only" in ops(lowered.program)
    assert any("dynamic" in name for name in ops(lowered.program))


def test_the_second_time_nothing_changes() -> None:
    _, program = stored(Others(), torch.randn(2, 32, 9), qc.INT4_GROUP)
    text = program.dump()
    assert not LowerWeights().run(program)
    assert program.dump() == text


def test_ops_keep_their_names_and_claims() -> None:
    before, after = stored(Products(), torch.randn(5, 32), qc.INT8_WEIGHT_ONLY)
    for node in before.nodes():
        claim = before.plan.claims.get(node)
        if claim is not None and node.op == "call_function":
            assert after.plan.claims[after.node(node.name)] == claim
    assert after.coverage().counts == before.coverage().counts


def test_nothing_is_left_of_what_was_made_float() -> None:
    _, program = stored(Products(), torch.randn(5, 32), qc.INT8_WEIGHT_ONLY)
    sizes = {name: tensor.dtype for name, tensor in program.root.named_buffers() if tensor.dim() == 2}
    assert set(sizes.values()) == {torch.int8}


def test_only_lowering_runs_it() -> None:
    assert "lower-weights" in str(pipelines.lower())
    assert "lower-weights" not in str(pipelines.integer())


@pytest.mark.parametrize("spec", [qc.INT8_WEIGHT_ONLY, qc.INT4_GROUP, qc.FP8_E4M3_WEIGHT], ids=str)
def test_what_was_lowered_can_be_saved(spec: QuantSpec, tmp_path: Any) -> None:
    x = torch.randn(5, 32)
    _, program = stored(Products(), x, spec)
    program.save(tmp_path / "net.qc")
    assert torch.equal(qc.load(tmp_path / "net.qc")(x), program(x))


def test_ops_inside_a_branch_are_lowered() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 32))

        def forward(self, x: Tensor) -> Any:
            return torch.cond(
                x.sum() > 0, lambda x: F.linear(x, self.weight), lambda x: F.linear(-x, self.weight), (x,)
            )

    x = torch.randn(3, 32)
    before, after = stored(Branches(), x, qc.INT8_WEIGHT_ONLY)
    assert ops(after) == ["linear_weight_only"] * 2
    for sign in (1, -1):
        assert torch.equal(before(sign * x), after(sign * x))
