"""Observers as modules: the identity, which sees real data once and only while it is enabled."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import quantc as qc
from quantc.errors import DataError
from quantc.observe import MinMax, ObserverModule, observers_in, observers_off
from quantc.observe.module import behind, observer_nodes
from tests.support.calibration import batch, prepared


def observer(where: str = "") -> tuple[ObserverModule, MinMax]:
    seen = MinMax()
    return ObserverModule("relu:out0", seen, where), seen


def test_it_gives_back_the_very_tensor_and_observes_it() -> None:
    module, seen = observer()
    x = torch.tensor([-1.0, 3.0])
    assert module(x) is x
    assert (seen.seen, float(seen.range()[0]), float(seen.range()[1])) == (2, -1.0, 3.0)


def test_only_real_numbers_are_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = observer()
    module(torch.ones(2, device="meta"))
    with FakeTensorMode():
        module(torch.ones(2))
    assert seen.seen == 0
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    module(torch.ones(2))
    assert seen.seen == 0


def test_gradients_pass_and_do_not_reach_the_statistics() -> None:
    module, seen = observer()
    x = torch.ones(3, requires_grad=True)
    module(x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    assert not seen.range()[1].requires_grad


def test_new_nan_is_refused_where_it_appears() -> None:
    module, _ = observer("softmax of Net")
    module(torch.ones(2))
    with pytest.raises(DataError, match="2 of 3 values") as caught:
        module(torch.tensor([1.0, math.nan, math.inf]))
    assert caught.value.where == "softmax of Net"
    with pytest.raises(DataError, match="1 of 2 values"):
        module(torch.tensor([1.0, math.nan]))


def test_observers_are_switched_off_and_on_again_after_an_error() -> None:
    (first, seen), (second, _) = observer(), observer()
    second.enabled = False
    model = nn.Sequential(first, nn.Sequential(second, first))
    assert list(observers_in(model)) == [first, second]  # each once
    with observers_off(model):
        model(torch.ones(4))
    with pytest.raises(RuntimeError, match="size"), observers_off(model):
        model(torch.ones(4)).reshape(3)
    assert seen.seen == 0
    assert (first.enabled, second.enabled) == (True, False)  # what was off before stays off
    assert "off" in repr(second)
    assert "off" not in repr(first)


def test_the_nodes_that_call_observers_are_found_and_looked_behind() -> None:
    program = prepared("minmax")
    assert observer_nodes(program) == {}
    observed = qc.Pipeline.parse("insert-observers").run(program)
    nodes = observer_nodes(observed)
    assert {module.group for module in nodes.values()} == {module.group for module in observers_in(observed.root)}
    for node in nodes:
        source = behind(node, nodes)
        assert source not in nodes
        assert behind(source, nodes) is source
    assert behind(3, nodes) == 3
    with torch.no_grad():
        result: Tensor = observed(batch(0))
        assert torch.equal(result, program(batch(0)))
