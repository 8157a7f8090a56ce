"""Rule by rule, what ONNX Runtime makes of the kit's models for the backend `onnx`: kernels on integers, moves of levels, or float."""

from __future__ import annotations

import pytest

import quantc as qc
from quantc.backends.onnx import ONNX
from quantc.targets.onnx.ort_fusions import Fusions
from quantc.testing.kernel_checks import one_for_each_op
from quantc.testing.rule_trial import Subject, calibrate_trial, trials_of
from quantc.verbs.convert import convert
from tests.support.onnx_models import ADDED, quantized

pytest.importorskip("onnxruntime")
KERNELS = {
    "add": {"QLinearAdd"},
    "add-convolutions": {"QLinearAdd"},
    "addmm-constant": {"QGemm"},
    "average": {"QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearReduceMean"},
    "cat": {"QLinearConcat"},
    "conv": {"QLinearConv"},
    "linear": {"QGemm"},
    "linear-computed": {"QGemm"},
    "matmul": {"QLinearMatMul"},
    "matmul-constant": {"QLinearMatMul"},
    "mul": {"QLinearMul"},
    "stack": {"QLinearConcat"},
}
"""By rule: the kernels on integers, one of which it becomes."""
MOVED = frozenset(
    {
        "clamp",
        "copy",
        "embedding",
        "expand",
        "extreme",
        "flip",
        "gather",
        "max-pool",
        "pad",
        "reshape",
        "shuffle",
        "slice",
        "split",
        "transpose",
        "upsample",
    }
)
"""Rules whose ops pick or move levels: ops that ONNX has for integers too, so that nothing is computed in float."""
IN_FLOAT = frozenset({"gru", "gru-cell", "lstm", "lstm-cell", "rnn", "rnn-cell"})
"""Rules whose weights are int8 and whose arithmetic is float. A name may be taken out of here, and none may be added."""


def fusions(name: str) -> list[Fusions]:
    """What becomes of a model for each op of a rule."""
    if name in ADDED:
        model, inputs = ADDED[name]()
        return [qc.lower(quantized(model, [inputs]), "onnx").fusions()]
    subject = Subject(ONNX)
    trials = one_for_each_op(trials_of(subject, subject.demanded.table[name]))
    return [qc.lower(convert(calibrate_trial(each.prepared.clone(), each.inputs)), "onnx").fusions() for each in trials]


def test_every_rule_is_told_of() -> None:
    assert {*KERNELS, *MOVED, *IN_FLOAT} == set(ONNX.table.names)


@pytest.mark.parametrize("name", ONNX.table.names)
def test_a_rule_becomes_what_it_is_said_to(name: str) -> None:
    found = fusions(name)
    assert found
    for each in found:
        if name in KERNELS:
            assert KERNELS[name] & set(each.integer), each
        assert bool(each.left) == (name in IN_FLOAT), each
        if name in MOVED:
            assert not each.integer, each
