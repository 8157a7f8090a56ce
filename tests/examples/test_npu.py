"""examples/npu: a backend and target from outside. Its interpreter, in NumPy, has the bits of the integer form."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.bench.models import task_of
from quantc.errors import InvariantError
from quantc.pipeline.registry import BACKENDS
from quantc.targets.target import TARGETS, register_target
from quantc.testing import check_backend
from tests.support.paths import ROOT

NPU = ROOT / "examples" / "npu"


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package's module, its backend and target registered."""
    monkeypatch.syspath_prepend(str(NPU))
    module = import_module("quantc_npu")
    BACKENDS.register("npu", module.BACKEND)
    register_target(module.TARGET)
    yield module
    BACKENDS.forget("npu")
    TARGETS.forget("npu")


class Block(nn.Module):
    """Random layers of one width, around which there is a sum."""

    def __init__(self, random: Random, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(random.randint(1, 3)):
            kernel = random.choice((1, 3, 5))
            groups = random.choice((1, width))
            padding, dilation = kernel // 2, 1
            if kernel == 3 and random.random() < 0.3:
                padding, dilation = 2, 2
            layers += [
                nn.Conv2d(width, width, kernel, 1, padding, dilation, groups, bias=random.random() < 0.7),
                random.choice((nn.Identity, nn.ReLU, nn.ReLU6, nn.Hardswish, nn.Sigmoid, nn.Tanh, nn.SiLU, nn.GELU))(),
            ]
        self.layers = nn.Sequential(*layers)
        self.has_sum = random.random() < 0.6

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made + x if self.has_sum else made


def network(seed: int) -> nn.Module:
    """A random network on images of 3 × 12 × 12."""
    random = Random(seed)
    torch.manual_seed(seed)
    width = random.choice((4, 6, 8, 12))  # six channels do not fill the lanes
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, random.choice((1, 2)), 1)]
    layers += [Block(random, width) for _ in range(random.randint(1, 3))]
    layers += [random.choice((nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.Identity()))]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(random.choice((3, 8)))).eval()


def check_bits(model: nn.Module, batches: Sequence[tuple[Tensor, ...]], unseen: Sequence[tuple[Tensor, ...]]) -> Any:
    """Bits of the interpreter and of the integer form are equal; the artifact."""
    with torch.no_grad():
        model(*batches[0])
        prepared = qc.prepare(qc.capture(model, batches[0]), "npu")
        qc.calibrate(prepared, batches)
        integer = qc.convert(prepared, to="integer")
        artifact = qc.lower(qc.convert(prepared), "npu")
        for inputs in unseen:
            assert torch.equal(artifact(*inputs), integer(*inputs))
    return artifact


def check_networks(seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        batches = [(torch.randn(2, 3, 12, 12, generator=generator),) for _ in range(2)]
        wide = [(torch.randn(3, 3, 12, 12, generator=generator) * 3,)]
        artifact = check_bits(network(seed), batches, [*batches, *wide])
        assert artifact.to_data()["instructions"] >= 1


def test_it_is_small() -> None:
    lines = [line for path in sorted(NPU.glob("*")) if path.is_file() for line in path.read_text().splitlines()]
    assert len(lines) <= 250


def test_random_networks_have_the_bits_of_the_integer_form(npu: Any) -> None:
    check_networks(range(12))


@pytest.mark.slow
def test_two_hundred_random_networks_have_the_bits_of_the_integer_form(npu: Any) -> None:
    check_networks(range(12, 200))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2"])
def test_large_networks_have_the_bits_of_the_integer_form(npu: Any, name: str) -> None:
    task = task_of(name)
    artifact = check_bits(task.model, task.calibration, task.unseen[:2])
    assert artifact.to_data()["regions"] == 2  # all but the mean in between


def test_the_kit_finds_no_fault(npu: Any) -> None:
    check_backend(npu.BACKEND).raise_if_failed()


def test_every_invariant_broken_on_purpose_is_caught(npu: Any) -> None:
    class Sum(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.conv, self.other = nn.Conv2d(3, channels, 3), nn.Conv2d(3, channels, 3)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.conv(x) + 50 * self.other(x)
            return made

    def convert(channels: int = 8, table: Any = None, **roles: Any) -> qc.Program:
        backend = replace(npu.BACKEND.but(**roles), table=npu.BACKEND.table if table is None else table)
        torch.manual_seed(0)
        x = torch.randn(2, 3, 8, 8)
        prepared = qc.prepare(qc.capture(Sum(channels).eval(), (x,)), backend)
        qc.calibrate(prepared, [x])
        return qc.convert(prepared)

    def with_rule(name: str, **changes: Any) -> Any:
        rules = tuple(replace(rule, **changes) if rule.name == name else rule for rule in npu.BACKEND.table)
        return replace(npu.BACKEND.table, rules=rules)

    convert()
    with pytest.raises(InvariantError, match="scales are powers of two"):
        convert(act=npu.ACT.but(scale_bits=24))
    with pytest.raises(InvariantError, match="both inputs of add share a scale"):
        convert(table=with_rule("add", roles={"x": "act", "y": "act", "out": "act"}))
    with pytest.raises(InvariantError, match="channels are a multiple of 4"):
        convert(channels=6, table=with_rule("conv", when=()))


def test_what_the_table_refuses_runs_on_the_host(npu: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 8, 9, padding=4), nn.ReLU()).eval()
    batch = (torch.randn(1, 3, 12, 12),)
    artifact = check_bits(model, [batch], [batch])
    assert artifact.to_data() == {"regions": 1, "instructions": 1}
    left = qc.prepare(qc.capture(model, batch), "npu").coverage()
    reasons = {row.node: row.reason for row in left.rows}
    assert reasons["conv2d_1"].endswith("it has 6 output channels, and the NPU wants a multiple of 4")
    assert reasons["conv2d_2"].endswith("its kernel is [9, 9], and the NPU has 7 × 7 at most")


def test_users_cannot_ask_for_other_scales(npu: Any) -> None:
    program = qc.capture(nn.Linear(4, 4).eval(), (torch.ones(1, 4),))
    with pytest.raises(qc.QuantcError, match="scales must be powers of two, not have 24 significant bits"):
        qc.prepare(program, "npu", config=qc.QuantConfig().set(nn.Linear, npu.ACT.but(scale_bits=24)))


@pytest.mark.slow
def test_the_installed_package_serves_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    site = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})["purelib"]
    source = tmp_path / "npu"
    source.mkdir()
    for path in NPU.glob("*.*"):
        (source / path.name).write_text(path.read_text())
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site, str(source)]
    subprocess.run([sys.executable, *install], check=True)
    (Path(site) / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    python = str(folder / "bin" / "python")
    out = tmp_path / "m.npu"
    command = [python, "-m", "quantc", "quantize", "--backend", "npu", "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(out.read_text())["regions"]["region_0"]["code"][0]["op"] == "conv"
    listed = subprocess.run(
        [python, "-m", "quantc", "check-backend", "npu"], check=False, capture_output=True, text=True
    )
    assert listed.returncode == 0, listed.stdout + listed.stderr
