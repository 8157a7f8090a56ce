"""Lowered modules under torch.compile, as one op, and under torch.export, as the portable program."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import QuantcError
from quantc.ir.program import Program
from quantc.targets.kernels.lowered import Lowered
from quantc.targets.kernels.module_as_op import RUN_LOWERED, register_module
from tests.support.lowered_nets import dynamic_program, image, same, static_program


@pytest.fixture(params=[static_program, dynamic_program], ids=["static", "dynamic"])
def program(request: pytest.FixtureRequest) -> Program:
    found: Program = request.param()
    return found


@pytest.fixture
def lowered(program: Program) -> Lowered:
    return qc.lower(program, "x86")


@pytest.mark.parametrize("first", [False, True], ids=["before a call", "after a call"])
def test_exports_as_the_portable_program(lowered: Lowered, first: bool) -> None:
    x = image(4)
    if first:
        lowered(x)
    exported = torch.export.export(lowered, (x,), dynamic_shapes={"args": ({0: torch.export.Dim("batch", max=32)},)})
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file)
    for batch in (4, 7):
        assert same(loaded.module()(image(batch)), lowered.program(image(batch)))
    called = {node.target for node in exported.graph.nodes if node.op == "call_function"}
    assert not [target for target in called if "run_" in str(target) or "onednn" in str(target)]
    weights = [
        value for value in exported.constants.values() if isinstance(value, Tensor) and value.dtype is torch.int8
    ]
    assert sorted(weight.numel() for weight in weights) == [64, 216, 576, 8 * 36 * 16]
    assert not exported.state_dict, "nothing is taken along twice"


def test_strict_export_says_what_to_do(lowered: Lowered) -> None:
    with pytest.raises(Exception, match=r"strict=False; or export lowered\.program\.module"):
        torch.export.export(lowered, (image(4),), strict=True)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiles_as_one_op(lowered: Lowered, fullgraph: bool) -> None:
    torch._dynamo.reset()
    seen: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(module.graph)
        return module.forward

    made = torch.compile(lowered, fullgraph=fullgraph, backend=keep)
    for batch in (4, 5, 1, 9):
        assert same(made(image(batch)), lowered(image(batch)))
    assert all(any("run_lowered" in str(node.target) for node in graph.nodes) for graph in seen)
    torch._dynamo.reset()


def test_compiles_within_a_model() -> None:
    """Through functionalization and the shapes of its op: `aot_eager` asks for all of that, and compiles nothing."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(3, 8)
    inner = qc.lower(qc.quantize(model, (x,), mode="dynamic").program, "x86")
    whole = nn.Sequential(nn.Tanh(), inner, nn.Softmax(-1))
    with torch.no_grad():
        assert torch.equal(torch.compile(whole, fullgraph=True, backend="aot_eager")(x), whole(x))
    torch._dynamo.reset()


@pytest.mark.slow
def test_inductor_compiles_it() -> None:
    torch._dynamo.reset()
    lowered = qc.lower(static_program(), "x86")
    made = torch.compile(lowered, fullgraph=True)
    for batch in (4, 5):
        assert same(made(image(batch)), lowered(image(batch)))


def test_what_comes_out_of_a_compiled_one_is_its_own() -> None:
    """A model may yield what it is given; an op may not."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return x, self.linear(x), x.t()

    x = torch.randn(4, 4)
    lowered = qc.lower(qc.quantize(Both().eval(), (x,), [(x,)]).program, "x86")
    torch._dynamo.reset()
    found = torch.compile(lowered, fullgraph=True, backend="aot_eager")(x)
    assert same(found, lowered(x))
    assert len({tensor.data_ptr() for tensor in (x, *found)}) == 4


def test_an_op_whose_module_is_gone_says_so() -> None:
    with pytest.raises(QuantcError, match="'lowered_gone'") as caught:
        RUN_LOWERED([torch.zeros(1)], "lowered_gone")
    assert "keep the lowered module" in str(caught.value.advice)


def test_a_module_is_found_by_its_key_as_long_as_it_lives() -> None:
    made = qc.lower(static_program(), "x86")
    key, again = register_module(made), register_module(made)
    assert key != again
    x = image(3)
    assert same(tuple(RUN_LOWERED([x], key)), tuple(made(x)))
    del made
    gc.collect()
    with pytest.raises(QuantcError, match=key):
        RUN_LOWERED([x], key)


def test_the_shapes_of_the_op_are_those_of_its_results(lowered: Lowered) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        found = RUN_LOWERED([mode.from_tensor(image(5))], register_module(lowered))
    expected = lowered(image(5))
    assert [(part.shape, part.dtype) for part in found] == [(part.shape, part.dtype) for part in expected]
