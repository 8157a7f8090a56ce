"""From a model to a `.pte` that ExecuTorch runs: what it computes, what it says of itself, and what is refused."""

from __future__ import annotations

import json
import sys
import warnings
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from typer.testing import CliRunner

import quantc as qc
from quantc.cli.app import app
from quantc.cli.example import digits_cnn, digits_data
from quantc.errors import InputError, LoadError, MissingDependencyError, UnknownNameError
from quantc.targets import executorch
from quantc.targets.executorch.delegation import RunsOn
from quantc.targets.executorch.pte_container import SEALED, seal_pte
from tests.support.backend_cases import Net
from tests.support.executorch_models import conv, image, static, steps

pytest.importorskip("executorch")
STEP = 1.001
"""One step; dequantized numbers are floats."""


def net(forward: Any, **modules: nn.Module) -> nn.Module:
    return Net(forward, modules)


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


@pytest.mark.slow
def test_metadata_tells_versions_config_and_source() -> None:
    x = image()
    first = qc.lower(static(conv(), x), "executorch").metadata
    other = qc.lower(
        static(conv(), x, config=qc.QuantConfig().set_all(qc.INT8.but(eps=2.0**-12))), "executorch"
    ).metadata
    assert first is not None
    assert other is not None
    assert (first.quantc, first.executorch, first.torch) == (version("quantc"), version("executorch"), version("torch"))
    assert first.backend == "executorch"
    assert first.config != other.config
    assert first.source != other.source
    assert [(item.name, item.dtype, item.shape) for item in first.inputs] == [("input_1", "float32", [2, 4, 8, 8])]
    assert first.source == qc.lower(static(conv(), x), "onnx").metadata["quantc.source"], "one digest for both"


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


def test_a_refused_op_beside_taken_ones_leaves_their_numbers_alone() -> None:
    """XNNPACK's partitioner marks the ops around a product before it knows whether it takes the product."""
    from quantc.targets.executorch.weight_only_linear import xnnpack_partitioner

    x = image()
    quantized = static(net(lambda self, x: self.c(self.b(self.a(x).relu()).relu()), a=conv(), b=conv(), c=conv()), x)
    partitioner = xnnpack_partitioner()
    config = partitioner.target_partitioner_configs["convolution.default"]
    inner = config.check_constraints
    seen: list[str] = []

    def refuse_second(node: Any, exported: Any) -> bool:
        is_taken = bool(inner(node, exported))
        name = node.meta["custom"]["quantc"]
        seen.append(name)
        return is_taken and name != "conv2d_1"

    type(config).check_constraints, kept = refuse_second_as(refuse_second), type(config).check_constraints
    try:
        lowered = qc.lower(quantized, "executorch", partitioners=[partitioner])
    finally:
        type(config).check_constraints = kept
    assert "conv2d_1" in seen
    assert {row.node for row in lowered.delegation().fallen_back} >= {"conv2d_1"}
    assert max(steps(quantized, lowered, x)) <= STEP


def refuse_second_as(check: Any) -> Any:
    return lambda self, node, exported: check(node, exported)


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


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = conv()

    def forward(self, x: Tensor, scale: int, *, other: Tensor) -> Any:
        return {"sum": self.a(x) + other, "same": scale}


@pytest.mark.slow
def test_it_is_called_like_the_model() -> None:
    x = image()
    program = qc.capture(Named().eval(), (x, 3), example_kwargs={"other": x})
    prepared = qc.prepare(program, "executorch")
    qc.calibrate(prepared, [{"x": x, "scale": 3, "other": x}], progress="silent")
    quantized = qc.convert(prepared)
    lowered = qc.lower(quantized, "executorch")
    got, want = lowered(x, 3, other=x), quantized(x, 3, other=x)
    assert got["same"] == want["same"] == 3
    assert torch.allclose(got["sum"], want["sum"], atol=0.1)
    with pytest.raises(InputError, match="captured for 3"):
        lowered(x, 4, other=x)


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


