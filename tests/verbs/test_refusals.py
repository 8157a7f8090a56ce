"""Everything quantc promises to refuse: the kind of error, the place it names, and what it says to do.

One test (or several) for each refusal a user is promised, in that order. Each must be a `QuantcError`, must come
before any partial result, and must leave what was given to it as it was.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.annotator import Annotator
from quantc.errors import (
    AnnotationError,
    CalibrationError,
    ConfigError,
    DataError,
    GuardError,
    LoadError,
    MissingDependencyError,
    PassError,
    PipelineError,
    QuantcError,
    UnknownNameError,
)
from quantc.files import sealed_tensors
from quantc.hooks import Guard, Reproducer, Verify
from quantc.ir.decisions import Quantize, SameAs
from quantc.ir.program import Program
from quantc.observe import Statistics, start
from quantc.observe.store import STATISTICS, VERSION
from quantc.pipeline.pipeline import Pass, Pipeline
from quantc.spec.spec import INT4_GROUP, INT8, INT16, UINT8
from tests.support.by_hand import two_layers

E = TypeVar("E", bound=QuantcError)


class Net(nn.Module):
    """Two convolutions with names to blame, and an op that no backend quantizes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.log1p(self.first(x).abs())))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def images(seed: int = 0) -> Tensor:
    return torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def captured(model: nn.Module) -> Program:
    return qc.capture(model, (images(),))


def prepared(model: nn.Module) -> Program:
    return qc.prepare(captured(model), "x86")


def refused(kind: type[E], attempt: Callable[[], Any]) -> E:
    """The refusal, which says what, where and what to do."""
    with pytest.raises(kind) as caught:
        attempt()
    assert caught.value.what
    assert caught.value.where
    assert caught.value.advice
    return caught.value


# -- calibration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [[], (), iter([])], ids=["list", "tuple", "iterator"])
def test_zero_batches(net: Net, batches: Any) -> None:
    program = prepared(net)
    error = refused(CalibrationError, lambda: qc.calibrate(program, batches))
    assert "zero batches" in error.what
    assert "Net" in str(error.where)
    assert "at least one batch" in str(error.advice)
    refused(CalibrationError, lambda: qc.convert(program))


def test_zero_batches_in_one_call(net: Net) -> None:
    assert "zero batches" in refused(CalibrationError, lambda: qc.quantize(net, (images(),), [])).what


def test_converting_without_calibrating(net: Net) -> None:
    error = refused(CalibrationError, lambda: qc.convert(prepared(net)))
    assert "was not calibrated" in error.what
    assert "qc.calibrate" in str(error.advice)


def test_calibrating_or_converting_what_was_not_prepared(net: Net) -> None:
    program = captured(net)
    verbs: tuple[Callable[[], Any], ...] = (lambda: qc.calibrate(program, [images()]), lambda: qc.convert(program))
    for verb in verbs:
        assert "qc.prepare" in str(refused(CalibrationError, verb).advice)


# -- NaN and infinity -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [nan, inf, -inf], ids=str)
def test_bad_numbers_in_the_data_name_the_node_and_the_batch(net: Net, bad: float) -> None:
    batches = [images(seed) for seed in range(4)]
    batches[2][1, 0, 3, 3] = bad
    error = refused(DataError, lambda: qc.convert(_calibrated(net, batches)))
    text = str(error)
    assert "x" in str(error.where), "the input has them first"
    assert "batch 2" in text
    assert "NaN" in text or "infinit" in text


