"""Captured programs compute what the models of the zoo compute, by either capture, and the captures agree."""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.errors import CaptureError, InputError
from quantc.ir.dialect import is_op
from quantc.ir.program import Program
from quantc.text.printer import numbered
from tests import zoo
from tests.support.agree import assert_agrees, assert_same_buffers, buffers, fingerprint, run
from tests.zoo import BY_NAME, CASES, Case

Method = Literal["export", "fx"]
METHODS: tuple[Method, ...] = ("export", "fx")
ZOO = str(Path(zoo.__file__).parent)
TESTS = str(Path(__file__).parents[1])

PAIRS = [
    pytest.param((case, method), id=f"{case.name}-{method}")
    for case in CASES
    for method in METHODS
    if method == "export" or not case.fx_refuses
]
TAKING_TURNS = [
    pytest.param(*pair.values, id=pair.id, marks=() if index % 2 else pytest.mark.slow)
    for index, pair in enumerate(PAIRS)
]
"""Every second pair at once; the others are slow."""
BOTH = [
    pytest.param(case, id=case.name, marks=() if index % 2 else pytest.mark.slow)
    for index, case in enumerate(case for case in CASES if not case.fx_refuses)
]


def fresh(case: Case, method: Method | Literal["auto"], **options: Any) -> Program:
    args, kwargs = case.example()
    return qc.capture(case.model(), args, method=method, example_kwargs=kwargs or None, **options)


@dataclass(frozen=True)
class Captured:
    """A model of the zoo and its program, captured once for the tests that look at it."""

    case: Case
    method: Method
    model: nn.Module
    before: str
    """The fingerprint of the model before it was captured."""
    program: Program


@pytest.fixture(scope="module", params=PAIRS)
def captured(request: pytest.FixtureRequest) -> Captured:
    case, method = request.param
    model = case.model()
    before = fingerprint(model)
    args, kwargs = case.example()
    program = qc.capture(model, args, method=method, example_kwargs=kwargs or None)
    return Captured(case, method, model, before, program)


def computing(program: Program) -> list[torch.fx.Node]:
    """The nodes that a line of the model's computes: sizes of inputs are read before it runs."""
    calls = ("call_function", "call_module", "call_method")
    return [
        node
        for node in program.nodes()
        if node.op in calls and node.target is not operator.getitem and not is_op(node, "sym_size")
    ]


def dynamic_shapes(case: Case) -> Any:
    """The first dimension of every input tensor is the batch."""
    batch = Dim("batch")
    args, kwargs = case.example()
    mark = lambda leaf: {0: batch} if isinstance(leaf, Tensor) else None  # noqa: E731 - read best as a value
    marked_args, marked_kwargs = pytree.tree_map(mark, (args, kwargs))
    if not kwargs:
        return marked_args
    names = list(inspect.signature(case.model().forward).parameters)
    return {**dict(zip(names, marked_args, strict=False)), **marked_kwargs}


def test_the_zoo_is_large_and_its_names_are_unique() -> None:
    assert len(CASES) >= 32
    assert len(BY_NAME) == len(CASES)


def test_program_equals_the_eager_model(captured: Captured) -> None:
    case, program = captured.case, captured.program
    assert fingerprint(captured.model) == captured.before, "capture changed the caller's model"
    assert program.method == captured.method
    program.verify()
    after = assert_agrees(case, program, batches=(2, 2, 2))
    assert fingerprint(captured.model) == captured.before, "running the program changed the caller's model"
    if "state" in case.tags:
        assert_same_buffers(program.module, after, buffers(case.model()))


def test_every_computing_node_knows_its_line_and_its_module(captured: Captured) -> None:
    program, model = captured.program, captured.model
    is_written_here = type(model).__module__.startswith("tests.zoo")
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    for node in computing(program):
        origin = program.origins.get(node)
        assert origin is not None, f"{node.name} has no origin"
        assert origin.module_path in known, node.name
        if is_written_here:
            assert origin.file.startswith(ZOO), f"{node.name} comes from {origin}"
            assert origin.line > 1
        else:
            # a container of torch's alone: no line of the user's computes anything, least of all the one that captures
            assert not origin.file.startswith(TESTS), f"{node.name} comes from {origin}"


