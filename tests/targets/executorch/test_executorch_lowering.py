"""From a model to a `.pte` that ExecuTorch runs: what it computes, what it says of itself, and what is refused."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from typer.testing import CliRunner

import quantc as qc
from quantc.cli.app import app
from quantc.cli.example import digits_cnn, digits_data
from quantc.errors import GuardError, InputError, UnknownNameError
from quantc.hooks import Guard, Timing, Verify
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Pass, Pipeline
from quantc.targets import executorch
from quantc.targets.executorch.executorch_lowering import pipeline_for
from tests.support.executorch_models import STEP, conv, image, net, static, steps

pytest.importorskip("executorch")


@pytest.fixture(scope="module")
def digits() -> tuple[qc.Program, executorch.Pte]:
    """The executable version of ExecuTorch's quantization flow: capture, prepare, calibrate, convert, lower."""
    model, inputs = digits_cnn()
    batches, _ = digits_data()
    program = qc.capture(model, inputs, dynamic_shapes=({0: Dim("batch")},))
    prepared = qc.prepare(program, "executorch")
    qc.calibrate(prepared, batches, progress="silent")
    quantized = qc.convert(prepared)
    return quantized, qc.lower(quantized, "executorch")


def test_the_whole_flow_on_real_digits(digits: tuple[qc.Program, executorch.Pte]) -> None:
    quantized, lowered = digits
    model, _ = digits_cnn()
    _, held_out = digits_data()
    images, labels = held_out.images[:640], held_out.labels[:640]
    got = torch.cat([lowered(part) for part in images.reshape(10, 64, 1, 8, 8)])
    want = quantized(images)
    assert (got.argmax(1) == want.argmax(1)).double().mean() >= 0.99
    assert (got.argmax(1) == labels).double().mean() >= 0.99
    (row,) = lowered.delegation().fallen_back
    assert row.op in ("mean", "adaptive_avg_pool2d"), "with any number of images it is a pool in float"
    assert row.place == "delegate, in float"
    assert lowered.delegation().delegates == 1
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert len(lowered.content) <= 0.3 * size


def test_the_digits_are_on_integers_whole_if_their_number_is_fixed() -> None:
    model, inputs = digits_cnn()
    program = qc.quantize(model, inputs, [inputs], backend="executorch").program
    delegation = qc.lower(program, "executorch").delegation()
    assert (delegation.fraction, delegation.delegates) == (1, 1)


def test_a_saved_file_runs_without_the_program(digits: tuple[qc.Program, executorch.Pte], tmp_path: Path) -> None:
    _, lowered = digits
    lowered.save(tmp_path / "digits.pte")
    loaded = qc.load(tmp_path / "digits.pte")
    x = digits_data()[1].images[:5]
    assert torch.equal(loaded(x), lowered(x))
    assert torch.equal(loaded.run(x)[0], lowered.run(x)[0])
    assert loaded.metadata == lowered.metadata
    with pytest.raises(qc.QuantcError, match="does not say which op is which"):
        loaded.delegation()
    assert "for ExecuTorch" in str(loaded)
    with pytest.raises(InputError, match="give images by position"):
        loaded(images=x)


def test_executorchs_own_runtime_reads_the_file(digits: tuple[qc.Program, executorch.Pte], tmp_path: Path) -> None:
    Runtime: Any = import_module("executorch.runtime").Runtime  # noqa: N806 - the name of a class

    _, lowered = digits
    lowered.save(tmp_path / "digits.pte")
    program = Runtime.get().load_program(str(tmp_path / "digits.pte"))
    x = digits_data()[1].images[:3]
    (got,) = program.load_method("forward").execute([x])
    assert torch.equal(got, lowered(x))
    (told,) = program.load_method("quantc").execute([])
    assert json.loads(told)["quantc"] == version("quantc")


# -- numbers -------------------------------------------------------------------------------------------------------


def doubled(y: Tensor) -> Tensor:
    return y + y


def read_thrice(y: Tensor, layer: nn.Module) -> Any:
    return y, y.relu(), layer(y)


SHAPES: dict[str, nn.Module] = {
    "a module called twice": net(lambda self, x: (self.a(self.a(x)) + self.a(x), self.a(x)), a=conv()),
    "a clamp with one end": net(lambda self, x: self.a(x).clamp(min=-0.2), a=conv()),
    "a sum with itself": net(lambda self, x: doubled(self.a(x)), a=conv()),
    "channels shuffled": net(
        lambda self, x: self.b(self.a(x).reshape(2, 2, 2, 8, 8).transpose(1, 2).reshape(2, 4, 8, 8)), a=conv(), b=conv()
    ),
    "several outputs": net(lambda self, x: read_thrice(self.a(x), self.b), a=conv(), b=conv()),
    "depthwise": net(lambda self, x: nn.functional.relu6(self.a(x)), a=conv(4, 8, groups=4)),
}


FAST = ("a module called twice",)
CASES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES]


