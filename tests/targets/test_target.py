"""Targets as values: quantc's own and one brought from outside."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from typer.testing import CliRunner

import quantc as qc
from quantc.backends.qnnpack import QNNPACK
from quantc.cli.app import app
from quantc.errors import (
    ConfigError,
    InputError,
    InvariantError,
    MissingDependencyError,
    PluginError,
    QuantcError,
    UnknownNameError,
)
from quantc.ir.program import Program
from quantc.pipeline.registry import BACKENDS
from quantc.qdq.ops import is_quantize
from quantc.targets.target import TARGETS, Invariant, Target, check_invariants, register_target, suffixes
from quantc.verbs.lower import artifact_of
from tests.support.faulty_targets import Listed, Names, Untold, erase_all, registered

NPU = replace(QNNPACK, name="npu")


class Instructions:
    """A program as a list of its ops."""

    def __init__(self, program: Program) -> None:
        self.ops = [node.name for node in program.nodes() if node.op == "call_function"]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.ops), encoding="utf-8")

    def to_data(self) -> dict[str, Any]:
        return {"ops": len(self.ops)}


def instructions(program: Program, *, limit: int = 100) -> Instructions:
    made = Instructions(program)
    made.ops = made.ops[:limit]
    return made


def coarse(program: Program) -> Iterator[tuple[fx.Node, str]]:
    for node in program.nodes():
        scale = node.args[1] if is_quantize(node) else None
        if isinstance(scale, float) and scale > 1.0:
            yield node, f"its scale is {scale:.3g}"


@pytest.fixture
def npu() -> Iterator[Target]:
    yield register_target(
        Target("npu", instructions, suffix=".npu", invariants=(Invariant("scales are at most 1", coarse),))
    )
    TARGETS.forget("npu")


def prepared(factor: float = 1.0) -> Program:
    torch.manual_seed(0)
    x = torch.rand(4, 6) * factor
    program = qc.prepare(qc.capture(nn.Sequential(nn.Linear(6, 3), nn.ReLU()).eval(), (x,)), NPU)
    qc.calibrate(program, [(x,)])
    return program


def test_own_targets_come_through_the_same_door() -> None:
    assert {"executorch", "onnx", "qnnpack", "x86"} <= set(TARGETS.names())
    assert suffixes() == {".onnx": "onnx", ".pte": "executorch"}
    assert all(callable(TARGETS[name].function) for name in ("qnnpack", "x86"))


def test_a_target_from_outside_is_lowered_to_and_saved(npu: Target, tmp_path: Path) -> None:
    made = qc.lower(qc.convert(prepared()), "npu", limit=2)
    made.save(tmp_path / "m.npu")
    assert len(json.loads((tmp_path / "m.npu").read_text())) == 2
    assert artifact_of(tmp_path / "m.NPU") == npu.name


def test_the_command_line_writes_its_files(npu: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS.session, "npu", NPU)
    out = tmp_path / "digits.npu"
    found = CliRunner().invoke(app, ["quantize", "--backend", "npu", "--out", str(out), "--json"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told["artifact"] == {"ops": len(json.loads(out.read_text()))}
    assert "what npu lowers to cannot be called" in told["not_lowered"]
    assert out.with_suffix(".qc").exists()
    again = CliRunner().invoke(app, ["quantize", "--backend", "npu", "--out", str(out)])
    assert again.exit_code == 1, "a file that the target does not recognize is not replaced"
    assert "digits.npu is there" in again.output
    assert npu.name in TARGETS


def test_an_option_it_does_not_have_is_refused(npu: Target) -> None:
    with pytest.raises(UnknownNameError, match="npu has no option 'limits'"):
        qc.lower(qc.convert(prepared()), npu.name, limits=2)


def test_convert_holds_programs_to_the_invariants_of_their_target(npu: Target) -> None:
    qc.convert(prepared())
    with pytest.raises(InvariantError, match="scales are at most 1") as caught:
        qc.convert(prepared(1e4))
    assert re.search(r"quantize_per_tensor: its scale is 3\d\.\d", str(caught.value))
    assert npu.name in caught.value.what


def test_a_program_can_be_held_to_another_target() -> None:
    never = Invariant("nothing is computed", lambda program: [(next(iter(program.nodes())), "it is there")])
    converted = qc.convert(prepared(1e4))
    with pytest.raises(InvariantError, match="nothing is computed"):
        check_invariants(converted, Target("npu", instructions, invariants=(never,)))


def test_what_cannot_be_saved_is_refused(npu: Target) -> None:
    TARGETS.forget(npu.name)
    register_target(replace(npu, lower=lambda program: program.name))
    with pytest.raises(PluginError, match=r"writes \.npu files, and gave a str without save and to_data"):
        qc.lower(qc.convert(prepared()), npu.name)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"lower": "quantc.nowhere:lower"}, "No module named 'quantc.nowhere'"),
        ({"lower": "quantc.verbs.lower:nothing"}, "nothing"),
        ({"lower": lambda: None}, "takes nothing"),
        ({"lower": lambda program, device: None}, "takes program, device"),
        ({"lower": 3}, "not callable"),
        ({"lower": lambda program, *, device: None}, "takes program, device"),
        ({"lower": dict}, "no signature"),
        ({"lower": "quantc_nowhere"}, "no lowering function"),
        ({"lower": ":lower"}, "no lowering function"),
        ({"lower": "tests.support.raises_at_import:lower"}, "ZeroDivisionError: the license has expired"),
        ({"lower": instructions, "requires": ("tests.support.raises_at_import", "npu-sdk")}, "the license has expired"),
    ],
)
def test_a_lowering_that_cannot_work_is_refused_before_calibration(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(PluginError, match=told):
        Target("npu", **fields).check_ready()


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": "npu"},
        {"suffix": ".qc"},
        {"suffix": ".N"},
        {"suffix": 3},
        {"name": "my npu"},
        {"name": 3},
        {"requires": "npu_sdk"},
        {"requires": ("npu_sdk", "")},
        {"invariants": "scales"},
        {"invariants": [coarse]},
        {"invariants": [Invariant("scales", "coarse")]},  # type: ignore[arg-type]
        {"arithmetic": "half-up"},
        {"pipeline": None},
        {"recognizes": ".npu"},
    ],
)
def test_fields_that_mean_nothing_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PluginError):
        Target(**{"name": "npu", "lower": instructions, **fields})


def test_a_target_by_another_name_is_refused() -> None:
    with pytest.raises(PluginError, match="named 'npu'"):
        TARGETS.register("tpu", Target("npu", instructions))


def test_two_targets_may_not_write_the_same_files(npu: Target) -> None:
    register_target(Target("npv", instructions, suffix=npu.suffix))
    try:
        with pytest.raises(PluginError, match=r"npu and npv both write \.npu files"):
            suffixes()
    finally:
        TARGETS.forget("npv")


def test_lowering_holds_the_invariants_too(npu: Target) -> None:
    TARGETS.forget(npu.name)
    converted = qc.convert(prepared(1e4))
    register_target(npu)
    with pytest.raises(InvariantError, match="scales are at most 1"):
        qc.lower(converted, npu.name)


def test_one_of_several_backends_has_its_invariants_held(npu: Target) -> None:
    x = torch.rand(4, 6) * 1e4
    program = qc.prepare(qc.capture(nn.Sequential(nn.Linear(6, 3), nn.ReLU()).eval(), (x,)), [NPU, "x86"])
    qc.calibrate(program, [(x,)])
    with pytest.raises(InvariantError, match=npu.name):
        qc.convert(program)


def test_invariants_are_found_in_files_too(npu: Target, tmp_path: Path) -> None:
    prepared(1e4).save(tmp_path / "prepared.qc")
    with pytest.raises(InvariantError, match=npu.name):
        qc.convert(qc.load(tmp_path / "prepared.qc"))


def test_only_quantized_programs_are_lowered(npu: Target) -> None:
    never = Invariant("nothing is computed", lambda program: [(next(iter(program.nodes())), "it is there")])
    with registered(replace(npu, name="npv", suffix=".npv", invariants=(never,))):
        for given in (qc.capture(nn.Linear(2, 2).eval(), (torch.ones(1, 2),)), prepared()):
            with pytest.raises(QuantcError, match="is not quantized"):
                qc.lower(given, "npv")
        with pytest.raises(InputError, match=r"qc\.lower was given a Linear, and takes a Program"):
            qc.lower(nn.Linear(2, 2), "npv")  # type: ignore[call-overload]
    name: Any
    for name in (None, []):
        with pytest.raises(UnknownNameError, match="no name of a target"):
            qc.lower(qc.convert(prepared()), name)


def test_a_lowering_works_on_a_copy() -> None:
    converted = qc.convert(prepared())
    text, x = converted.dump(), torch.rand(4, 6)
    expected = converted(x)
    with registered(Target("npu", erase_all, suffix=".npu")):
        assert len(qc.lower(converted, "npu").ops) > 3
    assert converted.dump() == text
    assert torch.equal(converted(x), expected)
    assert converted.name != "overwritten"


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        (lambda program: 1 / 0, "invariant 'it holds' of target npu failed: ZeroDivisionError"),
        (lambda program: None, "failed: TypeError: 'NoneType' object is not iterable"),
        (lambda program: [3], "gives 3"),
        (lambda program: ["ab"], "gives 'ab'"),
        (lambda: (), "takes 0 positional arguments"),
    ],
)
def test_an_invariant_that_cannot_tell_is_named(faults: Any, told: str) -> None:
    converted = qc.convert(prepared())
    with pytest.raises(PluginError, match=re.escape(told)):
        check_invariants(converted, Target("npu", instructions, invariants=(Invariant("it holds", faults),)))


def test_one_invariant_needs_no_list() -> None:
    one = Invariant("scales are at most 1", coarse)
    assert Target("npu", instructions, invariants=one).invariants == (one,)  # type: ignore[arg-type]


def test_what_a_lowering_raises_names_the_target_and_the_node(npu: Target) -> None:
    def lower(program: Program) -> None:
        for node in program.nodes():
            if node.op == "call_function":
                raise KeyError("quantize")

    converted = qc.convert(prepared())
    with (
        registered(replace(npu, name="npv", suffix=".npv", lower=lower)),
        pytest.raises(PluginError, match="lowering to npv failed: KeyError: 'quantize'") as caught,
    ):
        qc.lower(converted, "npv")
    assert str(caught.value.where).startswith("quantize_per_tensor")


def test_what_is_missing_is_told_before_lowering_and_how_pip_installs_it(npu: Target) -> None:
    converted = qc.convert(prepared())
    with (
        registered(replace(npu, name="npv", suffix=".npv", requires=("npu_sdk", "npu-sdk[full]"))),
        pytest.raises(MissingDependencyError, match="npu_sdk is not installed") as caught,
    ):
        qc.lower(converted, "npv")
    assert caught.value.advice == "pip install 'npu-sdk[full]'"


def test_files_of_other_tools_are_written_by_targets_from_outside(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"writes no \.tflite files"):
        artifact_of(tmp_path / "m.tflite")
    with registered(Target("micro", instructions, suffix=".tflite")):
        assert artifact_of(tmp_path / "m.tflite") == "micro"


def test_options_that_are_handed_on_are_not_compared_with_those_of_kernels() -> None:
    def lower(program: Program, **options: Any) -> Instructions:
        return instructions(program, limit=options["most"])

    with registered(Target("npu", lower)):
        assert len(qc.lower(qc.convert(prepared()), "npu", most=1).ops) == 1


def test_a_file_that_the_target_cannot_read_is_not_its_own(tmp_path: Path) -> None:
    target = Target("npu", instructions, suffix=".npu", recognizes=lambda path: path.read_text().startswith("["))
    path = tmp_path / "m.npu"
    path.write_bytes(b"\xff\xfe\x00")
    assert not target.is_own_file(path)
    path.write_text("[]")
    assert target.is_own_file(path)


@pytest.mark.parametrize(
    ("lower", "told"),
    [
        (Untold, "to_data() of what npu lowers to failed: TypeError"),
        (Listed, "to_data() of what npu lowers to gives a list"),
    ],
)
def test_summaries_are_json(lower: Any, told: str) -> None:
    target = Target("npu", lower)
    with pytest.raises(PluginError, match=re.escape(told)):
        target.data_of(lower(prepared()))
    assert target.data_of(Names(prepared()))["ops"] > 0
    assert target.data_of(object()) == {}
