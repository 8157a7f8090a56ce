"""The running form: one function that computes what the module does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.targets.kernels import lowered as lowered_module
from quantc.targets.kernels.codegen import BINDINGS, _Writing, straight_line, why_not_repeated
from quantc.targets.kernels.kernel import Kernel, KernelForm
from quantc.targets.kernels.lowered import Lowered
from tests.support.lowered_families import Counter, check_line, of_family

X = torch.randn(2, 6, 8, 8, generator=torch.Generator().manual_seed(0))
ROWS = X.flatten(2)
WEIGHT = torch.linspace(-1, 1, 64)
SAMPLES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "aten.adaptive_avg_pool2d.default": ((X, [1, 2]), {}),
    "aten.add.Tensor": ((X, X.abs()), {"alpha": 2}),
    "aten.cat.default": (([X, X.abs()], 1), {}),
    "aten.clamp.default": ((X, -0.5, 0.5), {}),
    "aten.contiguous.default": ((X.transpose(1, 2),), {}),
    "aten.div.Tensor": ((X, 3.0), {}),
    "aten.embedding.default": ((ROWS[0], torch.tensor([[1, 2], [5, 0]])), {}),
    "aten.expand.default": ((X[:, :1], [2, 6, 8, 8]), {}),
    "aten.flatten.using_ints": ((X, 1, 2), {}),
    "aten.gelu.default": ((X,), {"approximate": "tanh"}),
    "aten.hardswish.default": ((X,), {}),
    "aten.layer_norm.default": ((ROWS, [64], WEIGHT, WEIGHT, 1e-3), {}),
    "aten.matmul.default": ((X, X), {}),
    "aten.mul.Tensor": ((X, 2.0), {}),
    "aten.permute.default": ((X, [3, 0, 1, 2]), {}),
    "aten.relu.default": ((X,), {}),
    "aten.reshape.default": ((X, [2, -1]), {}),
    "aten.scaled_dot_product_attention.default": ((X, X, X), {"scale": 0.3}),
    "aten.select.int": ((X, 1, 2), {}),
    "aten.sigmoid.default": ((X,), {}),
    "aten.silu.default": ((X,), {}),
    "aten.softmax.int": ((X, -1), {}),
    "aten.sub.Tensor": ((X, X.abs()), {}),
    "aten.tanh.default": ((X,), {}),
    "aten.transpose.int": ((X, 1, 3), {}),
    "aten.unbind.int": ((X, 1), {}),
    "aten.unsqueeze.default": ((X, 1), {}),
}


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("op", BINDINGS, ids=str)
def test_a_binding_is_its_op(op: Any) -> None:
    args, kwargs = SAMPLES[str(op)]
    found, expected = BINDINGS[op](*args, **kwargs), op(*args, **kwargs)
    pairs = [(found, expected)] if isinstance(found, Tensor) else list(zip(found, expected, strict=True))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)


# -- whole models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["fbgemm", "onednn"])
@pytest.mark.parametrize("rows", [1, 40])
def test_linear_layers(family: str, rows: int) -> None:
    model = nn.Sequential(
        nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 8)
    )
    check_line(*of_family(model, family, rows, 32))


@pytest.mark.parametrize("family", ["fbgemm", "onednn"])
def test_convolutions(family: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU6(), nn.Conv2d(8, 8, 1),
        nn.MaxPool2d(2), nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(36, 4),
    )  # fmt: skip
    check_line(*of_family(model, family, 2, 4, 8, 8))


def forms(lowered: Lowered) -> list[KernelForm]:
    return list(_Writing(lowered.module).forms.values())


def test_kernels_of_fbgemm_hand_quantized_tensors_on() -> None:
    linear = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    lowered, x = of_family(linear, "fbgemm", 1, 32)
    lowered(x)
    assert forms(lowered).count(KernelForm.QUANTIZED) == 2
    conv = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    lowered, x = of_family(conv, "fbgemm", 1, 4, 8, 8)
    lowered(x)
    assert KernelForm.QUANTIZED in forms(lowered)


def test_other_weights_are_packed_again() -> None:
    (one, x), (other, _) = (of_family(nn.Sequential(nn.Linear(32, 32)), "fbgemm", 4, 32) for _ in range(2))
    one(x)
    state = {name: value.clone() for name, value in one.state_dict().items()}
    levels = next(name for name, value in state.items() if value.dtype is torch.int8)
    state[levels] = -state[levels]
    other(x)
    other.load_state_dict(state)
    assert not torch.equal(other(x), one(x))
    assert torch.equal(other(x), other(x))


def test_what_is_not_packed_runs_as_it_is() -> None:
    lowered, x = of_family(nn.Sequential(nn.Linear(32, 32)), "fbgemm", 4, 32)
    line = straight_line(lowered.module)
    kernels = [kernel for kernel in lowered.module.modules() if isinstance(kernel, Kernel)]
    assert all(kernel._packed is None for kernel in kernels)
    assert torch.equal(line(x)[0], lowered(x))


class Statistics(nn.Module):
    """Batch norm whose op writes to its statistics, and whose schema does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.norm.running_mean, self.norm.running_var
        return torch.nn.functional.batch_norm(self.layer(x), mean, var, training=True)