@pytest.mark.slow
def test_the_delegation_says_what_fell_back_and_why() -> None:
    quantized = static(net(lambda self, x: self.b(nn.functional.gelu(self.a(x))), a=conv(), b=conv()), image())
    lowered = qc.lower(quantized, "executorch", partitioners=[])
    delegation = lowered.delegation()
    assert delegation.fraction == 0
    assert delegation.delegates == 0
    assert {row.place for row in delegation.rows} == {RunsOn.PORTABLE}
    assert all(row.why for row in delegation.rows)
    assert "0 of 2 quantized ops" in str(delegation)
    data = json.loads(delegation.to_json())
    assert data["taken"] == 0
    assert {row["node"] for row in data["ops"]} == {"conv2d", "conv2d_1"}
    assert max(steps(quantized, lowered, image())) <= STEP


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


def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = static(conv(), image())
    for name in [name for name in sys.modules if name.partition(".")[0] == "executorch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "executorch", None)
    with pytest.raises(MissingDependencyError, match="executorch is not installed") as caught:
        qc.lower(quantized, "executorch")
    assert "pip install 'quantc[executorch]'" in str(caught.value)


def test_nan_and_gradients_are_refused_also_after_inputs_that_fitted(tmp_path: Path) -> None:
    """The delegate makes a number of NaN, where the float model yields NaN; and it has no gradients."""
    quantized, x = static(conv(), image()), image()
    lowered = qc.lower(quantized, "executorch")
    lowered.save(tmp_path / "model.pte")
    broken = x.clone()
    broken[1, 2, 3, 3] = float("nan")
    for made in (lowered, qc.load(tmp_path / "model.pte")):
        assert torch.equal(made(x), lowered.run(x)[0])
        for call in (made, made.run):
            with pytest.raises(InputError, match="holds NaN"):
                call(broken)
            with pytest.raises(InputError, match="requires a gradient"):
                call(x.clone().requires_grad_())
        with torch.no_grad():
            assert torch.equal(made(x.clone().requires_grad_()), made(x))
        infinite = x.clone()
        infinite[0, 0, 0, :2] = torch.tensor([float("inf"), -float("inf")])
        for form in (made, quantized):
            with pytest.raises(InputError, match="holds infinity"):
                form(infinite)


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


@pytest.mark.parametrize("where", ["first", "half", "last", "flipped", "seal", "other", "empty"])
def test_damaged_files_are_refused(digits: tuple[qc.Program, executorch.Pte], where: str, tmp_path: Path) -> None:
    path = tmp_path / "digits.pte"
    digits[1].save(path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    broken = {
        "first": whole[:20],
        "half": whole[: len(whole) // 2],
        "last": whole[: -SEALED - 1],
        "flipped": bytes(flipped),
        "seal": whole[:-SEALED] + bytes(32) + whole[-8:],
        "other": b"PK" + whole[2:8] + b"nothing",
        "empty": b"",
    }
    path.write_bytes(broken[where])
    with pytest.raises(LoadError):
        executorch.load(path)


@pytest.mark.slow
def test_a_file_of_another_length_or_without_its_seal_is_refused(tmp_path: Path) -> None:
    content = qc.lower(static(conv(), image()), "executorch").content
    path = tmp_path / "model.pte"
    path.write_bytes(content)
    with pytest.raises(LoadError, match="lost its seal"):
        executorch.load(path)
    wrong = bytearray(content)
    wrong[64:512] = bytes(448)
    path.write_bytes(bytes(wrong))
    with pytest.raises(LoadError):
        executorch.load(path).run(image())
    for changed in (seal_pte(content) + b"garbage", seal_pte(content)[:-3], seal_pte(content)[:-8], content + b"\0"):
        path.write_bytes(changed)
        with pytest.raises(LoadError, match="not what was sealed"):
            qc.load(path)
    with pytest.raises(LoadError, match="no such file"):
        executorch.load(tmp_path / "nothing.pte")


@pytest.mark.slow
def test_warnings_of_other_packages_are_kept_away() -> None:
    quantized = static(conv(), image())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qc.lower(quantized, "executorch")(image())
    assert [str(row.message) for row in caught] == []


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