def test_what_is_captured_is_canonical(captured: Captured) -> None:
    """Capture ends in the canonical form, so canonicalizing again changes nothing."""
    program = captured.program
    before = program.dump()
    qc.Pipeline.parse("canonicalize").run(program)
    assert not program.log[-1].changed
    assert program.dump() == before


def test_tied_parameters_stay_tied(captured: Captured) -> None:
    """A program has no more parameters than the model: sharing is kept, nothing is copied."""
    program = captured.program
    model = dict(captured.model.named_parameters(remove_duplicate=False))
    used = {str(node.target) for node in program.nodes() if node.op == "get_attr"}
    tensors = {name: program.module.get_parameter(name) for name in used & set(model)}
    for (a, left), (b, right) in combinations(tensors.items(), 2):
        assert (left is right) == (model[a] is model[b]), (a, b)


@pytest.mark.parametrize("case", BOTH)
def test_both_captures_give_the_same_canonical_program(case: Case) -> None:
    if case.dumps_differ:
        pytest.skip(case.dumps_differ)
    exported, traced = (numbered(fresh(case, method, dynamic_shapes=None)) for method in METHODS)
    assert traced.splitlines() == exported.splitlines()


@pytest.mark.parametrize("pair", TAKING_TURNS)
def test_dynamic_batch(pair: tuple[Case, Method]) -> None:
    case, method = pair
    if case.fixed_batch:
        pytest.skip(case.fixed_batch)
    program = fresh(case, method, dynamic_shapes=dynamic_shapes(case))
    assert_agrees(case, program, batches=(3, 5))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if case.shape_free])
def test_symbolic_tracing_needs_no_example_inputs_where_no_shape_is_read(case: Case) -> None:
    model = case.model()
    before = fingerprint(model)
    program = qc.capture(model, method="fx")
    assert fingerprint(model) == before
    program.verify()
    assert_agrees(case, program, batches=(2, 3))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if case.fx_refuses])
def test_symbolic_tracing_refuses_rather_than_guesses(case: Case) -> None:
    model = case.model()
    before = fingerprint(model)
    args, kwargs = case.example()
    with pytest.raises(CaptureError) as caught:
        qc.capture(model, args, method="fx", example_kwargs=kwargs or None)
    assert caught.value.advice
    assert fingerprint(model) == before


@pytest.mark.parametrize("name", ["mlp", "cond", "counter", "dict_in_and_out", "resnet_block"])
def test_auto_takes_what_either_takes(name: str) -> None:
    program = fresh(BY_NAME[name], "auto")
    assert program.method in METHODS
    assert_agrees(BY_NAME[name], program)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["mlp", "resnet_block", "vit", "dict_in_and_out"])
def test_another_size_than_the_captured_one_is_refused(name: str, method: Method) -> None:
    program = fresh(BY_NAME[name], method, dynamic_shapes=None)
    args, kwargs = BY_NAME[name].example(batch=3)
    with pytest.raises(InputError):
        run(program, args, kwargs)


ACCEPTED = [
    "mlp",
    "resnet_block",
    "unet",
    "vit",
    "lstm_tagger",
    "dict_in_and_out",
    "shared_module",
    "counter",
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ACCEPTED)
def test_torch_compile_takes_the_module(name: str, method: Method) -> None:
    case = BY_NAME[name]
    if method == "fx" and case.fx_refuses:
        pytest.skip(case.fx_refuses)
    torch._dynamo.reset()
    compiled = torch.compile(fresh(case, method).module, backend="eager", fullgraph=True)
    assert_agrees(case, compiled)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ACCEPTED)
def test_torch_export_takes_the_module(name: str, method: Method) -> None:
    case = BY_NAME[name]
    if method == "fx" and case.fx_refuses:
        pytest.skip(case.fx_refuses)
    args, kwargs = case.example()
    exported = torch.export.export(fresh(case, method).module, args, kwargs, strict=False)
    assert_agrees(case, exported.module())