class Kept(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_what_must_not_be_called_for_nothing_is_told_apart() -> None:
    x = torch.randn(4, 8)
    models = {
        Counter(): "writes to a tensor",
        Statistics(): "writes to a tensor",
        nn.Sequential(nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), Kept()): "3 is code of its own",
        nn.Linear(8, 8): None,
    }
    for model, wanted in models.items():
        program = qc.capture(model.eval(), (x,), leaf=Kept if wanted and "code" in wanted else ())
        why = why_not_repeated(qc.lower(qc.quantize(program, None, mode="dynamic").program, "x86").module)
        assert why is None if wanted is None else wanted in (why or "")


class AddedTo(nn.Module):
    """A convolution's result is the second summand, and lies otherwise in memory than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x + self.conv(x)
        return total * total.mean((2, 3), keepdim=True)


@pytest.mark.parametrize("seed", range(3))
def test_the_first_call_yields_the_bits_of_the_others(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, 8, 6, 6)
    lowered = qc.lower(qc.quantize(AddedTo().eval(), (x,), [x]).program, "x86")
    with torch.no_grad():
        first = lowered(x)
        assert all(torch.equal(lowered(x), first) for _ in range(4))


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.table: Tensor
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.layer(x), self.table, self.table[2:], self.table.reshape(2, 4), self.layer(x) + self.table


def test_results_that_are_constants_are_the_callers_own() -> None:
    x = torch.randn(4, 8)
    lowered = qc.lower(qc.quantize(Constants().eval(), (x,), [x]).program, "x86")
    with torch.no_grad():
        wanted = [result.clone() for result in lowered(x)]
        for _ in range(5):
            made = lowered(x)
            assert all(torch.equal(one, other) for one, other in zip(made, wanted, strict=True))
            for result in made:
                result.mul_(3)


@pytest.mark.parametrize("gain", [0.5, 2.0])
def test_compiling_stays_where_it_is_faster(gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8)
    program = qc.quantize(nn.Linear(8, 8).eval(), (x,), mode="dynamic").program
    lowered = qc.lower(program, "x86", compile=True)
    run: Callable[..., Any] = lowered.module.forward
    lowered._run = run  # nothing has to be compiled for this
    monkeypatch.setattr(lowered_module, "race", lambda forms, inputs: {"plain": 1.0, "compiled": 1.0 / gain})
    lowered(x)
    assert (lowered._line is run) == (gain > 1)
    assert lowered.to_data()["compiled_gain"] == pytest.approx(gain)
    ending = ", the rest compiled" if gain > 1 else ", the rest not compiled, since that is 0.50 times as fast"
    assert lowered.headline.endswith(ending)
