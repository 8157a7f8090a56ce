"""The dynamic tracing flow on models that no tracer captures: numbers, kernels, control flow, copies and files."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.flows.tracing import UnseenOpError, convert, prepare
from tests.support.traced_models import (
    Capturable,
    EarlyExit,
)
from tests.support.traced_runs import (
    EXPORTED,
    MODELS,
    Counted,
    Gated,
    calibrated,
    floats,
    images,
    seeded,
    sqnr,
    trace_of,
    tree,
)


@pytest.mark.parametrize("name", MODELS)
def test_models_run_on_int8_kernels(name: str) -> None:
    model, examples, products = seeded(name)
    quantized = convert(calibrated(model, examples))
    with torch.no_grad():
        for example in examples:
            quantized(*example)
            with Counted() as counted:
                found = quantized(*example)
            assert counted.int8 >= products
            assert counted.float_products == 0
            assert sqnr(model(*example), found) > 30


@pytest.mark.parametrize("name", EXPORTED)
def test_same_scales_and_results_as_the_export_flow(name: str) -> None:
    model, examples, _ = seeded(name)
    program = qc.prepare(qc.capture(model, examples[0], method="export"), "x86")
    batches = [pytree.tree_map(torch.randn_like, example) for example in examples * 4]
    prepared = prepare(model, examples)
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)
    qc.calibrate(program, batches, progress="silent")
    exported, quantized = qc.convert(program), convert(prepared)
    ours = trace_of(quantized).held.plan.qparams
    assert sorted(ours) == sorted(exported.plan.qparams)
    for group, theirs in exported.plan.qparams.items():
        torch.testing.assert_close(ours[group].scale, theirs.scale, rtol=1e-6, atol=0)
        assert torch.equal(ours[group].zero_point, theirs.zero_point)
    lowered = qc.lower(exported, "x86")
    with torch.no_grad():
        for a, b in zip(floats(quantized(*batches[0])), floats(lowered(*batches[0])), strict=True):
            # results are float: one step of the last product is far more than this
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_sqnr_is_on_par_with_the_export_flow() -> None:
    model, examples, _ = seeded("what both flows take")
    quantized = convert(calibrated(model, examples))
    batches = examples * 3
    exported = qc.quantize(model, examples[0], batches, backend="x86")
    with torch.no_grad():
        ours = sqnr(model(*examples[0]), quantized(*examples[0]))
        theirs = sqnr(model(*examples[0]), exported.program(*examples[0]))
    assert ours > theirs - 1


def test_a_loop_may_be_longer_than_the_example() -> None:
    model, examples, _ = seeded("variable-length loop over a cell")
    quantized = convert(calibrated(model, examples))
    with torch.no_grad():
        for length in (2, 9, 20):
            x = torch.randn(length, 2, 16)
            assert sqnr(model(x), quantized(x)) > 20


def test_a_tree_may_be_larger_than_the_example() -> None:
    model, _, _ = seeded("recursion over a tree")
    quantized = convert(calibrated(model, [(tree(5),)]))
    with torch.no_grad():
        larger = tree(7)
        assert sqnr(model(larger), quantized(larger)) > 25


@pytest.mark.parametrize("phase", ["prepared", "converted"])
def test_control_flow_that_was_never_seen_is_an_error_and_the_model_goes_on(phase: str) -> None:
    torch.manual_seed(0)
    model = Gated().eval()
    seen = torch.randn(4, 16)
    seen = -seen if seen.sum() > 0 else seen
    prepared = prepare(model, [(seen,)])
    with torch.no_grad():
        before = prepared(seen)
        used = convert(prepared) if phase == "converted" else prepared
        with pytest.raises(UnseenOpError) as caught:
            used(-seen)
        after = used(seen)
    text = str(caught.value)
    assert "in more (Sequential)" in text
    assert "seen linear of more.0" in text
    assert "expected linear at traced_runs.py" in text
    assert "traced_runs.py:" in (caught.value.where or "")
    assert sqnr(before, after) > 30


def test_an_exit_that_was_never_seen_is_an_error() -> None:
    torch.manual_seed(0)
    model = Gated().eval()
    prepared = prepare(model, [(torch.ones(4, 16),)])
    with torch.no_grad(), pytest.raises(UnseenOpError, match="expected a call of more, seen linear"):
        prepared(-torch.ones(4, 16))


def test_several_examples_cover_several_ways() -> None:
    torch.manual_seed(0)
    model = EarlyExit().eval()
    prepared = prepare(model, [(images(0.1),), (images(9.0),)])
    with torch.no_grad():
        prepared(images(0.1))
        prepared(images(9.0))
        quantized = convert(prepared)
        for x in (images(0.1), images(9.0)):
            assert sqnr(model(x), quantized(x)) > 25


class Scaled(nn.Module):
    """Multiplies by a number that it reads from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        factor = x.abs().max().item()
        return self.b(self.a(x) * factor)


