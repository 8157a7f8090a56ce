"""What the states of a traced model hold, what is looked at and what is not, and what is said, copied and saved of it."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

import quantc as qc
from quantc.flows import tracing
from quantc.flows.tracing import AutoQuantizationState, convert, prepare
from quantc.flows.tracing.auto_trace import Interception
from quantc.ir.decisions import FLOAT
from tests.support.traced_runs import (
    Counted,
    Hooks,
    Nested,
    calibrated,
    floats,
    nested,
    picture,
    seeded,
    sqnr,
    state,
    trace_of,
)

# -- states ------------------------------------------------------------------------------------------------------


def test_every_module_that_is_called_and_makes_calls_of_others_has_a_state() -> None:
    model, prepared, _ = nested()
    holders = {
        name
        for name, module in model.named_modules()
        if not isinstance(module, nn.ModuleList) and (any(True for _ in module.children()) or name == "shift")
    }
    found = {name for name, module in prepared.named_modules() if "_auto_quant_state" in module._modules}
    assert found == holders == {"", "deep", "deep.0", "deep.1", "list.0", "shift"}
    assert all(state(prepared, name).path == name for name in found)


def test_observers_are_those_of_the_modules_own_ops() -> None:
    _, prepared, _ = nested()
    plan = trace_of(prepared).held.plan
    for path in ("", "deep.0", "deep.1", "list.0"):
        row = state(prepared, path)
        nodes = {node.name for graph in row.subgraphs for node in graph.graph.nodes if node.op == "call_function"}
        expected = {group.name for group in plan.groups if nodes & {site.node for site in group.places}}
        assert set(row.observers) == expected & set(plan.statistics)
    assert set(state(prepared, "deep.0").observers) != set(state(prepared, "").observers)
    everywhere = [
        name for row in prepared.modules() if isinstance(row, AutoQuantizationState) for name in row.observers
    ]
    assert set(everywhere) == set(plan.statistics)


def test_fake_quantizers_are_those_of_the_modules_own_ops() -> None:
    torch.manual_seed(0)
    trained = prepare(Nested(), picture(), qat=True)
    rows = {path: set(state(trained, path).fake_quants) for path in ("deep.0", "deep.1", "list.0")}
    weights = {path: {name for name in row if "in1" in name} for path, row in rows.items()}
    assert all(len(row) == 1 for row in weights.values())
    assert len(set.union(*weights.values())) == 3  # each has its own


def test_only_what_may_be_quantized_needs_hooks() -> None:
    _, prepared, _ = nested()
    row = state(prepared)
    quantized = (F.conv2d, F.linear, torch.relu, F.relu, F.batch_norm, torch.matmul, torch.Tensor.__add__, torch.add)
    needed = [func for func in quantized if row.cur_op_needs_hooks(func)]
    assert {F.conv2d, F.linear, torch.relu, F.relu, F.batch_norm, torch.matmul} <= set(needed)
    assert not [func for func in (torch.sin, torch.softmax, torch.sort, torch.exp) if row.cur_op_needs_hooks(func)]


def test_hooks_of_a_converted_model_are_called_in_order(monkeypatch: Any) -> None:
    _, prepared, x = nested()
    quantized = convert(prepared)
    hooks = Hooks(monkeypatch)
    with torch.no_grad():
        quantized(x)
    order = ["validate_cur_op", "op_convert_before_hook", "op_convert_function", "op_convert_after_hook"]
    seen = [name for name in hooks.seen if name in order]
    assert "op_convert_function" in seen
    positions = [index for index, name in enumerate(seen) if name == "op_convert_before_hook"]
    assert all(seen[index - 1 : index + 3] == order for index in positions)
    assert len(positions) == seen.count("op_convert_function") == seen.count("op_convert_after_hook")


# -- what is not looked at ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["observing", "converted"])
def test_interception_costs_nothing_where_nothing_is_quantizable(phase: str, monkeypatch: Any) -> None:
    seen: Counter[str] = Counter()
    original = Interception.__torch_function__

    def call(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen[getattr(func, "__name__", "")] += 1
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(Interception, "__torch_function__", call)
    model, prepared, x = nested()
    assert {"sin", "cos", "exp", "log1p", "sqrt"} <= set(seen)  # while it is traced
    made = convert(prepared) if phase == "converted" else prepared
    assert type(made.get_submodule("stem")) is not nn.Conv2d
    assert phase == "observing" or type(made.get_submodule("soft")) is nn.Softmax
    seen.clear()
    with torch.no_grad():
        found = [made(x) for _ in range(4)][-1]
        assert not {"sin", "cos", "exp", "log1p", "sqrt"} & set(seen)
        assert seen["relu"] >= 1
        assert sqnr(model(x), found) > 25


def test_containers_look_as_they_did() -> None:
    model, prepared, x = nested()
    deep: Any = prepared.get_submodule("deep")
    assert [name for name, _ in deep.named_children()] == ["0", "1"]
    assert [name for name, _ in prepared.named_children()] == [name for name, _ in model.named_children()]
    assert len(deep) == len(list(deep)) == 2
    assert deep[-1] is deep[1]
    assert len(deep[:1]) == 1
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-5, atol=1e-5)


def test_hooks_on_containers_and_on_all_modules_are_called() -> None:
    _, prepared, x = nested()
    quantized = convert(prepared)
    with torch.no_grad():
        expected = [quantized(x) for _ in range(4)][-1]
        seen: list[Any] = []
        handle = quantized.get_submodule("deep").register_forward_hook(lambda *row: seen.append(row[2].shape))
        assert torch.equal(quantized(x), expected)
        handle.remove()
        assert seen == [x.shape]
        kinds: list[str] = []
        every = hooks_of_all.register_module_forward_hook(lambda *row: kinds.append(type(row[0]).__name__))
        try:
            assert torch.equal(quantized(x), expected)
        finally:
            every.remove()
        assert Counter(kinds)["Conv2d"] == 5
        assert torch.equal(quantized(x), expected)


# -- what runs ---------------------------------------------------------------------------------------------------


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        y = torch.relu(self.layer(batch["x"]))
        return {"y": y, "more": [y.flatten(), (y + batch["x"],)]}


def test_the_caller_is_given_plain_floats_wherever_they_are() -> None:
    torch.manual_seed(0)
    model, example = Gives().eval(), {"x": torch.randn(4, 8)}
    prepared = prepare(model, (example,), backend="qnnpack")
    with torch.no_grad():
        prepared(example)
        quantized = convert(prepared)
        for _ in range(4):
            rows = floats(quantized(example))
            assert [type(row) for row in rows] == [Tensor] * 3
            assert not any(row.is_meta for row in rows)
        assert sqnr(model(example), quantized(example)) > 25
        lowered = qc.lower(qc.convert(tracing.to_program(prepared)), "qnnpack")
        assert torch.equal(lowered(example)["more"][1][0], quantized(example)["more"][1][0])


class Moves(nn.Module):
    """Convolutions with copies of elements between. Views are views of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        x = torch.cat([x, x], 1).flip(2).roll(1, 3)
        x = self.second(x)
        return self.third(torch.cat([x, x.clone()], 1))


