"""What is saved is loaded: the same program, the same numbers to the last bit, at every stage."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import quantc as qc
from quantc.backends.x86 import X86
from quantc.errors import ModeError, SaveError
from quantc.files import sealed_tensors
from quantc.ir.plan import Plan
from quantc.ir.program import Program, Stage
from quantc.store.stored_plan import PlanData
from tests.support.store_files import calibrated, images, small_model, taken_apart
from tests.zoo.vision import ResNet18


def again(program: Program, tmp_path: Path) -> Program:
    program.save(tmp_path / "model.qc")
    loaded: Program = qc.load(tmp_path / "model.qc")
    return loaded


def assert_same(loaded: Program, program: Program) -> None:
    assert loaded.dump() == program.dump()
    assert not loaded.diff(program)
    assert (loaded.stage, loaded.method, loaded.training) == (program.stage, program.method, program.training)
    assert loaded.log == program.log
    assert str(loaded.plan) == str(program.plan)
    assert loaded.plan.outcomes == program.plan.outcomes
    assert loaded.plan.groups == program.plan.groups
    assert loaded.plan.config == program.plan.config
    names = {node.name: str(origin) for node, origin in program.origins.rows.items()}
    assert {node.name: str(origin) for node, origin in loaded.origins.rows.items()} == names


# -- the main path ---------------------------------------------------------------------------------------------


def test_each_stage_comes_back_and_goes_on(tmp_path: Path) -> None:
    """A program that is saved and loaded after every step ends as one that never was, bit for bit."""
    program = qc.capture(small_model(), (images(),))
    loaded = again(program, tmp_path)
    assert_same(loaded, program)
    prepared, loaded = qc.prepare(program, "x86"), again(qc.prepare(loaded, "x86"), tmp_path)
    assert_same(loaded, dataclasses.replace(prepared, log=loaded.log))
    qc.calibrate(prepared, [images(1), images(2), images(3)])
    qc.calibrate(loaded, [images(1)])
    loaded = again(loaded, tmp_path)
    assert loaded.plan.batches == 1
    qc.calibrate(loaded, [images(2), images(3)])
    loaded = again(loaded, tmp_path)
    quantized, converted = qc.convert(prepared), again(qc.convert(loaded), tmp_path)
    assert converted.dump() == quantized.dump()
    assert converted.stage is Stage.FOLDED
    assert torch.equal(converted(images(9)), quantized(images(9)))
    for name, qparams in quantized.plan.qparams.items():
        assert converted.plan.qparams[name].equals(qparams)


def test_outputs_are_those_of_torch_export_of_the_original(tmp_path: Path) -> None:
    quantized = qc.convert(calibrated())
    loaded = again(quantized, tmp_path)
    expected = torch.export.export(quantized.module, (images(),)).module()(images(4))
    exported = torch.export.export(loaded.module, (images(),)).module()
    assert torch.equal(exported(images(4)), expected)
    assert torch.equal(loaded(images(4)), expected)


def test_a_loaded_program_compiles(tmp_path: Path) -> None:
    loaded = again(qc.convert(calibrated()), tmp_path)
    compiled = torch.compile(loaded.module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(images(4)), loaded(images(4)))


def test_a_new_process_loads_what_this_one_saved(tmp_path: Path) -> None:
    """Nothing that this process happens to have imported or registered is needed."""
    quantized = qc.convert(calibrated())
    quantized.save(tmp_path / "model.qc")
    save_file({"x": images(5), "y": quantized(images(5)).detach()}, tmp_path / "expected.safetensors")
    code = (
        "import quantc, torch\n"
        "from safetensors.torch import load_file\n"
        "expected = load_file('expected.safetensors')\n"
        "program = quantc.load('model.qc')\n"
        "assert torch.equal(program(expected['x']), expected['y'])\n"
        "assert program.plan.quantizer.name == 'x86'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_coverage_and_explain_are_the_same_after_loading(tmp_path: Path) -> None:
    prepared = calibrated()
    for program in (prepared, qc.convert(prepared)):
        loaded = again(program, tmp_path)
        assert str(loaded.coverage()) == str(program.coverage())
        assert str(loaded.explain("linear")) == str(program.explain("linear"))


def test_the_config_comes_back(tmp_path: Path) -> None:
    config = qc.QuantConfig().set("conv", qc.FLOAT).set(nn.Linear, qc.INT8_NARROW_WEIGHT).set_op("relu", qc.UINT8)
    prepared = qc.prepare(qc.capture(small_model(), (images(),)), "x86", config=config)
    assert again(prepared, tmp_path).plan.config == config


OBSERVED = ["minmax", "mse", "entropy", "percentile{percentile=99.9}", "moving-average{rate=0.5}"]


@pytest.mark.parametrize("observe", OBSERVED)
def test_statistics_of_every_kind_come_back(observe: str, tmp_path: Path) -> None:
    prepared = qc.prepare(qc.capture(small_model(), (images(),)), X86.but(act=qc.UINT8.but(observe=observe)))
    qc.calibrate(prepared, [images(1)])
    loaded = again(prepared, tmp_path)
    for program in (prepared, loaded):
        qc.calibrate(program, [images(2)])
    assert qc.convert(loaded).dump() == qc.convert(prepared).dump()


# -- what else a program holds ---------------------------------------------------------------------------------


def test_every_field_of_a_program_and_of_a_plan_is_thought_of() -> None:
    """Whoever adds a field decides here whether it is saved."""
    text = {"graph", "root", "signature", "name", "method", "training", "stage", "inference_only", "fixed_mode"}
    document = {"modes", "counters", "log", "origins", "plan", "example_inputs"}
    made_anew = {"_module", "_taken", "_watched"}
    refused = {"set_aside", "placements"}  # a program that has some cannot be saved
    assert {field.name for field in dataclasses.fields(Program)} == text | document | made_anew | refused
    within_quantizer = {"absent"}
    assert {field.name for field in dataclasses.fields(Plan)} == set(PlanData.model_fields) - {
        "uses"
    } | within_quantizer


def test_modes_and_counters_come_back(tmp_path: Path) -> None:
    model = small_model().train()
    program = qc.capture(model, (images(),))
    loaded = again(program, tmp_path)
    assert loaded.training
    for each in (program, loaded):
        each.eval()
        each.train()
        each(images(1))
        each.eval()
    assert torch.equal(loaded(images(2)), program(images(2)))
    assert loaded.dump() == program.dump()
    assert int(loaded.root.get_buffer("norm.num_batches_tracked")) == 1


def test_limits_of_the_mode_come_back(tmp_path: Path) -> None:
    loaded = again(qc.convert(calibrated()), tmp_path)
    with pytest.raises(ModeError, match="cannot be trained any more"):
        loaded.train()
    program = qc.capture(small_model(), (images(),))
    program.fixed_mode = "it was captured without a model"
    with pytest.raises(ModeError, match="cannot change its mode"):
        again(program, tmp_path).train()


def test_what_is_tied_stays_tied_and_is_stored_once(tmp_path: Path) -> None:
    program = qc.capture(small_model(), (images(),))
    own = program.read("second.weight", before=program.node("linear_1"))
    program.node("linear_1").replace_input_with(program.node("second_weight"), own)
    assert 'tied="first.weight"' in program.dump()
    loaded = again(program, tmp_path)
    assert torch.equal(loaded(images(1)), program(images(1)))
    assert loaded.root.get_parameter("second.weight") is loaded.root.get_parameter("first.weight")
    _, tensors = taken_apart(tmp_path / "model.qc")
    assert [name for name in tensors if name.endswith(("first.weight", "second.weight"))] == ["constants/first.weight"]


def test_parameters_and_buffers_stay_what_they_are(tmp_path: Path) -> None:
    model = small_model()
    for parameter in model.get_submodule("conv").parameters():
        parameter.requires_grad_(False)
    program = qc.capture(model, (images(),))
    loaded = again(program, tmp_path)
    kinds = {name: value.requires_grad for name, value in program.root.named_parameters()}
    assert {name: value.requires_grad for name, value in loaded.root.named_parameters()} == kinds
    assert not kinds["conv.weight"]
    assert {name for name, _ in loaded.root.named_buffers()} == {name for name, _ in program.root.named_buffers()}


def test_example_inputs_come_back_or_are_left_out(tmp_path: Path) -> None:
    program = qc.capture(small_model(), (images(),))
    loaded = again(program, tmp_path)
    assert loaded.example_inputs is not None
    assert torch.equal(loaded.example_inputs[0], images())
    program.example_inputs = None
    assert again(program, tmp_path).example_inputs is None


class Flagged(nn.Module):
    def forward(self, x: Tensor, scale: int, how: str) -> Tensor:
        return x * scale if how == "times" else x + scale


def test_inputs_that_are_no_tensors_come_back(tmp_path: Path) -> None:
    program = qc.capture(Flagged(), (images(), 3, "times"))
    loaded = again(program, tmp_path)
    assert torch.equal(loaded(images(1), 3, "times"), images(1) * 3)
    assert loaded.example_inputs is not None
    assert loaded.example_inputs[1:] == (3, "times")


def test_the_memory_format_of_weights_is_kept(tmp_path: Path) -> None:
    """Kernels are chosen by it, and so the last bits of the outputs."""
    model = small_model()
    weight = model.get_parameter("conv.weight")
    weight.data = weight.data.to(memory_format=torch.channels_last)
    program = qc.capture(model, (images(),))
    loaded = again(program, tmp_path)
    assert (
        loaded.root.get_parameter("conv.weight").stride()
        == program.root.get_parameter("conv.weight").stride()
        == (27, 1, 9, 3)
    )


def test_paths_of_this_machine_are_not_written(tmp_path: Path) -> None:
    again(qc.capture(small_model(), (images(),)), tmp_path)
    document, _ = taken_apart(tmp_path / "model.qc")
    assert any(row[2] == "store_files.py" for row in document["origins"]["known"])
    assert str(Path(__file__).parents[1]) not in str(document["origins"])


class TwoRoads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 3)
        self.right = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, self.left, self.right, (x,))


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "batches"),
    [(small_model(), [images(1), images(2)]), (TwoRoads().eval(), [torch.ones(2, 3), -torch.ones(2, 3)])],
    ids=["plain", "nested"],
)
def test_observers_in_the_graph_come_back_and_go_on(model: nn.Module, batches: list[Tensor], tmp_path: Path) -> None:
    prepared = qc.prepare(qc.capture(model, (batches[0],)), "x86")
    observed = qc.Pipeline.parse("insert-observers").run(prepared)
    observed.module(batches[0])
    loaded = again(observed, tmp_path)
    assert loaded.dump() == observed.dump()
    for program in (observed, loaded):
        program.module(batches[1])
    quantized, converted = qc.convert(observed), qc.convert(loaded)
    assert converted.dump() == quantized.dump()
    assert torch.equal(converted(batches[0]), quantized(batches[0]))


# -- the file --------------------------------------------------------------------------------------------------


def test_int8_weights_are_stored_as_int8_and_zero_points_as_one_number(tmp_path: Path) -> None:
    quantized = qc.convert(calibrated())
    again(quantized, tmp_path)
    document, tensors = taken_apart(tmp_path / "model.qc")
    weights = [name for name in tensors if name.endswith("weight_quantized")]
    assert weights
    assert all(tensors[name].dtype == torch.int8 for name in weights)
    zero_points = {
        name: row for name, row in document["records"].items() if name.endswith("weight_zero_point") and name[0] == "c"
    }
    assert len(zero_points) == len(weights)
    assert all(row["form"] == "filled" and row["value"] == "00" * 8 for row in zero_points.values())
    assert not zero_points.keys() & tensors.keys()


def test_int4_weights_take_half_a_byte_each(tmp_path: Path) -> None:
    backend = dataclasses.replace(X86.but(weight=qc.INT4_WEIGHT), takes=())
    prepared = qc.prepare(qc.capture(small_model(), (images(),)), backend)
    qc.calibrate(prepared, [images(1)])
    quantized = qc.convert(prepared)
    loaded = again(quantized, tmp_path)
    assert torch.equal(loaded(images(3)), quantized(images(3)))
    _, tensors = taken_apart(tmp_path / "model.qc")
    packed = tensors["constants/conv.weight_quantized"]
    assert (packed.dtype, packed.numel()) == (torch.uint8, 6 * 3 * 3 * 3 // 2)


def test_other_tools_can_read_the_tensors(tmp_path: Path) -> None:
    program = qc.capture(small_model(), (images(),))
    program.save(tmp_path / "model.qc")
    with safe_open(tmp_path / "model.qc", framework="np") as file:
        weight = file.get_tensor("constants/conv.weight")
    assert (weight == program.root.get_parameter("conv.weight").detach().numpy()).all()


def test_the_same_program_is_the_same_file(tmp_path: Path) -> None:
    program = qc.convert(calibrated())
    program.save(tmp_path / "a.qc")
    program.save(tmp_path / "b.qc")
    qc.load(tmp_path / "a.qc").save(tmp_path / "c.qc")
    assert (tmp_path / "a.qc").read_bytes() == (tmp_path / "b.qc").read_bytes() == (tmp_path / "c.qc").read_bytes()


def test_saving_and_loading_leave_the_program_as_it_was(tmp_path: Path) -> None:
    program = calibrated()
    before = program.dump()
    loaded = again(program, tmp_path)
    loaded.root.state_dict()["conv.bias"].zero_()
    assert program.dump() == before
    (tmp_path / "model.qc").write_bytes(b"overwritten in place")
    assert loaded.dump() != before
    loaded(images())


def test_an_interruption_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.qc"
    program = qc.capture(small_model(), (images(),))
    program.save(path)
    before = path.read_bytes()

    def interrupted(file: BinaryIO, parts: object) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(sealed_tensors, "_put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        program.save(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_path_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    program = qc.capture(small_model(), (images(),))
    with pytest.raises(SaveError, match="cannot be written") as caught:
        program.save(tmp_path / "nowhere" / "model.qc")
    assert "folder" in str(caught.value.advice)


@pytest.mark.slow
def test_the_size_of_resnet18(tmp_path: Path) -> None:
    """An int8 ResNet-18, example input and statistics included, against the float state dict: 0.256 of it."""
    torch.manual_seed(0)
    model = ResNet18().eval()
    torch.save(model.state_dict(), tmp_path / "float.pt")
    save_file(model.state_dict(), tmp_path / "float.safetensors")
    x = torch.randn(2, 3, 64, 64)
    prepared = qc.prepare(qc.capture(model, (x,)), "x86")
    qc.calibrate(prepared, [x])
    quantized = qc.convert(prepared)
    loaded = again(quantized, tmp_path)
    assert torch.equal(loaded(x), quantized(x))
    size = (tmp_path / "model.qc").stat().st_size
    for name in ("float.pt", "float.safetensors"):
        ratio = size / (tmp_path / name).stat().st_size
        assert math.isclose(ratio, 0.256, abs_tol=0.004), ratio
        assert ratio <= 0.27


Pair = namedtuple("Pair", ["left", "right"])


class Paired(nn.Module):
    def forward(self, x: Tensor) -> Pair:
        return Pair(x + 1, {"twice": x * 2})


def test_arrangements_come_back_if_their_classes_are_known(tmp_path: Path) -> None:
    loaded = again(qc.capture(Paired(), (images(),)), tmp_path)
    result = loaded(images(1))
    assert type(result) is Pair
    assert torch.equal(result.right["twice"], images(1) * 2)
