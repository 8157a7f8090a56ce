"""Unusual but legal models: captured programs compute the same, and the caller's model stays as it was."""

from __future__ import annotations

import time
import warnings
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.errors import CaptureError, ModeError
from quantc.text.printer import numbered
from tests.support.agree import assert_same, fingerprint, run
from tests.support.edge_models import EDGES, Counts, Edge, hooked, linear, module

Method = Literal["export", "fx"]
METHODS: tuple[Method, ...] = ("export", "fx")
methods = pytest.mark.parametrize("method", METHODS)


def refusal(case: Edge, method: Method) -> str:
    return case.export_refuses if method == "export" else case.fx_refuses


TAKEN = [
    pytest.param(case, method, id=f"{case}-{method}")
    for case in EDGES
    for method in METHODS
    if not refusal(case, method)
]
REFUSED = [
    pytest.param(case, method, id=f"{case}-{method}") for case in EDGES for method in METHODS if refusal(case, method)
]


def built(case: Edge) -> tuple[nn.Module, tuple[Any, ...]]:
    """The same model and inputs each time."""
    torch.manual_seed(0)
    model: nn.Module = case.build()
    return model.train(case.training), case.inputs()


def plain(model: nn.Module) -> list[tuple[str, str, str]]:
    """The Python attributes of a model that are no tensors."""
    return [
        (path, name, repr(value))
        for path, part in model.named_modules()
        for name, value in vars(part).items()
        if not name.startswith("_") and not isinstance(value, Tensor)
    ]


@pytest.mark.parametrize(("case", "method"), TAKEN)
def test_the_program_computes_what_the_model_computes(case: Edge, method: Method) -> None:
    model, args = built(case)
    program = qc.capture(model, args, method=method)
    program.verify()
    eager, args = built(case)
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = run(eager, args)
        torch.manual_seed(seed)
        actual = run(program, args)
        assert_same(actual.output, expected.output)
        assert_same(actual.arguments, expected.arguments)
    mine = dict(program.module.named_buffers())
    for name, buffer in eager.named_buffers():
        assert name not in mine or torch.equal(mine[name], buffer), name


@pytest.mark.parametrize(("case", "method"), TAKEN)
def test_capture_changes_nothing_and_says_nothing(
    case: Edge, method: Method, capfd: pytest.CaptureFixture[str]
) -> None:
    model, args = built(case)
    before, attributes, examples = fingerprint(model), plain(model), pytree.tree_map_only(Tensor, torch.clone, args)
    hooks = [len(part._forward_hooks) for part in model.modules()]
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qc.capture(model, args, method=method)
    assert fingerprint(model) == before
    assert plain(model) == attributes
    assert [len(part._forward_hooks) for part in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), state), "capture drew random numbers"
    assert_same(args, examples)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize(("case", "method"), REFUSED)
def test_what_one_method_cannot_take_the_other_can(case: Edge, method: Method) -> None:
    model, args = built(case)
    with pytest.raises(CaptureError) as caught:
        qc.capture(model, args, method=method)
    assert refusal(case, method) in caught.value.what
    assert caught.value.where
    program = qc.capture(model, args)
    assert program.method != method


@methods
def test_clones_are_independent(method: Method) -> None:
    program = qc.capture(
        module(lambda self, x: self.bn(self.fc(x)), fc=linear, bn=lambda: nn.BatchNorm1d(4))().train(),
        (torch.randn(3, 4),),
        method=method,
    )
    twin = program.clone()
    twin(torch.randn(3, 4))
    assert twin.dump() != program.dump(), "running the twin changed its buffers, and only its own"
    with torch.no_grad():
        next(iter(twin.module.parameters())).zero_()
    assert next(iter(program.module.parameters())).abs().sum() > 0


@methods
def test_an_opaque_op_is_listed_and_its_neighbours_are_canonical(method: Method) -> None:
    case = next(case for case in EDGES if case.name == "custom op")
    model, args = built(case)
    program = qc.capture(model, args, method=method)
    assert [str(node.target) for node in program.opaque()] == ["quantc_tests.scaled.default"]
    assert "relu(" in program.dump()
    assert "linear(" in program.dump()


def test_hooks_give_the_same_program_by_either_method() -> None:
    args = (torch.randn(2, 4),)
    torch.manual_seed(0)
    model = hooked()
    export, fx = (qc.capture(model, args, method=method) for method in METHODS)
    assert numbered(export) == numbered(fx)


def test_the_log_names_state_that_does_not_matter() -> None:
    program = qc.capture(Counts(), (torch.randn(2, 4),), method="fx")
    assert any("self.count" in note for entry in program.log for note in entry.notes)


def test_a_very_deep_model_is_traced_in_time_that_grows_with_its_depth() -> None:
    def seconds(depth: int) -> float:
        model = nn.Sequential(*(nn.ReLU() if i % 2 else nn.Linear(2, 2) for i in range(depth)))
        start = time.perf_counter()
        program = qc.capture(model, (torch.randn(1, 2),), method="fx")
        elapsed = time.perf_counter() - start
        x = torch.randn(1, 2)
        assert torch.equal(program(x), model(x))
        return elapsed

    seconds(20)
    short, long = seconds(500), seconds(2000)
    assert long < 10 * short


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) + 1


def test_deeply_nested_modules() -> None:
    model: nn.Module = linear()
    for _ in range(60):
        model = Around(model)
    x = torch.randn(2, 4)
    for method in METHODS:
        assert torch.equal(qc.capture(model, (x,), method=method)(x), model(x))


def test_a_model_on_the_meta_device() -> None:
    model = nn.Sequential(nn.Linear(4, 3, device="meta"), nn.ReLU())
    for method in METHODS:
        program = qc.capture(model, (torch.empty(2, 4, device="meta"),), method=method)
        assert "f32[2,3] = relu(" in program.dump()


@methods
def test_a_cumulative_batch_norm_works_in_inference_and_cannot_be_trained(method: Method) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=None)).eval()
    x = torch.randn(3, 4)
    program = qc.capture(model, (x,), method=method)
    assert torch.equal(program(x), model(x))
    with pytest.raises(ModeError, match="momentum=None") as caught:
        program.train()
    assert caught.value.where
    assert caught.value.advice


@methods
def test_attention_with_masks(method: Method) -> None:
    """Torch's fused kernel for inference adds in another order, so compare with the one that follows the code."""
    torch.manual_seed(0)
    attention = module(
        lambda self, x, pad: self.m(x, x, x, key_padding_mask=pad, attn_mask=torch.ones(5, 5).triu(1).bool()),
        m=lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    )().eval()
    x, pad = torch.randn(2, 5, 8), torch.tensor([[False] * 4 + [True], [False] * 3 + [True] * 2])
    program = qc.capture(attention, (x, pad), method=method)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert_same(run(program, (x, pad)).output, run(attention, (x, pad)).output, 1e-6)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("name", ["counts", "hooks on the model", "shared modules", "asks what it is", "nested output"])
def test_strict_export(name: str) -> None:
    model, args = built(next(case for case in EDGES if case.name == name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = qc.capture(model, args, method="export-strict")
    assert_same(run(program, args).output, run(model, args).output)


def test_strict_export_refuses_autocast_which_it_gets_wrong() -> None:
    model, args = built(next(case for case in EDGES if case.name == "autocast"))
    with pytest.raises(CaptureError, match="method='export'"):
        qc.capture(model, args, method="export-strict")
