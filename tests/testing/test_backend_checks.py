"""The kit for authors of backends: it passes good backends, and names what is wrong with faulty ones."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.annotator import Annotator
from quantc.annotate.quantizer import TableQuantizer
from quantc.errors import PatternError
from quantc.ir.dialect import aten as aten_ops
from quantc.ir.dialect import is_op
from quantc.ir.program import Program, Stage
from quantc.ir.types import tensor_type
from quantc.passes.quantize import QuantizePass
from quantc.patterns import aten
from quantc.patterns.operand_patterns import const, value
from quantc.patterns.predicates import predicate
from quantc.patterns.rule import Match
from quantc.pipeline.pipeline import Outcome, Pass
from quantc.qdq.ops import is_quantize
from quantc.testing import Check, Conformance, check_backend
from tests.support.faulty_backends import FAULTY, GOOD, QDQ, Faulty
from tests.support.faulty_techniques import TECHNIQUES
from tests.support.onnx_models import ADDED
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def good() -> Conformance:
    return check_backend(GOOD)


def test_a_good_backend_passes(good: Conformance) -> None:
    assert good.failures == ()
    good.raise_if_failed()
    checked = {row.check for row in good.rows}
    of_backends = {check for check in Check if list(Check).index(check) < list(Check).index(Check.INVARIANTS)}
    assert of_backends - checked == {Check.KERNELS, Check.NAMED, Check.ONNX}  # which no rule of it claims
    for rule in GOOD.table.names:
        for check in (Check.SUPPORTS, Check.MODELS, Check.TAKEN, Check.RUNS, Check.PLACED, Check.FIDELITY):
            assert good.row(rule, check) is not None, (rule, check)


@pytest.mark.parametrize("faulty", [*FAULTY, *TECHNIQUES], ids=lambda faulty: faulty.name)
def test_a_faulty_backend_fails_in_the_right_row(faulty: Faulty) -> None:
    found = check_backend(faulty.backend)
    row = found.row(faulty.rule, faulty.check)
    assert row is not None
    assert not row.passed
    assert faulty.says in row.what
    assert row.advice
    # and nothing is said against rules that are right
    assert {failure.rule for failure in found.failures} <= {faulty.rule, *faulty.also}


def test_there_are_faults_of_many_kinds() -> None:
    assert len(FAULTY) >= 10
    assert len({faulty.name for faulty in FAULTY}) == len(FAULTY)
    assert len({faulty.check for faulty in FAULTY}) >= 12


class MaskedSoftmax(nn.Module):
    """What `softmax-of-float` is for: the scores hold a mask, and are not quantized."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(x.masked_fill(mask, float("-inf")), -1)


def masked_softmax() -> tuple[nn.Module, tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    return MaskedSoftmax(), (torch.randn(4, 6, 6, generator=generator), torch.ones(6, 6, dtype=torch.bool).triu(1))


SLOW_BACKENDS = ("onnx", "openvino", "qnnpack", "tensorrt", "x86")
EXAMPLES = {"qnnpack": {"softmax-of-float": masked_softmax}, "onnx": ADDED, "openvino": ADDED, "tensorrt": ADDED}


@pytest.mark.parametrize(
    "backend",
    ["executorch", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_BACKENDS)],
)
def test_the_backends_that_come_with_quantc_conform(backend: str) -> None:
    found = check_backend(backend, examples=EXAMPLES.get(backend))
    assert found.passed, str(found)


class BakeBatch(Pass):
    """Reshape the input of every sigmoid to the shape it has: right for one size of the batch alone."""

    name: ClassVar[str] = "test-bake-batch"
    needs: ClassVar[Stage] = Stage.CANONICAL

    def run(self, program: Program) -> bool:
        for node in list(program.graph.nodes):
            kind = tensor_type(node)
            if is_op(node, "sigmoid") and kind is not None and not is_op(node.args[0], "reshape"):
                args = (node.args[0], list(kind.shape))
                node.args = (program.emit(aten_ops.reshape.default, args, before=node, value=kind),)
        return True


def test_a_model_made_for_one_size_of_the_batch_is_said() -> None:
    backend = replace(GOOD, table=GOOD.table.only("sigmoid"), before=(BakeBatch(),))
    row = check_backend(backend).row("sigmoid", Check.BATCHES)
    assert row is not None
    assert not row.passed
    assert "a batch of 1" in row.what


