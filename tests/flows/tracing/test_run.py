"""One call of a model: where it is, what it has seen, and what it holds weights to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import InputError, QuantcError
from quantc.flows.tracing import convert, prepare
from quantc.flows.tracing.call_sites import END
from quantc.flows.tracing.run import Bound, Frame, Run
from tests.support.traced_runs import state, trace_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.block(x))


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def made(phase: str) -> Any:
    torch.manual_seed(0)
    if phase == "trained":
        return prepare(Net().train(), X, qat=True)
    prepared = prepare(Net().eval(), X)
    with torch.no_grad():
        prepared(X)
    return convert(prepared) if phase == "converted" else prepared


def run_of(model: Any) -> Run:
    return Run(trace_of(model), state(model), model)


def test_statistics_are_taken_of_prepared_models_alone() -> None:
    assert run_of(made("prepared")).watch is not None
    assert run_of(made("converted")).watch is None
    trained = run_of(made("trained"))
    assert trained.watch is None
    assert trained.is_live


def test_modules_end_in_the_order_they_began_and_the_model_itself_does_not() -> None:
    run = run_of(made("converted"))
    outer = run.frame
    run.frame = Frame(outer.state, outer.context, outer)
    run.pop("block")
    assert run.frame is outer
    assert outer.last == "block"
    with pytest.raises(RuntimeError, match="model"):
        run.pop("")


def test_the_first_refusal_is_remembered() -> None:
    run = run_of(made("converted"))
    first, second = QuantcError("first"), InputError("second")
    assert run.refuse(first) is first
    assert run.refuse(second) is second
    assert run.refused is first


def test_memory_of_weights_that_is_handed_out_is_told_from_that_of_others() -> None:
    model = made("converted")
    run = run_of(model)
    run.hand_out([torch.ones(1)])
    assert (run.escapes.count, run.gave_weights) == (1, False)
    run.hand_out([model.head.weight])
    assert (run.escapes.count, run.gave_weights) == (2, True)


def test_steps_are_named_for_messages() -> None:
    model = made("converted")
    run = run_of(model)
    assert run.step_name(END) == "the end of forward"
    number = next(call.number for call in trace_of(model).calls if call.name == "linear")
    assert run.step_name(number).startswith("linear at ")
    child = next(context for context in trace_of(model).context.walk() if context.path == "block")
    assert run.step_name(child.number) == "a call of block"


def test_the_looks_of_a_result_are_those_that_torch_gives_and_are_kept() -> None:
    run = run_of(made("converted"))
    shape, dtype = run.looks_of(0, torch.matmul, (X, X.t()), {}, None)
    assert (shape, dtype) == ((4, 4), torch.float32)
    assert run.looks_of(0, lambda *_: pytest.fail("it is known"), (X, X.t()), {}, None) == (shape, dtype)
    assert run.looks_of(0, torch.matmul, (X.double(), X.t().double()), {}, None)[1] is torch.float64
    with pytest.raises(RuntimeError):
        run.looks_of(1, torch.matmul, (X, X), {}, None)


def test_a_tensor_is_rounded_once_until_it_is_written_to() -> None:
    model = made("trained")
    model(X)
    run = run_of(model)
    target = next(
        name for name, _ in trace_of(model).held.root.named_modules() if name.endswith("input_0:in0") or "in0" in name
    )
    x = X.clone()
    first = run.rounded_once(target, x)
    assert run.rounded_once(target, x) is first
    twin = run.copied(x)
    assert run.rounded_once(target, twin) is first
    x.add_(1)
    assert run.rounded_once(target, x) is not first


def test_operands_are_kept_as_they_are_now() -> None:
    model = made("converted")
    run, trace = run_of(model), trace_of(model)
    unit = next(iter(trace.units.values()))
    x = X.clone()
    kept = run.snapshot(unit, 0, x)
    before = kept.floats().clone()
    x.zero_()
    assert torch.equal(kept.floats(), before)
    assert float(before.abs().sum()) > 0


def test_a_module_of_the_model_is_found_by_its_path_in_the_whole() -> None:
    model = made("converted")
    whole, part = Bound(trace_of(model), model, ""), Bound(trace_of(model), model.block, "block")
    assert whole.module("block.0") is model.block[0]
    assert part.module("block.0") is model.block[0]
    assert part.module("head") is model.block
    assert {name.partition(".")[0] for name in part.constants if "_auto_quant" not in name} == {"block"}
    assert whole.names[id(model.head.weight)] == "head.weight"


def test_weights_that_were_replaced_in_training_are_noticed() -> None:
    model = made("trained")
    run: Any = run_of(model)
    assert not run.bound.is_loose
    run.check_weights()
    model.head.weight = nn.Parameter(torch.zeros(2, 3))
    assert run.bound.is_loose
    with pytest.raises(QuantcError, match=r"head\.weight"):
        run.check_weights()


def test_inputs_that_are_computed_with_must_be_finite() -> None:
    assert run_of(made("converted")).bound.finite_inputs == {0}
