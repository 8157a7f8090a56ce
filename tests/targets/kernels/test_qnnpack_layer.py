"""Layers on QNNPACK: what it does not compute, whole programs against the integer form, and other engines beside it."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import quantc as qc
from quantc.backends import rules
from quantc.backends.qnnpack import QNNPACK
from quantc.errors import MissingDependencyError
from quantc.spec.capability import Capability
from quantc.spec.formats import DType, Role, Scheme
from quantc.spec.spec import INT8
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.kernel_agreement import KernelGap, kernel_agreement
from quantc.targets.kernels.kernel_table import NoKernelError
from quantc.targets.kernels.qnnpack_layer import QnnpackLayer
from quantc.targets.kernels.qnnpack_linear import QnnpackLinear
from tests.support.qnnpack_layers import seeded

CLOSE = 2e-6
"""How far floats may be off, relative to the largest."""


# -- what the kernels do not do ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("multiplier", "reason"),
    [(300.0, "31 bits"), (0.0, "normal float32"), (1e-40, "normal float32"), (float("inf"), "normal float32")],
)
def test_multipliers_beyond_what_kernels_round(multiplier: float, reason: str) -> None:
    ending = Ending(torch.tensor([multiplier]), 0, 0, 255, torch.uint8)
    of = QnnpackLayer("linear", torch.full((8, 512), 127, dtype=torch.int8), None, ending, None, 0, torch.uint8, ())
    with pytest.raises(NoKernelError, match=reason):
        of.check()


# -- whole programs ------------------------------------------------------------------------------------------------


def quantized(model: nn.Module, *inputs: Tensor, backend: Any = "qnnpack", **options: Any) -> qc.Program:
    prepared = qc.prepare(qc.capture(model.eval(), inputs, **options), backend)
    qc.calibrate(prepared, [inputs], progress="silent")
    return qc.convert(prepared)


def lowered(model: nn.Module, *inputs: Tensor, **options: Any) -> qc.Lowered:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # among them that sums may be cut off
        return qc.lower(quantized(model, *inputs, **options), "qnnpack")


def gaps(module: qc.Lowered, *inputs: Tensor) -> tuple[KernelGap, ...]:
    found = kernel_agreement(module, *inputs)
    assert found
    assert all(gap.steps <= 1 and gap.relative <= CLOSE for gap in found), "\n".join(map(str, found))
    return found


class Net(nn.Module):
    """Convolutions of several kinds, sums, pools, activations, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 7, 2, 3)
        self.deep = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.point = nn.Conv2d(32, 16, 1)
        self.up = nn.ConvTranspose2d(16, 16, 2, 2)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.stem(x)), 3, 2, 1)
        y = functional.relu6(self.deep(x)) + x
        y = functional.relu(self.grouped(y) * y)
        z = functional.hardswish(self.up(functional.avg_pool2d(self.point(y), 2)))
        z = torch.cat([z, torch.sigmoid(z)], 1)
        made: Tensor = self.head(z.mean((2, 3)))
        return made


def image(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=seeded(0))


def test_every_op_of_an_image_model_is_on_a_kernel() -> None:
    torch.manual_seed(0)
    module = lowered(Net(), image())
    gaps(module, image())
    assert not [row for row in module.placed if not row.kernel], module
    names = {row.kernel for row in module.placed}
    assert {"QNNPACK conv of rows", "QNNPACK conv", "QNNPACK linear"} <= names
    exact = module.program(image())
    assert float((module(image()) - exact).abs().max()) <= 0.02 * float(exact.abs().max())


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_other_batches_in_any_order_in_memory(size: int, order: torch.memory_format) -> None:
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=1, max=64)
    module, x = lowered(Net(), image(), dynamic_shapes=({0: batch},)), image(size)
    gaps(module, x)
    assert torch.equal(module(x), module(x.to(memory_format=order)))


def test_copies_and_state_hold_plain_tensors() -> None:
    torch.manual_seed(0)
    module = lowered(Net(), image())
    result = module(image())
    assert torch.equal(copy.deepcopy(module)(image()), result)
    state = module.state_dict()
    assert not any(tensor.is_quantized for tensor in state.values())
    module.load_state_dict(state)
    assert torch.equal(module(image()), result)


def test_weights_that_are_packed_are_not_held_plain_as_well() -> None:
    module = lowered(nn.Linear(300, 200), torch.randn(4, 300, generator=seeded(0)))
    module(torch.randn(4, 300, generator=seeded(1)))
    (kernel,) = [kernel for kernel in module.modules() if isinstance(kernel, QnnpackLinear)]
    assert kernel.optional_buffer("weight") is None
    assert module.program(torch.randn(4, 300)).shape == (4, 200)


def test_weights_with_zero_points_and_signed_activations() -> None:
    weight = rules.WEIGHT_ROLES["weight"].but(scheme=Scheme.AFFINE, qmin=-128)
    either = ("per-tensor", "per-channel")
    taken = tuple(Capability(role=role, dtypes=(DType.INT8,), granularities=either) for role in (Role.ACT, Role.WEIGHT))
    backend = replace(QNNPACK, roles={**QNNPACK.roles, "act": INT8, "weight": weight}, takes=taken)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4 * 49, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    x = torch.randn(2, 3, 9, 9, generator=seeded(0))
    module = lowered(model, x, backend=backend)
    found = gaps(module, x)
    assert sum(gap.kernel.startswith("QNNPACK") for gap in found) == 3


# -- one process, several engines ----------------------------------------------------------------------------------


def test_an_engine_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 8, generator=seeded(0))
    program = quantized(nn.Linear(8, 4), x)
    monkeypatch.setattr(type(torch.backends.quantized), "supported_engines", ["fbgemm"])
    with pytest.raises(MissingDependencyError, match="no quantized engine 'qnnpack'"):
        qc.lower(program, "qnnpack")(x)


@pytest.fixture
def engine_of_process() -> Iterator[None]:
    before = torch.backends.quantized.engine
    yield
    torch.backends.quantized.engine = before


@pytest.mark.parametrize("target", ["qnnpack", "x86"])
@pytest.mark.usefixtures("engine_of_process")
def test_the_engine_of_the_process_changes_nothing_and_is_left_alone(target: str) -> None:
    torch.manual_seed(0)
    program = quantized(Net(), image())
    results = []
    for engine in ("qnnpack", "fbgemm", "onednn"):
        torch.backends.quantized.engine = engine
        module = qc.lower(program, target)
        results.append(module(image()))
        assert torch.backends.quantized.engine == engine
    assert all(torch.equal(result, results[0]) for result in results)


def test_threads_on_two_engines_get_what_each_gets_alone() -> None:
    torch.manual_seed(0)
    programs = {name: quantized(Net(), image(), backend=name) for name in ("qnnpack", "x86")}
    alone = {name: qc.lower(program, name)(image()) for name, program in programs.items()}
    modules = {name: qc.lower(program, name) for name, program in programs.items()}  # nothing is packed yet
    wrong: list[str] = []
    start = threading.Barrier(4)

    def run(name: str) -> None:
        start.wait()
        for round_ in range(12):
            fresh = modules[name] if round_ % 4 else qc.lower(programs[name], name)  # others pack in the meantime
            if not torch.equal(fresh(image()), alone[name]):
                wrong.append(name)

    threads = [threading.Thread(target=run, args=(name,)) for name in programs for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
