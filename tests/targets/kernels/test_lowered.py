"""`qc.lower`: what the lowered module promises, whatever kernels it runs on."""

from __future__ import annotations

import copy
import json
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.backends.x86 import X86
from quantc.config.config import QuantConfig
from quantc.errors import InputError, ModeError, QuantcError, UnknownNameError
from quantc.ir.program import Program
from quantc.spec.formats import PerToken
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.lowered import Lowered
from quantc.targets.kernels.saturation import adds_in_16_bits

TOKEN = X86.modes["dynamic"].but(granularity=PerToken())
SIZE = 16


class Block(nn.Module):
    """Attention with projections apart, and a feed-forward part."""

    def __init__(self, width: int = SIZE, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=index != 1) for index in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Any:
        parts = [part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        seen = nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        x = self.norm(x + self.out(seen))
        return x + self.down(torch.relu(self.up(x)))


def seeded(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / max(parameter.shape[-1], 1) ** 0.5
    return model.eval()


def tensor(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(model: nn.Module, *inputs: Tensor, config: QuantConfig | None = None, **rest: Any) -> Program:
    return qc.quantize(model, inputs, mode="dynamic", config=config, **rest).program


def kernels(lowered: Lowered) -> list[Kernel]:
    return [module for module in lowered.module.children() if isinstance(module, Kernel)]


@pytest.fixture(scope="module")
def program() -> Program:
    return quantized(seeded(Block()), tensor(1, 5, SIZE))


@pytest.fixture
def lowered(program: Program) -> Lowered:
    return qc.lower(program, "x86")


def close(found: Tensor, expected: Tensor) -> None:
    """A level may fall to the other side where it is halfway, which is rare: all but a few numbers agree closely."""
    expected = expected.detach()
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=0.02 * float(expected.abs().max()))
    assert ((found - expected).abs() < 1e-4 * expected.abs().max()).float().mean() > 0.8


@pytest.mark.parametrize("config", [None, QuantConfig().set_all(TOKEN)], ids=["per tensor", "per token"])
def test_computes_what_the_integer_form_does(config: QuantConfig | None) -> None:
    x = tensor(2, 5, SIZE)
    made = qc.lower(quantized(seeded(Block()), x, config=config), "x86")
    assert all(row.kernel for row in made.placed)
    assert len(made.placed) == 6
    close(made(x), made.program(x))


def test_takes_programs_in_either_form_and_changes_none(program: Program) -> None:
    integer = qc.pipelines.integer().run_on_copy(program)
    texts, x = (program.dump(), integer.dump()), tensor(1, 5, SIZE)
    one, other = qc.lower(program, "x86"), qc.lower(integer, "x86")
    assert torch.equal(one(x), other(x))
    assert (program.dump(), integer.dump()) == texts
    floats = {name: value * 0 for name, value in other.state_dict().items() if value.is_floating_point()}
    other.load_state_dict(other.state_dict() | floats)
    assert not torch.equal(integer(x), other(x))


def test_relu_and_siblings_go_into_kernels(lowered: Lowered) -> None:
    rows = {row.node: row.kernel for row in lowered.placed}
    assert sum("3 in one" in kernel for kernel in rows.values()) == 3
    assert sum("relu" in kernel for kernel in rows.values()) == 1
    assert len(kernels(lowered)) == 4
    assert "relu" not in lowered.module.code
    assert "scaled_dot_product_attention" in lowered.module.code


def test_siblings_that_leave_the_model_lie_in_order() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 6), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.a(x), self.b(x).reshape(-1)

    x = tensor(3, 8)
    made = qc.lower(quantized(seeded(Pair()), x), "x86")
    assert len(kernels(made)) == 1
    assert all(part.is_contiguous() for part in made(x))
    for found, expected in zip(made(x), made.program(x), strict=True):
        close(found, expected)


def test_batches_of_any_size() -> None:
    sizes = {"x": {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("tokens", min=1, max=64)}}
    made = qc.lower(quantized(seeded(Block()), tensor(2, 5, SIZE), dynamic_shapes=sizes), "x86")
    for shape in ((1, 1), (2, 5), (7, 3), (64, 64)):
        x = tensor(*shape, SIZE)
        close(made(x), made.program(x))


def test_inputs_that_do_not_fit_are_refused(lowered: Lowered) -> None:
    lowered(tensor(1, 5, SIZE))
    for x in (tensor(1, 5, SIZE + 1), tensor(1, 6, SIZE), tensor(5, SIZE), tensor(1, 5, SIZE).double()):
        with pytest.raises(InputError):
            lowered(x)
    with pytest.raises(InputError):
        lowered(tensor(1, 5, SIZE), tensor(1, 5, SIZE))
    with pytest.raises(InputError):
        lowered()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_never_hidden(lowered: Lowered, value: float) -> None:
    x = tensor(1, 5, SIZE)
    x[0, 2, 3] = value
    assert not lowered.module(x)[0][0, 2].isfinite().any(), "what comes up inside is handed on"
    with pytest.raises(InputError, match="holds"):
        lowered(x)


def test_threads_agree(program: Program) -> None:
    made = qc.lower(program, "x86")  # nothing is packed yet: they all come at once
    inputs = [tensor(1, 5, SIZE, seed=seed) for seed in range(16)]
    found: dict[int, Tensor] = {}

    def run(index: int) -> None:
        for _ in range(20):
            found[index] = made(inputs[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, x in enumerate(inputs):
        assert torch.equal(found[index], made(x))


def test_copies_pack_for_themselves(lowered: Lowered) -> None:
    x = tensor(1, 5, SIZE)
    expected = lowered(x)
    twin = copy.deepcopy(lowered)
    assert all(kernel._packed is None for kernel in kernels(twin))
    assert torch.equal(twin(x), expected)
    states = [made.state_dict() for made in (twin, lowered)]
    places = [{value.data_ptr() for value in state.values()} for state in states]
    assert not places[0] & places[1]
    kernel = kernels(lowered)[0]
    again = pickle.loads(pickle.dumps(kernel))  # noqa: S301 - our own bytes
    found, wanted = again(x), kernel(x)
    assert torch.equal(torch.cat(found, -1), torch.cat(wanted, -1))


def test_state_is_plain_and_loads(lowered: Lowered) -> None:
    x = tensor(1, 5, SIZE)
    before = lowered(x)
    state = lowered.state_dict()
    assert all(type(value) is Tensor and not value.is_quantized for value in state.values())
    lowered.load_state_dict({name: value * 2 if name.endswith("norm.bias") else value for name, value in state.items()})
    assert not torch.equal(lowered(x), before)
    halves = {name: value // 2 if value.dtype is torch.int8 else value for name, value in state.items()}
    changed = copy.deepcopy(lowered)
    changed.load_state_dict(halves)
    assert not torch.equal(changed(x), lowered(x)), "the packed weights are the old ones"


def test_weights_are_held_once(lowered: Lowered) -> None:
    """Packed from the first call on, and plain no more; asked for, they are unpacked."""
    wanted = {name: value.clone() for name, value in lowered.program.root.state_dict().items()}
    lowered(tensor(1, 5, SIZE))
    tensors = [*lowered.module.buffers(), *lowered._program.root.buffers()]
    assert not [value for value in tensors if value.dtype is torch.int8 and not value.is_meta]
    found = lowered.program.root.state_dict()
    assert sum(value.dtype is torch.int8 for value in found.values()) == 6
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_saves_without_what_is_packed(lowered: Lowered, tmp_path: Path) -> None:
    x = tensor(1, 5, SIZE)
    lowered(x)
    lowered.save(tmp_path / "program.qc")
    assert torch.equal(qc.load(tmp_path / "program.qc")(x), lowered(x))


def test_says_what_runs_on_what(lowered: Lowered, program: Program) -> None:
    text = str(lowered)
    assert text.splitlines()[0] == "Block on x86: 6 of 6 ops on kernels"
    assert text.count("fbgemm linear") == 6
    assert repr(lowered) == "<Lowered Block on x86: 6 of 6 ops on kernels>"
    data = json.loads(lowered.to_json())
    assert data["target"] == "x86"
    assert [row["kernel"] for row in data["ops"]] == [row.kernel for row in lowered.placed]
    other = qc.lower(program, "qnnpack")
    assert "0 of 6" in repr(other)
    assert all("0..255, not to 0..127" in row.reason for row in other.placed)
    x = tensor(1, 5, SIZE)
    close(other(x), other.program(x))


def test_full_range_runs_on_qnnpack() -> None:
    x = tensor(1, 5, SIZE)
    made = qc.lower(quantized(seeded(Block()), x, backend="qnnpack"), "qnnpack")
    assert all(row.kernel.startswith("QNNPACK linear") for row in made.placed)
    close(made(x), made.program(x))


def test_sums_that_can_saturate_are_announced() -> None:
    x = tensor(1, 5, SIZE)
    config = QuantConfig().set_all(X86.modes["dynamic"].but(qmax=255))
    full = quantized(seeded(Block()), x, config=config, reduce_range="no")
    if not adds_in_16_bits():
        pytest.skip("this processor adds products in 32 bits")
    with pytest.warns(UserWarning, match=r'sums can saturate in linear, linear_1.*avx.*reduce_range="auto"'):
        qc.lower(full, "x86")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qc.lower(quantized(seeded(Block()), x), "x86")


def test_runs_without_a_warning(program: Program) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qc.lower(program, "x86")(tensor(1, 5, SIZE))


def test_errors_name_what_is_wrong(program: Program) -> None:
    model, x = seeded(Block()), tensor(1, 5, SIZE)
    with pytest.raises(UnknownNameError, match="there are no kernels for 'x68'"):
        qc.lower(program, "x68")
    with pytest.raises(InputError, match="takes a Program"):
        qc.lower(model, "x86")  # type: ignore[call-overload]
    with pytest.raises(QuantcError, match="Block is not quantized"):
        qc.lower(qc.capture(model, (x,)), "x86")
    with pytest.raises(ModeError, match="cannot be trained"):
        qc.lower(program, "x86").train()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.before(x)
        return torch.cond(x.sum() > 0, lambda y: self.left(y).relu(), self.right, (x,))


@pytest.mark.parametrize("sign", [1, -1])
def test_kernels_run_in_branches(sign: int) -> None:
    x = tensor(3, 8)
    model = seeded(Branches())
    made = qc.lower(quantized(model, x), "x86")
    assert len(made.placed) == 3
    with torch.no_grad():
        given = x + 10 * sign
        close(made(given), made.program(given))
    close(made(given), made.program(given))
    assert torch.equal(copy.deepcopy(made)(given), made(given))


class Products(nn.Module):
    """Products with a constant that are no linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.bias = nn.Parameter(torch.zeros(8, 5)), nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Any:
        return x @ self.matrix, torch.addmm(self.bias, x, self.matrix)


@pytest.mark.parametrize("config", [None, QuantConfig().set_all(TOKEN)], ids=["per tensor", "per token"])
def test_products_with_a_constant_run_on_kernels(config: QuantConfig | None) -> None:
    x = tensor(3, 8)
    made = qc.lower(quantized(seeded(Products()), x, config=config), "x86")
    assert all(row.kernel for row in made.placed)
    for found, expected in zip(made(x), made.program(x), strict=True):
        close(found, expected)


class LowRank(nn.Module):
    """A linear layer whose weight is a parameter plus a product of two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.a, self.b = nn.Parameter(torch.randn(2, 8) * 0.1), nn.Parameter(torch.randn(8, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight + self.b @ self.a
        made: Tensor = self.head(torch.relu(nn.functional.linear(x, weight, self.inner.bias)))
        return made


@pytest.mark.parametrize("target", ["x86", "qnnpack"])
def test_ops_on_constants_alone_run_as_they_are(target: str) -> None:
    """Training keeps parameters, so that a product of two is quantized: no kernel is chosen by inputs that it has not."""
    torch.manual_seed(0)
    model, x = LowRank().eval(), torch.randn(16, 8)
    prepared = qc.prepare(qc.capture(model, (x,)), target, qat=True)
    prepared(x).sum().backward()
    converted = qc.convert(prepared.eval())
    with torch.no_grad():
        torch.testing.assert_close(qc.lower(converted, target)(x), model(x), rtol=0, atol=0.05)