@pytest.mark.parametrize("name", CASES)
def test_results_are_within_a_step_of_the_program(name: str) -> None:
    x = image()
    quantized = static(SHAPES[name], x)
    lowered = qc.lower(quantized, "executorch")
    assert lowered.delegation().fraction == 1, lowered.delegation()
    for factor in (1.0, 5.0):
        assert max(steps(quantized, lowered, x * factor)) <= STEP


@pytest.mark.slow
def test_a_narrow_range_is_clipped_where_the_program_clips() -> None:
    x = image()
    config = qc.QuantConfig().set_all(qc.INT8.but(qmin=-64, qmax=63, eps=2.0**-12))
    quantized = static(net(lambda self, x: self.a(x), a=conv()), x, config=config)
    lowered = qc.lower(quantized, "executorch")
    assert max(steps(quantized, lowered, x * 8)) <= STEP


@pytest.mark.slow
def test_a_program_of_another_backend_is_lowered_with_a_warning() -> None:
    x = image()
    quantized = static(net(lambda self, x: self.b(self.a(x).relu()), a=conv(), b=conv()), x, backend="qnnpack")
    with pytest.warns(UserWarning, match="was quantized for qnnpack"):
        lowered = qc.lower(quantized, "executorch")
    assert max(steps(quantized, lowered, x * 2)) <= STEP


@pytest.mark.slow
def test_the_program_is_not_changed() -> None:
    quantized = static(conv(), image())
    before = str(quantized)
    qc.lower(quantized, "executorch")
    assert str(quantized) == before


# -- calling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ((torch.zeros(2, 1, 9, 8),), "takes float32"),
        ((torch.zeros(65, 1, 8, 8),), "batch in 0..64"),
        ((torch.zeros(2, 1, 8, 8, dtype=torch.float64),), "is float64"),
        ((torch.zeros(8, 8),), "takes float32"),
        (([1.0],), "a list, not a tensor"),
        ((), "0 tensors for 1 inputs"),
    ],
    ids=["size", "batch", "dtype", "rank", "kind", "count"],
)
def test_inputs_that_do_not_fit_are_refused(
    digits: tuple[qc.Program, executorch.Pte], inputs: tuple[Any, ...], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        digits[1].run(*inputs)


@pytest.mark.slow
def test_memory_is_set_aside_for_the_largest_size() -> None:
    program = qc.capture(conv().eval(), (image(),), dynamic_shapes=({0: Dim("n")},))
    prepared = qc.prepare(program, "executorch")
    qc.calibrate(prepared, [image()], progress="silent")
    quantized = qc.convert(prepared)
    lowered = qc.lower(quantized, "executorch", largest={"n": 100})
    assert max(steps(quantized, lowered, image(100))) <= STEP
    with pytest.raises(InputError, match=r"n in \d+..100"):
        lowered.run(image(101))


def test_tensors_that_do_not_lie_in_order_are_read_as_they_are(digits: tuple[qc.Program, executorch.Pte]) -> None:
    x = digits_data()[1].images[:6]
    strided = x.transpose(2, 3).contiguous().transpose(2, 3)
    assert not strided.is_contiguous()
    assert torch.equal(digits[1](strided), digits[1](x))


# -- what is told --------------------------------------------------------------------------------------------------


# -- what ExecuTorch trips over --------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, factor: Tensor) -> Any:
        return self.a(x) * factor


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, self.a, lambda x: self.b(x).relu(), (x,))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["channels last", "transposed"])
def test_inputs_may_lie_in_memory_in_any_order(order: str) -> None:
    """The order of the example inputs was written into the program, and others were then read wrongly."""
    plain = image()
    other = plain.contiguous(memory_format=torch.channels_last)
    if order == "transposed":
        other = plain.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    quantized = static(nn.Sequential(conv(), nn.ReLU(), conv()), other)
    lowered = qc.lower(quantized, "executorch")
    for x in (plain, other):
        assert max(steps(quantized, lowered, x)) <= STEP


@pytest.mark.slow
def test_numbers_branches_and_norms_of_their_own_are_deployed() -> None:
    torch.manual_seed(0)
    rows = torch.randn(4, 8)
    scaled = static(Scaled(), rows, torch.tensor(2.5))
    inputs = (rows, torch.tensor(2.5))
    assert torch.allclose(qc.lower(scaled, "executorch")(*inputs), scaled(*inputs), atol=1e-6)
    sides = (rows.abs(),), (-rows.abs(),)
    branches = qc.quantize(Branches().eval(), sides[0], list(sides), "executorch").program
    lowered = qc.lower(branches, "executorch")
    for side in sides:
        assert torch.allclose(lowered(*side), branches(*side), atol=1e-5)
    norms = static(nn.Sequential(nn.BatchNorm2d(4), conv(), nn.ReLU(), nn.BatchNorm2d(4)), image())
    assert torch.allclose(qc.lower(norms, "executorch")(image()), norms(image()), atol=1e-2)