def test_a_rule_that_takes_integers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The annotator sees to it that none does; without that, the kit does."""
    monkeypatch.setattr(Annotator, "why_not_tensor", lambda self, value: None)
    row = check_backend(replace(GOOD, table=GOOD.table.only("add"))).row("add", Check.INTEGERS)
    assert row is not None
    assert not row.passed
    assert "takes add" in row.what


def test_scales_that_are_not_shared_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plan ties together must come out as one scale; a quantize pass that forgot it would be found."""
    whole = QuantizePass.run

    def forgetful(self: QuantizePass, program: Program) -> Outcome:
        outcome = whole(self, program)
        for node in program.graph.nodes:
            if is_op(node.args[0] if node.args else None, "cat") and is_quantize(node):
                for one in (node, *node.users):
                    one.args = (one.args[0], 2 * float(str(one.args[1])), *one.args[2:])
        return outcome

    monkeypatch.setattr(QuantizePass, "run", forgetful)
    row = check_backend(replace(GOOD, table=GOOD.table.only("cat"))).row("cat", Check.SHARING)
    assert row is not None
    assert not row.passed


def test_several_backends_are_checked_as_a_quantizer() -> None:
    found = check_backend(qc.Quantizers((TableQuantizer(GOOD), TableQuantizer(replace(GOOD, name="other")))))
    assert (found.noun, found.backend) == ("quantizer", "good+other")
    with pytest.raises(qc.QuantcError, match="unknown backend 'nowhere'"):
        check_backend("nowhere")


class IndexAdd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.index_add(x, 0, torch.arange(4), x)


def test_a_model_can_be_given_for_a_rule_that_none_can_be_made_for() -> None:
    odd = next(faulty.backend for faulty in FAULTY if faulty.name == "op-without-example")
    generator = torch.Generator().manual_seed(0)
    found = check_backend(odd, examples={"odd": lambda: (IndexAdd(), (torch.randn(4, 8, generator=generator),))})
    assert found.passed, str(found)
    with pytest.raises(PatternError, match="has no rule 'od' to give an example for") as caught:
        check_backend(odd, examples={"od": lambda: (IndexAdd(), ())})
    assert "odd" in str(caught.value.advice)


def test_a_given_model_that_the_rule_does_not_take_is_said() -> None:
    backend = replace(GOOD, table=GOOD.table.only("tanh"))
    program = qc.capture(nn.ReLU().eval(), (torch.randn(2, 3),))
    row = check_backend(backend, examples={"tanh": lambda: program}).row("tanh", Check.TAKEN)
    assert row is not None
    assert not row.passed
    assert "fits nowhere in the model that was given" in row.what


HELD: list[Program] = []


@predicate("test-writes-to-what-is-held")
def why_not_writing(match: Match) -> str | None:
    for program in HELD:
        with torch.no_grad():
            next(program.root.parameters()).add_(1.0)
    return None


def test_a_captured_program_that_is_changed_is_said() -> None:
    def given() -> Program:
        HELD.append(qc.capture(nn.Linear(4, 4).eval(), (torch.randn(2, 4),)))
        return HELD[0]

    linear = replace(GOOD.table["linear"], when="test-writes-to-what-is-held", pattern=_only_square)
    backend = replace(GOOD, table=replace(GOOD.table, rules=(linear,)))
    try:
        row = check_backend(backend, examples={"linear": given}).row("linear", Check.UNCHANGED)
    finally:
        HELD.clear()
    assert row is not None
    assert not row.passed


_only_square = aten.linear(value("x", rank=2), const("w"), const("b?"))


def _example_code() -> str:
    return (ROOT / "examples" / "five_ops_backend.py").read_text(encoding="utf-8")


def test_a_backend_of_five_ops_takes_forty_lines_at_most() -> None:
    page = (ROOT / "docs" / "write-a-backend.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if "FIVE = Backend(" in block]
    assert len(block.strip().splitlines()) <= 40
    assert block.strip() in _example_code(), "the page and the example show the same backend"


def test_the_backend_of_the_tutorial_conforms() -> None:
    from examples.five_ops_backend import FIVE

    assert len(FIVE.table) == 5
    found = check_backend(FIVE)
    assert found.passed, str(found)
    assert FIVE.table["conv"].supports >= QDQ


def test_powers_of_two_are_no_fault() -> None:
    roles = {name: GOOD.outcome(name) for name in GOOD.roles}
    rounded = {
        name: found.spec.but(scale_bits=1)
        for name, found in roles.items()
        if isinstance(found, qc.Quantize) and found.spec.dtype is not qc.INT32_BIAS.dtype
    }
    backend = replace(GOOD.but(**rounded), takes=())
    rows = [row for row in check_backend(backend).failures if row.check in (Check.FIDELITY, Check.CHANNELS)]
    assert rows == []


def test_a_coarse_scale_is_not_blamed_on_the_axis() -> None:
    coarse = replace(GOOD.but(weight=qc.INT8_WEIGHT.but(eps=0.25)), takes=())
    row = check_backend(coarse).row("linear", Check.CHANNELS)
    assert row is not None
    assert not row.passed
    assert "dB without that" in row.what
    assert "the axis is right" in row.advice
