"""What was seen of a model, shared by all its states: statistics, copies, and what goes into a state dict."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import CalibrationError, DataError, LoadError, SaveError
from quantc.flows.tracing import convert, prepare
from quantc.flows.tracing.call_sites import FIRST_CHILD, Context
from quantc.flows.tracing.trace import MAGIC, Phase, Trace, Watch
from tests.support.traced_models import (
    Capturable,
)
from tests.support.traced_runs import (
    calibrated,
    images,
    seeded,
    trace_of,
)


def test_calibration_in_threads_counts_every_batch() -> None:
    model, examples, _ = seeded("what both flows take")
    batches = [images() for _ in range(8)]
    alone, shared = prepare(model, examples), prepare(model, examples)
    with torch.no_grad():
        for x in batches:
            alone(x)

    def run(start: int) -> None:
        with torch.no_grad():
            for x in batches[start::4]:
                shared(x)

    threads = [threading.Thread(target=run, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trace_of(shared).held.plan.batches == 8
    with torch.no_grad():
        assert torch.equal(convert(alone)(batches[0]), convert(shared)(batches[0]))


def test_deepcopy() -> None:
    model, examples, _ = seeded("what both flows take")
    prepared = calibrated(model, examples)
    twin = copy.deepcopy(prepared)
    quantized = convert(twin)
    with torch.no_grad():
        expected = convert(prepared)(*examples[0])
        assert torch.equal(quantized(*examples[0]), expected)
        assert torch.equal(copy.deepcopy(quantized)(*examples[0]), expected)


def test_state_dict_without_pickle() -> None:
    model, examples, _ = seeded("what both flows take")
    quantized = convert(calibrated(model, examples))
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    torch.manual_seed(1)
    other = Capturable().eval()
    again = convert(calibrated(other, [(images(3.0),)]))
    again.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        assert torch.equal(again(*examples[0]), quantized(*examples[0]))


def test_state_dict_of_a_calibration() -> None:
    model, examples, _ = seeded("what both flows take")
    prepared = calibrated(model, examples)
    fresh = prepare(model, examples)
    fresh.load_state_dict(prepared.state_dict())
    with torch.no_grad():
        assert torch.equal(convert(fresh)(*examples[0]), convert(prepared)(*examples[0]))


def small(**options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return prepare(model.train(bool(options)), torch.randn(3, 4), **options)


def test_a_trace_that_has_seen_nothing_is_refused() -> None:
    trace = Trace(Context("", FIRST_CHILD), "x86")
    assert trace.phase is Phase.TRACING
    assert trace.to_bytes() is None
    with pytest.raises(CalibrationError, match="traced"):
        trace.held  # noqa: B018


def test_weights_of_quantized_ops_are_known_by_name() -> None:
    prepared = small()
    trace = trace_of(prepared)
    assert trace.weights == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert set(trace.made_of) >= trace.weights
    assert not trace.is_converted


def test_what_was_seen_is_written_without_code_and_read_again() -> None:
    prepared, fresh = small(), small()
    prepared(torch.randn(3, 4))
    content = trace_of(prepared).to_bytes()
    assert content is not None
    assert content.startswith(MAGIC)
    trace_of(fresh).from_bytes(content, {})
    assert trace_of(fresh).held.plan.batches == 1
    assert trace_of(fresh).to_bytes() == content


def test_training_is_held_in_tensors_alone() -> None:
    assert trace_of(small(qat=True)).to_bytes() is None


def test_content_of_another_phase_or_of_none_is_refused() -> None:
    prepared = small()
    prepared(torch.randn(3, 4))
    quantized = convert(prepared)
    content = trace_of(quantized).to_bytes()
    assert content is not None
    for wrong in (content, b"", b"something else\n{}\n"):
        with pytest.raises(LoadError):
            trace_of(small()).from_bytes(wrong, {})


def test_content_that_was_changed_is_refused() -> None:
    prepared = small()
    prepared(torch.randn(3, 4))
    content = trace_of(prepared).to_bytes()
    assert content is not None
    spoiled = content.replace(b'"observing"', b'"converted"', 1)
    assert spoiled != content
    with pytest.raises(LoadError):
        trace_of(convert(prepared)).from_bytes(spoiled, {})


def test_a_trace_is_not_pickled() -> None:
    with pytest.raises(SaveError, match="state_dict"):
        pickle.dumps(trace_of(small()))


def test_a_run_counts_each_tensor_once_until_it_is_written_to() -> None:
    trace = trace_of(small())
    watch, x = Watch(trace), torch.randn(3, 4)
    group = next(iter(watch.tally.seats))
    for _ in range(3):
        watch.observe([group], x, lambda: "here")
    assert watch.tally.seats[group].part.seen == x.numel()
    x.add_(1)
    watch.observe([group], x, lambda: "here")
    assert watch.tally.seats[group].part.seen == 2 * x.numel()
    watch.observe([group], torch.ones(3, dtype=torch.int64), lambda: "here")
    assert watch.tally.seats[group].part.seen == 2 * x.numel()


def test_a_copy_that_a_call_made_is_not_counted_again() -> None:
    watch, x = Watch(trace_of(small())), torch.randn(3, 4)
    group = next(iter(watch.tally.seats))
    watch.observe([group], x, lambda: "here")
    twin = x.clone()
    watch.copy(twin, [x])
    watch.observe([group], twin, lambda: "here")
    assert watch.tally.seats[group].part.seen == x.numel()


def test_numbers_that_are_none_are_refused_with_the_place() -> None:
    watch = Watch(trace_of(small()))
    group = next(iter(watch.tally.seats))
    with pytest.raises(DataError) as caught:
        watch.observe([group], torch.tensor([1.0, float("nan")]), lambda: "model.py:7")
    assert "model.py:7" in str(caught.value.where)
