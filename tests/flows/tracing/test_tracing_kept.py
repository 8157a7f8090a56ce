"""What is copied, saved and said of a traced model."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import CaptureError, LoadError
from quantc.flows import tracing
from quantc.flows.tracing import convert, prepare
from quantc.ir.decisions import FLOAT
from tests.support.traced_models import Capturable
from tests.support.traced_runs import Counted, Small, calibrated, nested, seeded, trace_of

# -- copies and files --------------------------------------------------------------------------------------------


def test_copies_are_calibrated_apart() -> None:
    model, examples, _ = seeded("what both flows take")
    prepared = calibrated(model, examples)
    with torch.no_grad():
        expected = convert(prepared)(*examples[0])
        twin = copy.deepcopy(prepared)
        for _ in range(3):
            twin(examples[0][0] * 10)
        assert trace_of(twin).held.plan.batches == trace_of(prepared).held.plan.batches + 3
        assert torch.equal(convert(prepared)(*examples[0]), expected)
        assert not torch.equal(convert(twin)(*examples[0]), expected)
        prepared(*examples[0])  # what was converted is not what is calibrated


def no_pickle(*_: Any, **__: Any) -> Any:
    raise AssertionError("this unpickles")


@pytest.mark.parametrize("phase", ["observing", "converted"])
def test_nothing_in_a_state_dict_is_pickled(phase: str, monkeypatch: Any) -> None:
    model, examples, _ = seeded("what both flows take")
    made = calibrated(model, examples)
    other = prepare(model, examples)
    if phase == "converted":
        made = convert(made)
        other = convert(calibrated(Capturable().eval(), examples))
    rows = made.state_dict()
    assert all(type(row) is Tensor for row in rows.values())
    file = io.BytesIO()
    torch.save(rows, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for name in ("loads", "load", "Unpickler"):
        monkeypatch.setattr(pickle, name, no_pickle)
    other.load_state_dict(loaded)
    monkeypatch.undo()
    with torch.no_grad():
        if phase == "observing":
            made, other = convert(made), convert(other)
        assert torch.equal(other(*examples[0]), made(*examples[0]))


def test_a_calibration_comes_with_its_weights() -> None:
    """What is folded by then is folded anew: the result is that of the model which was calibrated."""
    model, examples, _ = seeded("what both flows take")
    prepared, other = calibrated(model, examples), prepare(Capturable().eval(), examples)
    other.load_state_dict(prepared.state_dict())
    with torch.no_grad():
        assert torch.equal(convert(other)(*examples[0]), convert(prepared)(*examples[0]))


def test_state_dicts_of_other_models_are_refused() -> None:
    model, examples, _ = seeded("what both flows take")
    quantized = convert(calibrated(model, examples))
    rows = quantized.state_dict()
    (content,) = [name for name in rows if name.endswith("content")]
    del rows[content]
    with pytest.raises(RuntimeError, match="content"):
        quantized.load_state_dict(rows)
    x = torch.randn(2, 8)
    other = convert(calibrated(nn.Sequential(nn.Linear(8, 8)).eval(), [(x,)]))
    row = other.state_dict()
    row["_auto_quant_state.content"] = quantized.state_dict()[content]
    with pytest.raises(LoadError, match="another model"):
        other.load_state_dict(row)


# -- what is said ------------------------------------------------------------------------------------------------


def test_coverage_says_what_runs() -> None:
    config = qc.QuantConfig().set("deep.1.0", FLOAT)
    _, prepared, x = nested(config=config)
    text = str(tracing.coverage(prepared))
    with torch.no_grad():
        quantized = convert(prepared)
        quantized(x)
        with Counted() as counted:
            quantized(x)
    row = next(line for line in text.splitlines() if line.split()[:1] == ["conv2d"])
    assert row.split()[1] == str(counted.int8) == "4"
    assert counted.float_products == 1
    assert re.search(r"conv2d_\d\s+conv2d\s+deep\.1\.0 .*as the config says", text)
    assert "by conv of x86" in str(tracing.explain(prepared, "conv2d"))
    assert "softmax" in str(tracing.explain(prepared, "softmax"))


class Made(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Any:
        if self.how == "loop":
            for _ in range(3):
                x = self.layer(x)
            return x
        if self.how == "numbers":
            return self.layer(x) if x.sum().item() < 1e9 else x
        if self.how == "nothing":
            return self.layer(x) + torch.zeros(8)
        return (self.layer(x), "done")


REASONS = {
    "loop": "linear was called 3 times",
    "numbers": r"item looks at numbers \(test_tracing_kept.py:\d+\)",
    "nothing": "zeros makes a tensor of nothing",
    "values": "values other than tensors",
}


@pytest.mark.parametrize("how", REASONS)
def test_why_a_trace_is_not_stable(how: str) -> None:
    prepared = prepare(Made(how).eval(), torch.randn(2, 8))
    with pytest.raises(CaptureError, match=f"not stable: .*{REASONS[how]}"):
        tracing.to_program(prepared)


def test_norms_count_their_batches_as_torch_does() -> None:
    torch.manual_seed(0)
    model = Small()
    trained: Any = prepare(model, torch.randn(2, 3, 8, 8), qat=True)
    batches = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    for x in batches:
        trained(x)
    assert int(trained.norm.num_batches_tracked) == 3
    again = nn.BatchNorm2d(8)
    for x in batches:
        again(model.conv(x))
    torch.testing.assert_close(trained.norm.running_mean, again.running_mean, rtol=0.05, atol=0.02)
