"""The batch is open by default, wherever the model allows it; where not, the log says why."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.capture.capture_request import Request
from quantc.capture.export.open_batch import with_open_batch
from quantc.errors import CaptureError, InputError
from quantc.ir.program import Program
from quantc.passes.fix_sizes import fix_opened
from quantc.text.parser import parse
from quantc.text.printer import numbered
from tests.support.agree import assert_same, fingerprint, run
from tests.support.edge_models import linear, module
from tests.zoo import BY_NAME, CASES, Case

SIZES = (1, 2, 5)
FEW = ("mlp", "resnet_block", "bert", "vit", "lstm_tagger", "same_padding_odd", "counter", "dict_in_and_out")
FIXED = {
    "embedding_bags": "mixes",
    "inplace_used_again": "mixes",
    "inplace_index_put": "mixes",
    "inplace_zeroed": "generated guard",
    "spell_products": "mixes",
    "spell_moves": "mixes",
    "spell_slices": "mixes",
    "spell_reductions": "mixes",
    "spell_reshapes": "a number that depends on the size",
    "batch_norm_no_stats": "mixes",
    "moving_average": "mixes",
    "cache": "mixes",
}
"""The models of the zoo whose batch stays fixed, each with a word of the reason."""


def captured(case: Case, batch: int = 2, **options: Any) -> Program:
    args, kwargs = case.example(batch=batch)
    return qc.capture(case.model(), args, example_kwargs=kwargs or None, **options)


def said(program: Program) -> str:
    return "\n".join(program.log[0].notes)


def agrees(case: Case, batch: int) -> Program:
    """A program captured at one size, held against the model at others."""
    program = captured(case, batch)
    for size in SIZES if program.signature.opened else (batch,):
        args, kwargs = case.example(seed=3, batch=size)
        own = program.clone()  # some models count their calls
        assert_same(run(own, args, kwargs).output, run(case.model(), args, kwargs).output, 1e-6)
    return program


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", FEW)
def test_models_are_right_at_any_batch(name: str, batch: int) -> None:
    program = agrees(BY_NAME[name], batch)
    assert program.signature.opened == {"batch"}
    assert "is open, from 1" in said(program)


@pytest.mark.slow
def test_every_model_of_the_zoo_is_open_or_says_why_not() -> None:
    programs = {case.name: agrees(case, 2) for case in CASES}
    fixed = {name: said(program) for name, program in programs.items() if not program.signature.opened}
    assert set(fixed) == set(FIXED)
    assert all(FIXED[name] in reason for name, reason in fixed.items())
    assert Counter(bool(program.signature.opened) for program in programs.values())[True] >= 80


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
def test_an_open_batch_costs_no_bit_quantized_or_lowered(backend: str) -> None:
    compared = 0
    for case in CASES:
        args, kwargs = case.example()
        if kwargs or case.name in FIXED or case.name == "inplace_writes_input":
            continue
        batches = [case.example(seed=seed)[0] for seed in range(4)]  # both branches of a cond
        given = [
            qc.quantize(case.model(), args, batches, backend, dynamic_shapes=how, allow_empty=True)
            for how in ("auto", None)
        ]
        if not all(row.rule for made in given for row in made.prepared.coverage().rows if row.verdict == "quantized"):
            continue
        opened, fixed = (pytree.tree_leaves((made(*args), qc.lower(made.program, backend)(*args))) for made in given)
        assert all(torch.equal(a, b) for a, b in zip(opened, fixed, strict=True) if isinstance(a, Tensor)), case.name
        compared += 1
    assert compared >= 60


@pytest.mark.parametrize("name", FEW)
def test_sizes_fixed_afterwards_are_those_of_a_fixed_capture(name: str) -> None:
    """Bit for bit the same results; the same text where no size is computed."""
    case = BY_NAME[name]
    program = captured(case)
    assert fix_opened(program) == "batch is fixed to 2, as in the example inputs"
    program.verify()
    fixed = captured(case, dynamic_shapes=None)
    args, kwargs = case.example(seed=3)
    assert_same(run(program, args, kwargs).output, run(fixed, args, kwargs).output)
    assert all(item.type is None or item.type.is_static for item in program.signature.inputs)
    assert not program.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    if name in ("mlp", "resnet_block"):
        assert numbered(program) == numbered(fixed)
    assert fix_opened(program) is None


X = torch.randn(4, 6)
STAYS = {
    "samples that mix": (lambda s, x: x - x.mean(0), (X,), "output 0 mixes the samples"),
    "rows of two samples": (lambda s, x: x.reshape(-1, 4) * 2, (X,), "generated guard|the model itself fails"),
    "an order of samples": (lambda s, x: x.cumsum(0), (X,), "mixes the samples"),
    "one number for all": (lambda s, x: F.relu(x).sum(), (X,), "mixes the samples"),
    "a constant size": (lambda s, x: x.view(4, 2, 3).sum(1), (X,), "fixed (to 4 )?by the model"),
    "a branch on the size": (lambda s, x: x * 2 if x.shape[0] > 3 else -x, (X,), "fixed by the model|a dynamic size"),
    "a branch beyond what is tried": (
        lambda s, x: x * 2 if x.shape[0] > 100 else -x,
        (X,),
        "fixed by the model|a dynamic size",
    ),
    "a loop over samples": (
        lambda s, x: torch.stack([row * 2 for row in x]),
        (X,),
        "fixed by the model|is looped over",
    ),
    "a size among the outputs": (lambda s, x: (x, x.shape[0]), (X,), "a number that depends on the size"),
    "no shared size": (lambda s, x, y: x + y[0], (X, torch.randn(3, 6)), "x has 4 and y has 3"),
    "no dimensions": (lambda s, x, y: x * y, (X, torch.tensor(2.0)), "input 'y' has no dimensions"),
    "no tensor": (lambda s, k: torch.ones(2) * k, (3,), "no example input is a tensor"),
    "no samples": (lambda s, x: x * 2, (torch.zeros(0, 3),), "the example batch is empty"),
}


@pytest.mark.parametrize("method", ["export", "fx"])
@pytest.mark.parametrize(("forward", "example", "words"), STAYS.values(), ids=STAYS)
def test_what_cannot_be_open_is_fixed_and_says_why(forward: Any, example: Any, words: str, method: Any) -> None:
    model = module(forward)().eval()
    program = qc.capture(model, example, method)
    assert "sizes are fixed to those of the example inputs: " in said(program)
    assert re.search(words, said(program)), said(program)
    assert not program.signature.opened
    assert not program.signature.ranges
    assert_same(run(program, example).output, run(model, example).output)


@pytest.mark.parametrize(("change", "words"), [("mm", "fails"), ("sin", "is not the model")])
def test_a_program_that_fixed_sizes_do_not_mend_is_refused(change: str, words: str) -> None:
    model = module(lambda s, x: s.fc(x).relu(), fc=linear)().eval()
    request = Request((torch.ones(3, 4),), {}, "auto", ())

    def broken(request: Request) -> tuple[Program, list[str]]:
        program = qc.capture(model, request.args, dynamic_shapes=request.dynamic_shapes)
        (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        node.target = torch.ops.aten.sin.default if change == "sin" else torch.ops.aten.mm.default
        return program, []

    with pytest.raises(CaptureError, match=f"on the example inputs the captured program {words}"):
        with_open_batch(model, request, broken)


STILL = {
    "rows of one sample": (lambda s, x: x.reshape(-1, 3) * 2, (X,)),
    "no row at all": (lambda s, x: (x, torch.ones(2)), (X,)),
    "another axis for the batch": (lambda s, x: (x.t(), x), (X,)),
    "a batch of one": (lambda s, x: s.fc(x).relu(), (torch.zeros(1, 4),)),
    "a batch of three": (lambda s, x: s.fc(x).relu(), (torch.ones(3, 4),)),
    "two inputs, one of integers": (lambda s, x, y: x * y[:, None], (X, torch.arange(4))),
    "a constant": (lambda s, x, k: x * k, (X, 3)),
}


@pytest.mark.parametrize("method", ["export", "fx"])
@pytest.mark.parametrize(("forward", "example"), STILL.values(), ids=STILL)
def test_what_keeps_samples_apart_is_open(forward: Any, example: Any, method: Any) -> None:
    model = module(forward, fc=linear)().eval()
    program = qc.capture(model, example, method)
    assert program.signature.opened == {"batch"}, said(program)
    for size in SIZES:
        args = tuple(x[:1].repeat(size, *[1] * (x.dim() - 1)) if isinstance(x, Tensor) else x for x in example)
        assert_same(run(program, args).output, run(model, args).output, 1e-6)


@pytest.mark.parametrize("method", ["export", "fx"])
def test_a_model_that_fails_on_a_single_sample_is_open_from_two(method: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).train()
    program = qc.capture(model, (X,), method)
    assert program.signature.ranges == {"batch": (2, None)}
    assert "is open, from 2" in said(program)
    with pytest.raises(InputError, match="size batch is 1, outside the captured range 2"):
        program(X[:1])


@pytest.mark.parametrize("method", ["export", "fx"])
def test_what_a_single_sample_changes_is_not_guessed(method: Any) -> None:
    model = module(lambda s, x: x.squeeze().sum(-1))().eval()
    program = qc.capture(model, (X,), method)
    low = program.signature.ranges["batch"][0] if program.signature.opened else 2
    for size in (1, 3):
        if size >= low:
            assert_same(run(program, (X[:size],)).output, run(model, (X[:size],)).output)


def test_random_numbers_and_modes_are_kept_apart() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6)).train()
    before = fingerprint(model)
    torch.manual_seed(7)
    program = qc.capture(model, (X,))
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), drawn)
    assert fingerprint(model) == before
    assert program.signature.opened
    assert torch.backends.mha.get_fastpath_enabled()
    assert_same(run(program.eval(), (X,)).output, run(model.eval(), (X,)).output, 1e-6)


def test_attention_by_its_fused_kernel_does_not_close_the_batch() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)
    program = qc.capture(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval(), (torch.randn(2, 5, 8),))
    assert program.signature.opened, said(program)


def test_none_fixes_all_sizes() -> None:
    program = qc.capture(nn.Linear(6, 4), (X,), dynamic_shapes=None)
    assert "batch" not in said(program)
    with pytest.raises(InputError, match="has size 3 in dimension 0"):
        program(X[:3])


def test_who_opened_it_is_in_the_text_and_the_file(tmp_path: Any) -> None:
    program = qc.capture(nn.Linear(6, 4), (X,))
    assert "size batch in 1.. auto" in str(program)
    assert parse(str(program)).signature.opened == {"batch"}
    program.save(tmp_path / "p.qc")
    assert qc.load(tmp_path / "p.qc").signature == program.signature
    asked = qc.capture(nn.Linear(6, 4), (X,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    assert not asked.signature.opened
    assert not parse(str(asked)).signature.opened


def test_the_report_says_that_the_batch_is_open() -> None:
    result = qc.quantize(nn.Linear(6, 4).eval(), (X[:1],), [X, X[:3], X[:1]])
    assert "the batch (dimension 0 of input) is open" in str(result.report.log[0])
    assert result(torch.randn(7, 6)).shape == (7, 4)
    assert qc.lower(result.program, "x86")(torch.randn(7, 6)).shape == (7, 4)


def test_executorch_takes_the_batch_of_the_example_and_says_so() -> None:
    pytest.importorskip("executorch")
    program = qc.quantize(nn.Linear(6, 4).eval(), (X,), [X], "executorch").program
    lowered = qc.lower(program, "executorch")
    assert "batch is fixed to 4, as in the example inputs; for other sizes give largest=" in str(lowered)
    with pytest.raises(InputError, match="has size 3 in dimension 0"):
        lowered(X[:3])
    assert program.signature.opened
    free = qc.lower(program, "executorch", largest=8)
    assert free(X[:3]).shape == (3, 4)
    assert torch.equal(free(X), lowered(X))


def test_onnx_keeps_the_batch_open() -> None:
    pytest.importorskip("onnxruntime")
    lowered = qc.lower(qc.quantize(nn.Linear(6, 4).eval(), (X,), [X], "onnx").program, "onnx")
    assert lowered.proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert lowered(torch.randn(7, 6)).shape == (7, 4)


def test_executorch_keeps_the_batch_open_of_an_example_of_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)).eval()
    x = torch.randn(1, 3, 6, 6)
    program = qc.quantize(model, (x,), [x], backend="executorch").program
    lowered = qc.lower(program, "executorch", largest={"batch": 8})
    with torch.no_grad():
        for size in (1, 2, 8):
            given = torch.randn(size, 3, 6, 6)
            assert lowered(given).shape == (size, 4)
            assert float((lowered(given) - program(given)).abs().max()) < 0.05