def test_numbers_that_come_from_data_are_not_folded() -> None:
    torch.manual_seed(0)
    model = Scaled().eval()
    quantized = convert(calibrated(model, [(torch.randn(4, 16),)]))
    with torch.no_grad():
        x = torch.randn(4, 16) * 0.8
        assert sqnr(model(x), quantized(x)) > 25


class InPlace(nn.Module):
    """What is written in place is seen under its other names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        name = y
        y += 1
        y.relu_()
        y[:, 0] = 0
        return self.other(name)


def test_writes_in_place() -> None:
    torch.manual_seed(0)
    model = InPlace().eval()
    quantized = convert(calibrated(model, [(images(),)]))
    x = images()
    with torch.no_grad():
        assert sqnr(model(x), quantized(x)) > 30


def test_modules_called_from_two_places_have_two_scales() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Any:
            x = self.layer(x)
            return self.layer(x * 100)

    torch.manual_seed(0)
    model = Twice().eval()
    quantized = convert(calibrated(model, [(torch.randn(256, 16),)]))
    scales = [float(row.scale) for name, row in trace_of(quantized).held.plan.qparams.items() if "in0" in name]
    assert len(scales) == 2
    assert max(scales) > 20 * min(scales)
    x = torch.randn(64, 16)
    with torch.no_grad():
        assert sqnr(model(x), quantized(x)) > 25


def test_threads() -> None:
    model, examples, _ = seeded("data-dependent early exit")
    quantized = convert(calibrated(model, examples))
    inputs = [images(0.2 if number % 2 else 8.0) for number in range(12)]
    with torch.no_grad():
        expected = [quantized(x) for x in inputs]
    found: dict[int, Tensor] = {}

    def run(start: int) -> None:
        with torch.no_grad():
            for number in range(start, len(inputs), 4):
                found[number] = quantized(inputs[number])

    threads = [threading.Thread(target=run, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[number], row) for number, row in enumerate(expected))


def test_autocast_and_inference_mode() -> None:
    model, examples, _ = seeded("what both flows take")
    quantized = convert(calibrated(model, examples))
    with torch.no_grad():
        expected = quantized(*examples[0])
        with torch.autocast("cpu", torch.bfloat16):
            found = quantized(*examples[0])
    assert sqnr(expected, found) > 25
    with torch.inference_mode():
        assert torch.equal(quantized(*examples[0]), expected)


def test_training() -> None:
    torch.manual_seed(0)
    prepared = prepare(Capturable(), [(images(),)], qat=True)
    assert prepared.training
    names = dict(prepared.named_parameters())
    assert "conv1.weight" in names
    optimizer = torch.optim.SGD(prepared.parameters(), 0.01)
    x = images()
    before = names["conv1.weight"].detach().clone()
    for _ in range(3):
        loss = prepared(x).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert not torch.equal(names["conv1.weight"], before)
    prepared.eval()
    with torch.no_grad():
        trained, quantized = prepared(x), convert(prepared)(x)
    assert sqnr(trained, quantized) > 35


def test_training_learns_what_the_export_flow_does() -> None:
    torch.manual_seed(0)
    model = Capturable()
    dropout: Any = model.tail[2]
    dropout.p = 0.0
    x = images()
    program = qc.prepare(qc.capture(model.eval(), (x,)), "x86", qat=True)
    prepared = prepare(model, [(x,)], qat=True)
    for step in range(3):
        batch = images(1.0 + step)
        a, b = prepared(batch), program(batch)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    prepared.eval()
    program.eval()
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), program(x), rtol=1e-4, atol=1e-5)


def test_users_hooks_are_called() -> None:
    model, examples, _ = seeded("what both flows take")
    quantized = convert(calibrated(model, examples))
    seen: list[Any] = []
    layer: Any = quantized.get_submodule("conv1")
    layer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    with torch.no_grad():
        expected = convert(calibrated(model, examples))(*examples[0])
        assert torch.equal(quantized(*examples[0]), expected)
    assert seen == [torch.Size([2, 8, 8, 8])]