class Logarithm(Net):
    """The first batch without a positive number gives minus infinity."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.log(torch.relu(self.first(x)))))


def test_bad_numbers_that_the_model_makes_name_the_op() -> None:
    torch.manual_seed(0)
    model = Logarithm().eval()
    with torch.no_grad():
        model.first.weight.abs_()
        model.first.bias = nn.Parameter(torch.full((4,), 0.1))
    batches = [images(0), images(1), -images(2)]
    error = refused(DataError, lambda: qc.convert(_calibrated(model, batches)))
    assert "log (" in str(error.where)
    assert "test_refusals.py" in str(error.where), "the line of the model"
    assert "batch 2" in str(error)


@pytest.mark.parametrize("bad", [nan, inf], ids=str)
def test_bad_numbers_in_a_weight_name_the_weight(net: Net, bad: float) -> None:
    with torch.no_grad():
        net.second.weight[1, 2, 0, 0] = bad
    error = refused(DataError, lambda: qc.convert(_calibrated(net, [images()])))
    assert "second" in str(error.where)


def _calibrated(model: nn.Module, batches: list[Tensor]) -> Program:
    program = prepared(model)
    qc.calibrate(program, batches)
    return program


# -- config ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "closest"),
    [
        (qc.QuantConfig().set("frist", qc.FLOAT), "first"),
        (qc.QuantConfig().set_op("conv3d", qc.FLOAT), "conv2d"),
        (qc.QuantConfig().set_node("conv2d_2", qc.FLOAT), "conv2d_1"),
        (qc.QuantConfig().set_edge("log1p", "frist", qc.FLOAT), "first"),
        (qc.QuantConfig().set(nn.Conv1d, qc.FLOAT), "Conv2d"),
    ],
    ids=["module", "op", "node", "edge", "type"],
)
def test_a_selector_that_matches_nothing(net: Net, config: qc.QuantConfig, closest: str) -> None:
    error = refused(ConfigError, lambda: qc.prepare(captured(net), "x86", config=config))
    assert str(config.rules[0].select) in error.what
    assert closest in str(error.advice)


def test_nothing_was_quantized(net: Net) -> None:
    program = captured(net)
    config = qc.QuantConfig().set_all(qc.FLOAT)
    error = refused(AnnotationError, lambda: qc.prepare(program, "x86", config=config))
    assert "nothing was quantized" in error.what
    assert "allow_empty=True" in str(error.advice)
    assert program.plan.is_empty
    qc.prepare(program, "x86", config=config, allow_empty=True)


def test_nothing_was_quantized_because_no_rule_fits() -> None:
    model = nn.Sequential(nn.Softplus()).eval()
    error = refused(AnnotationError, lambda: qc.quantize(model, (torch.rand(2, 3),), [torch.rand(2, 3)]))
    assert "nothing was quantized" in error.what
    assert "docs/backends.md" in str(error.advice), "where the ops the backend knows are listed"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (qc.INT16, "int16"),
        (INT4_GROUP, "groups of 32 do not divide the 4 elements"),
        (UINT8.but(scheme="symmetric", dtype="int4"), "int4"),
    ],
    ids=["int16", "int4-group", "int4"],
)
def test_a_spec_the_backend_cannot_run(net: Net, spec: qc.QuantSpec, says: str) -> None:
    config = qc.QuantConfig().set("second", spec)
    error = refused(AnnotationError, lambda: qc.prepare(captured(net), "x86", config=config))
    assert "'x86' cannot run" in error.what
    assert says in error.what
    assert "conv2d_1 (second : Conv2d" in str(error.where)
    assert "FLOAT" in str(error.advice)


# -- sharing --------------------------------------------------------------------------------------------------


class Tying:
    """A quantizer that ties places as it is told to: (place, place it is like or spec), by node and operand."""

    name = "tying"

    def __init__(self, *decisions: tuple[str, str | qc.QuantSpec]) -> None:
        self.decisions = decisions

    def transforms(self) -> tuple[Pass, ...]:
        return ()

    def annotate(self, annotator: Annotator) -> None:
        for name, outcome in self.decisions:
            node = annotator.program.node(name)
            annotator.claim([node], qc_claim(name))
            wanted = Quantize(outcome) if isinstance(outcome, qc.QuantSpec) else None
            if wanted is None:
                other = annotator.program.node(str(outcome))
                annotator.output(node, SameAs(annotator.places.out(other)))
            else:
                annotator.output(node, wanted)

    def validate(self, program: Program) -> None:
        return None

    def supported_operators(self) -> tuple[str, ...]:
        return ("conv2d",)

    def explain(self, program: Program, node: str) -> Any:
        raise NotImplementedError


def qc_claim(name: str) -> Any:
    from quantc.ir.plan import Claim

    return Claim("tying", "all", name)


def test_a_circle_of_sharing_names_its_members(net: Net) -> None:
    tying = Tying(("conv2d", "log1p"), ("log1p", "conv2d_1"), ("conv2d_1", "conv2d"))
    error = refused(AnnotationError, lambda: qc.prepare(captured(net), tying))
    for member in ("conv2d", "log1p", "conv2d_1"):
        assert f"{member}:" in error.what
    assert "circle" in error.what
    assert "spec of its own" in str(error.advice)


def test_two_decisions_about_one_place_name_it(net: Net) -> None:
    tying = Tying(("conv2d", UINT8), ("conv2d", INT8))
    error = refused(AnnotationError, lambda: qc.prepare(captured(net), tying))
    assert "two decisions about conv2d" in error.what
    assert "conv2d (first : Conv2d" in str(error.where)


def test_places_tied_to_one_that_is_float_are_named(net: Net) -> None:
    tying = Tying(("conv2d", "log1p"))
    error = refused(AnnotationError, lambda: qc.prepare(captured(net), tying))
    assert "conv2d" in error.what
    assert "log1p" in error.what
    assert "float" in error.what


# -- pipelines and names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [("share,annotate{backend=x86}", "share", "annotate"), ("quantize,annotate{backend=x86}", "annotate", "quantize")],
    ids=["share-before-annotate", "annotate-after-quantize"],
)
def test_a_pipeline_in_the_wrong_order(text: str, first: str, second: str) -> None:
    error = refused(PipelineError, lambda: Pipeline.parse(text))
    assert first in error.what
    assert second in str(error)


def test_a_program_that_is_not_where_the_pipeline_needs_it(net: Net) -> None:
    error = refused(PipelineError, lambda: Pipeline.parse("share").run(captured(net)))
    assert "share needs a program that is annotated" in error.what


def test_verbs_in_the_wrong_order(net: Net) -> None:
    program = prepared(net)
    assert "already prepared" in refused(QuantcError, lambda: qc.prepare(program, "x86")).what
    qc.calibrate(program, [images()])
    quantized = qc.convert(program)
    for verb in (lambda: qc.prepare(quantized, "x86"), lambda: qc.convert(quantized)):
        error = refused(QuantcError, verb)
        assert "already" in error.what
        assert "qc.capture" in str(error.advice)


def test_unknown_passes_options_and_backends_list_the_known() -> None:
    error = refused(PipelineError, lambda: Pipeline.parse("anotate"))
    assert "annotate" in str(error.advice)
    assert "fuse" in str(error.advice), "all of them"
    error = refused(PipelineError, lambda: Pipeline.parse("annotate{bakend=x86}"))
    assert "bakend" in error.what
    assert "backend" in str(error.advice)
    error = refused(PipelineError, lambda: Pipeline.parse("annotate{backend=x87}"))
    assert "x87" in error.what
    assert "x86" in str(error)


def test_an_unknown_backend_lists_the_known(net: Net) -> None:
    with pytest.raises(UnknownNameError) as caught:
        qc.prepare(captured(net), "toaster")
    assert "unknown backend 'toaster'" in caught.value.what
    assert "x86" in str(caught.value.advice)


def test_an_unknown_mode_or_form_lists_the_known(net: Net) -> None:
    mode: Any = "statik"
    assert "static" in str(
        refused(UnknownNameError, lambda: qc.quantize(net, (images(),), [images()], mode=mode)).advice
    )
    form: Any = "qqd"
    error = refused(QuantcError, lambda: qc.convert(_calibrated(net, [images()]), to=form))
    assert "qdq" in str(error.advice)


# -- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ({"select": {"by": "module", "path": ""}, "use": "FLOAT"}, "path"),
        ({"select": {"by": "colour"}, "use": "FLOAT"}, "select"),
        ({"select": {"by": "all"}, "use": "INT9"}, "INT9"),
        ({"select": {"by": "all"}, "use": "FLOAT", "when": "always"}, "when"),
    ],
    ids=["empty-path", "unknown-selector", "unknown-spec", "unknown-field"],
)
def test_a_malformed_config_names_the_field(rule: dict[str, Any], field: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"rules": [rule]}))
    error = refused(ConfigError, lambda: qc.QuantConfig.load(path))
    assert field in error.what
    assert "rule 1" in str(error.where)


def forge(path: Path) -> None:
    """Another word in the document of a statistics file, sealed as quantc would."""
    tensors = load_file(path)
    document = bytes(tensors["document"].numpy()).replace(b'"minmax"', b'"minmux"')
    tensors["document"] = torch.frombuffer(bytearray(document), dtype=torch.uint8)
    sealed_tensors.write(path, STATISTICS, tensors, VERSION)


def test_malformed_statistics_name_the_field(tmp_path: Path) -> None:
    path = tmp_path / "statistics.safetensors"
    seen = start(INT8)
    seen.update(torch.ones(3))
    Statistics({"relu:out0": seen}).save(path)
    forge(path)
    error = refused(LoadError, lambda: Statistics.load(path))
    assert "'statistics'" in error.what
    assert "relu:out0" in str(error.where)


def test_a_truncated_program_is_refused(net: Net, tmp_path: Path) -> None:
    path = tmp_path / "net.qc"
    quantized = qc.convert(_calibrated(net, [images()]))
    quantized.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LoadError) as caught:
        qc.load(path)
    assert "net.qc" in str(caught.value)
    assert caught.value.advice


# -- passes ---------------------------------------------------------------------------------------------------


class Scale(Pass):
    """Changes a weight, and says that it changes no numbers."""

    name: ClassVar[str] = "test-scale"

    def run(self, program: Program) -> bool:
        weight = program.tensor(program.node("w2"))
        if weight is not None:
            weight.data.mul_(1.5)
        return weight is not None


class Break(Pass):
    """Gives relu an operand too many."""

    name: ClassVar[str] = "test-break"

    def run(self, program: Program) -> bool:
        node = program.node("relu")
        node.args = (*node.args, 3)
        return True


@pytest.mark.parametrize(
    ("pass_", "kind", "node"),
    [(Scale(), GuardError, "linear_1"), (Break(), PassError, "relu")],
    ids=["numbers", "graph"],
)
def test_a_pass_that_broke_something_is_named_and_reproduced(
    pass_: Pass, kind: type[PassError], node: str, tmp_path: Path
) -> None:
    hooks = [Reproducer(tmp_path / "again"), Verify(), Guard()]
    error = refused(kind, lambda: Pipeline((pass_,)).run(two_layers(), hooks))
    assert pass_.name in error.what
    assert node in str(error)
    written = tmp_path / "again"
    assert (written / "pipeline.txt").read_text().strip() == pass_.name
    assert node in (written / "error.txt").read_text()


# -- optional packages ----------------------------------------------------------------------------------------


@pytest.fixture
def without_sklearn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)


@pytest.mark.usefixtures("without_sklearn")
def test_a_missing_package_names_the_extra() -> None:
    from quantc.cli.example import digits_cnn, digits_data

    error = refused(MissingDependencyError, digits_data)
    assert "scikit-learn" in error.what
    assert "quantc[example]" in str(error.advice)
    model, inputs = digits_cnn()
    assert model(*inputs).shape == (4, 10)


def test_a_mode_that_does_not_exist_is_refused_by_name(net: Net) -> None:
    mode: Any = "dinamic"
    error = refused(UnknownNameError, lambda: qc.quantize(net, (images(),), [images()], mode=mode))
    assert mode in error.what
    assert "dynamic" in str(error.advice)


def test_a_dynamic_spec_in_a_static_flow_is_not_lost(net: Net) -> None:
    config = qc.QuantConfig().set("second", INT16.but(timing="dynamic"))
    error = refused(AnnotationError, lambda: qc.prepare(captured(net), "x86", config=config))
    assert "conv2d_1" in str(error.where)