@pytest.mark.slow
def test_what_lowers_and_cannot_run_is_refused_when_it_is_lowered() -> None:
    volumes = torch.randn(1, 2, 4, 5, 6)
    quantized = static(nn.Conv3d(2, 4, 3), volumes, allow_empty=True)
    with pytest.raises(qc.QuantcError, match="cannot run it") as caught:
        qc.lower(quantized, "executorch")
    assert "aten.convolution" in str(caught.value)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_programs_that_are_not_in_qdq_form_are_refused() -> None:
    program = qc.capture(conv().eval(), (image(),))
    with pytest.raises(qc.QuantcError, match="is not quantized"):
        qc.lower(program, "executorch")
    prepared = qc.prepare(program, "executorch")
    qc.calibrate(prepared, [image()], progress="silent")
    with pytest.raises(qc.QuantcError, match="integer form"):
        qc.lower(qc.convert(prepared, to="integer"), "executorch")


def test_options_of_other_targets_are_refused() -> None:
    quantized = static(conv(), image())
    with pytest.raises(UnknownNameError, match="executorch has no option 'tune'"):
        qc.lower(quantized, "executorch", tune=True)
    with pytest.raises(UnknownNameError, match="x86 has no option 'partitioners'"):
        qc.lower(quantized, "x86", partitioners=[])
    with pytest.raises(UnknownNameError, match="executorch"):
        qc.lower(quantized, "exectorch")


def test_what_executorch_raises_is_named() -> None:
    class Broken:
        def ops_to_not_decompose(self, exported: Any) -> Any:
            raise IndexError("broken partitioner")

    with pytest.raises(qc.QuantcError, match="cannot lower Conv2d: broken partitioner"):
        qc.lower(static(conv(), image()), "executorch", partitioners=[Broken()])


# -- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_line_writes_a_pte(tmp_path: Path) -> None:
    out = tmp_path / "new" / "digits.pte"
    done = CliRunner().invoke(app, ["quantize", "--backend", "executorch", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["out"] == str(out)
    assert told["artifact"]["delegation"]["fraction"] == 1
    loaded = executorch.load(out)
    assert loaded.metadata is not None
    assert loaded.metadata.model_dump(mode="json") == told["artifact"]["metadata"]
    assert loaded(digits_data()[1].images[:4]).shape == (4, 10)


def test_sizes_that_the_exporter_would_fix_are_an_error() -> None:
    """Its checks settle on the sizes of the example inputs where a tensor is split, and the file would take no others."""

    sizes = ({0: torch.export.Dim("batch", max=8), 1: torch.export.Dim("tokens", max=8)},)
    halves = net(lambda self, x: torch.cat(self.a(x).chunk(2, -1)[::-1], -1), a=nn.Linear(8, 8))
    x = torch.randn(3, 4, 8)
    program = qc.quantize(halves.eval(), (x,), [x], "executorch", dynamic_shapes=sizes).program
    with pytest.raises(qc.QuantcError, match=r"fixes .* of input"):
        qc.lower(program, "executorch")


# -- the pipeline --------------------------------------------------------------------------------------------------


def test_options_leave_passes_out_of_the_default_pipeline_and_of_no_other() -> None:
    program = static(net(lambda self, x: self.a(x), a=conv()), image(1))
    default = qc.pipelines.lower("executorch")
    assert pipeline_for(program, None, []) == default
    for name in ("fix-sizes", "space-to-depth"):
        assert pipeline_for(program, None, [name]) == pipeline_for(program, default, [name]) == default.without(name)
    other = default.without("legalize-bmm")
    assert pipeline_for(program, other, ["space-to-depth"]) == other


def test_a_float_program_runs_what_needs_no_quantized_one() -> None:
    program = qc.capture(net(lambda self, x: self.a(x), a=conv()).eval(), (image(1),))
    names = pipeline_for(program, None, []).names
    assert set(qc.pipelines.lower("executorch").names) - set(names) == {"space-to-depth", "duplicate-dq"}


def test_a_pipeline_of_the_user_is_run_and_watched() -> None:
    x = image(1)
    program = static(net(lambda self, x: self.a(x).clamp(0, 1), a=conv()), x)
    before, guard, timing = str(program), Guard(), Timing()
    pipeline = qc.pipelines.lower("executorch").without("legalize-bmm", "unroll-recurrent", "space-to-depth")
    lowered = qc.lower(program, "executorch", pipeline=pipeline, hooks=[Verify(), guard, timing])
    assert [row.name for row in timing.rows] == [str(step) for step in pipeline]
    assert guard.checked == list(pipeline.names)
    assert str(program) == before
    assert lowered.delegation().fraction == 1.0
    assert max(steps(program, lowered, x)) <= STEP


def test_a_pass_of_the_user_that_changes_numbers_is_found_before_anything_is_exported() -> None:
    class Shift(Pass):
        name: ClassVar[str] = "shift-levels"
        needs: ClassVar[Stage] = Stage.QUANTIZED

        def run(self, program: Program) -> bool:
            node = next(node for node in program.graph.nodes if "dequantize_per_tensor" in str(node.target))
            node.args = (*node.args[:2], int(node.args[2]) + 1, *node.args[3:])
            program.touch()
            return True

    program = static(net(lambda self, x: self.a(x), a=conv()), image(1))
    with pytest.raises(GuardError, match="shift-levels changed the numbers"):
        qc.lower(program, "executorch", pipeline=Pipeline((Shift(),)), hooks=[Guard()])