def test_bytes_are_handed_on_and_copied_as_bytes() -> None:
    torch.manual_seed(0)
    model, x = Moves().eval(), picture()
    prepared = prepare(model, x)
    with torch.no_grad():
        prepared(x)
        quantized = convert(prepared)
        quantized(x)
        with Counted() as counted:
            found = quantized(x)
    rounding = sum(count for op, count in counted.ops.items() if re.search(r"\.quantize_per|to_bytes", op))
    back = sum(count for op, count in counted.ops.items() if "dequantize" in op)
    assert (counted.int8, counted.float_products, rounding, back) == (3, 0, 1, 0)  # what comes in
    assert sqnr(model(x), found) > 25


@pytest.mark.parametrize("mode", ["autocast", "dynamic"])
def test_under_autocast_and_in_dynamic_mode_ops_run_at_once(mode: Any) -> None:
    model, examples, _ = seeded("what both flows take")
    prepared = calibrated(model, examples, mode="dynamic" if mode == "dynamic" else "static")
    quantized = convert(prepared)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        quantized(*examples[0])
        with Counted() as counted:
            found = quantized(*examples[0])
        for _ in range(3):
            quantized(*examples[0])
    with torch.no_grad(), Counted() as of_floats:
        expected = model(*examples[0])
    assert sqnr(expected, found.float()) > 20
    if mode == "autocast":
        assert (counted.int8, counted.float_products) == (of_floats.float_products, 0)
    else:  # convolutions have no dynamic form
        assert (counted.int8, counted.float_products) == (3, 3)


def test_config_counts_in_dynamic_mode() -> None:
    model, examples, _ = seeded("item-driven branches")
    config = qc.QuantConfig().set("first", FLOAT)
    quantized = convert(prepare(model, examples, mode="dynamic", config=config))
    with torch.no_grad():
        quantized(*examples[0])
        with Counted() as counted:
            quantized(*examples[0])
    assert (counted.int8, counted.float_products) == (1, 1)


OWN = threading.local()


class Shares(nn.Module):
    """Two layers read one tensor; in between, code of a test."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        x = torch.sin(x)
        between = getattr(OWN, "between", None)
        memory = x.data if between is not None else x
        y = self.first(x)
        if between is not None:
            between(memory)
        return y + self.second(x)


def test_memory_handed_out_in_one_thread_is_not_forgotten_by_another() -> None:
    torch.manual_seed(0)
    model, x = Shares().eval(), torch.randn(4, 8)
    prepared = prepare(model, x)
    with torch.no_grad():
        prepared(x)
    quantized = convert(prepared)
    inside, done = threading.Event(), threading.Event()

    def waits(_: Tensor) -> None:
        inside.set()
        done.wait(20)

    def other() -> None:
        OWN.between = waits
        with torch.no_grad():
            quantized(x)

    def writes(memory: Tensor) -> None:
        thread.start()
        assert inside.wait(20)  # the other is in the midst of the model
        memory.zero_()

    thread = threading.Thread(target=other)
    with torch.no_grad():
        OWN.between = writes
        found = quantized(x)
        OWN.between = None
        done.set()
        thread.join()
        zeros = torch.zeros_like(x)
        expected = model.first(torch.sin(x)) + model.second(zeros)
    assert sqnr(expected, found) > 25


def test_many_threads_at_once_on_many_ways() -> None:
    model, examples, _ = seeded("data-dependent early exit")
    prepared = calibrated(model, examples)
    alone, shared = convert(prepared), convert(prepared)
    inputs = [torch.randn(1 + number % 3, 3, 16, 16) * (0.2 if number % 2 else 8.0) for number in range(24)]
    with torch.no_grad():
        expected = [alone(x) for x in inputs]
        floats_of = [model(x) for x in inputs]
    found: dict[int, Tensor] = {}
    errors: list[BaseException] = []

    def run(start: int) -> None:
        try:
            with torch.inference_mode() if start % 2 else torch.no_grad():
                for number in range(start, len(inputs), 4):
                    found[number] = shared(inputs[number])
        except BaseException as error:  # noqa: BLE001 (shown below, in the thread that tests)
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []
    assert all(torch.equal(found[number], row) for number, row in enumerate(expected))
    assert all(sqnr(real, found[number]) > 25 for number, real in enumerate(floats_of))
